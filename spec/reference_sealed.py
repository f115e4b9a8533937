"""Encrypted archives, for the reference decoder (spec/format.md, "Encryption").

Imports numpy and the standard library only, and for AES-GCM, which neither has, the package `cryptography` where it is
installed. The key is taken from PLTPACK_KEY (hexadecimal) or from the file that PLTPACK_KEY_FILE names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import importlib
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from reference_numbers import DamagedError, need

ITEMS = {"U8": "u1", "I32": "<i4", "U32": "<u4", "U64": "<u8"}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _key() -> bytes:
    text = os.environ.get("PLTPACK_KEY", "").encode()
    if not text and os.environ.get("PLTPACK_KEY_FILE"):
        text = Path(os.environ["PLTPACK_KEY_FILE"]).read_bytes()
    need(bool(text), "the archive is encrypted, and no key is given (PLTPACK_KEY or PLTPACK_KEY_FILE)")
    if len(text) == 32:
        return text
    try:
        key = bytes.fromhex(text.decode().strip())
    except ValueError:
        key = b""
    need(len(key) == 32, "the key is not one of 32 bytes, as they are or in hexadecimal")
    return key


class File:
    """The key of one file, by its encryption header."""

    def __init__(self, header: Any) -> None:
        whole = isinstance(header, dict) and set(header) == {"cipher", "key", "archive", "salt"}
        need(whole and header["cipher"] == "AES-256-GCM", "encryption header is malformed, or of an unknown cipher")
        for name, digits in (("key", 16), ("archive", 32), ("salt", 64)):
            value = header[name]
            sized = isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value)
            need(sized, "encryption header is malformed")
        key = _key()
        name = hmac.new(key, b"pltpack key id", hashlib.sha256).hexdigest()[:16]
        need(name == header["key"], f"the archive is encrypted with key {header['key']}, not with {name}")
        self.archive = bytes.fromhex(header["archive"])
        extracted = hmac.new(bytes.fromhex(header["salt"]), key, hashlib.sha256).digest()
        expanded = hmac.new(extracted, b"pltpack file" + self.archive + b"\x01", hashlib.sha256).digest()
        try:
            self._cipher = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM(expanded)
        except ImportError:
            raise DamagedError("the archive is encrypted: to read it, install the package 'cryptography'") from None

    def open(self, role: bytes, number: int, data: bytes, bound: bytes) -> bytes:
        """Decrypt a part."""
        try:
            nonce = role + struct.pack(">Q", number)
            return bytes(self._cipher.decrypt(nonce, data, self.archive + role + bound))
        except Exception:  # its own kind, which need not be importable
            raise DamagedError(f"part {role.decode()} {number} was altered or moved") from None


def _unbase64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise DamagedError("a sealed part is malformed") from None


def open_manifest(body: dict[str, Any]) -> tuple[bytes, bytes]:
    """The sealed body's JSON, and the archive's own bytes."""
    names = {"format", "version", "generation", "files", "encryption", "sealed"}
    need(set(body) == names, f"manifest has unknown or missing fields: {sorted(set(body) ^ names)}")
    file = File(body["encryption"])
    outer = {name: value for name, value in body.items() if name != "sealed"}
    return file.open(b"mani", 0, _unbase64(body["sealed"]), _canonical(outer)), file.archive


def open_container(
    tensors: dict[str, np.ndarray], metadata: dict[str, str], header: Any, archive: bytes, parse: Any
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors, the payload among them, and metadata as they would be without encryption."""
    need(set(metadata) == {"format_version", "kind", "encryption", "sealed"}, "metadata has unknown or missing keys")
    need(metadata["format_version"] == "1.4", f"format version {metadata['format_version']!r} is not supported")
    file = File(header)
    need(file.archive == archive, "file is encrypted for another archive")
    inner = parse(file.open(b"head", 0, _unbase64(metadata["sealed"]), metadata["kind"].encode()))
    need(isinstance(inner, dict) and set(inner) == {"metadata", "tensors"}, "the sealed head is malformed")
    names = sorted(set(tensors) - {"unit.payload", "padding"})
    need(isinstance(inner["tensors"], dict) and sorted(inner["tensors"]) == names, "the sealed head does not fit")
    plain = {}
    for number, name in enumerate(names):
        data = file.open(b"tabl", number, tensors[name].tobytes(), name.encode())
        dtype, shape = inner["tensors"][name]
        need(dtype in ITEMS and len(shape) <= 2 and len(data) == np.dtype(ITEMS[dtype]).itemsize * int(np.prod(shape)),
             f"{name!r} does not have the form that the sealed head gives")  # fmt: skip
        plain[name] = np.frombuffer(data, ITEMS[dtype]).reshape(shape)
    index, stored, units, at = plain.get("unit.index", np.empty(0, np.uint8)).tobytes(), tensors["unit.payload"], [], 0
    for number in range(len(index) // 48):
        offset, length = struct.unpack_from("<QQ", index, 48 * number)
        need(offset + 16 * number == at and at + length + 16 <= len(stored), "units do not cover the payload")
        sealed = stored[at : at + length + 16].tobytes()
        units.append(file.open(b"unit", number, sealed, struct.pack("<QQ", offset, length)))
        at += length + 16
    need(at == len(stored), "units do not cover the payload")
    plain["unit.payload"] = np.frombuffer(b"".join(units), np.uint8)
    return plain, inner["metadata"]
