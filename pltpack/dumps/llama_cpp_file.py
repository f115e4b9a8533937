"""The structure of llama.cpp state files, checked against the file's size before anything is taken from it.

Little-endian. A sequence file: u32 ``ggsq``, u32 version 2 or 3, tokens, memory. A session file: u32 ``ggsn``, u32
version 9 or 10, tokens, the architecture's name as u32 length and bytes, memory. Tokens: u32 n, i32 [n]; as
llama-server saves them, those n words are −1, u32 1, u32 count, tokens, u32 number of media items and these. Memory:
u32 streams; each u32 cells, and unless that is 0 per cell i32 position, u32 k, i32 sequence [k]; u32 whether values are
transposed, u32 layers, each layer's keys as i32 type, u64 bytes per row, rows, and each layer's values alike, or if
transposed as i32 type, u32 bytes per element, u32 elements per row, and so many runs of one element per cell.
Source: llama-context.cpp, llama-kv-cache.cpp, server-common.cpp.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path

import numpy as np

from pltpack.dumps import base, ggml
from pltpack.dumps.safetensors_header import read_into
from pltpack.errors import DumpError, UnsupportedError

SEQUENCE, SESSION = 0x67677371, 0x6767736E
VERSIONS = {SEQUENCE: (2, 3), SESSION: (9, 10)}
_MAX_STREAMS = 1 << 12
_MAX_ARCH = 256
_CELL = np.dtype([("position", "<i4"), ("count", "<u4"), ("sequence", "<i4")])


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Where one layer's keys or values are.

    Attributes
    ----------
    kind : int
        ggml type.
    width : int
        Bytes of one cell's row, or of one element if transposed.
    columns : int
        Elements per row; 0 where rows are told by their bytes.
    offset : int
        In the file.
    """

    kind: int
    width: int
    columns: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One stream: positions int32 ``[C]`` of its cells, its sequences' cells by position, its layers."""

    positions: np.ndarray
    sequences: dict[int, np.ndarray]
    transposed: bool
    keys: list[Rows]
    values: list[Rows]


@dataclasses.dataclass(frozen=True, slots=True)
class StateFile:
    """A checked file."""

    magic: int
    version: int
    tokens: np.ndarray
    packed: bool
    arch: str | None
    streams: list[Stream]
    stamp: base.FileStamp


class _Cursor:
    """Reads on from an offset, never beyond the end of the file."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self._fd, self._size, self._path = fd, size, path
        self.at = 0

    def need(self, size: int, what: str) -> None:
        if size > self._size - self.at:
            raise DumpError(f"ends within {what}")

    def skip(self, size: int, what: str) -> int:
        self.need(size, what)
        start, self.at = self.at, self.at + size
        return start

    def take(self, layout: str, what: str) -> tuple[int, ...]:
        data = self.bytes(struct.calcsize(layout), what)
        return struct.unpack(layout, data)

    def bytes(self, size: int, what: str) -> bytearray:
        data = bytearray(size) if size <= self._size - self.at else bytearray()
        read_into(self._fd, self.skip(size, what), memoryview(data), self._path)
        return data

    @property
    def left(self) -> int:
        return self._size - self.at


def read_state(path: Path) -> StateFile:
    """Check the whole structure of a file.

    Raises
    ------
    DumpError
        If it is cut short or contradicts itself.
    UnsupportedError
        If it holds what a snapshot cannot.
    """
    stamp = base.FileStamp.of(path)
    with base.reading(os.fspath(path), stamp) as fd:
        cursor = _Cursor(fd, stamp.size, path)
        magic, version = cursor.take("<II", "its first words")
        if magic not in VERSIONS:
            raise DumpError("is no llama.cpp state file")
        if version not in VERSIONS[magic]:
            known = " and ".join(map(str, VERSIONS[magic]))
            raise UnsupportedError(f"is a llama.cpp state file of version {version} (known: {known})")
        tokens, packed = _tokens(cursor)
        arch = _arch(cursor) if magic == SESSION else None
        (count,) = cursor.take("<I", "the number of streams")
        if not 0 < count <= _MAX_STREAMS:
            raise DumpError(f"holds {count} streams (allowed: 1 to {_MAX_STREAMS})")
        streams = [stream for stream in (_stream(cursor) for _ in range(count)) if stream is not None]
        if cursor.left:
            raise UnsupportedError(f"holds {cursor.left} bytes after its cache: a second cache (of sliding layers), or "
                                   "recurrent state, which a snapshot cannot hold")  # fmt: skip
        return StateFile(magic, version, tokens, packed, arch, streams, stamp)


def _tokens(cursor: _Cursor) -> tuple[np.ndarray, bool]:
    (count,) = cursor.take("<I", "the number of tokens")
    # Packed lists are a few words longer than their tokens.
    base.check_count(max(0, count - 64))
    words = np.frombuffer(cursor.bytes(4 * count, "the tokens"), "<i4")
    if not count or words[0] != -1:
        return words, False
    unsigned = words.view("<u4")
    if count < 4 or unsigned[1] != 1:
        raise UnsupportedError("holds a packed token list of an unknown version")
    inner = int(unsigned[2])
    if inner > count - 4:
        raise DumpError(f"holds a packed token list of {inner} tokens in {count} words")
    if unsigned[3 + inner]:
        raise UnsupportedError("holds images or audio, whose tokens have no ids")
    if inner != count - 4:
        raise DumpError("holds a packed token list with more words than tokens")
    return words[3 : 3 + inner], True


def _arch(cursor: _Cursor) -> str:
    (length,) = cursor.take("<I", "the architecture's name")
    if length > _MAX_ARCH:
        raise DumpError(f"has an architecture's name of {length} bytes")
    return cursor.bytes(length, "the architecture's name").decode("ascii", "replace")


def _stream(cursor: _Cursor) -> Stream | None:
    (count,) = cursor.take("<I", "the number of cells")
    if not count:
        return None
    base.check_count(count)
    positions, sequences = _cells(cursor, count)
    transposed, layers = cursor.take("<II", "the number of layers")
    if transposed > 1 or not 0 < layers <= base.MAX_LAYERS:
        raise DumpError("has cells of more than a position and sequences (as models with M-RoPE do), or is damaged")
    keys = [_rows(cursor, count, f"the keys of layer {index}") for index in range(layers)]
    read = _columns if transposed else _rows
    values = [read(cursor, count, f"the values of layer {index}") for index in range(layers)]
    return Stream(positions, sequences, bool(transposed), keys, values)


def _cells(cursor: _Cursor, count: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    cursor.need(8 * count, "the cells")
    start = cursor.at
    if 12 * count <= cursor.left:
        cells = np.frombuffer(cursor.bytes(12 * count, "the cells"), _CELL)
        if bool((cells["count"] == 1).all()):
            return cells["position"], _members(cells["position"], np.arange(count), cells["sequence"])
    cursor.at = start
    positions, members, sequences = np.empty(count, np.int32), [], []
    for cell in range(count):
        position, several = cursor.take("<iI", "the cells")
        cursor.need(4 * several, "the cells")
        positions[cell] = position
        members.append(np.full(several, cell))
        sequences.append(np.frombuffer(cursor.bytes(4 * several, "the cells"), "<i4"))
    return positions, _members(positions, np.concatenate(members), np.concatenate(sequences))


def _members(positions: np.ndarray, cells: np.ndarray, sequences: np.ndarray) -> dict[int, np.ndarray]:
    """Each sequence's cells in the order of their positions, which must be all from 0 on."""
    if not len(sequences):
        raise DumpError("has cells of no sequence: it is damaged")
    order = np.lexsort((positions[cells], sequences))
    cells, sequences = cells[order], sequences[order]
    names, starts = np.unique(sequences, return_index=True)
    found = dict(zip(names.tolist(), np.split(cells, starts[1:]), strict=True))
    for name, own in found.items():
        if not np.array_equal(positions[own], np.arange(len(own))):
            raise UnsupportedError(f"sequence {name} does not hold every position from 0 on (a sliding window or a "
                                   "context shift dropped some)")  # fmt: skip
    return found


def _rows(cursor: _Cursor, count: int, what: str) -> Rows:
    kind, width = cursor.take("<iQ", what)
    if not 0 < width <= 4 * base.MAX_ELEMENTS:
        raise DumpError(f"{what}: rows of {width} bytes")
    return Rows(kind, width, 0, cursor.skip(count * width, what))


def _columns(cursor: _Cursor, count: int, what: str) -> Rows:
    kind, width, columns = cursor.take("<iII", what)
    if not (0 < width <= 64 and 0 < columns <= base.MAX_ELEMENTS):
        raise DumpError(f"{what}: {columns} elements of {width} bytes")
    if kind not in ggml.PLAIN:
        raise UnsupportedError(f"{what} are transposed and of ggml type {ggml.OTHERS.get(kind, kind)}")
    return Rows(kind, width, columns, cursor.skip(count * width * columns, what))
