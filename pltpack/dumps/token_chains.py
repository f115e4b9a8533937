"""Names that engines give pages of tokens: chained digests, so that a page's name stands for all tokens before it too.

Tokens from outside are matched with files by computing these names; a match verifies the tokens.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from pltpack.errors import UnsupportedError

#: Digests of vLLM (``prefix_caching_hash_algo``); the first one is the default there.
ALGORITHMS = ("sha256", "sha256_cbor")
BUILTIN = "builtin"
#: What vLLM's chains begin with, unless ``PYTHONHASHSEED`` says otherwise.
SEED = "vllm-none-hash"


def _digest(algorithm: str) -> Callable[[Any], bytes]:
    if algorithm == "sha256":
        # Pickles are made here to be digested, as the engine does; none is ever read.
        return lambda value: hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
    return lambda value: hashlib.sha256(cbor(value)).digest()


def vllm_chain(tokens: np.ndarray, size: int, algorithm: str = "sha256", seed: str = SEED) -> list[str]:
    """Hexadecimal hashes of the whole blocks of `size` tokens, as vLLM's prefix cache has them for plain text."""
    digest = _digest(algorithm)
    parent, out, ids = digest(seed), [], tokens.tolist()
    for start in range(0, len(ids) - size + 1, size):
        parent = digest((parent, tuple(ids[start : start + size]), None))
        out.append(parent.hex())
    return out


def lmcache_chain(
    tokens: np.ndarray, size: int, algorithm: str = "sha256", seed: str = SEED, root: int | None = None
) -> list[str]:
    """Chunk hashes as LMCache's keys have them, of the last chunk too where it is not whole.

    Parameters
    ----------
    tokens : ndarray
    size : int
        Tokens per chunk.
    algorithm : str
        One of `ALGORITHMS`, or ``builtin``: Python's own, of which `root` is taken for the root where it is given.
    seed : str
        What the digest of the root is of.
    root : int, optional
    """
    digest: Callable[[Any], int]
    if algorithm == BUILTIN:
        digest, parent = hash, root or 0
    else:
        whole = _digest(algorithm)

        def digest(value: Any) -> int:
            return int.from_bytes(whole(value)[:8], "big")

        parent = digest(seed) if root is None else root
    out, ids = [], tokens.tolist()
    for start in range(0, len(ids), size):
        parent = digest((parent, tuple(ids[start : start + size]), ()))
        out.append(f"{parent:x}")
    return out


def sglang_chain(tokens: np.ndarray, size: int) -> list[str]:
    """Hexadecimal hashes of the whole pages of `size` tokens, as SGLang's storage has them without a namespace."""
    ids = np.ascontiguousarray(tokens, "<u4")
    digest, out = b"", []
    for start in range(0, len(ids) - size + 1, size):
        digest = hashlib.sha256(digest + ids[start : start + size].tobytes()).digest()
        out.append(digest.hex())
    return out


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949) of text, bytes, integers, None and tuples of them.

    Raises
    ------
    UnsupportedError
        If it holds anything else.
    """
    if value is None:
        return b"\xf6"
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 64) <= value < 1 << 64:
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return _head(4, len(value)) + b"".join(map(cbor, value))
    raise UnsupportedError(f"{type(value).__name__} is not coded as CBOR here")


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, form in enumerate((">B", ">H", ">I", ">Q"), 24):
        if number < 1 << 8 * struct.calcsize(form):
            return bytes([major << 5 | code]) + struct.pack(form, number)
    raise AssertionError("checked before")
