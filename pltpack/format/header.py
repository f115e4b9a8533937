"""The JSON header of container files: parsed and checked (spec/format.md, "Containers")."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from pltpack.errors import FormatError
from pltpack.format import json_text

#: Dtypes of a container's tensors.
DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"), "I32": np.dtype("<i4"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8"),
}  # fmt: skip
#: Of a tensor: dtype, shape, begin and end in the data behind the header.
Entry = tuple[str, tuple[int, ...], int, int]


def parse_header(data: bytes, data_bytes: int, path: os.PathLike[str]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Parse and check a container's JSON header.

    Parameters
    ----------
    data : bytes
        The header, padding included.
    data_bytes : int
        Bytes that follow it in the file.

    Returns
    -------
    entries : dict
        Tensor name to ``(dtype, shape, begin, end)``; together they cover the data without holes or overlaps.
    metadata : dict of str to str

    Raises
    ------
    FormatError
        For anything else.
    """
    if data[:1] != b"{":
        raise FormatError("header is not a JSON object", path)
    try:
        header = json_text.parse(data)
    except ValueError:
        raise FormatError("header is not valid JSON", path) from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("metadata is not a mapping of strings", path)
    entries: dict[str, Entry] = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise FormatError(f"tensor {name!r} has a malformed entry", path)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise FormatError(f"tensor {name!r} has a dtype that containers do not use", path)
        if not (_naturals(shape) and len(shape) <= 2 and _naturals(offsets) and len(offsets) == 2):
            raise FormatError(f"tensor {name!r} has a malformed shape or offsets", path)
        count = 1
        for side in shape:
            count *= side
        if offsets[1] - offsets[0] != count * DTYPES[dtype].itemsize or offsets[1] > data_bytes:
            raise FormatError(f"tensor {name!r} does not fit its offsets", path)
        entries[name] = (dtype, tuple(shape), offsets[0], offsets[1])
    end = 0
    for _, _, first, last in sorted(entries.values(), key=lambda e: (e[2], e[3])):
        if first != end:
            raise FormatError("tensors overlap or leave holes", path)
        end = last
    if end != data_bytes:
        raise FormatError("tensors do not cover the file", path)
    return entries, metadata


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
