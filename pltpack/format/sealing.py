"""Encryption at rest: AES-256-GCM under a key of its own for every file (spec/format.md, "Encryption").

Each file draws 32 random bytes from which, with the archive's key, its own key is derived; so what numbers its parts
can serve as nonce, and no nonce is ever used twice under one key, however often a file is written anew.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pltpack.errors import EncryptionError, FormatError, UnsupportedError
from pltpack.format import json_text

CIPHER = "AES-256-GCM"
KEY_BYTES, SALT_BYTES, ARCHIVE_BYTES, TAG_BYTES = 32, 32, 16, 16
KEY_VARIABLE, FILE_VARIABLE = "PLTPACK_KEY", "PLTPACK_KEY_FILE"
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
#: A part's role and number.
NONCE = struct.Struct(">4sQ")
_given: list[bytes] = []


def parse_key(text: bytes | str, origin: str | os.PathLike[str] | None = None) -> bytes:
    """A key of 32 bytes, given as they are, in hexadecimal, or in base64.

    Raises
    ------
    EncryptionError
        If it is something else.
    """
    data = text.encode() if isinstance(text, str) else text
    if len(data) == KEY_BYTES and isinstance(text, bytes):
        return data
    bare = data.strip()
    with contextlib.suppress(binascii.Error, ValueError):
        found = bytes.fromhex(bare.decode()) if len(bare) == 2 * KEY_BYTES else base64.b64decode(bare, validate=True)
        if len(found) == KEY_BYTES:
            return found
    raise EncryptionError("not a key: 32 bytes are needed, as they are, in hexadecimal or in base64", origin)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The key in a file; errors as of `parse_key`."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise EncryptionError("the key file is not a regular file", path)
            return parse_key(file.read(1024), path)
    except OSError as error:
        raise EncryptionError(f"the key file cannot be read ({error.strerror})", path) from None


@contextlib.contextmanager
def using_key(key: bytes | str | os.PathLike[str]) -> Iterator[None]:
    """Have this process use a key, or that in a file, where none is named."""
    _given.append(key if isinstance(key, bytes) else read_key(key))
    try:
        yield
    finally:
        _given.pop()


def current_key() -> bytes | None:
    """The key of `using_key`, else that in ``PLTPACK_KEY``, else that of the file ``PLTPACK_KEY_FILE`` names."""
    if _given:
        return _given[-1]
    if os.environ.get(KEY_VARIABLE):
        return parse_key(os.environ[KEY_VARIABLE], KEY_VARIABLE)
    if os.environ.get(FILE_VARIABLE):
        return read_key(Path(os.environ[FILE_VARIABLE]))
    return None


def key_id(key: bytes) -> str:
    """What names a key without telling it: 16 hexadecimal digits."""
    return hmac.digest(key, b"pltpack key id", "sha256").hex()[:16]


class Seal:
    """The key of one archive.

    Parameters
    ----------
    key : bytes
        32 bytes.
    archive : bytes
        16 bytes that are the archive's own.
    """

    def __init__(self, key: bytes, archive: bytes) -> None:
        self.key, self.archive, self._key_id = key, archive, key_id(key)

    @classmethod
    def new(cls, key: bytes) -> Seal:
        """For an archive that is about to be made."""
        return cls(key, secrets.token_bytes(ARCHIVE_BYTES))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seal) and (self.key, self.archive) == (other.key, other.archive)

    def __hash__(self) -> int:
        return hash(self.archive)

    def __repr__(self) -> str:
        return f"Seal(key {self._key_id}, archive {self.archive.hex()})"

    def fresh(self) -> FileSeal:
        """For a file that is about to be written."""
        return self._file(secrets.token_bytes(SALT_BYTES))

    def opened(self, header: object, path: os.PathLike[str]) -> FileSeal:
        """For a file whose header says how it is encrypted.

        Raises
        ------
        EncryptionError
            If it needs another key.
        FormatError
            If the header is malformed, or of another archive.
        """
        fields = checked(header, path)
        if fields["key"] != self._key_id:
            require_key(self.key, fields, path)
        if fields["archive"] != self.archive.hex():
            raise FormatError("it is encrypted for another archive", path)
        return self._file(bytes.fromhex(fields["salt"]))

    def _file(self, salt: bytes) -> FileSeal:
        header = {"cipher": CIPHER, "key": self._key_id, "archive": self.archive.hex(), "salt": salt.hex()}
        # HKDF-SHA256 (RFC 5869) of one block.
        extracted = hmac.digest(salt, self.key, "sha256")
        return FileSeal(header, hmac.digest(extracted, b"pltpack file" + self.archive + b"\x01", "sha256"))


class FileSeal:
    """The key of one file, which opens no other.

    It can go to another process, and there stand for the `Seal` of a container that is opened.

    Parameters
    ----------
    header : dict
        The file's encryption header.
    key : bytes
        32 bytes.

    Attributes
    ----------
    cipher : AESGCM
        For who has many parts to open, and makes nonces and associated data of all at once.
    errors : tuple of type
        What it raises for a part that was altered.
    """

    def __init__(self, header: dict[str, str], key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise UnsupportedError("encryption needs a package that is not installed: pip install 'pltpack[encrypt]'"
                                   ) from None  # fmt: skip
        self.header, self._key, self._archive = header, key, bytes.fromhex(header["archive"])
        self.cipher, self.errors = AESGCM(key), (InvalidTag, ValueError)

    def __reduce__(self) -> tuple[type[FileSeal], tuple[dict[str, str], bytes]]:
        return FileSeal, (self.header, self._key)

    def opened(self, header: object, path: os.PathLike[str]) -> FileSeal:
        """See `Seal.opened`; `FormatError` for another file than its own."""
        if header != self.header:
            raise FormatError("it is encrypted with another key", path)
        return self

    def bound_to(self, role: bytes) -> bytes:
        """What the associated data of all parts of a kind begin with."""
        return self._archive + role

    def seal(self, role: bytes, number: int, data: bytes | memoryview, bound: bytes = b"") -> bytes:
        """Encrypt a part: its bytes, and a tag of 16.

        Parameters
        ----------
        role : bytes
            4 bytes, of each kind of part its own.
        number : int
            Of the part among those of its kind; each is sealed once.
        data : bytes-like
        bound : bytes
            What must be the same when it is opened.
        """
        return self.cipher.encrypt(NONCE.pack(role, number), data, self.bound_to(role) + bound)

    def seal_into(
        self, role: bytes, number: int, data: bytes | memoryview, out: memoryview, bound: bytes = b""
    ) -> None:
        """Encrypt a part to its place, `TAG_BYTES` longer than its bytes; arguments as of `seal`."""
        self.cipher.encrypt_into(NONCE.pack(role, number), data, self.bound_to(role) + bound, out)

    def open(
        self, role: bytes, number: int, data: bytes | memoryview, path: os.PathLike[str], bound: bytes = b""
    ) -> bytes:
        """Decrypt a part.

        Raises
        ------
        FormatError
            If any of its bytes, its place or what it is bound to is not as it was sealed.
        """
        try:
            return self.cipher.decrypt(NONCE.pack(role, number), data, self.bound_to(role) + bound)
        except self.errors:
            raise altered(role, number, path) from None


def checked(header: object, path: os.PathLike[str]) -> dict[str, str]:
    """The fields of an encryption header; `FormatError` if it is malformed, `UnsupportedError` for another cipher."""
    sizes = {"key": 8, "archive": ARCHIVE_BYTES, "salt": SALT_BYTES}
    if isinstance(header, dict) and isinstance(header.get("cipher"), str) and header["cipher"] != CIPHER:
        raise UnsupportedError(f"it is encrypted by {header['cipher']!r}, which this version does not know", path)
    if not isinstance(header, dict) or set(header) != {"cipher", *sizes}:
        raise FormatError("the encryption header is malformed", path)
    for name, size in sizes.items():
        if not isinstance(header[name], str) or not _HEX.fullmatch(header[name]) or len(header[name]) != 2 * size:
            raise FormatError("the encryption header is malformed", path)
    return dict(header)


def require_key(key: bytes | None, fields: dict[str, str], path: os.PathLike[str]) -> bytes:
    """The key, if it is the one that a header names; `EncryptionError` if not."""
    if key is None:
        raise EncryptionError(f"it is encrypted with key {fields['key']}, and none is given "
                              f"(--key-file, {FILE_VARIABLE} or {KEY_VARIABLE})", path)  # fmt: skip
    if key_id(key) != fields["key"]:
        raise EncryptionError(f"it is encrypted with key {fields['key']}, and the one given is {key_id(key)}", path)
    return key


def canonical(value: Any) -> bytes:
    """Canonical JSON (spec/format.md, "JSON")."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encoded(data: bytes) -> str:
    """Sealed bytes as text."""
    return base64.b64encode(data).decode()


def decoded(text: object, path: os.PathLike[str]) -> bytes:
    """Inverse of `encoded`; `FormatError` for anything else."""
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise FormatError("the sealed part is malformed", path)


def parsed(data: bytes, path: os.PathLike[str]) -> Any:
    """JSON that was sealed; `FormatError` if it is none."""
    try:
        return json_text.parse(data)
    except ValueError:
        raise FormatError("the sealed part is malformed", path) from None


def altered(role: bytes, number: int, path: os.PathLike[str]) -> FormatError:
    """The error for a part that does not open."""
    what = {b"unit": f"unit {number}", b"tabl": "a table"}.get(role, "the sealed head")
    return FormatError(f"{what} does not open with this key: it was altered or moved", path)
