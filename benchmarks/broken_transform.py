"""Recipes that break layer groups, profiles and payloads of the codec ``transform``."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.broken import recipe
from benchmarks.golden_profiles import header_of
from benchmarks.surgery import Surgery
from pltpack.archive.profiles import digest
from pltpack.codec.profile import pack_about
from pltpack.format import state as state_format

BASE = "transform"

# --- layer groups: a session's units hold layers 0 and 1, then layer 2 ----------------------------------------------


def _unit(name: str, index: int, **fields: int) -> None:
    @recipe(f"transform-{name}", BASE)
    def _(s: Surgery) -> None:
        for field, value in fields.items():
            s.shard().table("unit.index")[field][index] = value


_unit("no-layers", 0, layer_count=0)
_unit("layers-many", 1, layer_count=2)
_unit("layers-huge", 0, layer_count=0xFFFF)
_unit("groups-overlap", 1, layer=1, layer_count=2)
_unit("group-cut", 0, layer_count=1)
_unit("group-reference", 0, flags=1)


@recipe("transform-version", BASE)
def _(s: Surgery) -> None:
    s.shard().metadata["format_version"] = "1.0"


@recipe("transform-group-of-another-codec", BASE)
def _(s: Surgery) -> None:
    s.library.set_items("states", [{"codec": "turboquant", "config": {"bits": 2, "seed": 0}}])
    s.library.change_state(lambda arrays: (arrays.clear(), arrays.update(_levels())))


def _levels() -> dict[str, np.ndarray]:
    return {f"levels.{width}": np.array([-1, -0.5, 0.5, 1], np.float32) for width in (3, 4, 5)}


@recipe("node-unit-layers", BASE)
def _(s: Surgery) -> None:
    s.library.table("unit.index")["layer_count"][0] = 1


# --- profiles -----------------------------------------------------------------------------------------------------


def _entry(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """A recipe that changes the state's entry in the metadata."""

    @recipe(f"profile-{name}", BASE)
    def _(s: Surgery) -> None:
        states = s.library.items("states")
        change(states[0])
        s.library.set_items("states", states)


_entry("digest", lambda entry: entry.update(profile="0" * 64))
_entry("digest-text", lambda entry: entry.update(profile="0" * 63 + "A"))
_entry("digest-null", lambda entry: entry.update(profile=None))
_entry("nameless", lambda entry: entry.pop("profile"))
_entry("config-two", lambda entry: entry.update(config={"step": 1.0, "target_kl": 0.1}))
_entry("config-range", lambda entry: entry.update(config={"step": 0}))
_entry("config-unknown", lambda entry: entry.update(config={"rank": 4}))


@recipe("profile-of-another-codec")
def _(s: Surgery) -> None:
    s.library.metadata["format_version"] = "1.1"
    arrays = state_format.unpack(s.library.tensors["codec.state.0"])
    s.library.set_items("states", [{**s.library.items("states")[0], "profile": digest(arrays)}])


@recipe("profile-version", BASE)
def _(s: Surgery) -> None:
    s.library.metadata["format_version"] = "1.0"


@recipe("profile-cut", BASE)
def _(s: Surgery) -> None:
    s.library.tensors["codec.state.0"] = s.library.tensors["codec.state.0"][:-9]


def _arrays(name: str, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """A recipe that changes the profile's arrays, and its digest with them."""

    @recipe(f"profile-{name}", BASE)
    def _(s: Surgery) -> None:
        s.library.change_state(change)
        states = s.library.items("states")
        states[0]["profile"] = digest(state_format.unpack(s.library.tensors["codec.state.0"]))
        s.library.set_items("states", states)


def _put(name: str, at: Any, value: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda arrays: arrays[name].__setitem__(at, value)


def _about(**members: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda arrays: arrays.update(about=pack_about({**json.loads(arrays["about"].tobytes()), **members}))


def _move(table: np.ndarray, old: int, new: int) -> None:
    table[new] += table[old]
    table[old] = 0


_arrays("array-missing", lambda arrays: arrays.pop("local.log"))
_arrays("array-more", lambda arrays: arrays.update(more=np.zeros(1, np.uint8)))
_arrays("array-shape", lambda arrays: arrays.update(mean=arrays["mean"][:-1]))
_arrays("array-dtype", lambda arrays: arrays.update(basis=arrays["basis"].view(np.uint16)))
_arrays("not-finite", _put("mean", 3, np.nan))
_arrays("rank", _put("basis.rank", 1, 0xFFFFFFFF))
_arrays("scale-range", _put("basis.log", 0, 24 * 64 + 1))
_arrays("tables", _put("tables", (1, 5), 4000))
_arrays("tables-zero", lambda arrays: _move(arrays["tables"][2], 0, 1))
_arrays("tables-escape", lambda arrays: (_move(arrays["tables"][2], 5, 1), _move(arrays["tables"][2], 63, 1)))
_arrays("singular", _put("whiten", slice(None), 0))
_arrays("template-rows", lambda arrays: arrays.update({"sink.bits": arrays["sink.bits"][:, :, 1:]}))
_arrays("about-version", _about(version=2))
_arrays("about-group", _about(layer_group=0))
_arrays("about-floor", _about(floor=1e3))
_arrays("about-length", _about(kl_length=[0.7, 256, 192]))
_arrays("about-length-nan", _about(kl_length=[float("nan"), 1, 2]))
_arrays("about-text", lambda arrays: arrays.update(about=arrays["about"][:-1]))

# --- payloads -----------------------------------------------------------------------------------------------------


def _payload(name: str, change: Callable[[bytes, dict[str, int]], bytes]) -> None:
    """A recipe that changes the first unit that begins a session; it is told where the payload's parts are."""

    @recipe(f"transform-{name}", BASE)
    def _(s: Surgery) -> None:
        payload, tokens = s.library.payload(0), int(s.library.table("unit.index")["token_count"][0])
        _, exact, _ = header_of(payload, tokens)
        at = {"marks": 5, "classes": 5 + 2 * len(exact), "values": 5 + 2 * len(exact) + (tokens + 1) // 2}
        length, escapes, low = struct.unpack_from("<3I", payload, at["values"])
        at["exact"] = at["values"] + 12 + length + 4 * escapes + low
        at["kinds"] = at["exact"] + len(exact)
        assert len(exact) and payload[at["exact"]] != 255
        s.library.set_payload(0, change(payload, at))


def _over(part: str, data: bytes, shift: int = 0) -> Callable[[bytes, dict[str, int]], bytes]:
    def change(payload: bytes, at: dict[str, int]) -> bytes:
        first = at[part] + shift
        return payload[:first] + data + payload[first + len(data) :]

    return change


_payload("flags", lambda payload, at: b"\x02" + payload[1:])
_payload("referenced", lambda payload, at: b"\x01" + payload[1:])
_payload("step", lambda payload, at: payload[:1] + struct.pack("<h", 961) + payload[3:])
_payload("marks-many", lambda payload, at: payload[:3] + b"\xff\xff" + payload[5:])
_payload("mark-beyond", _over("marks", b"\xff\xff"))
_payload("stream-length", _over("values", b"\xff\xff\xff\xff"))
_payload("escapes", _over("values", b"\xff\xff\xff\x7f", 4))
_payload("low-bits", _over("values", b"\xff", 8))
_payload("template", _over("exact", b"\xfe"))
_payload("class", _over("kinds", b"\xc8"))
_payload("cut", lambda payload, at: payload[:-1])
_payload("trailing", lambda payload, at: payload + b"\0")
_payload("empty", lambda payload, at: b"")
