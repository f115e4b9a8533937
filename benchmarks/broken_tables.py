"""Recipes that break tables, codec states and payloads."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import zstandard

from benchmarks.broken import recipe
from benchmarks.surgery import Surgery

# --- unit index -------------------------------------------------------------------------------------------------


def _unit(name: str, field: str, value: Any, index: int = 0) -> None:
    """A recipe that sets a field of a unit in the first session's shard."""

    @recipe(f"unit-{name}")
    def _(s: Surgery) -> None:
        s.shard().table("unit.index")[field][index] = value


_unit("offset", "offset", 1)
_unit("length", "length", 1 << 63, 1)
_unit("length-short", "length", 3, 1)
_unit("tokens-none", "token_count", 0)
_unit("tokens-many", "token_count", (1 << 16) + 1)
_unit("start-huge", "token_start", 0xFFFFFFFF)
_unit("beyond", "token_start", 9)
_unit("layer", "layer", 2)
_unit("layer-count", "layer_count", 2)
_unit("state", "state", 1)
_unit("flag", "flags", 2)
_unit("node", "node", 0)
_unit("error", "error", np.nan)
_unit("checksum", "checksum", 0)
_unit("gap", "token_start", 7, 1)


@recipe("unit-order")
def _(s: Surgery) -> None:
    units = s.shard().table("unit.index")
    units["layer"] = units["layer"][::-1].copy()


@recipe("unit-missing")
def _(s: Surgery) -> None:
    part = s.shard(2)
    units = part.table("unit.index").copy()
    part.tensors["unit.payload"] = part.tensors["unit.payload"][: int(units["length"][0])]
    part.replace("unit.index", units[:1])


@recipe("unit-twice")
def _(s: Surgery) -> None:
    part = s.shard(2)
    units, payload = part.table("unit.index"), part.tensors["unit.payload"]
    first = int(units["length"][0])
    doubled = units[[0, 0, 1]]
    doubled["offset"] = np.cumsum(doubled["length"]) - doubled["length"]
    part.replace("unit.index", doubled)
    part.tensors["unit.payload"] = np.concatenate([payload[:first], payload])


# --- mapping table ----------------------------------------------------------------------------------------------


def _run(name: str, field: str, value: int) -> None:
    """A recipe that sets a field of the first session's only mapping row."""

    @recipe(f"run-{name}")
    def _(s: Surgery) -> None:
        s.shard().table("map")[field][0] = value


_run("empty", "length", 0)
_run("outside", "length", 0xFFFFFFFF)
_run("beyond-node", "length", 9)
_run("library", "library", 1)
_run("node", "node", 1)
_run("node-start", "node_start", 1)
_run("shift", "position_shift", -1)
_run("start", "session_start", 1)


@recipe("run-overlap")
def _(s: Surgery) -> None:
    runs = s.shard().table("map")[[0, 0]]
    runs["length"] = 5
    runs["session_start"] = runs["node_start"] = [0, 3]
    s.shard().replace("map", runs)


@recipe("run-order")
def _(s: Surgery) -> None:
    runs = s.shard().table("map")[[0, 0]]
    runs["length"] = 4
    runs["session_start"] = runs["node_start"] = [4, 0]
    s.shard().replace("map", runs)


@recipe("run-dropped")
def _(s: Surgery) -> None:
    s.shard().replace("map", s.shard().table("map")[:0])


@recipe("run-tokens")
def _(s: Surgery) -> None:
    s.shard().tensors["tokens"][2] += 1


@recipe("run-tenant")
def _(s: Surgery) -> None:
    s.library.set_items("salts", ["s"])


# --- trie -------------------------------------------------------------------------------------------------------


def _node(name: str, field: str, value: int) -> None:
    """A recipe that sets a field of the library's only node."""

    @recipe(f"node-{name}")
    def _(s: Surgery) -> None:
        s.library.table("trie.nodes")[field][0] = value


_node("empty", "length", 0)
_node("tokens", "token_offset", 1)
_node("tokens-huge", "token_offset", (1 << 64) - 4)
_node("length", "length", 7)
_node("position", "position", 0xFFFFFFFF)
_node("parent", "parent", 0)
_node("parent-library", "parent_library", 1)
_node("tenant", "tenant", 1)
_node("first-unit", "first_unit", 1)
_node("units-none", "unit_count", 0)
_node("units-many", "unit_count", 0xFFFFFFFF)


def _node_unit(name: str, field: str, value: int) -> None:
    @recipe(f"node-unit-{name}")
    def _(s: Surgery) -> None:
        s.library.table("unit.index")[field][0] = value


_node_unit("node", "node", 1)
_node_unit("flag", "flags", 1)
_node_unit("range", "token_count", 9)
_node_unit("short", "token_count", 7)
_node_unit("layer", "layer", 1)


@recipe("node-tokens-left")
def _(s: Surgery) -> None:
    s.library.tensors["trie.tokens"] = np.append(s.library.tensors["trie.tokens"], np.int32(1))


# --- codec states -----------------------------------------------------------------------------------------------


def _state(name: str, change: Any, base: str = "lossless") -> None:
    """A recipe that changes the arrays of the codec state."""

    @recipe(f"state-{name}", base)
    def _(s: Surgery) -> None:
        s.library.change_state(change)


def _set(name: str, at: Any, value: Any) -> Any:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][at] = value

    return change


_state("array-missing", lambda arrays: arrays.pop("escape"))
_state("array-more", lambda arrays: arrays.update(more=np.zeros(1, np.uint8)))
_state("array-shape", lambda arrays: arrays.update(base=arrays["base"][:-1]))
_state("array-dtype", lambda arrays: arrays.update(base=arrays["base"].astype(np.uint16)))
_state("frequencies", _set("freqs", (0, 0), 4095))
_state("class", _set("class", 0, 127))
_state("escape", lambda arrays: arrays["escape"].__setitem__(0, int(np.argmin(arrays["freqs"][0]))))
_state("group-frequencies", _set("freqs", (55, 0), 4095), "group")
_state("group-shrink", _set("shrink", 0, np.nan), "group")
_state("group-steps", _set("steps", 0, 961), "group")
_state("group-array", lambda arrays: arrays.pop("means"), "group")
_state("turboquant-order", _set("levels.4", 0, 1.5), "turboquant")
_state("turboquant-range", _set("levels.4", 3, 2.5), "turboquant")
_state("turboquant-nan", _set("levels.5", 3, np.nan), "turboquant")
_state("turboquant-array", lambda arrays: arrays.update({"levels.6": arrays["levels.5"]}), "turboquant")


def _blob(name: str, change: Any) -> None:
    """A recipe that changes the bytes of the codec state."""

    @recipe(f"state-{name}")
    def _(s: Surgery) -> None:
        blob = change(s.library.tensors["codec.state.0"].tobytes())
        s.library.tensors["codec.state.0"] = np.frombuffer(blob, np.uint8)


def _frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


_blob("empty", lambda blob: b"")
_blob("damaged", lambda blob: blob[:-4] + b"\xff\xff\xff\xff")
_blob("trailing", lambda blob: blob + b"\0")
_blob("no-size", lambda blob: zstandard.ZstdCompressor(write_content_size=False).compress(b"abcd"))
_blob("bomb", lambda blob: _frame(struct.pack("<I", 2) + b"[]" + bytes(1 << 28)))
_blob("header-long", lambda blob: _frame(struct.pack("<I", 1 << 21) + bytes(1 << 21)))
_blob("header-cut", lambda blob: _frame(struct.pack("<I", 100) + b"[]"))
_blob("header-deep", lambda blob: _frame(struct.pack("<I", 200_000) + b"[" * 100_000 + b"]" * 100_000))
_blob("header-shape", lambda blob: _frame(_state_header([["a", "U8", [1 << 31]]])))
_blob("header-axes", lambda blob: _frame(_state_header([["a", "U8", [0] * 5]])))
_blob("header-dtype", lambda blob: _frame(_state_header([["a", "F64", [0]]])))
_blob("header-twice", lambda blob: _frame(_state_header([["a", "U8", [0]], ["a", "U8", [0]]])))
_blob("rest", lambda blob: _frame(_state_header([]) + b"\0"))


def _state_header(items: list[Any]) -> bytes:
    text = json.dumps(items).encode()
    return struct.pack("<I", len(text)) + text


def _codec(name: str, base: str = "lossless", **members: Any) -> None:
    """A recipe that changes the codec's name or configuration."""

    @recipe(f"state-{name}", base)
    def _(s: Surgery) -> None:
        s.library.set_items("states", [{**s.library.items("states")[0], **members}])


_codec("codec", codec="brotli")
_codec("codec-type", codec=7)
_codec("config", config={"level": 9})
_codec("config-type", config=[])
_codec("group-config", "group", config={"bits": 5})
_codec("turboquant-config", "turboquant", config={"bits": 4, "seed": 1 << 32})
_codec("turboquant-boolean", "turboquant", config={"bits": 2, "seed": True})

# --- payloads ---------------------------------------------------------------------------------------------------


def _payload(name: str, change: Any, base: str = "lossless", shard: int = 0) -> None:
    """A recipe that changes the payload of a shard's first unit."""

    @recipe(name, base)
    def _(s: Surgery) -> None:
        part = s.shard(shard)
        part.set_payload(0, change(part.payload(0)))


def _put(at: int, data: bytes) -> Any:
    return lambda payload: payload[:at] + data + payload[at + len(data) :]


_payload("lossless-mode", _put(0, b"\x7f"))
_payload("lossless-empty", lambda payload: b"")
_payload("lossless-cut", lambda payload: payload[:-1], shard=2)
_payload("lossless-trailing", lambda payload: payload + b"\0", shard=2)
_payload("lossless-raw-short", lambda payload: b"\x00" + bytes(3))
_payload("lossless-frame", lambda payload: b"\x01" + bytes(20))
_payload("lossless-frame-size", lambda payload: b"\x01" + _frame(bytes(1 << 20)))
_payload("lossless-no-reference", lambda payload: b"\x04")
_payload("lossless-escapes", lambda payload: b"\x02" + b"\xff" * 8 + payload[9:])
_payload("lossless-model", lambda payload: b"\x03" + struct.pack("<I", 1 << 31))


@recipe("rans-damaged", "symbols")
def _(s: Surgery) -> None:
    _stream(s, lambda stream: bytes([stream[0] ^ 1]) + stream[1:])


@recipe("rans-cut", "symbols")
def _(s: Surgery) -> None:
    _stream(s, lambda stream: stream[:126])


@recipe("rans-longer", "symbols")
def _(s: Surgery) -> None:
    _stream(s, lambda stream: stream + b"\0\0")


def _stream(s: Surgery, change: Any) -> None:
    """Change the rANS stream of the first symbol body that has the state's tables."""
    for part in s.parts.values():
        for index in range(len(part.table("unit.index"))):
            payload = part.payload(index)
            if payload[0] == 2:
                escapes, length = struct.unpack_from("<II", payload, 1)
                at = 9 + 2 * escapes
                stream = change(payload[at : at + length])
                head = struct.pack("<BII", 2, escapes, len(stream)) + payload[9:at]
                part.set_payload(index, head + stream + payload[at + length :])
                return
    raise AssertionError("the base has no symbol body with the state's tables")


@recipe("sparse-range")
def _(s: Surgery) -> None:
    _sparse(s, struct.pack("<BI", 5, 1) + b"\xff\x7f")


@recipe("sparse-count")
def _(s: Surgery) -> None:
    _sparse(s, struct.pack("<BI", 5, 1 << 31))


@recipe("sparse-endless")
def _(s: Surgery) -> None:
    _sparse(s, struct.pack("<BI", 5, 1) + b"\xff" * 9)


@recipe("dense-kind")
def _(s: Surgery) -> None:
    _sparse(s, b"\x06\x03")


def _sparse(s: Surgery, payload: bytes) -> None:
    """Put a difference in the place of the first unit that has a reference."""
    for index in range(3):
        part = s.shard(index)
        flagged = np.flatnonzero(part.table("unit.index")["flags"])
        if len(flagged):
            part.set_payload(int(flagged[0]), payload)
            return
    raise AssertionError("the base has no unit with a reference")


@recipe("reference-outside")
def _(s: Surgery) -> None:
    part = s.shard(2)
    part.table("unit.index")["flags"] = 1
    part.set_payload(0, b"\x04")


_payload("group-flags", _put(0, b"\x03"), "group")
_payload("group-reserved", _put(2, b"\x01"), "group")
_payload("group-reference", _put(0, b"\x01"), "group")
_payload("group-escapes-odd", _put(8, b"\x01"), "group")
_payload("group-step", _put(16, struct.pack("<h", 961)), "group")
_payload("group-table", _put(20, b"\x1b"), "group")
_payload("group-class", _put(22, b"\xb3"), "group")
_payload("group-runs", _put(22, b"\xff"), "group")
_payload("group-runs-many", _put(4, b"\xff\xff\xff\xff"), "group")
_payload("group-cut", lambda payload: payload[:-1], "group")
_payload("group-trailing", lambda payload: payload + b"\0\0", "group")
_payload("turboquant-escapes", _put(0, b"\xff\xff\xff\xff"), "turboquant")
_payload("turboquant-escape-order", lambda payload: b"\x01\0\0\0\0\0\0\0" + payload[4:], "turboquant")
_payload("turboquant-norm", _put(4 + 4 * 2 * 9, b"\x80\x7f"), "turboquant")
_payload("turboquant-cut", lambda payload: payload[:-1], "turboquant")
_payload("turboquant-trailing", lambda payload: payload + b"\0", "turboquant")
