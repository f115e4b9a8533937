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
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from reference_container import (
    NONE,
    RUN,
    canonical,
    natural,
    quoted_name,
    read_container,
    read_manifest,
    read_units,
)
from reference_library import Library, Segment, decode_unit, holds_layer, layer_unit
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
from reference_tokens import Recompute

# --- shards and sessions ----------------------------------------------------------------------------------------


class Shard(Segment):
    """A session's shard."""

    def __init__(
        self, folder: Path, entry: dict[str, Any], identity: dict[str, Any], known: dict[str, Library]
    ) -> None:
        self.identity = identity
        self.container = read_container(folder, entry, identity, "shard")
        self.decoded = {}
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
