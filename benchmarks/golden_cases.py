"""Inputs of the golden archives: small sessions cut from real dumps or drawn from a seed, and what is done with them.

Those of the codec ``transform`` are in `benchmarks.golden_transform`, those of predictions in
`benchmarks.golden_predictions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from benchmarks.golden_predictions import PREDICTIONS
from benchmarks.golden_sessions import RealDumps, Shape, drawn, ids
from benchmarks.golden_steps import Case, Step, append, compress
from benchmarks.golden_transform import SCALED, TRANSFORM
from pltpack.snapshot import DTYPES, Identity, Snapshot

# --- cases ------------------------------------------------------------------------------------------------------


def _dtype(tier: str, dtype: str, inputs: str | None = None) -> Callable[[RealDumps], Case]:
    def make(real: RealDumps) -> Case:
        shared = ids(24)
        shapes: tuple[Shape, ...] = ((2, 16, 8), (1, 8, 8))
        sessions = (
            drawn("first", [*shared, *ids(19, 1)], layers=shapes, dtype=dtype, odd=True),
            drawn("second", [*shared, *ids(8, 2)], layers=shapes, dtype=dtype, noise=1),
        )
        title = f"{tier} on {dtype}, values that are not finite, kernel noise"
        return Case(title, [compress(*sessions, quality=tier)], inputs=inputs)

    return make


def _real(tier: str, inputs: str | None = None) -> Callable[[RealDumps], Case]:
    def make(real: RealDumps) -> Case:
        sessions = real.cut("helpdesk-0", 88), real.cut("helpdesk-1", 70)
        title = f"{tier} on real values that share a prefix"
        return Case(title, [compress(*sessions, quality=tier)], inputs=inputs)

    return make


def _sharing(real: RealDumps) -> Case:
    one = ids(40, 3)
    sessions = (
        drawn("whole", one), drawn("equal", one), drawn("noisy", one, noise=1), drawn("longer", [*one, *ids(9, 4)]),
        drawn("prefix", one[:21]), drawn("empty", []), drawn("single", one[:1]), drawn("other", ids(17, 5)),
        drawn("branch", [*one[:24], *ids(10, 6)], noise=2), drawn("foreign values", one, seed=9),
    )  # fmt: skip
    return Case("equal sessions, extensions, branches, noise, other values under equal tokens; empty and of one token",
                [compress(*sessions, quality="lossless")])  # fmt: skip


def _salts(real: RealDumps) -> Case:
    one = ids(32, 7)
    sessions = [drawn(f"{salt}-{i}", one, salt=salt) for salt in (None, "a", "tenant \u00e9") for i in range(2)]
    return Case("equal tokens of three tenants, shared within each alone", [compress(*sessions, quality="q3")])


def _append(real: RealDumps) -> Case:
    one, two = ids(32, 8), ids(24, 9)
    return Case(
        "two appends: nodes whose parents are in an older segment, private prefixes that become shared",
        [
            compress(drawn("a", one), drawn("b", [*one[:24], *two]), quality="lossless"),
            append(drawn("c", [*one[:24], *two, 5], noise=1), drawn("d", [*one, *ids(8, 10)])),
            append(drawn("e", [*one, *ids(8, 10), 7])),
        ],
    )


def _tiers(real: RealDumps) -> Case:
    one = ids(32, 11)
    return Case(
        "lossless, then q3 and turboquant-3 appended to it: three codecs in one archive",
        [
            compress(drawn("exact", one), drawn("exact too", one, noise=1), quality="lossless"),
            append(drawn("lossy", [*one, *ids(20, 12)], noise=2), quality="q3"),
            append(drawn("rotated", [*ids(20, 13)]), quality="turboquant-3"),
        ],
    )


def _moved(real: RealDumps) -> Case:
    title = "two appends: whole units of shards move to new segments where later sessions share them"
    return Case(title, _append(real).steps, inputs="020-append")


def _moved_compacted(real: RealDumps) -> Case:
    steps = _append(real).steps
    return Case("the archive of units that moved, compacted", [*steps, Step("compact")], inputs="020-append")


def _compacted(real: RealDumps) -> Case:
    steps = _append(real).steps
    return Case("the appended archive, compacted", [*steps, Step("compact")], inputs="020-append")


def _partial(real: RealDumps) -> Case:
    rope = {"type": "default", "theta": 10000, "dim": 12, "style": "interleaved"}
    shapes = ((2, 20, 9), (1, 20, 7))
    sessions = [drawn(name, ids(30, seed), layers=shapes, dtype="F16", rope=rope)
                for name, seed in (("p", 14), ("q", 15))]  # fmt: skip
    return Case(
        "interleaved rotary of 12 of 20 channels, odd value dimensions, F16", [compress(*sessions, quality="q2")]
    )


def _llama3(real: RealDumps) -> Case:
    rope = {"type": "llama3", "theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position": 64}  # fmt: skip
    session = drawn("l", ids(50, 16), layers=((1, 32, 32),), dtype="F32", rope=rope)
    return Case("llama3 rotary scaling, F32", [compress(session, quality="q3")])


def _linear(real: RealDumps) -> Case:
    rope = {"type": "linear", "theta": 10000.0, "factor": 4, "style": "half"}
    session = drawn("names / \u00fc % \U0001f600", ids(40, 17), rope=rope, model="mod\u00e8le \u201cx\u201d", tp_rank=1,
                    tp_size=2, weights="00ff", tokenizer="ff00")  # fmt: skip
    windows = tuple(dataclasses.replace(layer, window=w) for layer, w in
                    zip(session.identity.layers, (16, None), strict=True))  # fmt: skip
    session = dataclasses.replace(session, identity=dataclasses.replace(session.identity, layers=windows))
    return Case("linear rotary scaling, every identity member, a sliding window, a session name to be quoted",
                [compress(session, quality="q4")])  # fmt: skip


def _unrotated(real: RealDumps) -> Case:
    one = ids(40, 18)
    unknown = [drawn(name, one, rope=None, keys=None, model=None) for name in ("u", "v")]
    return Case("nothing known of the model, no sharing", [compress(*unknown, quality="q4", dedup=False)])


def _shapes(quality: str) -> Callable[[RealDumps], Case]:
    def make(real: RealDumps) -> Case:
        shapes = ((1, 8, 24), (3, 5, 3), (2, 1, 2))
        sessions = drawn("m", ids(26, 19), layers=shapes, odd=True), drawn("n", [*ids(26, 19)[:16], 4], layers=shapes)
        return Case(f"{quality}: layers of different heads and dimensions, dimensions of 1, 3 and 5",
                    [compress(*sessions, quality=quality)])  # fmt: skip

    return make


def _long(quality: str) -> Callable[[RealDumps], Case]:
    def make(real: RealDumps) -> Case:
        one = ids(560, 20)
        shape: tuple[Shape, ...] = ((1, 4, 4),)
        sessions = drawn("x", one, layers=shape), drawn("y", [*one[:530], 1, 2], layers=shape, noise=3)
        return Case(f"{quality}: several units in a layer, of blocks of 32",
                    [compress(*sessions, quality=quality, block=32)])  # fmt: skip

    return make


def _modes(real: RealDumps) -> Case:
    rng = np.random.default_rng(21)
    layers = []
    for layer in range(3):
        shape = (1, 48, 16)
        words = rng.integers(0, 1 << 16, shape, dtype=np.uint16) if layer == 0 else np.full(shape, 0x3F80, np.uint16)
        if layer == 2:
            words = rng.integers(0x3F00, 0x4080, shape, dtype=np.uint16)
        layers.append((words.view(DTYPES["BF16"]), (words ^ np.uint16(layer)).view(DTYPES["BF16"])))
    one = Snapshot.from_arrays("m", ids(48, 22), layers, Identity(model="golden"))
    far = [(k.view(np.uint16) + np.uint16(9 * (i == 2)), v.view(np.uint16) ^ np.uint16(3 * (i == 0)))
           for i, (k, v) in enumerate(layers)]  # fmt: skip
    two = Snapshot.from_arrays("n", ids(48, 22), [(k.view(DTYPES["BF16"]), v.view(DTYPES["BF16"])) for k, v in far],
                               Identity(model="golden"))  # fmt: skip
    return Case("noise, constants and dense differences: the lossless codec's other modes",
                [compress(one, two, quality="lossless")])  # fmt: skip


def _references(real: RealDumps) -> Case:
    one = ids(32, 23)
    sessions = drawn("r", one), drawn("s", one, noise=5), drawn("t", [*one, *ids(4, 24)], seed=3)
    return Case("lossy differences to the mapped values", [compress(*sessions, quality="q2")], references=True)


def _inline(real: RealDumps) -> Case:
    shape: tuple[Shape, ...] = ((1, 16, 16),)
    far = drawn("far", ids(256, 31), layers=shape)
    words = [tuple(np.ldexp(part.astype(np.float32), 60).astype(part.dtype) for part in far.layer(0))]
    far = Snapshot.from_arrays("far", far.tokens, [(words[0][0], words[0][1])], far.identity)
    near = drawn("near", ids(20, 30), layers=shape)
    title = "values that the state's tables do not fit, coded with tables of their own"
    return Case(title, [compress(near, quality="lossless", block=32), append(far)])


def _same(real: RealDumps) -> Case:
    one = ids(24, 32)
    sessions = drawn("r", one), drawn("s", one), drawn("t", [*one, 9], noise=1)
    return Case("differences that are nothing", [compress(*sessions, quality="lossless")], references=True)


def _small(real: RealDumps) -> Case:
    one = ids(12, 25)
    shape: tuple[Shape, ...] = ((1, 4, 4), (1, 4, 4))
    sessions = (
        drawn("a", one, layers=shape), drawn("b", [*one[:8], *ids(3, 26)], layers=shape, noise=7),
        drawn("c", ids(6, 27), layers=shape, salt="s"),
    )  # fmt: skip
    return Case("small: the base of the broken archives", [compress(*sessions, quality="lossless", block=4)])


def _small_lossy(quality: str) -> Callable[[RealDumps], Case]:
    def make(real: RealDumps) -> Case:
        session = drawn("a", ids(12, 28), layers=((1, 5, 4),))
        return Case(f"small {quality}: a base of broken archives", [compress(session, quality=quality, block=4)])

    return make


#: Number and name -> what makes it. Numbers are never used again.
CASES: dict[str, Callable[[RealDumps], Case]] = {
    "001-lossless-real": _real("lossless"),
    "002-lossless-f16": _dtype("lossless", "F16"),
    "003-lossless-f32": _dtype("lossless", "F32"),
    "004-lossless-f8-e4m3": _dtype("lossless", "F8_E4M3"),
    "005-lossless-f8-e5m2": _dtype("lossless", "F8_E5M2"),
    "006-lossless-bf16": _dtype("lossless", "BF16"),
    "007-q1-real": _real("q1", "001-lossless-real"),
    "008-q2-real": _real("q2", "001-lossless-real"),
    "009-q3-real": _real("q3", "001-lossless-real"),
    "010-q4-real": _real("q4", "001-lossless-real"),
    "011-q4-f16": _dtype("q4", "F16", "002-lossless-f16"),
    "012-q4-f32": _dtype("q4", "F32", "003-lossless-f32"),
    "013-q3-f8-e4m3": _dtype("q3", "F8_E4M3", "004-lossless-f8-e4m3"),
    "014-q3-f8-e5m2": _dtype("q3", "F8_E5M2", "005-lossless-f8-e5m2"),
    "015-turboquant-2-real": _real("turboquant-2", "001-lossless-real"),
    "016-turboquant-3-f8-e4m3": _dtype("turboquant-3", "F8_E4M3", "004-lossless-f8-e4m3"),
    "017-turboquant-4-f16": _dtype("turboquant-4", "F16", "002-lossless-f16"),
    "018-sharing": _sharing,
    "019-salts": _salts,
    "020-append": _append,
    "021-tiers": _tiers,
    "022-compacted": _compacted,
    "023-partial-rotary": _partial,
    "024-llama3-rotary": _llama3,
    "025-identity": _linear,
    "026-unknown": _unrotated,
    "027-shapes-lossless": _shapes("lossless"),
    "028-shapes-q3": _shapes("q3"),
    "029-shapes-turboquant-4": _shapes("turboquant-4"),
    "030-long-lossless": _long("lossless"),
    "031-long-q4": _long("q4"),
    "032-modes": _modes,
    "033-references": _references,
    "034-small-lossless": _small,
    "035-small-q4": _small_lossy("q4"),
    "036-small-turboquant-2": _small_lossy("turboquant-2"),
    "037-inline": _inline,
    "038-same": _same,
    **TRANSFORM,
    **PREDICTIONS,
    "060-append-moved": _moved,
    "061-moved-compacted": _moved_compacted,
    **SCALED,
}
