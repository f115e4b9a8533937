"""Recipes that break manifests."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.broken import recipe
from benchmarks.surgery import Surgery, manifest_bytes


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
