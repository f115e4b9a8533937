"""Recipes that break payloads of predicted units: what format 1.2 adds to the codecs."""

from __future__ import annotations

import struct
from collections.abc import Callable

import zstandard

from benchmarks.broken import recipe
from benchmarks.surgery import Part, Surgery

Change = Callable[[bytes], bytes]


def _first(s: Surgery, mode: int) -> tuple[Part, int]:
    """The first unit of a shard whose payload begins with a byte."""
    for entry in s.body["sessions"]:
        part = s.parts[entry["file"]]
        for index in range(len(part.table("unit.index"))):
            if part.payload(index)[:1] == bytes([mode]):
                return part, index
    raise AssertionError(f"no payload begins with {mode}")


def _payload(name: str, base: str, mode: int, change: Change) -> None:
    @recipe(name, base)
    def _(s: Surgery) -> None:
        part, index = _first(s, mode)
        part.set_payload(index, change(part.payload(index)))


def _unreferenced(name: str, base: str, mode: int) -> None:
    @recipe(name, base)
    def _(s: Surgery) -> None:
        part, index = _first(s, mode)
        part.table("unit.index")["flags"][index] = 0


# --- lossless, mode "predicted": u8 mode, u32 escapes, stream, low bytes, frame; then frame, escapes, stream, low -----


def _predicted(name: str, change: Change) -> None:
    _payload(f"predicted-{name}", "near-lossless", 7, change)


def _with(number: int, value: int) -> Change:
    """Set one of the four counts."""
    return lambda data: data[: 1 + 4 * number] + struct.pack("<I", value) + data[5 + 4 * number :]


def _more(number: int, extra: int, place: Callable[[tuple[int, ...]], int]) -> Change:
    """Raise one of the counts, and put as many zeros in."""

    def change(data: bytes) -> bytes:
        counts = struct.unpack_from("<4I", data, 1)
        size = extra * (2 if number == 0 else 1)
        at = 17 + place(counts)
        grown = _with(number, counts[number] + extra)(data)
        return grown[:at] + bytes(size) + grown[at:]

    return change


def _frame(change: Change) -> Change:
    """Change what the model's frame holds."""

    def changed(data: bytes) -> bytes:
        size = struct.unpack_from("<4I", data, 1)[3]
        frame = zstandard.ZstdCompressor().compress(change(zstandard.decompress(data[17 : 17 + size])))
        return _with(3, len(frame))(data)[:17] + frame + data[17 + size :]

    return changed


_predicted("escapes-many", _with(0, 0xFFFFFFFF))
_predicted("escape-left", _more(0, 1, lambda counts: counts[3]))
_predicted("stream-long", _with(1, 0xFFFFFFFF))
_predicted("stream-odd", _more(1, 1, lambda counts: counts[3] + 2 * counts[0] + counts[1]))
_predicted("low-many", _more(2, 1, lambda counts: counts[3] + 2 * counts[0] + counts[1] + counts[2]))
_predicted("frame-long", _with(3, 0xFFFFFFFF))
_predicted("cut", lambda data: data[:-1])
_predicted("behind", lambda data: data + b"\0")
_predicted("header-cut", lambda data: data[:9])
_predicted("model-long", _frame(lambda model: model + b"\0"))
_predicted("base-large", _frame(lambda model: struct.pack("<h", 1025) + model[2:]))
_predicted("base-small", _frame(lambda model: struct.pack("<h", -1025) + model[2:]))
_unreferenced("predicted-unreferenced", "near-lossless", 7)

# --- group, flag "shifted" ------------------------------------------------------------------------------------------


def _shifts_at(data: bytes) -> int:
    """Where the shifts of a unit of one head begin: behind header, step codes, table classes and runs."""
    return 16 + 6 + struct.unpack_from("<I", data, 4)[0]


for _flags in (4, 6, 7, 13):
    _payload(f"shifted-flags-{_flags}", "near-group", 5, lambda data, flags=_flags: bytes([flags]) + data[1:])
_payload("shifted-cut", "near-group", 5, lambda data: data[: _shifts_at(data)] + data[_shifts_at(data) + 1 :])
_payload("shifted-unlike", "near-group", 5,
         lambda data: data[: _shifts_at(data)] + b"\xff" + data[_shifts_at(data) + 1 :])  # fmt: skip
_unreferenced("shifted-unreferenced", "near-group", 5)

# --- transform, flag "predicted" ------------------------------------------------------------------------------------

for _flags in (2, 5, 7):
    _payload(f"near-transform-flags-{_flags}", "near-transform", 3,
             lambda data, flags=_flags: bytes([flags]) + data[1:])  # fmt: skip
_payload("near-transform-unpredicted", "near-transform", 3, lambda data: b"\1" + data[1:])
_payload("near-transform-cut", "near-transform", 3, lambda data: data[:-1])
_unreferenced("near-transform-unreferenced", "near-transform", 3)
