"""TurboQuant in its MSE variant (arXiv 2504.19874, algorithm 1): the per-vector baseline, no calibration needed.

A vector is one head of one token, keys as stored. It is divided by its norm, rotated at random, and each coordinate is
rounded to a Lloyd-Max codebook of the coordinate's distribution on the sphere. The first tokens of a session
(`SINK_TOKENS`) and tokens whose norm is not finite are stored exactly. The reference is ignored: the rotation makes
every vector look alike, which a difference would not improve by itself.

Payload, little-endian, for T tokens of H heads; D is `k_dim` in the keys' parts and `v_dim` in the values'; S of the
unit's first tokens are sinks, E more are escapes, N = T - S - E are coded; tokens in order, padding bits zero:

| Part            | Bytes                | Content |
|:----------------|:---------------------|:--------|
| `Escape_Count`  | 4                    | E, unsigned |
| `Escapes`       | 4 E                  | their indices in the unit, unsigned, strictly ascending, in [S, T) |
| `Exact_Keys`    | H (S+E) k_dim size   | keys of sinks and escapes `[H, S+E, k_dim]` in the stored dtype |
| `Exact_Values`  | H (S+E) v_dim size   | values of the same tokens |
| `Key_Norms`     | 2 H N                | bfloat16 `[H, N]`, finite and not negative |
| `Value_Norms`   | 2 H N                | the same for values |
| `Key_Indices`   | ceil(H N k_dim b/8)  | element i of `[H, N, k_dim]` in bits [i b, (i+1) b), lowest first |
| `Value_Indices` | ceil(H N v_dim b/8)  | the same for values |

State: ``levels.D``, float32 ``[2**b]`` strictly ascending, for each vector length D that occurs.

Rotation of a vector of length D, all in binary32, one operation at a time. P is the largest power of two <= D and
c = 1 / sqrt(P) rounded to binary32. A *Hadamard step* on P neighbours: for h = 1, 2, 4, ..., P/2, each pair
(a, b) = (x[i], x[i+h]) with i mod 2h < h becomes (a + b, a - b); then, if P > 1, everything is multiplied by c.
Forward, each of the 4 rounds: multiply by the round's signs; if P < D, replace x by x[p] with the round's permutation
p; Hadamard step on the first P elements; if P < D, multiply by the round's second signs, then Hadamard step on the last
P. Decoding takes the levels of the indices and undoes the rounds, last round first: if P < D, Hadamard step on the last
P, then multiply by the second signs; Hadamard step on the first P; if P < D, put element i at p[i]; multiply by the
signs. Then it multiplies by the norm, clamps to the largest finite value of the dtype and rounds to nearest even.

Signs and permutations come from splitmix64: the n-th draw, n = 1, 2, ..., starts from
z = seed * 2**32 + D + n * 0x9E3779B97F4A7C15 and is, modulo 2**64, z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9,
z = (z ^ z >> 27) * 0x94D049BB133111EB, z ^ z >> 31. Each round takes D draws for its signs, negative where bit 63 is
set; then, if P < D, D draws for its second signs and D - 1 for its permutation: from the identity, for
i = D-1, ..., 1 swap p[i] and p[j], j = (draw >> 32) * (i+1) >> 32.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pltpack.codec import sphere
from pltpack.codec.base import SINK_TOKENS, Codec, KeyValue, Samples, State, Unit
from pltpack.snapshot import DTYPES, Identity

_BFLOAT16 = DTYPES["BF16"]
_INFINITY = 0x7F80
_LARGEST = {"F32": (2 - 2**-23) * 2.0**127, "BF16": (2 - 2**-7) * 2.0**127, "F16": 65504.0, "F8_E4M3": 448.0,
            "F8_E5M2": 57344.0}  # fmt: skip


class TurboQuantCodec(Codec):
    """TurboQuant-MSE, arXiv 2504.19874: random rotation, Lloyd-Max levels, one norm per vector.

    Parameters
    ----------
    bits : int
        Bits per element, 2, 3 or 4; each vector adds 16 for its norm.
    seed : int
        Of the rotation, below 2**32.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """

    codec_id = "turboquant"
    predicts = False

    def __init__(self, bits: int = 4, seed: int = 0) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or bits not in (2, 3, 4):
            raise ValueError(f"turboquant takes 2, 3 or 4 bits, not {bits!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
            raise ValueError(f"turboquant takes a seed of 0 to 2**32 - 1, not {seed!r}")
        self.bits, self.seed = bits, seed
        self._tables: dict[int, tuple[np.ndarray, np.ndarray, sphere.Rotation]] = {}

    def get_config(self) -> dict[str, Any]:
        """See `Codec.get_config`."""
        return {"bits": self.bits, "seed": self.seed}

    def learn(self, samples: Samples, identity: Identity) -> dict[str, np.ndarray]:
        """The codebooks; they depend on the vector lengths only."""
        return {f"levels.{dim}": sphere.lloyd_max(dim, self.bits) for dim in _dims(identity)}

    def start(self, state: State, identity: Identity) -> None:
        """See `Codec.start`."""
        dims = _dims(identity)
        if set(state) != {f"levels.{dim}" for dim in dims}:
            raise ValueError("turboquant state does not hold one codebook per vector length")
        tables = {}
        for dim in dims:
            levels = np.asarray(state[f"levels.{dim}"])
            if levels.dtype != np.float32 or levels.shape != (1 << self.bits,):
                raise ValueError(f"turboquant codebook for length {dim} has the wrong shape or dtype")
            if not (np.abs(levels) <= 2).all() or not (levels[1:] > levels[:-1]).all():
                raise ValueError(f"turboquant codebook for length {dim} is not strictly ascending within [-2, 2]")
            borders = np.full(sphere.MOST_BORDERS, np.inf, dtype=np.float32)
            borders[: len(levels) - 1] = (levels[1:] + levels[:-1]) * np.float32(0.5)
            tables[dim] = (np.ascontiguousarray(levels), borders, sphere.Rotation.of(dim, self.seed))
        self._tables = tables

    def _table(self, dim: int) -> tuple[np.ndarray, np.ndarray, sphere.Rotation]:
        try:
            return self._tables[dim]
        except KeyError:
            raise ValueError(f"turboquant has no codebook for vectors of length {dim}") from None

    def encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None) -> bytes:
        """See `Codec.encode`; `reference` is ignored."""
        sinks = _sinks(unit)
        vectors = [np.ascontiguousarray(part[:, sinks:].astype(np.float32)) for part in (keys, values)]
        norms = [_stored_norms(part) for part in vectors]
        kept = np.isfinite(norms[0].astype(np.float32)).all(0) & np.isfinite(norms[1].astype(np.float32)).all(0)
        escapes = sinks + np.flatnonzero(~kept)
        exact = np.concatenate([np.arange(sinks), escapes])
        out = [len(escapes).to_bytes(4, "little"), escapes.astype("<u4").tobytes()]
        out += [np.ascontiguousarray(part[:, exact]).tobytes() for part in (keys, values)]
        norms = [np.ascontiguousarray(part[:, kept]) for part in norms]
        out += [part.view(np.uint16).astype("<u2").tobytes() for part in norms]
        out += [self._indices(part[:, kept], norm) for part, norm in zip(vectors, norms, strict=True)]
        return b"".join(out)

    def _indices(self, vectors: np.ndarray, norms: np.ndarray) -> bytes:
        dim = vectors.shape[2]
        _, borders, rotation = self._table(dim)
        indices = np.zeros(-(-vectors.size // 8) * 8, dtype=np.uint8)
        sphere.quantize(
            np.ascontiguousarray(vectors).reshape(-1, dim), norms.astype(np.float32).reshape(-1), rotation.signs,
            rotation.perms, rotation.size, rotation.scale, borders, indices[: vectors.size].reshape(-1, dim),
        )  # fmt: skip
        packed = np.empty(len(indices) // 8 * self.bits, dtype=np.uint8)
        sphere.pack(indices, self.bits, packed)
        return packed[: -(-vectors.size * self.bits // 8)].tobytes()

    def decode(self, payload: memoryview, unit: Unit, keys: np.ndarray, values: np.ndarray,
               reference: KeyValue | None = None) -> None:  # fmt: skip
        """See `Codec.decode`; `reference` is ignored."""
        data = np.frombuffer(payload, dtype=np.uint8)
        sinks, geometry = _sinks(unit), unit.geometry
        heads, dims, itemsize = geometry.heads, (geometry.k_dim, geometry.v_dim), DTYPES[geometry.dtype].itemsize
        escapes = _escapes(data, sinks, unit.tokens)
        count = unit.tokens - sinks - len(escapes)
        sizes = [heads * (sinks + len(escapes)) * dim * itemsize for dim in dims]
        sizes += [2 * heads * count] * 2 + [-(-heads * count * dim * self.bits // 8) for dim in dims]
        ends = list(accumulate(sizes, initial=4 + 4 * len(escapes)))
        if ends[-1] != len(data):
            raise ValueError(f"turboquant payload has {len(data)} bytes where its unit takes {ends[-1]}")
        parts = [data[a:b] for a, b in pairwise(ends)]
        coded = np.ones(unit.tokens, dtype=bool)
        coded[:sinks] = coded[escapes] = False
        runs = _runs(coded)
        for i, out in enumerate((keys, values)):
            raw = np.frombuffer(parts[i].tobytes(), dtype=out.dtype)
            out[:, ~coded] = raw.reshape(heads, sinks + len(escapes), dims[i])
            decoded = self._vectors(parts[4 + i], parts[2 + i], heads, count, dims[i], geometry.dtype)
            for start, stop, at in runs:
                out[:, start:stop] = decoded[:, at : at + stop - start]

    def _vectors(self, packed: np.ndarray, norms: np.ndarray, heads: int, count: int, dim: int,
                 dtype: str) -> np.ndarray:  # fmt: skip
        levels, _, rotation = self._table(dim)
        norm_bits = np.frombuffer(norms.tobytes(), dtype="<u2")
        if (norm_bits >= _INFINITY).any():
            raise ValueError("turboquant payload has a norm that is negative or not finite")
        total = heads * count * dim
        indices = np.empty(-(-total // 8) * 8, dtype=np.uint8)
        whole = np.zeros(len(indices) // 8 * self.bits, dtype=np.uint8)
        whole[: len(packed)] = packed
        sphere.unpack(whole, self.bits, indices)
        if indices[total:].any():
            raise ValueError("turboquant payload has padding bits set")
        out = np.empty((heads * count, dim), dtype=np.float32)
        sphere.dequantize(
            indices[:total].reshape(-1, dim), levels, (norm_bits.astype(np.uint32) << 16).view(np.float32),
            rotation.signs, rotation.perms, rotation.size, rotation.scale, np.float32(_LARGEST[dtype]), out,
        )  # fmt: skip
        return out.reshape(heads, count, dim).astype(DTYPES[dtype])


def _dims(identity: Identity) -> list[int]:
    return sorted({dim for layer in identity.layers for dim in (layer.k_dim, layer.v_dim)})


def _sinks(unit: Unit) -> int:
    return min(max(SINK_TOKENS - unit.position, 0), unit.tokens)


def _stored_norms(vectors: np.ndarray) -> np.ndarray:
    """Norms of ``[H, T, D]`` as bfloat16 ``[H, T]``, infinite or NaN where bfloat16 cannot hold them."""
    heads, tokens, dim = vectors.shape
    out = np.empty(heads * tokens)
    sphere.norms(vectors.reshape(-1, dim), out)
    with np.errstate(over="ignore", invalid="ignore"):
        return out.astype(np.float32).astype(_BFLOAT16).reshape(heads, tokens)


def _escapes(data: np.ndarray, sinks: int, tokens: int) -> np.ndarray:
    if len(data) < 4:
        raise ValueError("turboquant payload is truncated")
    count = int.from_bytes(data[:4].tobytes(), "little")
    if count > tokens - sinks or len(data) < 4 + 4 * count:
        raise ValueError(f"turboquant payload names {count} escapes, more than it can hold")
    escapes = np.frombuffer(data[4 : 4 + 4 * count].tobytes(), dtype="<u4").astype(np.int64)
    if count and (escapes[0] < sinks or escapes[-1] >= tokens or (np.diff(escapes) <= 0).any()):
        raise ValueError("turboquant payload's escapes are not ascending token indices")
    return escapes


def _runs(coded: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, stop, tokens coded before) of each run of coded tokens; slices copy faster than a mask."""
    edges = np.flatnonzero(np.diff(coded.astype(np.int8), prepend=0, append=0)).tolist()
    before = np.concatenate([[0], np.cumsum(coded)]).tolist()
    return [(a, b, before[a]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
