"""MANIFEST.json: the archive's only commit point (spec/format.md, "MANIFEST")."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from pltpack.errors import FormatError, PltpackError, UnsupportedError
from pltpack.format import durable, json_text
from pltpack.format.container import FORMAT_VERSION
from pltpack.format.sealing import Seal, canonical, checked, decoded, encoded, parsed, require_key
from pltpack.format.tables import MAX_LAYERS
from pltpack.names import check_session
from pltpack.snapshot import Identity

NAME = "MANIFEST.json"
MAX_BYTES = 1 << 26
SHARDS = "shards"
#: Member of the body for `Manifest.commits`; readers can do without it.
COMMITS = "x-commits"
#: Member of the body of an encrypted manifest.
ENCRYPTION = "encryption"
LIBRARY_NAME = re.compile(r"library-\d{6,12}\.pltlib")
SHARD_NAME = re.compile(r"shards/[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]{0,239}\.pltshard")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class FileEntry:
    """A library segment as the manifest names it.

    Attributes
    ----------
    file : str
        Path inside the archive.
    bytes : int
        Size.
    head_sha256, payload_sha256 : str
        Digests of all but the payload, and of the payload.
    """

    file: str
    bytes: int
    head_sha256: str
    payload_sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class SessionEntry(FileEntry):
    """A shard as the manifest names it: a `FileEntry` with the session's name, token count and salt."""

    session: str = ""
    tokens: int = 0
    salt: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One generation of an archive.

    Attributes
    ----------
    generation : int
        1 for a new archive, one more with every commit.
    identity : Identity
        Shared by all sessions; its salt is None (each session has its own).
    block : int
        Tokens per block.
    quality : str
        Tier that `append` uses unless told otherwise.
    dedup : bool
        Whether sessions share prefixes.
    libraries : tuple of FileEntry
    sessions : tuple of SessionEntry
    commits : tuple of str
        Marks of the latest commits in an object store, by which a writer finds out whether its own was done.
    seal : Seal or None
        With what it is encrypted.
    """

    generation: int
    identity: Identity
    block: int
    quality: str
    dedup: bool
    libraries: tuple[FileEntry, ...]
    sessions: tuple[SessionEntry, ...]
    commits: tuple[str, ...] = ()
    seal: Seal | None = None

    def to_bytes(self) -> bytes:
        """The file's bytes: a JSON object of ``body`` and the SHA-256 of the body's canonical form."""
        body: dict[str, Any] = {
            "format": "pltpack", "version": list(FORMAT_VERSION), "generation": self.generation,
            "identity": self.identity.to_json(), "block": self.block, "quality": self.quality, "dedup": self.dedup,
            "libraries": [dataclasses.asdict(entry) for entry in self.libraries],
            "sessions": [{k: v for k, v in dataclasses.asdict(e).items() if v is not None} for e in self.sessions],
        }  # fmt: skip
        if self.commits:
            body[COMMITS] = list(self.commits)
        if self.seal is not None:
            body = _sealed(body, self.seal)
        return json.dumps({"body": body, "sha256": _digest(body)}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes, path: os.PathLike[str], key: bytes | None = None) -> Manifest:
        """Read and check a manifest; `key` opens an encrypted one.

        Raises
        ------
        FormatError
            Naming what is wrong.
        EncryptionError
            If the key is missing or another one.
        """
        if len(data) > MAX_BYTES:
            raise FormatError("manifest is larger than allowed", path)
        try:
            outer = json_text.parse(data)
            body, digest = outer["body"], outer["sha256"]
            recomputed = _digest(body)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise FormatError("manifest is not valid", path) from None
        if set(outer) != {"body", "sha256"} or digest != recomputed:
            raise FormatError("manifest does not match its own checksum", path)
        seal = None
        if isinstance(body, dict) and ENCRYPTION in body:
            body, seal = _unsealed(body, key, path)
        try:
            return dataclasses.replace(_from_body(body), seal=seal)
        except FormatError as error:
            raise error.at(path) from None
        except PltpackError as error:
            raise FormatError(f"manifest is not valid: {error.fact}", path) from None

    @classmethod
    def load(cls, archive: Path) -> Manifest:
        """Read the manifest of an archive folder.

        Raises
        ------
        FormatError
            If there is none, or it is damaged.
        """
        return cls.parse(cls.read(archive), archive / NAME)

    @staticmethod
    def read(archive: Path) -> bytes:
        """The bytes of an archive folder's manifest; `FormatError` if there is none."""
        path = archive / NAME
        try:
            # Without O_NONBLOCK, opening a pipe of that name would wait for its other end.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise FormatError("not a regular file", path)
                return file.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise FormatError(f"not an archive (no {NAME})", archive) from None

    def commit(self, archive: Path) -> None:
        """Make this generation the archive's, durably and at once.

        Raises
        ------
        UnsupportedError
            If readers would refuse it, for its size or the values in it.
        """
        durable.write_file(archive / NAME, self.checked_bytes(archive))

    def checked_bytes(self, archive: os.PathLike[str]) -> bytes:
        """What `to_bytes` gives, if readers will take it.

        Raises
        ------
        UnsupportedError
            If they would refuse it, for its size or the values in it.
        """
        data = self.to_bytes()
        try:
            self.parse(data, archive, None if self.seal is None else self.seal.key)
        except FormatError as error:
            raise UnsupportedError(f"this generation could not be read back: {error.fact}", archive) from None
        return data


def outline(data: bytes, path: os.PathLike[str]) -> dict[str, Any] | None:
    """What an encrypted manifest tells without its key: ``generation``, ``key`` and ``files`` with their sizes.

    None for one that is not encrypted. Nothing of it is known to be true.
    """
    try:
        body = json_text.parse(data)["body"]
        if ENCRYPTION not in body:
            return None
        fields = checked(body[ENCRYPTION], path)
        files = [{"file": str(name), "bytes": int(size)} for name, size in body["files"]]
        return {"generation": int(body["generation"]), "key": fields["key"], "cipher": fields["cipher"], "files": files}
    except (ValueError, TypeError, KeyError):
        raise FormatError("manifest is not valid", path) from None


def _sealed(body: dict[str, Any], seal: Seal) -> dict[str, Any]:
    file = seal.fresh()
    outer = {"format": body["format"], "version": body["version"], "generation": body["generation"],
             "files": [[entry["file"], entry["bytes"]] for entry in (*body["libraries"], *body["sessions"])],
             ENCRYPTION: file.header}  # fmt: skip
    return {**outer, "sealed": encoded(file.seal(b"mani", 0, canonical(body), canonical(outer)))}


def _unsealed(body: dict[str, Any], key: bytes | None, path: os.PathLike[str]) -> tuple[Any, Seal]:
    if set(body) != {"format", "version", "generation", "files", ENCRYPTION, "sealed"}:
        raise FormatError("manifest is encrypted, but not in a form that is known", path)
    fields = checked(body[ENCRYPTION], path)
    seal = Seal(require_key(key, fields, path), bytes.fromhex(fields["archive"]))
    outer = {name: value for name, value in body.items() if name != "sealed"}
    data = seal.opened(fields, path).open(b"mani", 0, decoded(body["sealed"], path), path, canonical(outer))
    return parsed(data, path), seal


def _digest(body: object) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _from_body(body: Any) -> Manifest:
    if not isinstance(body, dict) or body.get("format") != "pltpack":
        raise FormatError("manifest is not of a pltpack archive")
    version = body.get("version")
    known = isinstance(version, list) and len(version) == 2 and all(_natural(part, 0, 1 << 16) for part in version)
    if not isinstance(version, list) or not known or version[0] != FORMAT_VERSION[0]:
        raise FormatError(f"format version {version!r} is not supported (this reader knows {FORMAT_VERSION[0]}.x)")
    names = {"format", "version", "generation", "identity", "block", "quality", "dedup", "libraries", "sessions"}
    # A later minor version may add fields that old readers can do without; it marks them by this prefix.
    unknown = {name for name in body if not name.startswith("x-")} - names
    if unknown or not names <= set(body):
        raise FormatError(f"manifest has unknown or missing fields: {sorted(unknown | (names - set(body)))}")
    if not _natural(body["generation"], 1, 1 << 53) or not _natural(body["block"], 1, 1 << 12):
        raise FormatError("manifest field 'generation' or 'block' is out of range")
    if not isinstance(body["quality"], str) or not isinstance(body["dedup"], bool):
        raise FormatError("manifest field 'quality' or 'dedup' has the wrong type")
    identity = Identity.from_json(body["identity"])
    if identity.salt is not None:
        raise FormatError("manifest identity must not carry a salt")
    if not 0 < len(identity.layers) <= MAX_LAYERS:
        raise FormatError(f"manifest identity has {len(identity.layers)} layers (allowed: 1 to {MAX_LAYERS})")
    if not isinstance(body["libraries"], list) or not isinstance(body["sessions"], list):
        raise FormatError("manifest field 'libraries' or 'sessions' is not a list")
    libraries = tuple(FileEntry(**_file(entry, LIBRARY_NAME, set())) for entry in body["libraries"])
    sessions = []
    for entry in body["sessions"]:
        fields = _file(entry, SHARD_NAME, {"session", "tokens", "salt"})
        if not isinstance(fields.get("session"), str) or not _natural(fields.get("tokens"), 0, 1 << 28):
            raise FormatError("manifest has a malformed session entry")
        if not isinstance(fields.get("salt", ""), str):
            raise FormatError("manifest has a malformed session entry")
        check_session(fields["session"])
        sessions.append(SessionEntry(**fields))
    files = [entry.file for entry in (*libraries, *sessions)]
    if len(set(files)) != len(files) or len({e.session for e in sessions}) != len(sessions):
        raise FormatError("manifest names a file or a session twice")
    if len({entry.head_sha256 for entry in libraries}) != len(libraries):
        raise FormatError("manifest names a library segment twice")
    commits = body.get(COMMITS)
    marks = tuple(mark for mark in commits if isinstance(mark, str)) if isinstance(commits, list) else ()
    return Manifest(body["generation"], identity, body["block"], body["quality"], body["dedup"],
                    libraries, tuple(sessions), marks)  # fmt: skip


def _file(entry: Any, pattern: re.Pattern[str], extra: set[str]) -> dict[str, Any]:
    required = {"file", "bytes", "head_sha256", "payload_sha256"}
    if not isinstance(entry, dict) or not required <= set(entry) <= required | extra:
        raise FormatError("manifest has a malformed file entry")
    if not isinstance(entry["file"], str) or not pattern.fullmatch(entry["file"]):
        raise FormatError(f"manifest names a file that may not be in an archive: {entry['file']!r}")
    if not _natural(entry["bytes"], 0, 1 << 62):
        raise FormatError("manifest has a file size out of range")
    for name in ("head_sha256", "payload_sha256"):
        if not isinstance(entry[name], str) or not _DIGEST.fullmatch(entry[name]):
            raise FormatError(f"manifest has a malformed {name}")
    return dict(entry)


def _natural(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high
