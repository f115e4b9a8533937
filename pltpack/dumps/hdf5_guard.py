"""What stands between untrusted HDF5 files and the library that reads them.

Links other than hard ones, external storage, virtual datasets and plug-in filters are refused, since they reach
outside the file; shapes are checked against the bytes that are really stored before anything is allocated.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pltpack.dumps.base import FileStamp
from pltpack.errors import DumpError, PltpackError, UnsupportedError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Deflate and lzf cannot expand data further than this.
_MAX_EXPANSION = 1032
_MAX_CHUNK = 256 << 20
_lock = threading.RLock()
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}


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


def check_dataset(dataset: Any, axes: int | None) -> None:
    """Raise unless a dataset can be read within the file and within bounds.

    Parameters
    ----------
    dataset : h5py.Dataset
    axes : int or None
        Expected number of axes; None for 1 or 2.
    """
    shape = dataset.shape
    if shape is None or len(shape) not in ((1, 2) if axes is None else (axes,)):
        raise DumpError(f"{dataset.name} has the shape {shape}")
    if dataset.dtype.kind not in "iuf":
        raise DumpError(f"{dataset.name} is not numeric")
    plist = dataset.id.get_create_plist()
    if dataset.is_virtual or plist.get_external_count():
        raise DumpError(f"{dataset.name} keeps its data in other files, which are not followed")
    filters = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
    for code in filters:
        if code not in _FILTERS:
            raise UnsupportedError(f"{dataset.name} uses HDF5 filter {code} (known: {', '.join(_FILTERS.values())})")
    item = dataset.dtype.itemsize
    if dataset.chunks is not None and math.prod(dataset.chunks) * item > _MAX_CHUNK:
        raise UnsupportedError(f"{dataset.name} has chunks of more than {_MAX_CHUNK} bytes")
    stored = dataset.id.get_storage_size()
    compressed = any(code in (1, 32000) for code in filters)
    size = math.prod(shape) * item
    if stored > os.stat(dataset.file.filename).st_size or size > stored * (_MAX_EXPANSION if compressed else 1):
        raise DumpError(f"{dataset.name} declares {size} bytes but stores {stored}")


def _join(group: Any, name: str) -> str:
    return f"{group.name.rstrip('/')}/{name}"
