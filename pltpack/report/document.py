"""The page: sections of text and charts, put into the template beside this module."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import string
from collections.abc import Mapping
from typing import Any

from pltpack.archive.figures import Figures
from pltpack.codec.registry import TIERS
from pltpack.report import bars, tables
from pltpack.report.amounts import count, percent, size, times
from pltpack.report.heat_map import heat_map
from pltpack.report.markup import Markup, element, joined, text
from pltpack.report.rd_chart import rated, rd_chart
from pltpack.report.trie_map import hot_paths, trie_map

#: Tier of each codec with its configuration, see `tables.configured`.
_TIER_NAMES = {tables.configured(codec, config): tier for tier, (codec, config) in TIERS.items()}

#: What a span of a session is, and the class of its colour.
_KINDS = (("exact prefix", "exact"), ("near window", "near"), ("predicts others", "kept"), ("own", "own"))


def page(found: Mapping[str, Any], version: str) -> str:
    """The page as one HTML document that loads nothing.

    Its content security policy allows the one script that it holds, by digest, and no connection: what a name from an
    archive could smuggle in would not run.

    Parameters
    ----------
    found : mapping
        See `pltpack.report.gather`.
    version : str
        Of pltpack.
    """
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = [_bytes(found), _sharing(found), _distortion(found), _errors(found), _sessions(found), _tiers(found),
                _identity(found)]  # fmt: skip
    return string.Template(_resource("page.html")).substitute(
        title=text(f"{found['name']}: pltpack report"), style=_resource("page.css"), script=script,
        script_digest=digest, head=_head(found), figures=_figures(found), sections=joined(sections),
        version=text(version),
    )  # fmt: skip


def _resource(name: str) -> str:
    return (importlib.resources.files("pltpack.report") / name).read_text(encoding="utf-8")


def _section(title: str, lede: object, *content: object, anchor: str) -> Markup:
    return element("section", element("h2", title), element("p", lede, class_="lede"), *content, id=anchor)


def _head(found: Mapping[str, Any]) -> Markup:
    archive, stats = found["archive"], found["archive"]["stats"]
    model = archive["identity"].get("model") or "a model that the dumps do not name"
    facts = [model, count(stats["sessions"], "session"), count(stats["tokens"], "token"), f"tier {stats['quality']}",
             f"generation {archive['generation']}"]  # fmt: skip
    return joined([element("h1", found["name"]), element("p", joined(facts, " · "), class_="facts")])


def _figures(found: Mapping[str, Any]) -> Markup:
    """The four figures, as `pltpack.archive.figures` has them everywhere."""
    stats = found["archive"]["stats"]
    shown = Figures.of(stats).shown()
    own = found["own_score"]
    known = f"{stats['scored_sessions']:,} of {count(stats['sessions'], 'session')}"
    if stats["kl"] is not None:
        kl, more = shown["kl"], f"perplexity {shown['ppl_change_pct']}, {known}"
    elif own is not None:
        kl = f"{own.total['kl']:.5f} nats"
        more = f"perplexity {own.total['ppl_change_pct']:+.2f} %, from the scores given"
    else:
        kl, more = shown["kl"], "score the archive, or compress it with a guard"
    tiles = [
        ("compression ratio", shown["ratio"].replace("x", "×"),
         f"{size(stats['raw_bytes'])} → {size(stats['archive_bytes'])}, everything counted"),
        ("KL divergence", kl, more),
        ("dedup hit rate", shown["dedup_hit_rate"], f"{stats['shared_tokens']:,} of {stats['tokens']:,} tokens"),
        ("tail bits per element", shown["tail_bits_per_element"],
         f"of what no other session has; {stats['bits_per_element']:.3f} with all files"),
    ]  # fmt: skip
    return joined(
        element("div", element("dt", name),
                element("dd", _value(value), class_="value" if value[0].isdigit() else "value unknown"),
                element("dd", more, class_="more"), class_="tile")
        for name, value, more in tiles
    )  # fmt: skip


def _value(shown: str) -> Markup:
    number, space, unit = shown.partition(" ")
    return joined([number, space, element("small", unit)]) if unit == "nats" else text(shown)


def _bytes(found: Mapping[str, Any]) -> Markup:
    stats, origin = found["archive"]["stats"], found["provenance"]
    size_now, saved = stats["archive_bytes"], origin["saved"]
    alone = size_now + saved["exact"] + saved["near"]
    shared = size_now + saved["near"]
    rows = [("as dumped", stats["raw_bytes"], size(stats["raw_bytes"]), "")]
    for name, amount, before, known in (
        ("coded, each session alone", alone, stats["raw_bytes"], saved["exact"] + saved["near"] == 0),
        ("exact prefixes stored once", shared, alone, saved["near"] == 0),
        ("near windows predicted", size_now, shared, True),
    ):
        shown = size(amount) if known else f"≈ {size(amount)}"
        rows.append((name, amount, shown, f"{times(before / amount)} smaller" if amount < before else "nothing saved"))
    parts = origin["bytes"]
    stacked = bars.stacked("what the archive's bytes are", [
        bars.Part("shared library", "exact", parts["library"], size(parts["library"]), "stored once for many"),
        bars.Part("sessions’ own", "own", parts["own"], size(parts["own"]), "nothing like it elsewhere"),
        bars.Part("near windows", "near", parts["predicted"], size(parts["predicted"]), "coded as differences"),
        bars.Part("corrections", "fix", parts["corrections"], size(parts["corrections"]), "kernel noise in prefixes"),
        bars.Part("profile", "profile", parts["profile"], size(parts["profile"]), "once a model"),
        bars.Part("tokens, tables", "rest", parts["other"], size(parts["other"]), "ids, indexes, headers"),
    ])  # fmt: skip
    own = stats["tokens"] - stats["shared_tokens"] - stats["predicted_tokens"]
    tokens = bars.stacked("where tokens came from", [
        bars.Part("exact prefix", "exact", stats["shared_tokens"], f"{stats['shared_tokens']:,}"),
        bars.Part("near window", "near", stats["predicted_tokens"], f"{stats['predicted_tokens']:,}"),
        bars.Part("own", "own", own, f"{own:,}"),
    ])  # fmt: skip
    lede = f"{size(stats['raw_bytes'])} of keys and values became {size(size_now)}. What sharing saved is an estimate: "
    return _section("What was saved", lede + "shared parts are priced as the library's copy of them.",
                    bars.steps(rows), stacked, tokens, anchor="saved")  # fmt: skip


def _sharing(found: Mapping[str, Any]) -> Markup:
    stats, nodes = found["archive"]["stats"], found["trie"]["nodes"]
    sessions = {one["session"]: one["tokens"] for one in found["archive"]["sessions"]}
    shared = sum(node["kind"] == "library" for node in nodes)
    lede = (f"A row a session, tokens from left to right. The library holds {count(shared, 'node')}: a block over "
            "several rows is a prefix that they share, the stronger the more it saves. Amber windows are coded as "
            "differences from hatched ones elsewhere; grey is a session's own.")  # fmt: skip
    if not stats["sessions"]:
        return _section("What sessions share", "The archive has no sessions.", anchor="trie")
    paths = hot_paths(nodes)
    key = element("ul", *(element("li", element("i", class_=f"key {class_}"), name) for name, class_ in _KINDS),
                  class_="legend inline")  # fmt: skip
    table = [element("h3", "Hot paths"), tables.path_table(paths)] if paths else []
    return _section("What sessions share", lede, key, trie_map(nodes, sessions, found["provenance"]["spans"]), *table,
                    anchor="trie")  # fmt: skip


def _distortion(found: Mapping[str, Any]) -> Markup:
    points, own = found["scores"], found["own_score"]
    title = "Rate and distortion"
    if not any(point.bits is not None for point in points):
        return _section(title, joined([
            "Not measured. Score the archive with its model and give the result: ",
            element("code", "pltpack score … --json > scores.json"), " and ",
            element("code", "pltpack report … --scores scores.json"), "."]), anchor="distortion")  # fmt: skip
    lede = "Lower and further left is better; compare curves along a horizontal line."
    if own is None:
        lede += " None of the scored archives is this one."
    else:
        kl = own.total["kl"]
        lede += (f" This archive: {own.bits:.3f} bits per element, " if own.bits else " This archive: ") + (
            "bit-exact." if kl == 0 else f"KL {kl:.5f} nats, perplexity {own.total['ppl_change_pct']:+.2f} %, the same "
            f"first choice in {own.total['top1_pct']:.1f} % of places.")  # fmt: skip
    return _section(title, lede, element("div", rd_chart(points, own), class_="chart"), rated(points),
                    anchor="distortion")  # fmt: skip


def _errors(found: Mapping[str, Any]) -> Markup:
    errors, title = found["errors"], "Error by layer and head"
    if errors is None and found["exact"]:
        lede = "None: all sessions are in bit-exact codecs, and every unit has a checksum."
        return _section(title, lede, anchor="errors")
    if errors is None:
        return _section(title, joined([
            "Not measured, and there is no profile that would predict it. ",
            element("code", "--against DUMPS"), " compares with the dumps."]), anchor="errors")  # fmt: skip
    values = [error for kind in ("keys", "values") for layer in errors[kind] for error in layer]
    if not any(error is None or error for error in values):
        lede = f"Measured against the dumps of {count(errors['sessions'], 'session')}: every value is kept bit for bit."
        return _section(title, lede, anchor="errors")
    how = (f"Measured against the dumps of {count(errors['sessions'], 'session')}" if errors["how"] == "measured"
           else "Predicted by the profile from the steps that tokens were quantized with; not measured")  # fmt: skip
    lede = (f"{how}. RMS error over RMS value, of tokens that are not kept bit for bit. A calibrated codec puts error "
            "where the model feels it least.")  # fmt: skip
    return _section(title, lede, heat_map(errors), anchor="errors")


def _sessions(found: Mapping[str, Any]) -> Markup:
    sessions = found["archive"]["sessions"]
    box = element("input", type="search", placeholder="Find a session", aria_label="Find a session", id="find",
                  autocomplete="off")  # fmt: skip
    return _section("Sessions", "Choose a column to sort by it.", box,
                    tables.session_table(sessions, found["own_score"], _TIER_NAMES), anchor="sessions")  # fmt: skip


def _tiers(found: Mapping[str, Any]) -> Markup:
    sessions = found["archive"]["sessions"]
    decisions = tables.guard_table(sessions)
    guarded = sum(one["guard"] is not None for one in sessions)
    stepped = sum(one["guard"] is not None and one["guard"]["asked"] != one["guard"]["kept"] for one in sessions)
    if decisions is None:
        lede: object = "No guard looked at these sessions when they were written."
    else:
        lede = (f"The guard looked at {guarded:,} of {count(len(sessions), 'session')} and stepped {stepped:,} up "
                f"({percent(stepped, guarded)}).")  # fmt: skip
    table = tables.codec_table(found["provenance"]["codecs"], _TIER_NAMES)
    more = [] if decisions is None else [element("h3", "Guard decisions"), decisions]
    return _section("Tiers and guard", lede, table, *more, anchor="tiers")


def _identity(found: Mapping[str, Any]) -> Markup:
    archive = found["archive"]
    layers = archive["identity"].get("layers") or []
    rows = [(name, value) for name, value in archive["identity"].items() if name != "layers"]
    kinds = dict.fromkeys(
        f"{layer['heads']} heads, K {layer['k_dim']}, V {layer['v_dim']}, {layer['dtype']}" for layer in layers
    )
    rows += [("layers", f"{len(layers)}: {'; '.join(kinds)}"), ("identity sha256", archive["identity_sha256"]),
             ("block", count(archive["block"], "token"))]  # fmt: skip
    body = joined(element("div", element("dt", name), element("dd", _plain(value))) for name, value in rows)
    return element("section", element("h2", "Identity"), element("dl", body, class_="identity"), id="identity")


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "not known" if value is None else str(value)
