"""The calibration-free lossy codec of the tiers q1 to q4: one step per head and token, static entropy tables.

Notation: a unit has N tokens, H heads, key and value dimension D. A *head* below is one of the 2 H rows of heads: keys
0 to H - 1, then values. P = ceil(D / 2) is a head's number of *pairs*: pair j joins channels j and P + j. All integers
are little-endian, all arithmetic on values is single binary32 operations, rounded to nearest even, as written.

**Payload**

| bytes | content |
|---|---|
| 1 | flags: bit 0 `referenced`, bit 1 `own means`, bit 2 `shifted` (format 1.2); others 0. See below |
| 3 | 0 |
| 4 | u32 number of run bytes G |
| 4 | u32 number of escaped values X, even |
| 4 | u32 length of the first rANS stream Z |
| 4 H | i16 step code of each head, -928 to 960 |
| 2 H | u8 table class of each head, 0 to 26 |
| G | runs of token classes: class in the high 4 bits, run length - 1 in the low 4; they cover N tokens exactly |
| ceil(N / 2) | `shifted` only: 4 bits per token, the first in the low half, 8 more than the shift of its tables |
| 2 H (D_k + D_v) | `own means` only: i16 means of the channels, heads in order |
| 2 X | i16 escaped values |
| B | low-bit planes |
| R | rest of the exact tokens' words |
| Z | rANS stream |
| the rest | if P differs between keys and values: a second rANS stream, for values; else nothing |

At most one of `referenced` and `own means` is set, and `shifted` only with `referenced`.

**Tokens.** Class c of a token: 0 to 10 coded with the head's step over ``2^(c / 2)``; 14 copied from the reference
(`referenced` only); 15 exact. Of M coded tokens, token t of head i has step code ``C = code_i - 4 c_t``, step
``s = POWERS[C mod 8] * 2^floor(C / 8)`` (POWERS is ``2^(i / 8)`` rounded to binary32), table class
``k = min(max(class_i + c_t + shift_t, 0), 26)`` (shift 0 if not `shifted`) and ``r = max(0, floor((k - 8) / 2))`` low
bits.

**Streams.** Symbol rows have P columns: for each head in order, for each coded token in order, one row with table
``k`` for keys or ``27 + k`` for values; then, for each head in order and each exact token in order, two rows with
table 54 for keys or 55 for values: columns 0 to D - 1 of the two rows joined are the highest bytes of the words of
channels 0 to D - 1, a last odd column is 0. With one P a single stream holds all heads (quantized rows of all, then
exact rows of all); else the first holds the keys and the second the values.

**Values.** A symbol is ``a | b << 4``; a belongs to channel j, b to channel P + j (8 if there is none). Symbol 0 is an
escape: the next two escaped values (rows and columns in order, keys first) are the pair's quantized values, in full.
Otherwise, for n = a or b,

- r = 0: ``f = n - 8``; ``level = f - shrink * min(max(f, -1), 1)``, with the state's shrink of the row's table;
- r > 0: ``level = ((n - 8) << r) + low - (1 << r >> 1)``, exact as an integer, then converted.

``value = level * s + prediction``; an escaped value q gives ``q * s + prediction``. The low-bit planes run over the
quantized rows in order, r planes of ceil(2 P / 8) bytes per row, plane p giving bit p of `low`: channel d is bit
``d mod 8`` of byte ``d div 8``, and b of pair j counts as channel P + j.

**Prediction** is the mean of the layer, head and channel: from the state (bfloat16 bits), or `own means`: i16 times
``0.25 * s`` with the head's s for c = 0. If `referenced`, it is the reference's value, converted to binary32 and, for
keys, un-rotated: ``x cos + y sin``, ``y cos - x sin`` per pair, written as a product with the negated sine.

**Keys** are un-rotated before coding where the identity gives RoPE (section "RoPE"): decoded keys x, y of a rotated
pair become ``x cos - y sin``, ``y cos + x sin``. Last, values are rounded to the stored dtype, to nearest even.

**Exact tokens**: the highest bytes come from the stream. R holds the other bytes of the words, for W bytes per word:
keys ``[H, tokens, D_k, W - 1]``, then values, the lowest byte first. The first 4 tokens of a session are exact or
copies; so are tokens with values that are not finite or out of range.

**State**: ``means`` u16, bfloat16 bits of all channels, per layer keys ``[H, D_k]`` then values ``[H, D_v]``;
``shrink`` f32 ``[54]``; ``freqs`` u16 ``[56, 256]``, each row with sum 4096. For the encoder only: ``steps`` i16, the
2 H step codes per layer; ``norms`` f32 per layer, the usual squared value norm of a token, 0 where not learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from pltpack.codec import group_batch, group_decode, group_encode, group_learn, levels, rans
from pltpack.codec.base import Codec, DecodeJob, KeyValue, Samples, State, Unit
from pltpack.codec.group_decode import Layer
from pltpack.codec.levels import CLASSES, STEP_CODES, TABLES
from pltpack.codec.rope import Rotation
from pltpack.snapshot import Identity

#: Step over a usual head's geometric deviation, by tier.
STEPS = {1: 2.4, 2: 1.4, 3: 0.75, 4: 0.4}


class GroupCodec(Codec):
    """Entropy-coded quantization with steps that follow each token's weight (the module's text is its bitstream).

    Parameters
    ----------
    bits : int
        1 to 4: the tier.
    """

    codec_id: ClassVar[str] = "group"

    def __init__(self, bits: int = 4) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or bits not in STEPS:
            raise ValueError(f"group codec has tiers of 1 to 4 bits, not {bits!r}")
        self.bits = bits
        self._layers: list[Layer] = []

    def get_config(self) -> dict[str, Any]:
        """See `Codec.get_config`."""
        return {"bits": self.bits}

    def learn(self, samples: Samples, identity: Identity) -> dict[str, np.ndarray]:
        """See `Codec.learn`: means, steps and tables; with an empty sample, tables of a synthetic one."""
        return group_learn.learn(samples, identity, STEPS[self.bits])

    def start(self, state: State, identity: Identity) -> None:
        """See `Codec.start`."""
        if set(state) != {"means", "steps", "norms", "shrink", "freqs"}:
            raise ValueError("group state does not hold the arrays means, steps, norms, shrink and freqs")
        layers = identity.layers
        wanted = {
            "means": (np.uint16, (sum(g.elements_per_token for g in layers),)),
            "steps": (np.int16, (sum(2 * g.heads for g in layers),)),
            "norms": (np.float32, (len(layers),)),
            "shrink": (np.float32, (2 * CLASSES,)),
            "freqs": (np.uint16, (TABLES, 256)),
        }
        for name, (dtype, shape) in wanted.items():
            if state[name].dtype != dtype or state[name].shape != shape:
                raise ValueError(f"group state array {name!r} is {state[name].dtype} {list(state[name].shape)}, "
                                 f"not {np.dtype(dtype)} {list(shape)}")  # fmt: skip
        codes = state["steps"]
        if codes.size and not STEP_CODES[0] <= codes.min() <= codes.max() <= STEP_CODES[1]:
            raise ValueError("group state has a step code out of range")
        if (state["freqs"][: 2 * CLASSES, 0] == 0).any() or not np.isfinite(state["shrink"]).all():
            raise ValueError("group state has a table without escape, or a shrink that is not finite")
        self._freqs = np.ascontiguousarray(state["freqs"])
        self._tables = rans.decode_tables(self._freqs)
        # Readers need no costs, and they take as long to make as a session to decode.
        self._coding: group_encode.Coding | None = None
        self._shrink = np.ascontiguousarray(state["shrink"])
        means = state["means"].view(ml_dtypes.bfloat16).astype(np.float32)
        rotations = {dim: Rotation.of(identity.rope, identity.keys, dim) for dim in {g.k_dim for g in layers}}
        self._layers, channel, head = [], 0, 0
        for g, norm in zip(layers, state["norms"].tolist(), strict=True):
            parts = []
            for dim in (g.k_dim, g.v_dim):
                parts.append(group_decode.padded(means[channel : channel + g.heads * dim].reshape(g.heads, 1, dim)))
                channel += g.heads * dim
            mine = codes[head : head + 2 * g.heads]
            self._layers.append(Layer(g, (parts[0], parts[1]), mine, norm, rotations[g.k_dim]))
            head += 2 * g.heads
        self._batch = group_batch.Batch(self._layers, self._tables, self._shrink)

    def encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None) -> bytes:
        """See `Codec.encode`."""
        layer = self._layer(unit)
        g = unit.geometry
        shapes = (g.heads, unit.tokens, g.k_dim), (g.heads, unit.tokens, g.v_dim)
        if (keys.shape, values.shape) != shapes:
            raise ValueError(f"unit arrays are {keys.shape} and {values.shape}, not {shapes[0]} and {shapes[1]}")
        if self._coding is None:
            self._coding = group_encode.Coding(STEPS[self.bits], self._freqs, levels.bit_costs(self._freqs),
                                               rans.encode_tables(self._freqs), self._shrink)  # fmt: skip
        return group_encode.encode(self._coding, layer, unit, (keys, values), reference)

    def decode(
        self,
        payload: memoryview,
        unit: Unit,
        keys: np.ndarray,
        values: np.ndarray,
        reference: KeyValue | None = None,
    ) -> None:
        """See `Codec.decode`."""
        self.decode_many([DecodeJob(payload, unit, keys, values, reference)])

    def decode_many(self, jobs: Sequence[DecodeJob]) -> None:
        """See `Codec.decode_many`."""
        for job in jobs:
            self._layer(job.unit)
        for payload, unit, keys, values, reference in self._batch.decode(jobs):
            group_decode.decode(payload, self._layer(unit), unit, (keys, values), reference, self._tables,
                                self._shrink)  # fmt: skip

    def _layer(self, unit: Unit) -> Layer:
        # One object nearly always, which is faster to tell than equal ones.
        known = self._layers[unit.layer].geometry if 0 <= unit.layer < len(self._layers) else None
        if known is not unit.geometry and known != unit.geometry:
            raise ValueError(f"group state has no layer {unit.layer} of this geometry")
        return self._layers[unit.layer]
