"""Recipes that break manifests, headers and metadata."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from benchmarks.broken import recipe
from benchmarks.surgery import Surgery, make_pipe, manifest_bytes

# --- MANIFEST ---------------------------------------------------------------------------------------------------


@recipe("manifest-missing")
def _(s: Surgery) -> None:
    s.last = lambda folder: (folder / "MANIFEST.json").unlink()


@recipe("manifest-cut")
def _(s: Surgery) -> None:
    s.manifest = lambda data: data[: len(data) // 2]


@recipe("manifest-checksum")
def _(s: Surgery) -> None:
    s.manifest = lambda data: data.replace(b'"generation": 1', b'"generation": 2')


@recipe("manifest-no-object")
def _(s: Surgery) -> None:
    s.manifest = lambda data: b"[]\n"


@recipe("manifest-encoding")
def _(s: Surgery) -> None:
    s.manifest = lambda data: data.decode().encode("utf-16")


@recipe("manifest-deep")
def _(s: Surgery) -> None:
    s.manifest = lambda data: b"[" * 200_000 + b"]" * 200_000


@recipe("manifest-deep-body")
def _(s: Surgery) -> None:
    s.manifest = lambda data: b'{"body": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b', "sha256": ""}'


@recipe("manifest-many-lists")
def _(s: Surgery) -> None:
    s.manifest = lambda data: b'{"body": [' + b"[]," * (1 << 20) + b'[]], "sha256": ""}'


@recipe("manifest-repeated-key")
def _(s: Surgery) -> None:
    s.manifest = lambda data: data.replace(b'"block": 4', b'"block": 4, "block": 4')


@recipe("manifest-more-members")
def _(s: Surgery) -> None:
    s.manifest = lambda data: data.replace(b'"body"', b'"x-more": 1, "body"')


def _body(name: str, value: Any) -> None:
    """A recipe that sets a member of the body."""

    @recipe(f"manifest-{name}")
    def _(s: Surgery) -> None:
        member = value(s.body) if callable(value) else value
        s.body.update(member)


_body("format", {"format": "other"})
_body("version", {"version": [2, 0]})
_body("version-shape", {"version": "1.0"})
_body("version-long", {"version": [1, 0, 0]})
_body("unknown-member", {"compression": "none"})
_body("generation", {"generation": 0})
_body("generation-float", {"generation": 1.5})
_body("block", {"block": 4097})
_body("quality", {"quality": 4})
_body("dedup", {"dedup": 1})
_body("libraries", {"libraries": {}})


@recipe("manifest-missing-member")
def _(s: Surgery) -> None:
    s.entries = lambda body: body.pop("quality")


def _identity(name: str, **members: Any) -> None:
    """A recipe that sets members of the manifest's identity."""

    @recipe(f"identity-{name}")
    def _(s: Surgery) -> None:
        s.body["identity"].update(members)


_identity("salt", salt="mine")
_identity("unknown-member", revision="main")
_identity("wrong-type", model=7)
_identity("keys", keys="turned")
_identity("no-layers", layers=[])
_identity("null-layers", layers=None)
_identity("differs", model="another")
_identity("rope-differs", rope={"type": "default", "theta": 500.0})


def _layer(name: str, **members: Any) -> None:
    @recipe(f"identity-layer-{name}")
    def _(s: Surgery) -> None:
        s.body["identity"]["layers"][0].update(members)


_layer("heads", heads=0)
_layer("dimension", k_dim=(1 << 20) + 1)
_layer("float", v_dim=4.0)
_layer("dtype", dtype="I8")
_layer("dtype-type", dtype=["BF16"])
_layer("window", window=0)
_layer("unknown-member", scale=1)


def _entry(name: str, kind: str, **members: Any) -> None:
    """A recipe that sets members of the first session's or library's entry."""

    @recipe(f"manifest-{name}")
    def _(s: Surgery) -> None:
        s.entries = lambda body: body[kind][0].update(members)


_entry("path-parent", "sessions", file="shards/../../a.pltshard")
_entry("path-absolute", "sessions", file="/etc/passwd")
_entry("path-dot", "sessions", file="shards/.tmp-0000000000000000.pltshard")
_entry("path-newline", "sessions", file="shards/a.pltshard\n")
_entry("path-backslash", "sessions", file="shards/..\\a.pltshard")
_entry("path-library", "libraries", file="library-1.pltlib")
_entry("path-folder", "libraries", file="x/library-000001.pltlib")
_entry("path-type", "libraries", file=None)
_entry("size-negative", "libraries", bytes=-1)
_entry("size-huge", "libraries", bytes=1 << 63)
_entry("size-boolean", "libraries", bytes=True)
_entry("digest-upper", "libraries", head_sha256="A" * 64)
_entry("digest-short", "libraries", payload_sha256="0" * 63)
_entry("entry-more", "libraries", compressed=True)
_entry("tokens-huge", "sessions", tokens=(1 << 28) + 1)
_entry("tokens-wrong", "sessions", tokens=11)
_entry("session-wrong", "sessions", session="another")
_entry("session-control", "sessions", session="a\nb")
_entry("session-empty", "sessions", session="")
_entry("session-long", "sessions", session="a" * 201)
_entry("session-surrogate", "sessions", session="\ud800")
_entry("salt-type", "sessions", salt=5)
_entry("salt-wrong", "sessions", salt="s")


@recipe("manifest-file-twice")
def _(s: Surgery) -> None:
    s.entries = lambda body: body["sessions"][1].update(
        {k: v for k, v in body["sessions"][0].items() if k != "session"}
    )


@recipe("manifest-session-twice")
def _(s: Surgery) -> None:
    s.entries = lambda body: body["sessions"][1].update(session=body["sessions"][0]["session"])


@recipe("manifest-library-twice")
def _(s: Surgery) -> None:
    s.entries = lambda body: body["libraries"].append({**body["libraries"][0], "file": "library-000002.pltlib"})


@recipe("manifest-number")
def _(s: Surgery) -> None:
    s.manifest = lambda data: data.replace(b'"block": 4', b'"block": ' + b"4" * 5000)


@recipe("manifest-infinity")
def _(s: Surgery) -> None:
    def change(data: bytes) -> bytes:
        body = json.loads(data)["body"]
        body["identity"]["rope"]["theta"] = float("inf")
        return manifest_bytes(body)

    s.manifest = change


# --- files ------------------------------------------------------------------------------------------------------


@recipe("library-missing")
def _(s: Surgery) -> None:
    s.library.missing = True


@recipe("library-dropped")
def _(s: Surgery) -> None:
    s.entries = lambda body: body["libraries"].clear()


@recipe("shard-missing")
def _(s: Surgery) -> None:
    s.shard().missing = True


@recipe("shard-cut")
def _(s: Surgery) -> None:
    s.shard().after = lambda data: data[:-1]


@recipe("shard-longer")
def _(s: Surgery) -> None:
    s.shard().after = lambda data: data + b"\0"


@recipe("shard-swapped")
def _(s: Surgery) -> None:
    def swap(body: dict[str, Any]) -> None:
        a, b = body["sessions"][:2]
        for key in ("file", "bytes", "head_sha256", "payload_sha256"):
            a[key], b[key] = b[key], a[key]

    s.entries = swap


@recipe("shard-is-a-library")
def _(s: Surgery) -> None:
    s.shard().metadata["kind"] = "library"


@recipe("library-is-a-pipe")
def _(s: Surgery) -> None:
    s.last = lambda folder: make_pipe(folder / "library-000001.pltlib")


@recipe("library-is-a-folder")
def _(s: Surgery) -> None:
    def replace(folder: Any) -> None:
        (folder / "library-000001.pltlib").unlink()
        (folder / "library-000001.pltlib").mkdir()

    s.last = replace


@recipe("head-flip")
def _(s: Surgery) -> None:
    s.shard().after = lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


@recipe("payload-flip")
def _(s: Surgery) -> None:
    def flip(data: bytes) -> bytes:
        at = 8 + struct.unpack_from("<Q", data)[0] + 5
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]

    s.shard(1).after = flip


@recipe("payload-digest")
def _(s: Surgery) -> None:
    s.entries = lambda body: body["sessions"][0].update(payload_sha256="0" * 64)


# --- headers ----------------------------------------------------------------------------------------------------


def _length(name: str, value: int) -> None:
    @recipe(f"header-{name}")
    def _(s: Surgery) -> None:
        s.library.raw = lambda data: struct.pack("<Q", value) + data[8:]


_length("long", 1 << 20)
_length("huge", (1 << 64) - 1)
_length("empty", 0)


def _text(name: str, change: Any) -> None:
    @recipe(f"header-{name}")
    def _(s: Surgery) -> None:
        s.library.text = change


_text("no-json", lambda text: text.replace(b":", b";", 1))
_text("list", lambda text: b"[1]".ljust(len(text)))
_text("leading-space", lambda text: b" " + text[:-1] if text.endswith(b" ") else b" " + text + b" " * 7)
_text("encoding", lambda text: text.replace(b"golden", b"g\xffdden"))
_text("deep", lambda text: b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
_text("many-lists", lambda text: b'{"a":[' + b"[]," * (1 << 20) + b"[]]}")
_text("repeated-tensor", lambda text: text.rstrip()[:-1] + b',"trie.tokens":' + text.split(b'"trie.tokens":')[1])


def _header(name: str, change: Any) -> None:
    """A recipe that changes the library's header."""

    @recipe(f"tensor-{name}")
    def _(s: Surgery) -> None:
        s.library.header = change


def _offsets(tensor: str, first: Any, last: Any) -> Any:
    def change(header: dict[str, Any]) -> None:
        offsets = header[tensor]["data_offsets"]
        header[tensor]["data_offsets"] = [offsets[0] + first, offsets[1] + last]

    return change


_header("hole", lambda header: header.pop("trie.tokens"))
_header("overlap", _offsets("trie.tokens", -4, -4))
_header("beyond", _offsets("codec.state.0", 1, 1))
_header("offset-float", _offsets("trie.tokens", 0.0, 0.0))
_header("offset-negative", lambda header: header["trie.tokens"].update(data_offsets=[-4, 0], shape=[1]))
_header("offset-reversed", lambda header: header["trie.tokens"].update(data_offsets=[8, 4], shape=[0]))
_header("dtype", lambda header: header["trie.tokens"].update(dtype="F32"))
_header("dtype-type", lambda header: header["trie.tokens"].update(dtype=["I32"]))
_header("shape", lambda header: header["trie.tokens"].update(shape=[9]))
_header("shape-huge", lambda header: header["trie.tokens"].update(shape=[1 << 40, 1 << 40]))
_header("shape-boolean", lambda header: header["codec.state.0"].update(shape=[True]))
_header("rank", lambda header: header["trie.tokens"].update(shape=[1, *header["trie.tokens"]["shape"], 1]))
_header("member", lambda header: header["trie.tokens"].update(order="C"))
_header("no-object", lambda header: header.update({"trie.tokens": 4}))
_header("payload-renamed", lambda header: header.update({"payload": header.pop("unit.payload")}))
_header("metadata-type", lambda header: header["__metadata__"].update(kind=1))


@recipe("tensor-payload-late")
def _(s: Surgery) -> None:
    tokens = s.library.tensors.pop("trie.tokens")
    s.library.tensors = {"trie.tokens": tokens, **s.library.tensors}


@recipe("tensor-unknown")
def _(s: Surgery) -> None:
    s.library.tensors["profile"] = np.zeros(1, np.uint8)


@recipe("tensor-missing")
def _(s: Surgery) -> None:
    del s.shard().tensors["map"]


@recipe("tensor-records")
def _(s: Surgery) -> None:
    s.shard().tensors["map"] = np.zeros((1, 20), np.uint8)


@recipe("tensor-tokens-rank")
def _(s: Surgery) -> None:
    s.shard().tensors["tokens"] = s.shard().tensors["tokens"].reshape(2, -1)


# --- metadata ---------------------------------------------------------------------------------------------------


def _metadata(name: str, **members: str | None) -> None:
    """A recipe that sets or removes metadata of the library."""

    @recipe(f"metadata-{name}")
    def _(s: Surgery) -> None:
        for key, value in members.items():
            if value is None:
                del s.library.metadata[key]
            else:
                s.library.metadata[key] = value


_metadata("version", format_version="2.0")
_metadata("version-text", format_version="1.x")
_metadata("version-missing", format_version=None)
_metadata("kind", kind="shard")
_metadata("identity-digest", identity_sha256="0" * 64)
_metadata("identity-text", identity="{}")
_metadata("unknown", compression="none")
_metadata("missing", salts=None)
_metadata("states-object", states="{}")
_metadata("states-deep", states="[" * 100_000 + "]" * 100_000)
_metadata("libraries-type", libraries="[5]")
_metadata("salts-type", salts='[null, {"a": 1}]')


@recipe("metadata-session")
def _(s: Surgery) -> None:
    s.shard().metadata["session"] = "another"


@recipe("metadata-salt")
def _(s: Surgery) -> None:
    s.shard().metadata["salt"] = "s"


@recipe("metadata-library-unknown")
def _(s: Surgery) -> None:
    s.shard().set_items("libraries", ["0" * 64])


@recipe("metadata-state-pair")
def _(s: Surgery) -> None:
    s.shard().set_items("states", [[0, 1]])


@recipe("metadata-state-library")
def _(s: Surgery) -> None:
    s.shard().set_items("states", [[1, 0]])
