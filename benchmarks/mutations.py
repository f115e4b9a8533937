"""Random edits of bytes and of JSON values, for `benchmarks.fuzz`."""

from __future__ import annotations

import random

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few random edits: flips, interesting integers, cuts, repeats, insertions."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not out:
            break
        at = rng.randrange(len(out))
        kind = rng.randrange(7)
        if kind <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at] = rng.randrange(256)
        elif kind == 3:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice(INTERESTING) & ((1 << 8 * size) - 1)
            out[at : at + size] = value.to_bytes(size, "little")
        elif kind == 4:
            del out[at : at + rng.choice((1, 2, 8, len(out)))]
        elif kind == 5:
            out[at:at] = out[at : at + rng.choice((1, 8, 64))]
        else:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
    return bytes(out)


def mutate_json(value: object, rng: random.Random) -> object:
    """Replace one random part of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        changed = dict(value)
        if rng.random() < 0.05:
            del changed[key]
        else:
            changed[key] = mutate_json(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(value[at], rng), *value[at + 1 :]]
    junk = (None, True, -1, 0, 1, 1 << 31, 1 << 63, 1.5, "", "..", "a/../b", "0" * 64, [], {}, [[]], "x" * 300)
    return rng.choice(junk)
