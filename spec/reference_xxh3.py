"""XXH3-64 with seed 0 and the default secret, as in the xxHash specification, for the checksums of units."""

from __future__ import annotations

import numpy as np

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
MASK = (1 << 64) - 1
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _secret(at: int) -> int:
    return _u64(SECRET, at)


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & MASK) ^ (product >> 64)


def _rotate(h: int, bits: int) -> int:
    return (h << bits | h >> (64 - bits)) & MASK


def _avalanche(h: int) -> int:
    h ^= h >> 37
    h = h * 0x165667919E3779F9 & MASK
    return h ^ h >> 32


def _avalanche_64(h: int) -> int:
    h = (h ^ h >> 33) * P64[1] & MASK
    h = (h ^ h >> 29) * P64[2] & MASK
    return h ^ h >> 32


def _mix(data: bytes, at: int, secret: int) -> int:
    return _fold(_u64(data, at) ^ _secret(secret), _u64(data, at + 8) ^ _secret(secret + 8))


def _short(data: bytes) -> int:
    size = len(data)
    if size == 0:
        return _avalanche_64(_secret(56) ^ _secret(64))
    if size <= 3:
        combined = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
        return _avalanche_64(combined ^ _u32(SECRET, 0) ^ _u32(SECRET, 4))
    if size <= 8:
        h = (_u32(data, size - 4) + (_u32(data, 0) << 32)) ^ _secret(8) ^ _secret(16)
        h ^= _rotate(h, 49) ^ _rotate(h, 24)
        h = h * 0x9FB21C651E98DF25 & MASK
        h = (h ^ (h >> 35) + size) * 0x9FB21C651E98DF25 & MASK
        return h ^ h >> 28
    low = _u64(data, 0) ^ _secret(24) ^ _secret(32)
    high = _u64(data, size - 8) ^ _secret(40) ^ _secret(48)
    swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
    return _avalanche(size + swapped + high + _fold(low, high) & MASK)


def _middle(data: bytes) -> int:
    size = len(data)
    h = size * P64[0]
    if size <= 128:
        for i in range((size - 1) // 32, -1, -1):
            h += _mix(data, 16 * i, 32 * i) + _mix(data, size - 16 * (i + 1), 32 * i + 16)
        return _avalanche(h & MASK)
    h += sum(_mix(data, 16 * i, 16 * i) for i in range(8))
    h = _avalanche(h & MASK)
    h += sum(_mix(data, 16 * i, 16 * (i - 8) + 3) for i in range(8, size // 16))
    return _avalanche(h + _mix(data, size - 16, 136 - 17) & MASK)


def _accumulate(lanes: np.ndarray, stripes: np.ndarray, secrets: np.ndarray) -> None:
    """Add stripes, u64 ``[n, 8]``, to the eight lanes; sums wrap."""
    keys = stripes ^ secrets
    lanes += stripes.reshape(-1, 4, 2)[:, :, ::-1].reshape(-1, 8).sum(axis=0, dtype=np.uint64)
    lanes += ((keys & np.uint64(0xFFFFFFFF)) * (keys >> np.uint64(32))).sum(axis=0, dtype=np.uint64)


def _long(data: bytes) -> int:
    size = len(data)
    lanes = np.array([P32[2], *P64[:4], P32[1], P64[4], P32[0]], np.uint64)
    secrets = np.array([np.frombuffer(SECRET, "<u8", 8, at) for at in range(0, 128, 8)], np.uint64)
    scramble = np.frombuffer(SECRET, "<u8", 8, 128)
    for at in range(0, size - 1, 1024):
        count = min(16, (size - 1 - at) // 64)
        stripes = np.frombuffer(data, "<u8", 8 * count, at).reshape(count, 8)
        _accumulate(lanes, stripes, secrets[:count])
        if at + 1024 < size:
            lanes = ((lanes ^ (lanes >> np.uint64(47))) ^ scramble) * np.uint64(P32[0])
    _accumulate(lanes, np.frombuffer(data, "<u8", 8, size - 64)[None], np.frombuffer(SECRET, "<u8", 8, 121)[None])
    h = size * P64[0]
    for i in range(4):
        h += _fold(int(lanes[2 * i]) ^ _secret(11 + 16 * i), int(lanes[2 * i + 1]) ^ _secret(19 + 16 * i))
    return _avalanche(h & MASK)


def xxh3_64(data: bytes) -> int:
    """The checksum of some bytes."""
    if len(data) <= 16:
        return _short(data)
    return _middle(data) if len(data) <= 240 else _long(data)
