"""MANIFEST, containers and their tables, for the reference decoder (spec/format.md).

Imports numpy, zstandard and the standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from reference_numbers import BYTES, DamagedError, need, unzstd
from reference_sealed import open_container, open_manifest

UNIT = np.dtype([
    ("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8"), ("token_start", "<u4"), ("token_count", "<u4"),
    ("layer", "<u2"), ("layer_count", "<u2"), ("state", "<u2"), ("flags", "<u2"), ("node", "<u4"), ("error", "<f4"),
])  # fmt: skip
RUN = np.dtype([
    ("session_start", "<u4"), ("length", "<u4"), ("library", "<u4"), ("node", "<u4"), ("node_start", "<u4"),
    ("position_shift", "<i4"),
])  # fmt: skip
NODE = np.dtype([
    ("token_offset", "<u8"), ("parent_library", "<u4"), ("parent", "<u4"), ("position", "<u4"), ("length", "<u4"),
    ("visits", "<u4"), ("first_unit", "<u4"), ("unit_count", "<u4"), ("tenant", "<u4"),
])  # fmt: skip
NONE = 0xFFFFFFFF

# --- JSON -------------------------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    """Parse JSON under the rules of section "JSON"."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "JSON repeats a key")
        return dict(pairs)

    try:
        text = text.decode() if isinstance(text, bytes) else text
        need(text.count("[") + text.count("{") <= 1 << 20 and text.count(",") <= 1 << 21, "JSON is too large")
        value = json.loads(text, object_pairs_hook=unique)
        need(depth_of(value) <= 64, "JSON is nested too deeply")
        return value
    except (ValueError, RecursionError):
        raise DamagedError("not valid JSON") from None


def depth_of(value: Any) -> int:
    """Arrays and objects inside each other, the outermost counted; 0 for other values."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


def canonical(value: Any) -> str:
    """Canonical JSON."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        raise DamagedError("JSON holds a number that is not finite, or is nested too deeply") from None


def digest(data: str | bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def natural(value: Any, low: int, high: int) -> bool:
    """Whether a JSON value is an integer in a range."""
    return type(value) is int and low <= value <= high


# --- MANIFEST ---------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's body, checked."""
    with open(folder / "MANIFEST.json", "rb") as file:
        data = file.read((1 << 26) + 1)
    need(len(data) <= 1 << 26, "manifest is too large")
    outer = parse_json(data)
    need(isinstance(outer, dict) and set(outer) == {"body", "sha256"}, "manifest is not an object of body and sha256")
    body = outer["body"]
    need(digest(canonical(body)) == outer["sha256"], "manifest does not match its own checksum")
    need(isinstance(body, dict) and body.get("format") == "pltpack", "manifest is not of a pltpack archive")
    version = body.get("version")
    need(isinstance(version, list) and len(version) == 2 and all(natural(part, 0, 1 << 16) for part in version)
         and version[0] == 1, f"format version {version!r} is not supported")  # fmt: skip
    archive = None
    if "encryption" in body:
        inner, archive = open_manifest(body)
        body = parse_json(inner)
    known = {"format", "version", "generation", "identity", "block", "quality", "dedup", "libraries", "sessions"}
    found = {name for name in body if not name.startswith("x-")}
    need(found == known, f"manifest has unknown or missing fields: {sorted(found ^ known)}")
    need(
        natural(body["generation"], 1, 1 << 53) and natural(body["block"], 1, 4096), "a manifest field is out of range"
    )
    need(isinstance(body["quality"], str) and isinstance(body["dedup"], bool), "a manifest field has the wrong type")
    body["identity"] = check_identity(body["identity"])
    need(isinstance(body["libraries"], list) and isinstance(body["sessions"], list), "manifest lacks its lists")
    for entry in body["libraries"]:
        check_entry(entry, r"library-[0-9]{6,12}\.pltlib", set(), set())
    for entry in body["sessions"]:
        pattern = r"shards/[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]{0,239}\.pltshard"
        check_entry(entry, pattern, {"session", "tokens"}, {"salt"})
        need(natural(entry["tokens"], 0, 1 << 28), "number of tokens is out of range")
        need(isinstance(entry.get("salt", ""), str), "salt is not a string")
        quoted_name(entry["session"])
    for entries, name in ((body["libraries"] + body["sessions"], "file"), (body["sessions"], "session"),
                          (body["libraries"], "head_sha256")):  # fmt: skip
        need(len({entry[name] for entry in entries}) == len(entries), f"manifest names a {name} twice")
    for entry in body["libraries"] + body["sessions"]:
        entry["archive"] = archive
    return dict(body)


def check_identity(identity: Any) -> dict[str, Any]:
    """The identity without unknown members."""
    kinds = {"model": str, "weights": str, "tokenizer": str, "rope": dict, "keys": str, "layers": list, "tp_rank": int,
             "tp_size": int, "quantized": dict}  # fmt: skip
    need(isinstance(identity, dict), "identity is not an object")
    known = {name: value for name, value in identity.items() if value is not None}
    for name, value in known.items():
        need(name in kinds and isinstance(value, kinds[name]) and not isinstance(value, bool),
             f"identity has a wrong member {name!r}")  # fmt: skip
    need(known.get("keys", "rotated") in ("rotated", "unrotated"), "identity member 'keys' is out of range")
    layers = known.get("layers", [])
    need(1 <= len(layers) <= 1 << 14, "number of layers is out of range")
    required = {"heads", "k_dim", "v_dim", "dtype"}
    for index, layer in enumerate(layers):
        need(isinstance(layer, dict) and required <= set(layer) <= required | {"window"}, "a layer is malformed")
        layers[index] = layer = {name: value for name, value in layer.items() if value is not None}
        numbers = [layer.get(name) for name in ("heads", "k_dim", "v_dim")] + [layer.get("window", 1)]
        need(all(natural(number, 1, 1 << 20) for number in numbers), "a layer's geometry is out of range")
        need(isinstance(layer["dtype"], str) and layer["dtype"] in BYTES, "a layer's dtype is unknown")
    return known


def check_entry(entry: Any, pattern: str, more: set[str], optional: set[str]) -> None:
    """A file entry or session entry."""
    required = {"file", "bytes", "head_sha256", "payload_sha256"} | more
    need(isinstance(entry, dict) and required <= set(entry) <= required | optional, "manifest has a malformed entry")
    need(isinstance(entry["file"], str) and re.fullmatch(pattern, entry["file"]),
         f"manifest names a file that may not be in an archive: {entry['file']!r}")  # fmt: skip
    need(natural(entry["bytes"], 0, 1 << 62), "a file size is out of range")
    for name in ("head_sha256", "payload_sha256"):
        need(isinstance(entry[name], str) and re.fullmatch("[0-9a-f]{64}", entry[name]), f"{name} is malformed")


def quoted_name(name: Any) -> str:
    """A session name's quoted form."""
    need(isinstance(name, str) and not re.search("[\x00-\x1f\x7f]", name), "a session name is malformed")
    try:
        need(1 <= len(name.encode()) <= 200, "a session name has a length out of range")
    except UnicodeEncodeError:
        raise DamagedError("a session name is not valid Unicode") from None
    quoted = quote(name, safe="")
    quoted = "%2E" + quoted[1:] if quoted.startswith(".") else quoted
    need(len(quoted) <= 220, "a session name is too long once quoted")
    return quoted


# --- containers -------------------------------------------------------------------------------------------------

ITEMS = {"U8": "u1", "I32": "<i4", "U32": "<u4", "U64": "<u8"}


@dataclasses.dataclass
class Container:
    """A library segment or shard: its tensors, payload included, and metadata."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]

    @property
    def minor(self) -> int:
        """The file's minor version: 1 knows layer groups and profiles, 2 predictions, 3 what a model makes again."""
        return int(self.metadata["format_version"].split(".")[1])

    def table(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """A table of records."""
        array = self.tensors[name]
        need(array.dtype == np.uint8 and array.ndim == 2 and array.shape[1] == dtype.itemsize, f"{name} is malformed")
        return np.frombuffer(array.tobytes(), dtype)

    def array(self, name: str, dtype: str) -> np.ndarray:
        """A one-dimensional tensor."""
        array = self.tensors[name]
        need(array.dtype == np.dtype(ITEMS[dtype]) and array.ndim == 1, f"{name} is malformed")
        return array

    def list(self, name: str) -> list[Any]:
        """A list in the metadata."""
        value = parse_json(self.metadata[name])
        need(isinstance(value, list), f"metadata {name!r} is not a list")
        return list(value)


def read_container(folder: Path, entry: dict[str, Any], identity: dict[str, Any], kind: str) -> Container:
    """Read a file that the manifest names, whole, and check it as a container."""
    path = folder / entry["file"]
    need(path.is_file(), "the file that the manifest names is missing")
    need(path.stat().st_size == entry["bytes"], "file does not have the size that the manifest gives")
    data = path.read_bytes()
    need(len(data) >= 8, "file is too short")
    (length,) = struct.unpack_from("<Q", data)
    need(2 <= length <= min(100_000_000, len(data) - 8), "header length is out of range")
    need(data[8:9] == b"{", "header is not a JSON object")
    header = parse_json(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    need(isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()), "metadata is malformed")
    body, tensors, ranges = data[8 + length :], {}, []
    for name, tensor in header.items():
        need(isinstance(tensor, dict) and set(tensor) == {"dtype", "shape", "data_offsets"}, f"{name!r} is malformed")
        dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        need(isinstance(dtype, str) and dtype in ITEMS, f"{name!r} has an unknown dtype")
        for numbers in (shape, offsets):
            need(isinstance(numbers, list) and len(numbers) <= 2, f"{name!r} is malformed")
            need(all(natural(number, 0, (1 << 62) - 1) for number in numbers), f"{name!r} is malformed")
        need(len(offsets) == 2 and offsets[1] <= len(body), f"{name!r} does not fit the file")
        size = np.dtype(ITEMS[dtype]).itemsize
        for side in shape:
            size *= side
        need(offsets[1] - offsets[0] == size, f"{name!r} does not fit its offsets")
        tensors[name] = np.frombuffer(body[offsets[0] : offsets[1]], ITEMS[dtype]).reshape(shape)
        ranges.append((offsets[0], offsets[1]))
    end = 0
    for first, last in sorted(ranges):
        need(first == end, "tensors overlap or leave holes")
        end = last
    need(end == len(body), "tensors do not cover the file")
    payload = header.get("unit.payload", {"dtype": "", "data_offsets": [1, 1]})
    need(payload["dtype"] == "U8" and payload["data_offsets"][0] == 0, "unit.payload does not come first")
    split = 8 + length + payload["data_offsets"][1]
    need(len(data) - split <= 1 << 29, "tables are too large")
    need(digest(data[: 8 + length] + data[split:]) == entry["head_sha256"], "header and tables have another digest")
    need(digest(data[8 + length : split]) == entry["payload_sha256"], "payload has another digest")
    need(("encryption" in metadata) == (entry["archive"] is not None), "file and archive are not both encrypted")
    if entry["archive"] is not None:
        header = parse_json(metadata["encryption"])
        tensors, metadata = open_container(tensors, metadata, header, entry["archive"], parse_json)
    container = Container(tensors, metadata)
    check_metadata(container, identity, kind)
    return container


def check_metadata(container: Container, identity: dict[str, Any], kind: str) -> None:
    """Metadata and names of tensors."""
    metadata = container.metadata
    version = metadata.get("format_version", "")
    need(re.fullmatch(r"1\.[0-9]{1,5}", version), f"format version {version!r} is not supported")
    need(metadata.get("kind") == kind, f"not a {kind} file")
    mine = canonical(identity)
    brief = kind == "shard" and "recompute" in metadata and int(version.split(".")[1]) >= 3
    same = metadata.get("identity") == mine or (brief and "identity" not in metadata)
    need(metadata.get("identity_sha256") == digest(mine) and same, "identity differs")
    keys = {"format_version", "kind", "identity", "identity_sha256", "libraries", "states"}
    keys |= {"salts"} if kind == "library" else {"session"}
    keys |= {"recompute"} if brief else set()
    found = {key for key in metadata if not key.startswith("x-")} - ({"salt"} if kind == "shard" else set())
    found |= {"identity"} if brief else set()
    need(found == keys, f"metadata has unknown or missing keys: {sorted(found ^ keys)}")
    names = {"unit.payload", "unit.index"} | ({"tokens", "map"} if kind == "shard" else {"trie.nodes", "trie.tokens"})
    if brief:
        names = names - {"tokens"} | {"recompute.digests"} | ({"recompute.tokens"} & set(container.tensors))
    if kind == "library":
        names |= {f"codec.state.{index}" for index in range(len(container.list("states")))}
    tensors = {name for name in container.tensors if not name.startswith("x-")} - {"padding"}
    need(tensors == names, f"unknown or missing tensors: {sorted(tensors ^ names)}")


def read_units(container: Container, identity: dict[str, Any], states: int) -> np.ndarray:
    """The unit index, checked."""
    units, layers = container.table("unit.index", UNIT), identity["layers"]
    end = 0
    for index, unit in enumerate(units):
        tokens, layer, count = int(unit["token_count"]), int(unit["layer"]), int(unit["layer_count"])
        good = unit["offset"] == end and 1 <= tokens <= 1 << 16 and int(unit["token_start"]) + tokens <= 1 << 28
        good = good and count >= 1 and layer + count <= len(layers) and unit["state"] < states
        good = good and (count == 1 or container.minor >= (2 if unit["flags"] else 1))
        good = good and unit["flags"] <= (2 if container.minor >= 3 else 1)
        need(good and unit["error"] >= 0, f"unit {index} of the index breaks the rules")
        size = 0
        for shape in layers[layer : layer + count]:
            size += tokens * shape["heads"] * (shape["k_dim"] + shape["v_dim"]) * BYTES[shape["dtype"]]
        need(size <= 1 << 30, f"unit {index} of the index is too large")
        end += int(unit["length"])
    need(end == len(container.tensors["unit.payload"]), "units do not cover the payload")
    return units


def read_state(blob: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a codec state."""
    data = unzstd(blob.tobytes(), None, 1 << 28)
    need(len(data) >= 4, "codec state is truncated")
    (length,) = struct.unpack_from("<I", data)
    need(length <= min(1 << 20, len(data) - 4), "codec state has a header of a length out of range")
    kinds = {"U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "F16": "<f2", "F32": "<f4"}
    header, arrays, at = parse_json(data[4 : 4 + length]), {}, 4 + length
    need(isinstance(header, list), "codec state is malformed")
    for item in header:
        need(isinstance(item, list) and len(item) == 3 and all(isinstance(x, str) for x in item[:2]), "malformed state")
        name, dtype, shape = item
        need(dtype in kinds and name not in arrays and isinstance(shape, list) and len(shape) <= 4, "malformed state")
        need(all(natural(side, 0, (1 << 31) - 1) for side in shape), "codec state is malformed")
        count = 1
        for side in shape:
            count *= side
        end = at + count * np.dtype(kinds[dtype]).itemsize
        need(end <= len(data), "codec state is truncated")
        arrays[name] = np.frombuffer(data[at:end], kinds[dtype]).reshape(shape)
        at = end
    need(at == len(data), "codec state has trailing bytes")
    return arrays
