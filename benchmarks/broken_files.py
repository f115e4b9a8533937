"""Recipes that break files, headers and metadata."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from benchmarks.broken import recipe
from benchmarks.surgery import Surgery, make_pipe

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


@recipe("tensor-token-negative")
def _(s: Surgery) -> None:
    s.shard(2).tensors["tokens"][3] = -1


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
