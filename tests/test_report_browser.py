"""The page in a real browser: what a person sees, sorts and reads, and that nothing else happens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_common import done
from test_report import HOSTILE, hostile, scores_of

__all__ = ["hostile"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class View:
    """A page that is open in the browser, and what it did."""

    def __init__(self, browser: Any, address: str, width: int, scheme: str) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    with playwright.sync_playwright() as driver:
        # Without a sandbox of its own, which a container's root does not have; the pages are made here.
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    done("append", hostile, *more(folder / "more"), "--quality", "q2")
    scores = scores_of(folder / "s.json", hostile, [f"{HOSTILE}{seed}" for seed in (1, 2)])
    dumps = hostile.parent / "dumps"
    done("report", hostile, "-o", folder / "r.html", "--scores", scores, "--against", dumps)
    return folder / "r.html"


def more(folder: Path) -> list[Path]:
    """Dumps of several lengths for the hostile model."""
    import numpy as np
    from cli_common import IDENTITY, write_dump

    return [
        write_dump(folder, f"s{n}", np.random.default_rng(n).integers(0, 1000, n), n, {**IDENTITY, "model": HOSTILE})
        for n in (9, 40, 300)
    ]


@pytest.fixture
def view(browser: Any, report: Path) -> Iterator[Callable[..., View]]:
    opened: list[View] = []

    def look(width: int = 1100, scheme: str = "light") -> View:
        opened.append(View(browser, report.as_uri(), width, scheme))
        return opened[-1]

    yield look
    for one in opened:
        one.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 768, 390, 320])
def test_it_fits_and_is_quiet(view: Callable[..., View], report: Path, width: int, scheme: str) -> None:
    seen = view(width, scheme)
    assert seen.messages == []
    assert seen.requests == [report.as_uri()]
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.evaluate("window.pwned") is None
    # Paper and ink have the contrast that WCAG asks of small text.
    luminance = """(colour) => { const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map((v) => {
        v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; }"""
    paper = seen.page.evaluate(f"({luminance})(getComputedStyle(document.body).backgroundColor)")
    assert (paper > 0.5) == (scheme == "light")
    for place in ("body", ".lede", ".tile .more", ".facts", "thead th"):
        ink = seen.page.evaluate(f"({luminance})(getComputedStyle(document.querySelector('{place}')).color)")
        assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 4.5, place


def test_columns_sort_both_ways(view: Callable[..., View]) -> None:
    page = view().page
    column = page.locator("#sessions thead th", has_text="tokens")
    cells = page.locator("#sessions tbody tr td:nth-child(2)")
    before = cells.all_inner_texts()
    column.locator("button").click()
    assert cells.all_inner_texts() == sorted(before, key=int, reverse=True) != before
    assert column.get_attribute("aria-sort") == "descending"
    column.locator("button").press("Enter")
    assert cells.all_inner_texts() == sorted(before, key=int)
    assert column.get_attribute("aria-sort") == "ascending"
    names = page.locator("#sessions tbody th")
    page.locator("#sessions thead th", has_text="session").locator("button").click()
    assert [name for name in names.all_inner_texts() if name.startswith("s")] == ["s9", "s40", "s300"]


def test_what_is_not_known_sorts_last(view: Callable[..., View]) -> None:
    page = view().page
    column = page.locator("#sessions thead th", has_text="perplexity").locator("button")
    place = page.locator("#sessions thead th").all_inner_texts().index("perplexity") + 1
    cells = page.locator(f"#sessions tbody tr > :nth-child({place})")
    for _ in range(2):
        column.click()
        shown = cells.all_inner_texts()
        assert "–" in shown
        assert shown[-shown.count("–") :] == ["–"] * shown.count("–")


def test_sessions_are_found(view: Callable[..., View]) -> None:
    page = view().page
    page.locator("#find").fill("S30")
    assert page.locator("#sessions tbody tr:visible th").all_inner_texts() == ["s300"]
    page.locator("#find").fill("")
    assert page.locator("#sessions tbody tr:visible").count() == 5


def test_tips_show_names_as_text(view: Callable[..., View]) -> None:
    seen = view()
    seen.page.locator(".map-names span").first.hover()
    tip = seen.page.locator("#tip")
    tip.wait_for(state="visible", timeout=5000)
    assert "<script>window.pwned=1</script>" in tip.inner_text()
    assert seen.page.evaluate("window.pwned") is None
    assert seen.messages == []


def test_what_is_smuggled_in_does_not_run(browser: Any, report: Path, tmp_path: Path) -> None:
    # Should a name ever become markup, the policy stands behind.
    evil = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1><b onclick=window.pwned=1>x</b>"
    broken = report.read_text(encoding="utf-8").replace("<main>", f"<main>{evil}")
    (tmp_path / "broken.html").write_text(broken, encoding="utf-8")
    seen = View(browser, (tmp_path / "broken.html").as_uri(), 1100, "light")
    seen.page.locator("main > b").click()
    assert seen.page.evaluate("window.pwned") is None
    assert sum("Content Security Policy" in message for message in seen.messages) >= 3
    seen.page.close()
