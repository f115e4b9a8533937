"use strict";
(() => {
  const tip = document.getElementById("tip");
  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), document.documentElement.clientWidth - box.width - 8);
    const above = y - box.height - 14;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above < 8 ? y + 18 : above) + "px";
  };
  let at = [0, 0];
  let over = null;
  const show = (event) => {
    const target = event.target.closest ? event.target.closest("[data-tip]") : null;
    over = target;
    at = [event.clientX, event.clientY];
    tip.hidden = !target;
    if (!target) return;
    tip.textContent = target.dataset.tip;
    place(event.clientX, event.clientY);
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("pointermove", (event) => {
    at = [event.clientX, event.clientY];
    if (!tip.hidden) place(...at);
  });
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", () => {
    const below = document.elementFromPoint(...at);
    if (!over || !below || below.closest("[data-tip]") !== over) tip.hidden = true;
  }, { passive: true });

  const order = new Intl.Collator(undefined, { numeric: true });
  const key = (row, column) => {
    const cell = row.cells[column];
    return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
  };
  const unknown = (value) => value === "–";
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const numbers = head.classList.contains("n");
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numbers;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
      rows.sort(([a], [b]) => {
        if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);
        const way = typeof a === "number" && typeof b === "number" ? a - b : order.compare(a, b);
        return down ? -way : way;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    }));
  }

  const find = document.getElementById("find");
  if (find) {
    const rows = [...document.querySelectorAll("#sessions tbody tr")];
    find.addEventListener("input", () => {
      const wanted = find.value.toLowerCase();
      for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
    });
  }
})();
