"""Library segments of an archive, and units of a table, written from spec/format.md alone."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
from reference_container import NODE, NONE, Container, read_container, read_state, read_units
from reference_group import Group
from reference_lossless import Lossless
from reference_numbers import KeyValue, Unit, need
from reference_profile import digest_of, find_profile
from reference_tokens import Recompute
from reference_transform import Transform
from reference_turboquant import TurboQuant
from reference_xxh3 import xxh3_64

CODECS: dict[str, Any] = {
    "lossless": Lossless, "group": Group, "recompute": Recompute, "transform": Transform, "turboquant": TurboQuant,
}  # fmt: skip


class Segment:
    """What holds units: a library segment, or a session's shard."""

    identity: dict[str, Any]
    container: Container
    #: Units of several layers, by their place and first layer.
    decoded: dict[tuple[int, int], list[KeyValue]]


class Library(Segment):
    """A library segment."""

    def __init__(
        self, folder: Path, entry: dict[str, Any], identity: dict[str, Any], profile: Path | None = None
    ) -> None:
        self.identity, self.file, self.folder, self.profile = identity, entry["file"], folder, profile
        self.container = read_container(folder, entry, identity, "library")
        others, self.salts = self.container.list("libraries"), self.container.list("salts")
        need(all(isinstance(other, str) for other in others), "metadata 'libraries' is malformed")
        need(all(salt is None or isinstance(salt, str) for salt in self.salts), "metadata 'salts' is malformed")
        self.states = self.container.list("states")
        digests = [entry["profile"] for entry in self.states if isinstance(entry, dict) and "profile" in entry]
        need(self.container.minor >= 1 or not digests, "a state is a profile, which the format version does not know")
        good = all(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
        need(good, "a profile's digest is malformed")
        self.units = read_units(self.container, identity, len(self.states))
        self.tokens = self.container.array("trie.tokens", "I32")
        need((self.tokens >= 0).all(), "a token id is negative")
        self.nodes = self.container.table("trie.nodes", NODE)
        token = first = 0
        for index, node in enumerate(self.nodes):
            length, count = int(node["length"]), int(node["unit_count"])
            good = length >= 1 and node["token_offset"] == token and node["first_unit"] == first
            good = good and int(node["position"]) + length <= 1 << 28 and node["tenant"] < len(self.salts)
            good = good and node["parent_library"] <= len(others)
            own = node["parent_library"] == 0 and node["parent"] != NONE
            need(good and not (own and node["parent"] >= index), f"trie node {index} breaks the rules")
            token, first = token + length, first + count
            self.check_tiling(index, length, self.units[first - count : first])
        need(token == len(self.tokens) and first == len(self.units), "trie nodes do not cover the tables")
        self.codecs: dict[int, Any] = {}
        self.decoded = {}
        #: All segments of the archive: a state may be a profile that another one holds.
        self.segments: list[Library] = []

    def check_tiling(self, index: int, length: int, units: np.ndarray) -> None:
        """A node's units cover its tokens, layer group by layer group."""
        layer = at = count = 0
        for unit in units:
            good = unit["node"] == index and unit["flags"] == 0 and unit["layer"] == layer
            good = good and (at == 0 or unit["layer_count"] == count)
            need(good and unit["token_start"] == at, f"trie node {index} has units that do not fit")
            at, count = at + int(unit["token_count"]), int(unit["layer_count"])
            if at == length:
                layer, at = layer + count, 0
        need(at == 0 and layer == len(self.identity["layers"]), f"trie node {index} is not covered by its units")

    def codec(self, index: int) -> Any:
        """The codec of a state, made once."""
        if index not in self.codecs:
            entry = self.states[index]
            good = isinstance(entry, dict) and set(entry) - {"profile"} == {"codec", "config"}
            good = good and isinstance(entry["codec"], str) and isinstance(entry["config"], dict)
            need(good, f"codec state {index} is malformed")
            need(entry["codec"] in CODECS, f"unknown codec {entry['codec']!r}")
            digest = entry.get("profile")
            need((digest is not None) == (entry["codec"] == "transform"), f"codec state {index} is malformed")
            state = self.held(index, digest) if digest is None or self.holds(index) else self.elsewhere(digest)
            rope = self.identity.get("rope") or {}
            added = rope.get("type") in ("dynamic", "yarn", "longrope") and self.container.minor < 2
            known = {name: value for name, value in self.identity.items() if name != "rope" or not added}
            self.codecs[index] = CODECS[entry["codec"]](entry["config"], state, known)
        return self.codecs[index]

    def holds(self, index: int) -> bool:
        """Whether a state's arrays are in this segment."""
        return len(self.container.array(f"codec.state.{index}", "U8")) > 0

    def held(self, index: int, digest: str | None) -> dict[str, np.ndarray]:
        """A state's arrays, which are in this segment; those of a profile have its digest."""
        state = read_state(self.container.array(f"codec.state.{index}", "U8"))
        need(digest in (None, digest_of(state)), f"codec state {index} is another profile than its entry says")
        return state

    def elsewhere(self, digest: str) -> dict[str, np.ndarray]:
        """A profile that another segment holds, or else a file."""
        for library in self.segments:
            for index, entry in enumerate(library.states):
                if isinstance(entry, dict) and entry.get("profile") == digest and library.holds(index):
                    return library.held(index, digest)
        return find_profile(digest, self.profile, self.folder)


def layer_unit(identity: dict[str, Any], index: int) -> Unit:
    """A layer's geometry, without tokens."""
    shape = identity["layers"][index]
    return Unit(index, shape["heads"], shape["k_dim"], shape["v_dim"], shape["dtype"], 0, 0)


def holds_layer(units: np.ndarray, layer: int) -> np.ndarray:
    """Which units of an index hold a layer."""
    first = units["layer"].astype(int)
    return (first <= layer) & (layer < first + units["layer_count"])


def decode_unit(segment: Segment, record: np.void, codec: Any, layer: Unit, position: int,
                reference: list[KeyValue] | None) -> KeyValue:  # fmt: skip
    """One layer of a unit of the index."""
    first, count = int(record["offset"]), int(record["layer_count"])
    key = (first, int(record["layer"]))
    if key not in segment.decoded:
        payload = segment.container.tensors["unit.payload"][first : first + int(record["length"])].tobytes()
        need(xxh3_64(payload) == record["checksum"], "a unit does not match its checksum")
        place: dict[str, Any] = {"tokens": int(record["token_count"]), "position": position}
        if isinstance(codec, Transform):
            layers = range(int(record["layer"]), int(record["layer"]) + count)
            units = [dataclasses.replace(layer_unit(segment.identity, index), **place) for index in layers]
            found = codec.decode(payload, units, reference)
        else:
            need(count == 1, "a unit holds several layers, which its codec does not")
            found = [codec.decode(payload, dataclasses.replace(layer, **place), reference[0] if reference else None)]
        if count == 1:
            return found[0]
        # Asked for layer by layer, but decoded once.
        segment.decoded[key] = found
    return segment.decoded[key][layer.layer - key[1]]
