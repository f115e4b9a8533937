"""Educational decoder of pltpack archives, written from spec/format.md, spec/codecs.md and spec/profile.md alone.

Usage: python reference_decoder.py ARCHIVE OUT [PROFILE]

Writes one safetensors file per session to the new folder OUT, byte by byte as ``pltpack decompress --to safetensors``
does (of the codec ``transform`` up to the rounding that spec/codecs.md allows). Checks every digest, every checksum and
every rule of the tables. A damaged archive gives one line on standard error and exit code 2. PROFILE is the profile of
an archive that refers to one outside; else it is looked for as spec/profile.md says.

Imports numpy, zstandard and the standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from reference_container import (
    NODE,
    NONE,
    RUN,
    canonical,
    natural,
    quoted_name,
    read_container,
    read_manifest,
    read_state,
    read_units,
)
from reference_group import Group
from reference_lossless import Lossless
from reference_numbers import (
    LARGEST,
    DamagedError,
    KeyValue,
    Unit,
    need,
    rope_frequencies,
    rope_rotate,
    to_float,
    to_words,
)
from reference_profile import digest_of, find_profile
from reference_tokens import Recompute
from reference_transform import Transform
from reference_turboquant import TurboQuant
from reference_xxh3 import xxh3_64

CODECS: dict[str, Any] = {
    "lossless": Lossless, "group": Group, "recompute": Recompute, "transform": Transform, "turboquant": TurboQuant,
}  # fmt: skip

# --- library segments -------------------------------------------------------------------------------------------


class Library:
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
        self.decoded: dict[tuple[int, int], list[KeyValue]] = {}
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


# --- shards and sessions ----------------------------------------------------------------------------------------


class Shard:
    """A session's shard."""

    def __init__(
        self, folder: Path, entry: dict[str, Any], identity: dict[str, Any], known: dict[str, Library]
    ) -> None:
        self.identity = identity
        self.container = read_container(folder, entry, identity, "shard")
        self.decoded: dict[tuple[int, int], list[KeyValue]] = {}
        self.mappings: dict[int, KeyValue] = {}
        metadata = self.container.metadata
        same = metadata["session"] == entry["session"] and metadata.get("salt") == entry.get("salt")
        need(same, "shard belongs to another session than the manifest says")
        digests = self.container.list("libraries")
        need(all(isinstance(d, str) and d in known for d in digests), "shard refers to a segment that is not there")
        self.libraries = [known[digest] for digest in digests]
        self.states = self.container.list("states")
        for pair in self.states:
            good = isinstance(pair, list) and len(pair) == 2 and natural(pair[0], 0, len(digests) - 1)
            need(good and natural(pair[1], 0, len(self.libraries[pair[0]].states) - 1), "a codec state is not there")
        if "recompute" in metadata and self.container.minor >= 3:
            self.refuse(entry)
        self.tokens = self.container.array("tokens", "I32")
        need((self.tokens >= 0).all(), "a token id is negative")
        need(len(self.tokens) == entry["tokens"], "shard has another number of tokens than the manifest says")
        self.units = read_units(self.container, identity, len(self.states))
        layers, least = range(1), 0
        for unit in self.units:
            mine = range(int(unit["layer"]), int(unit["layer"]) + int(unit["layer_count"]))
            start = int(unit["token_start"])
            behind = mine.start >= layers.stop or (mine == layers and start >= least)
            need(unit["node"] == NONE and (behind or least == 0), "units overlap or are out of order")
            layers, least = mine, start + int(unit["token_count"])
            need(least <= len(self.tokens), "a unit reaches beyond the session's end")
        self.runs = self.container.table("map", RUN)
        mapped, predicted = (np.zeros(len(self.tokens), bool) for _ in range(2))
        end = 0
        for index, run in enumerate(self.runs):
            need(
                run["session_start"] >= end and run["length"] >= 1, f"row {index} of the mapping table breaks the rules"
            )
            end = int(run["session_start"]) + int(run["length"])
            need(end <= len(self.tokens), f"row {index} of the mapping table leaves the session")
            place = slice(int(run["session_start"]), end)
            mapped[place], predicted[place] = True, self.check_run(run, entry.get("salt"))
        for unit in self.units[self.units["flags"] == 1]:
            at = int(unit["token_start"])
            need(mapped[at : at + int(unit["token_count"])].all(), "a reference lies outside the mapping table")
        for layer in range(len(identity["layers"])):
            left = predicted.copy()
            for unit in self.units[holds_layer(self.units, layer)]:
                at = int(unit["token_start"])
                left[at : at + int(unit["token_count"])] = False
            need(not left.any(), f"predicted tokens are in no unit of layer {layer}")

    def refuse(self, entry: dict[str, Any]) -> None:
        """A model makes the session again, which this decoder cannot run; tokens that need none are decoded."""
        recipe = json.loads(self.container.metadata["recompute"])
        good = isinstance(recipe, dict) and set(recipe) == {"weights", "predictor", "exact", "run", "text"}
        need(good and isinstance(recipe["weights"], str), "metadata 'recompute' is malformed")
        if recipe["text"] is not None:
            need(len(self.states) > 0 and natural(recipe["text"], 0, 1 << 32), "metadata 'recompute' is malformed")
            number, state = self.states[0]
            codec = self.libraries[number].codec(state)
            need(isinstance(codec, Recompute), "shard names no state that holds its tokens")
            self.tokens = codec.session(recipe["text"], entry["tokens"])
        raise DamagedError(f"session {entry['session']!r} is made again by a model (weights {recipe['weights']}), "
                           "which this decoder cannot run")  # fmt: skip

    def check_run(self, run: np.void, salt: str | None) -> bool:
        """A row of the mapping table fits its node; whether own units must hold all of its tokens."""
        shift = int(run["position_shift"])
        need(run["library"] < len(self.libraries), "a mapping row breaks the rules")
        need(
            shift == 0 or self.container.minor >= 2, "a mapping row has a shift, which the format version does not know"
        )
        library = self.libraries[run["library"]]
        need(run["node"] < len(library.nodes), "a mapping row names a node that is not there")
        node = library.nodes[run["node"]]
        first, length, start = int(run["node_start"]), int(run["length"]), int(run["session_start"])
        fits = first + length <= node["length"] and int(node["position"]) + first + shift == start
        need(fits, "a mapping row does not fit its node")
        need(library.salts[node["tenant"]] == salt, "a mapping row points to another tenant's node")
        at = int(node["token_offset"]) + first
        same = np.array_equal(library.tokens[at : at + length], self.tokens[start : start + length])
        need(same or self.container.minor >= 2, "a mapping row points to a node of other tokens")
        need(shift == 0 or can_move(self.identity), "a mapping row moves keys whose rotary embedding is not known")
        return shift != 0 or not same

    def layer(self, index: int) -> KeyValue:
        """Keys and values of one layer, as words."""
        unit = layer_unit(self.identity, index)
        mapped_keys, mapped_values = self.mapped(index)
        keys, values = mapped_keys.copy(), mapped_values.copy()
        covered = np.zeros(len(self.tokens), bool)
        for run in self.runs:
            # All tokens of a row that only predicts are in units, as checked.
            covered[int(run["session_start"]) : int(run["session_start"]) + int(run["length"])] = True
        for record in self.units[holds_layer(self.units, index)]:
            at, end = int(record["token_start"]), int(record["token_start"]) + int(record["token_count"])
            number, state = self.states[record["state"]]
            reference = None
            if record["flags"]:
                layers = range(int(record["layer"]), int(record["layer"]) + int(record["layer_count"]))
                found = [self.mapped(layer) for layer in layers]
                reference = [(k[:, at:end].copy(), v[:, at:end].copy()) for k, v in found]
            codec = self.libraries[number].codec(state)
            keys[:, at:end], values[:, at:end] = decode_unit(self, record, codec, unit, at, reference)
            covered[at:end] = True
        gaps = np.flatnonzero(~covered)
        need(len(gaps) == 0, f"no unit holds layer {index}, token {gaps[:1].sum()}")
        return keys, values

    def mapped(self, index: int) -> KeyValue:
        """What the mapping table gives for one layer, as words; 0 for other tokens."""
        if index not in self.mappings:
            self.mappings[index] = self.map_layer(index)
        return self.mappings[index]

    def map_layer(self, index: int) -> KeyValue:
        """See `mapped`."""
        unit = dataclasses.replace(layer_unit(self.identity, index), tokens=len(self.tokens))
        keys, values = (np.zeros(size, unit.word) for size in unit.shapes)
        for run in self.runs:
            shift = int(run["position_shift"])
            library, start = self.libraries[run["library"]], int(run["session_start"])
            node, stop = library.nodes[run["node"]], start + int(run["length"])
            units = library.units[node["first_unit"] : node["first_unit"] + node["unit_count"]]
            for record in units[holds_layer(units, index)]:
                at = int(node["position"]) + int(record["token_start"])
                # At session positions from here on.
                own = at + shift
                low, high = max(own, start), min(own + int(record["token_count"]), stop)
                if low < high:
                    found = decode_unit(library, record, library.codec(record["state"]), unit, at, None)
                    keys[:, low:high] = found[0][:, low - own : high - own]
                    values[:, low:high] = found[1][:, low - own : high - own]
            if shift:
                keys[:, start:stop] = move(keys[:, start:stop], unit, self.identity, start - shift, start)
        return keys, values


def can_move(identity: dict[str, Any]) -> bool:
    """Whether keys can be moved: they are not rotated, or by embeddings that are known."""
    known = (rope_frequencies(identity.get("rope"), shape["k_dim"]) is not None for shape in identity["layers"])
    return identity.get("keys") == "unrotated" or (identity.get("keys") == "rotated" and all(known))


def move(words: np.ndarray, layer: Unit, identity: dict[str, Any], position: int, target: int) -> np.ndarray:
    """Keys ``[H, T, D]`` as words, moved to other positions."""
    frequencies = rope_frequencies(identity.get("rope"), layer.k_dim)
    if identity["keys"] == "unrotated" or frequencies is None:
        return words
    style = identity["rope"].get("style", "half")
    with np.errstate(over="ignore", invalid="ignore"):
        plain = rope_rotate(to_float(words, layer.dtype), frequencies, style, position, back=True)
        moved = rope_rotate(plain, frequencies, style, target, back=False)
    moved[~np.isfinite(moved)] = 0
    limit = np.float32(LARGEST[layer.dtype])
    return to_words(np.clip(moved, -limit, limit), layer.dtype)


def layer_unit(identity: dict[str, Any], index: int) -> Unit:
    """A layer's geometry, without tokens."""
    shape = identity["layers"][index]
    return Unit(index, shape["heads"], shape["k_dim"], shape["v_dim"], shape["dtype"], 0, 0)


def holds_layer(units: np.ndarray, layer: int) -> np.ndarray:
    """Which units of an index hold a layer."""
    first = units["layer"].astype(int)
    return (first <= layer) & (layer < first + units["layer_count"])


def decode_unit(segment: Library | Shard, record: np.void, codec: Any, layer: Unit, position: int,
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


# --- dumps ------------------------------------------------------------------------------------------------------


def write_dump(path: Path, session: str, salt: str | None, shard: Shard) -> None:
    """Write one session as a safetensors file (section "Dumps")."""
    tensors: list[tuple[str, str, np.ndarray]] = [("tokens", "I32", shard.tokens)]
    for index, shape in enumerate(shard.identity["layers"]):
        keys, values = shard.layer(index)
        tensors += [(f"layers.{index}.keys", shape["dtype"], keys), (f"layers.{index}.values", shape["dtype"], values)]
    tensors.sort(key=lambda tensor: -tensor[2].dtype.itemsize)
    identity = shard.identity if salt is None else {**shard.identity, "salt": salt}
    metadata = {"pltpack.dump": "1", "session": session, "identity": canonical(identity)}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, array in tensors:
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, array in tensors:
            file.write(np.ascontiguousarray(array).tobytes())


def decode(folder: Path, out: Path, profile: Path | None = None) -> None:
    """Decode all sessions of an archive into a new folder."""
    at = folder / "MANIFEST.json"
    try:
        need(at.is_file(), "not an archive (no MANIFEST.json)")
        body = read_manifest(folder)
        known: dict[str, Library] = {}
        for entry in body["libraries"]:
            at = folder / entry["file"]
            known[entry["head_sha256"]] = Library(folder, entry, body["identity"], profile)
        for library in known.values():
            library.segments = list(known.values())
        out.mkdir(parents=True)
        for entry in body["sessions"]:
            at = folder / entry["file"]
            shard = Shard(folder, entry, body["identity"], known)
            write_dump(out / f"{quoted_name(entry['session'])}.safetensors", entry["session"], entry.get("salt"), shard)
    except DamagedError as error:
        raise DamagedError(f"{os.fspath(at)}: {error}") from None


def main(arguments: list[str]) -> int:
    """Command line; returns the exit code."""
    if len(arguments) not in (2, 3):
        print("usage: python reference_decoder.py ARCHIVE OUT [PROFILE]", file=sys.stderr)
        return 2
    try:
        decode(*map(Path, arguments))
    except (DamagedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
