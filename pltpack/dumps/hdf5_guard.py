"""What stands between untrusted HDF5 files and the library that reads them.

Links other than hard ones are refused, since they reach outside the file; objects are counted before they are listed;
what makes the library hang is found before it is asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pltpack.dumps.base import FileStamp
from pltpack.errors import DumpError, PltpackError, UnsupportedError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Signature and version of a global heap; its header and those of its objects are of one size.
_HEAP = b"GCOL\x01"
_HEAP_HEADER = 16
_LEAST_HEAP = 4096
_SEARCH_BYTES = 8 << 20
_TEXT_NAMES = re.compile(rb"(session|identity|dtype)\0")
_LONGEST_NAME = len(b"identity")
_MAX_TEXT = 64 << 20
# Class of variable-length datatypes.
_VARIABLE = 9
_lock = threading.RLock()


@contextlib.contextmanager
def opened(path: str, stamp: FileStamp) -> Iterator[Any]:
    """The file, open for reading by one thread at a time; DumpError if it changed since `stamp` was taken.

    It is closed again at once: an open HDF5 file is locked against writers, in this process and others.
    """
    import h5py

    with _lock:
        stamp.check(path, path)
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file


@contextlib.contextmanager
def translated(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever the library raises on a damaged file into one DumpError naming the file."""
    try:
        yield
    except PltpackError as error:
        raise error.at(path) from None
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except Exception as error:  # h5py raises nearly every built-in exception on damaged files
        fact = " ".join(str(error).split())[:200]
        raise DumpError(f"is not a sound HDF5 dump ({fact or type(error).__name__})", Path(path)) from None


def check_strings(path: str | os.PathLike[str]) -> None:
    """Refuse a file whose variable-length strings the HDF5 library could not survive.

    It never gets past a free heap object of size 0, and it allocates the length that an attribute claims before it
    looks for the string. Neither heaps nor attributes have an index, so the file is searched for heap signatures and
    attribute names (HDF5 file format specification, III.E and IV.A.2.m), a few seconds for 10 GB.

    Raises
    ------
    DumpError
        If there is such a heap or attribute.
    """
    size = os.stat(path).st_size
    # Sound heaps do not overlap, so their objects are at most so many; more would be a file made to keep us busy.
    budget = size // _HEAP_HEADER
    with open(path, "rb") as file:
        for start in range(0, size, _SEARCH_BYTES):
            file.seek(start)
            part = file.read(_SEARCH_BYTES + len(_HEAP) - 1)
            at = part.find(_HEAP)
            while at >= 0:
                budget -= _check_heap(file, start + at, size, budget)
                at = part.find(_HEAP, at + 1)
            file.seek(start)
            for found in _TEXT_NAMES.finditer(file.read(_SEARCH_BYTES + _LONGEST_NAME)):
                _check_text(file, start + found.start(), len(found[0]), size)


def _check_text(file: BinaryIO, name: int, name_bytes: int, size: int) -> None:
    """Check the length in an attribute message, if the name at this offset belongs to one."""
    file.seek(max(0, name - 9))
    head = file.read(9)
    for version, before, padding in ((1, 8, 8), (2, 8, 1), (3, 9, 1)):
        fields = head[9 - before :]
        sizes = [int.from_bytes(fields[at : at + 2], "little") for at in (2, 4, 6)]
        if len(head) < 9 or fields[0] != version or sizes[0] != name_bytes:
            continue
        padded = [-(-part // padding) * padding for part in sizes]
        name_end, space_end = name + padded[0], name + sum(padded)
        file.seek(name_end)
        kind = file.read(1)
        file.seek(space_end)
        length = int.from_bytes(file.read(4), "little")
        if kind and kind[0] & 15 == _VARIABLE and length > min(size, _MAX_TEXT):
            raise DumpError(f"has a string attribute of {length} bytes")


def _check_heap(file: BinaryIO, start: int, size: int, budget: int) -> int:
    """Walk over a heap's objects; returns their number."""
    file.seek(start + 8)
    length = int.from_bytes(file.read(8), "little")
    if not _LEAST_HEAP <= length <= size - start:
        return 0
    at, end, count = start + _HEAP_HEADER, start + length, 0
    while at + _HEAP_HEADER <= end:
        count += 1
        if count > budget:
            raise DumpError("has string heaps that overlap")
        file.seek(at)
        head = file.read(_HEAP_HEADER)
        index, used = int.from_bytes(head[:2], "little"), int.from_bytes(head[8:], "little")
        if index == 0 and used == 0:
            raise DumpError("has a string heap that cannot be read to its end")
        # A free object counts its own header in its size, a used one does not.
        at += used if index == 0 else _HEAP_HEADER + (used + 7) // 8 * 8
    return count


def check_sizes(file: Any) -> None:
    """Refuse a file whose offsets or lengths are not of 8 bytes, as all are that anyone writes by default."""
    if tuple(file.id.get_create_plist().get_sizes()) != (8, 8):
        raise UnsupportedError("uses HDF5 offsets or lengths of other than 8 bytes")


def member_names(group: Any, limit: int) -> list[str]:
    """Names in a group, sorted, their number checked before they are listed."""
    if len(group) > limit:
        raise DumpError(f"{group.name} holds {len(group)} objects (allowed: {limit})")
    return sorted(group)


def child(group: Any, name: str, kind: str) -> Any:
    """A group or dataset inside a group.

    Raises
    ------
    DumpError
        If it is missing, of another kind, or a link to elsewhere.
    """
    import h5py

    link = group.get(name, getlink=True) if name in group.keys() else None  # noqa: SIM118  # `in group` follows links
    if link is None:
        raise DumpError(f"has no {kind} {_join(group, name)}")
    if not isinstance(link, h5py.HardLink):
        raise DumpError(f"{_join(group, name)} is a link to elsewhere, which is not followed")
    node = group[name]
    if not isinstance(node, h5py.Group if kind == "group" else h5py.Dataset):
        raise DumpError(f"{_join(group, name)} is not a {kind}")
    return node


def _join(group: Any, name: str) -> str:
    return f"{group.name.rstrip('/')}/{name}"
