"""Fixed-size little-endian records of libraries and shards, and the checks that a reader makes of them.

Byte layouts: spec/format.md, "Unit index", "Mapping table", "Trie tables".
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from pltpack.errors import FormatError
from pltpack.format import json_text
from pltpack.format.container import MINOR_GROUPS, MINOR_PREDICTIONS, MINOR_RECOMPUTE, Container

#: Most tokens in one session.
MAX_TOKENS = 1 << 28
#: Most tokens in one unit.
MAX_UNIT_TOKENS = 1 << 16
#: Most bytes that one unit decodes to.
MAX_UNIT_BYTES = 1 << 30
#: Most layers of a model.
MAX_LAYERS = 1 << 14
NO_NODE = 0xFFFFFFFF

#: Unit flag: decoding needs the values that the mapping gives for the same tokens.
FLAG_REFERENCE = 1
#: Unit flag: decoding needs the values that a model makes of the same tokens.
FLAG_REBUILT = 2

UNIT = np.dtype([
    ("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8"),
    ("token_start", "<u4"), ("token_count", "<u4"),
    ("layer", "<u2"), ("layer_count", "<u2"), ("state", "<u2"), ("flags", "<u2"),
    ("node", "<u4"), ("error", "<f4"),
])  # fmt: skip

RUN = np.dtype([
    ("session_start", "<u4"), ("length", "<u4"), ("library", "<u4"),
    ("node", "<u4"), ("node_start", "<u4"), ("position_shift", "<i4"),
])  # fmt: skip

NODE = np.dtype([
    ("token_offset", "<u8"), ("parent_library", "<u4"), ("parent", "<u4"),
    ("position", "<u4"), ("length", "<u4"), ("visits", "<u4"),
    ("first_unit", "<u4"), ("unit_count", "<u4"), ("tenant", "<u4"),
])  # fmt: skip


def as_bytes(records: np.ndarray) -> np.ndarray:
    """Records as the U8 ``[n, size]`` array that a container stores."""
    return np.frombuffer(records.tobytes(), np.uint8).reshape(len(records), records.dtype.itemsize)


def read_units(
    container: Container, token_bytes: Sequence[int], states: int, minor: int = MINOR_PREDICTIONS
) -> np.ndarray:
    """The unit index, checked: units cover the payload in order, without holes or overlaps.

    Parameters
    ----------
    container : Container
    token_bytes : sequence of int
        Per layer of the archive's identity, raw bytes of one token.
    states : int
        Number of codec states that the container refers to.
    minor : int
        The container's minor version.

    Returns
    -------
    ndarray
        `UNIT` records.

    Raises
    ------
    FormatError
        Naming the first record that breaks a rule.
    """
    units = container.table("unit.index", UNIT)
    layers = len(token_bytes)
    # Python integers would be slow and 64-bit sums may wrap: lengths are bounded before they are summed.
    bad = units["length"] > container.payload_bytes
    bad |= (units["token_count"] == 0) | (units["token_count"] > MAX_UNIT_TOKENS)
    bad |= units["token_start"].astype(np.uint64) + units["token_count"] > MAX_TOKENS
    last = units["layer"].astype(np.int64) + units["layer_count"]
    bad |= (units["layer_count"] == 0) | (last > layers)
    # The first version had units of one layer only, and the second references of one layer only.
    several = units["layer_count"] != 1
    bad |= several & (((units["flags"] != 0) & (minor < MINOR_PREDICTIONS)) | (minor < MINOR_GROUPS))
    known = FLAG_REBUILT if minor >= MINOR_RECOMPUTE else FLAG_REFERENCE
    bad |= (units["state"] >= states) | (units["flags"] > known)
    bad |= ~(units["error"] >= 0)
    if not bad.any() and len(units):
        before = np.concatenate([[0], np.cumsum(np.array(token_bytes, np.float64))])
        bad |= units["token_count"] * (before[last] - before[units["layer"]]) > MAX_UNIT_BYTES
        if float(units["length"].sum(dtype=np.float64)) > 2.0**53:
            raise FormatError("unit index describes more bytes than a file holds", container.path)
        ends = np.cumsum(units["length"], dtype=np.uint64)
        bad |= units["offset"] != ends - units["length"]
    if bad.any():
        raise FormatError(f"unit {int(np.argmax(bad))} of the index breaks the rules", container.path)
    if int(units["length"].sum(dtype=np.uint64)) != container.payload_bytes:
        raise FormatError("units do not cover the payload", container.path)
    return units


def read_runs(container: Container, tokens: int, libraries: int, minor: int = MINOR_PREDICTIONS) -> np.ndarray:
    """The mapping table, checked: runs are ordered, do not overlap, and stay inside the session.

    Parameters
    ----------
    container : Container
        A shard.
    tokens : int
        Number of tokens of the session.
    libraries : int
        Number of segments that the shard names.
    minor : int
        The container's minor version.

    Raises
    ------
    FormatError
        Naming the first row that breaks a rule.
    """
    runs = container.table("map", RUN)
    starts = runs["session_start"].astype(np.int64)
    ends = starts + runs["length"]
    bad = (runs["length"] == 0) | (ends > tokens) | (runs["library"] >= libraries)
    bad[1:] |= starts[1:] < ends[:-1]
    bad |= (runs["position_shift"] != 0) & (minor < MINOR_PREDICTIONS)
    if bad.any():
        raise FormatError(f"row {int(np.argmax(bad))} of the mapping table breaks the rules", container.path)
    return runs


def read_nodes(container: Container, units: np.ndarray, layers: int, libraries: int, tenants: int) -> np.ndarray:
    """The trie's nodes, checked: their tokens and units tile the tables, parents come before children.

    Parameters
    ----------
    container : Container
        A library segment.
    units : ndarray
        Its checked unit index.
    layers : int
        Number of layers of the archive's identity.
    libraries : int
        Number of other segments that its metadata names.
    tenants : int
        Number of salts that its metadata names.

    Raises
    ------
    FormatError
        Naming the first node or unit that breaks a rule.
    """
    nodes = container.table("trie.nodes", NODE)
    tokens = len(container.array("trie.tokens", "I32"))
    lengths, counts = nodes["length"].astype(np.int64), nodes["unit_count"].astype(np.int64)
    bad = (lengths == 0) | (counts == 0) | (nodes["tenant"] >= tenants)
    bad |= nodes["token_offset"] != (np.cumsum(lengths) - lengths).astype(np.uint64)
    bad |= nodes["first_unit"] != np.cumsum(counts) - counts
    bad |= nodes["position"] + lengths > MAX_TOKENS
    own = (nodes["parent_library"] == 0) & (nodes["parent"] != NO_NODE)
    bad |= own & (nodes["parent"] >= np.arange(len(nodes)))
    bad |= nodes["parent_library"] > libraries
    if bad.any():
        raise FormatError(f"trie node {int(np.argmax(bad))} breaks the rules", container.path)
    if lengths.sum() != tokens or counts.sum() != len(units):
        raise FormatError("trie nodes do not cover the tokens and units", container.path)
    _check_tiling(units, np.repeat(np.arange(len(nodes)), counts), lengths, layers, container.path)
    return nodes


def _check_tiling(
    units: np.ndarray, owner: np.ndarray, lengths: np.ndarray, layers: int, path: os.PathLike[str]
) -> None:
    """Units of a node: layer by layer, each layer's in token order, covering the node's tokens exactly."""
    if not len(units):
        return
    start = units["token_start"].astype(np.int64)
    end = start + units["token_count"]
    layer = units["layer"].astype(np.int64)
    whole = end == lengths[owner]
    bad = (units["node"] != owner) | (units["flags"] != 0) | (end > lengths[owner])
    last = np.append(owner[1:] != owner[:-1], True)
    first = np.insert(last[:-1], 0, True)
    after = np.insert(np.where(whole[:-1], 0, end[:-1]), 0, 0)
    bad |= start != np.where(first, 0, after)
    count = units["layer_count"].astype(np.int64)
    bad |= layer != np.where(first, 0, np.insert(layer[:-1] + count[:-1] * whole[:-1], 0, 0))
    # All units of a layer group have the same layers.
    bad[1:] |= ~first[1:] & (layer[1:] == layer[:-1]) & (count[1:] != count[:-1])
    bad |= last & ~(whole & (layer + count == layers))
    if bad.any():
        raise FormatError(f"unit {int(np.argmax(bad))} does not fit its trie node", path)


def metadata_list(metadata: dict[str, str], key: str, path: os.PathLike[str]) -> list[object]:
    """A metadata value that is a JSON list.

    Raises
    ------
    FormatError
        If it is missing or something else.
    """
    try:
        value = json_text.parse(metadata[key])
    except (KeyError, ValueError):
        value = None
    if not isinstance(value, list):
        raise FormatError(f"metadata {key!r} is missing or not a list", path)
    return value
