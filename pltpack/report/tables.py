"""Tables of the page: sessions, tiers, the guard's decisions, the hottest paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from pltpack.report.amounts import count, nats, percent, signed, size, times
from pltpack.report.markup import Markup, element, joined
from pltpack.report.scores import Point
from pltpack.report.trie_map import label

#: Sessions in the table; of more, those that take most.
MOST_SESSIONS = 2000


class Column(NamedTuple):
    """A column that can be sorted: its title, and whether its cells are numbers."""

    title: str
    number: bool = True
    tip: str | None = None


class Cell(NamedTuple):
    """What a cell shows, and the number that it is sorted by; None stands last."""

    shown: object
    value: float | None = None
    tip: str | None = None


def sortable(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], label: str) -> Markup:
    """A table whose heads are buttons that sort it; the first cell of a row is its head."""
    heads = joined(
        element("th", element("button", column.title, type="button", title=column.tip), scope="col",
                class_="n" if column.number else None)
        for column in columns
    )  # fmt: skip
    body = joined(element("tr", *(_cell(cell, column, index) for index, (cell, column) in
                                  enumerate(zip(row, columns, strict=True)))) for row in rows)  # fmt: skip
    table = element("table", element("thead", element("tr", heads)), element("tbody", body), class_="sortable",
                    aria_label=label)  # fmt: skip
    return element("div", table, class_="scroll", tabindex="0")


def _cell(cell: Cell, column: Column, index: int) -> Markup:
    value = None if cell.value is None else repr(float(cell.value))
    shown: object = "–" if cell.shown is None else cell.shown
    return element("td" if index else "th", shown, scope=None if index else "row", data_v=value, data_tip=cell.tip,
                   class_="n" if column.number else None)  # fmt: skip


def configured(codec: str | None, config: Mapping[str, Any] | None) -> tuple[str, str]:
    """A codec with its configuration, as a key."""
    return str(codec), repr(sorted((config or {}).items()))


def session_table(
    sessions: Sequence[Mapping[str, Any]], own: Point | None, tiers: Mapping[tuple[str, str], str]
) -> Markup:
    """Every session: size, ratio, where its tokens came from, quality, and the tier it is kept in."""
    shown = sessions
    if len(sessions) > MOST_SESSIONS:
        shown = sorted(sessions, key=lambda one: -one["bytes"])[:MOST_SESSIONS]
    columns = [
        Column("session", number=False), Column("tokens"), Column("raw"), Column("stored", tip="bytes of its shard"),
        Column("ratio", tip="raw bytes over bytes of its shard; the library is not counted"),
        Column("shared", tip="tokens that the library has"),
        Column("predicted", tip="tokens predicted from the library"),
        Column("tail bits", tip="bits per element of its own units"), Column("KL", tip="nats per token"),
        Column("perplexity", tip="change in percent"), Column("tier", number=False),
    ]  # fmt: skip
    rows = [_session(one, own, tiers) for one in shown]
    known = [not column.number or any(row[at].value is not None for row in rows) for at, column in enumerate(columns)]
    columns, rows = list(compress(columns, known)), [list(compress(row, known)) for row in rows]
    left = len(sessions) - len(shown)
    parts = [sortable(columns, rows, "Sessions")]
    if left:
        parts.append(element("p", f"{count(left, 'smaller session')} left out.", class_="note"))
    return joined(parts)


def _session(one: Mapping[str, Any], own: Point | None, tiers: Mapping[tuple[str, str], str]) -> list[Cell]:
    tokens = one["tokens"]
    scored = own.sessions.get(one["session"]) if own else None
    measured = one if one["kl"] is not None or scored is None else scored
    kl, change = measured["kl"], measured["ppl_change_pct"]
    ratio = one["raw_bytes"] / one["bytes"] if one["bytes"] else 0.0
    guard = one["guard"]
    found = tiers.get(configured(one["codec"], one["config"]), one["codec"] or "shared")
    tier, stepped = (guard["kept"], guard["kept"] != guard["asked"]) if guard else (found, False)
    mark = element("span", f"{tier} ↑" if stepped else tier, class_="tag stepped" if stepped else "tag")
    return [
        Cell(one["session"]), Cell(f"{tokens:,}", tokens), Cell(size(one["raw_bytes"]), one["raw_bytes"]),
        Cell(size(one["bytes"]), one["bytes"]), Cell(times(ratio, 1), ratio),
        _share("exact", one["shared_tokens"], tokens), _share("near", one["predicted_tokens"], tokens),
        Cell(f"{one['tail_bits_per_element']:.3f}", one["tail_bits_per_element"]),
        Cell(None if kl is None else nats(kl), kl), Cell(None if change is None else signed(change), change),
        Cell(mark, None),
    ]  # fmt: skip


def _share(class_: str, part: int, tokens: int) -> Cell:
    share = part / tokens if tokens else 0.0
    bar = element("i", class_=f"mini {class_}", style=f"width:{2.5 * share:.3f}em")
    return Cell(joined([bar, " ", percent(share, digits=0)]) if part else "–", share, f"{part:,} of {tokens:,} tokens")


def codec_table(codecs: Sequence[Mapping[str, Any]], tiers: Mapping[tuple[str, str], str]) -> Markup:
    """Codecs that units were coded with; `tiers` names those configurations that are a tier's."""
    rows = []
    for row in codecs:
        settings = ", ".join(f"{key} {value}" for key, value in row["config"].items())
        tier = tiers.get(configured(row["codec"], row["config"]), "–")
        rows.append([
            Cell(tier), Cell(f"{row['codec']} ({settings})" if settings else row["codec"]),
            Cell(f"{row['sessions']:,}", row["sessions"]), Cell(f"{row['units']:,}", row["units"]),
            Cell(size(row["bytes"]), row["bytes"]),
        ])  # fmt: skip
    columns = [Column("tier", number=False), Column("codec", number=False), Column("sessions"), Column("units"),
               Column("bytes")]  # fmt: skip
    return sortable(columns, rows, "Tiers")


def guard_table(sessions: Sequence[Mapping[str, Any]]) -> Markup | None:
    """The guard's decisions, stepped up ones first; None where no guard looked at any session."""
    guarded = [one for one in sessions if one["guard"]]
    if not guarded:
        return None
    guarded.sort(key=lambda one: one["guard"]["asked"] == one["guard"]["kept"])
    columns = [Column("session", number=False), Column("asked", number=False), Column("kept", number=False),
               Column("tried", number=False), Column("KL"), Column("perplexity"), Column("scored on", number=False),
               Column("range", number=False, tip="largest magnitudes over what calibration saw")]  # fmt: skip
    return sortable(columns, [_decision(one) for one in guarded[:MOST_SESSIONS]], "Guard decisions")


def _decision(one: Mapping[str, Any]) -> list[Cell]:
    guard = one["guard"]
    last = guard["tried"][-1]
    kl = last["kl"] if last["kl"] is not None else last["predicted_kl"]
    shown = None if kl is None else nats(kl) + ("" if last["kl"] is not None else " (predicted)")
    change = last["ppl_change_pct"]
    stepped = guard["asked"] != guard["kept"]
    return [
        Cell(one["session"]), Cell(guard["asked"]),
        Cell(element("span", guard["kept"], class_="tag stepped" if stepped else "tag")),
        Cell(joined((_trial(trial) for trial in guard["tried"]), " → ")), Cell(shown, kl),
        Cell(None if change is None else signed(change), change),
        Cell("nothing: predicted" if guard["continuation"] is None else
             f"{guard['continuation']}, {count(last['tokens'], 'token')}"),
        Cell(", ".join(f"{name.replace('_', ' ')} {'not finite' if value is None else f'{value:.3g}'}"
                       for name, value in guard["range"].items() if value != 0) or None),
    ]  # fmt: skip


def _trial(trial: Mapping[str, Any]) -> str:
    return str(trial["tier"]) if trial["reason"] == "holds" else f"{trial['tier']} ({trial['reason']})"


def path_table(paths: Sequence[Mapping[str, Any]]) -> Markup:
    """The nodes that save most."""
    columns = [Column("path", number=False), Column("tokens"), Column("sessions"), Column("saves"),
               Column("bits/token", tip="information of its tokens, given those before them"),
               Column("begins with", number=False)]  # fmt: skip
    rows = []
    for node in paths:
        bits = node["information"] / node["tokens"] if node["information"] is not None and node["tokens"] else None
        begins = node["text"] if node.get("text") else " ".join(map(str, node["first_tokens"][:8]))
        rows.append([
            Cell(label(node["library"], node["node"])),
            Cell(f"{node['position']:,}–{node['position'] + node['tokens']:,}", node["position"]),
            Cell(f"{node['visits']:,}", node["visits"]), Cell(size(node["saved_bytes"]), node["saved_bytes"]),
            Cell(None if bits is None else f"{bits:.2f}", bits), Cell(element("code", begins)),
        ])  # fmt: skip
    return sortable(columns, rows, "Hot paths")
