"""The tiers q1 to q4: distortion, exact tokens, every dtype, an independent decoder, hostile payloads."""

from __future__ import annotations

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import levels, rans, tokens
from pltpack.codec.base import SINK_TOKENS, LayerSample, Unit
from pltpack.codec.group import GroupCodec
from pltpack.codec.rope import Rotation
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

ROPE = {"type": "default", "theta": 10000.0, "style": "half"}
QUICK = settings(deadline=None, max_examples=25)


class Runs:
    """A sample given as one run per layer."""

    def __init__(self, runs):
        self.runs = runs

    def layer(self, index):
        return self.runs[index]


def normal(shape, dtype, seed=0, scale=1.0, shift=0.0):
    with np.errstate(over="ignore"):
        return (np.random.default_rng(seed).normal(size=shape) * scale + shift).astype(DTYPES[dtype])


def unit_of(geometry, count, position=0, boundary=0, seed=0, scale=1.0):
    unit = Unit(0, geometry, position, count, boundary)
    keys = normal((geometry.heads, count, geometry.k_dim), geometry.dtype, seed, scale)
    return unit, keys, normal((geometry.heads, count, geometry.v_dim), geometry.dtype, seed + 1, scale)


def started(geometry, bits=4, sample=(), rope=None):
    identity = Identity(layers=(geometry,), rope=rope, keys="rotated" if rope else None)
    codec = GroupCodec(bits)
    state = codec.learn(Runs([[LayerSample(*run) for run in sample]]), identity)
    codec.start(state, identity)
    return codec, state


def bits_of(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def decoded(codec, payload, unit, reference=None):
    g = unit.geometry
    out = [np.zeros((g.heads, unit.tokens, d), DTYPES[g.dtype]) for d in (g.k_dim, g.v_dim)]
    codec.decode(memoryview(payload), unit, *out, reference)
    return out


def snr(x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    return 10 * np.log10(np.mean(x**2) / max(np.mean((x - y) ** 2), 1e-30))


# --- an independent decoder, written from the module's text in plain numpy ------------------------------------------

POWERS = np.exp2(np.arange(8) / 8).astype(np.float32)


def slow_rans(stream, kinds, freqs, columns):
    states = list(struct.unpack("<32I", stream[:128]))
    words = iter(np.frombuffer(stream, "<u2", offset=128).tolist())
    starts = np.cumsum(freqs, axis=1, dtype=np.int64) - freqs
    owner = [np.repeat(np.arange(256), f).tolist() for f in freqs]
    out = np.zeros((len(kinds), columns), np.uint8)
    for r, kind in enumerate(kinds):
        for i in range(columns):
            x = states[i % 32]
            slot = x & 4095
            s = owner[kind][slot]
            x = int(freqs[kind, s]) * (x >> 12) + slot - int(starts[kind, s])
            if x < 1 << 16:
                x = x << 16 | next(words)
            states[i % 32] = x
            out[r, i] = s
    assert next(words, None) is None and set(states) == {1 << 16}
    return out


def slow_decode(payload, unit, state, rotation=None, reference=None):
    g = unit.geometry
    dims, heads, freqs = (g.k_dim, g.v_dim), g.heads, state["freqs"]
    flags, runs, escapes, size = struct.unpack("<B3xIII", payload[:16])
    at = 16

    def take(count, dtype):
        nonlocal at
        found = np.frombuffer(payload, dtype, count, at)
        at += found.nbytes
        return found

    codes, bases, packed = take(2 * heads, "<i2").astype(int), take(2 * heads, "u1").astype(int), take(runs, "u1")
    classes = np.array([b >> 4 for b in packed.tolist() for _ in range((b & 15) + 1)])
    coded = np.flatnonzero(classes <= 10)
    exact = np.flatnonzero(classes == 15)
    own = take(heads * sum(dims), "<i2") if flags & 2 else None
    escaped = iter(take(escapes, "<i2").tolist())
    halves = [(d + 1) // 2 for d in dims]
    steps = [[POWERS[(c - 4 * k) % 8] * np.float32(2.0 ** ((c - 4 * k) // 8)) for k in range(11)] for c in codes]
    kind = [[min(bases[h] + classes[t], 26) for t in coded] for h in range(2 * heads)]
    low = [
        [
            [
                np.unpackbits(take((2 * halves[h // heads] + 7) // 8, "u1"), bitorder="little")
                for _ in range(max(0, (k - 8) // 2))
            ]
            for k in kind[h]
        ]
        for h in range(2 * heads)
    ]
    width = DTYPES[g.dtype].itemsize
    rest = [take(heads * len(exact) * d * (width - 1), "u1").reshape(heads, len(exact), d, width - 1) for d in dims]
    quantized = [[27 * p + k for h in range(heads) for k in kind[p * heads + h]] for p in (0, 1)]
    ends = [[54 + p] * (2 * heads * len(exact)) for p in (0, 1)]
    if halves[0] == halves[1]:
        both = slow_rans(payload[at:], quantized[0] + quantized[1] + ends[0] + ends[1], freqs, halves[0])
        cuts = np.cumsum([len(quantized[0]), len(quantized[1]), len(ends[0])])
        q0, q1, e0, e1 = np.split(both, cuts)
    else:
        a = slow_rans(payload[at : at + size], quantized[0] + ends[0], freqs, halves[0])
        b = slow_rans(payload[at + size :], quantized[1] + ends[1], freqs, halves[1])
        q0, e0, q1, e1 = a[: len(quantized[0])], a[len(quantized[0]) :], b[: len(quantized[1])], b[len(quantized[1]) :]
    means = np.split(state["means"], [heads * dims[0]])
    out, channel = [], 0
    for p, (dim, half, rows, tops) in enumerate(zip(dims, halves, (q0, q1), (e0, e1), strict=True)):
        values = np.zeros((heads, unit.tokens, 2 * half), np.float32)
        if flags & 1:
            centre = reference[p].astype(np.float32)
            if p == 0 and rotation is not None:
                centre = rotation.unrotate(centre, unit.position)
        elif flags & 2:
            scale = np.array([np.float32(0.25) * steps[p * heads + h][0] for h in range(heads)])
            numbers = own[channel : channel + heads * dim].reshape(heads, 1, dim)
            centre = numbers.astype(np.float32) * scale[:, None, None]
        else:
            centre = (means[p].astype(np.uint32) << 16).view(np.float32).reshape(heads, 1, dim)
        channel += heads * dim
        centre = np.pad(np.broadcast_to(centre, (heads, unit.tokens, dim)), ((0, 0), (0, 0), (0, 2 * half - dim)))
        for h in range(heads):
            for i, t in enumerate(coded):
                symbols, k = rows[h * len(coded) + i].astype(int), kind[p * heads + h][i]
                step = steps[p * heads + h][classes[t]]
                r = max(0, (k - 8) // 2)
                n = np.concatenate([symbols & 15, symbols >> 4]) - 8
                if r == 0:
                    f = n.astype(np.float32)
                    level = f - state["shrink"][27 * p + k] * np.clip(f, -1, 1)
                else:
                    digits = sum(plane[: 2 * half].astype(int) << b for b, plane in enumerate(low[p * heads + h][i]))
                    level = ((n << r) + digits - (1 << r >> 1)).astype(np.float32)
                for j in np.flatnonzero(symbols == 0):
                    level[j], level[half + j] = next(escaped), next(escaped)
                values[h, t] = level * step + centre[h, t]
        values = values[..., :dim]
        if p == 0 and rotation is not None:
            values = rotation.rotate(values, unit.position)
        if g.dtype not in ("BF16", "F32"):
            largest = {"F16": 65504, "F8_E4M3": 448, "F8_E5M2": 57344}[g.dtype]
            values = np.clip(values, -largest, largest)
        words = bits_of(values.astype(DTYPES[g.dtype])).copy()
        top = tops.reshape(heads, len(exact), 2 * half)[..., :dim, None]
        raw = np.concatenate([rest[p], top], axis=-1)
        words[:, exact] = np.ascontiguousarray(raw).view(f"<u{width}")[..., 0]
        copied = np.flatnonzero(classes == 14)
        if len(copied):
            words[:, copied] = bits_of(reference[p])[:, copied]
        out.append(words)
    assert next(escaped, None) is None
    return out


# --- quality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "floor", "rate"), [(1, 4, 1.8), (2, 8, 2.4), (3, 13, 3.2), (4, 18, 4.0)])
@pytest.mark.parametrize("learnt", [True, False])
def test_gaussian_quality(bits, floor, rate, learnt):
    geometry = LayerGeometry(2, 64, 64, "BF16")
    sample = [unit_of(geometry, 512, 4, seed=9)] if learnt else []
    codec, _ = started(geometry, bits, sample)
    unit, keys, values = unit_of(geometry, 256, 64, 1000)
    payload = codec.encode(unit, keys, values)
    for x, y in zip((keys, values), decoded(codec, payload, unit), strict=True):
        assert snr(x, y) > floor
    assert 8 * len(payload) / (keys.size + values.size) < rate


def test_steps_bound_every_error():
    geometry = LayerGeometry(2, 32, 32, "F32")
    codec, state = started(geometry, 2, [unit_of(geometry, 256, 4)])
    unit, keys, values = unit_of(geometry, 200, 10, 500, seed=5, scale=1.5)
    y = decoded(codec, codec.encode(unit, keys, values), unit)
    for part, (a, b) in enumerate(zip((keys, values), y, strict=True)):
        for h in range(2):
            step = float(levels.step_of(int(state["steps"][2 * part + h])))
            # Half a step, and what a level is moved towards zero.
            assert np.abs(a[h] - b[h]).max() <= step * (0.5 + state["shrink"].max()) * 1.0001


def test_short_values_and_last_tokens_get_finer_steps():
    geometry = LayerGeometry(1, 64, 64, "F32")
    codec, _ = started(geometry, 2, [unit_of(geometry, 512, 4)])
    unit, keys, values = unit_of(geometry, 512, 100, 0, seed=3)
    values[:, 100] *= 0.1
    y = decoded(codec, codec.encode(unit, keys, values), unit)
    error = np.square(keys - y[0]).mean(axis=(0, 2))
    usual = np.median(error[:256])
    assert error[100] < usual / 16
    assert error[-1] < usual / 16
    assert error[256:].mean() < usual


def test_a_unit_unlike_the_sample_keeps_its_distortion_and_its_rate():
    geometry = LayerGeometry(2, 64, 64, "BF16")
    codec, _ = started(geometry, 4, [unit_of(geometry, 512, 4)])
    for scale in (30.0, 3000.0):
        unit, keys, values = unit_of(geometry, 256, 64, 1000, scale=scale)
        payload = codec.encode(unit, keys + np.asarray(scale, keys.dtype), values)
        y = decoded(codec, payload, unit)
        assert snr(values, y[1]) > 30
        assert 8 * len(payload) / (keys.size + values.size) < 8


def test_one_odd_token_does_not_spoil_the_others():
    geometry = LayerGeometry(1, 64, 64, "F32")
    codec, _ = started(geometry, 4)
    unit, keys, values = unit_of(geometry, 128, 64, 1000)
    keys[0, 7] = 1e25
    values[0, 9, 3] = -3e37
    y = decoded(codec, codec.encode(unit, keys, values), unit)
    assert np.array_equal(y[0][:, 7], keys[:, 7]) and np.array_equal(y[1][:, 9], values[:, 9])
    rest = np.setdiff1d(np.arange(128), [7, 9])
    assert snr(keys[:, rest], y[0][:, rest]) > 18 and snr(values[:, rest], y[1][:, rest]) > 18


# --- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [None, ROPE, ROPE | {"style": "interleaved"}, ROPE | {"dim": 8}])
def test_independent_decoder_gives_the_same_bytes(dtype, rope):
    geometry = LayerGeometry(2, 40, 64 if rope is None else 40, dtype)
    codec, state = started(geometry, 4, [unit_of(geometry, 64, 0, seed=4)], rope)
    rotation = Rotation.of(rope, "rotated", 40)
    assert (rotation is None) == (rope is None)
    unit, keys, values = unit_of(geometry, 24, 2, 0, scale=1.2)
    values[:, 5] *= np.asarray(0.1, values.dtype)
    keys[1, 11, 3] = np.nan
    for reference in (None, (keys + normal(keys.shape, dtype, 8, 0.1), values.copy())):
        payload = codec.encode(unit, keys, values, reference)
        y = decoded(codec, payload, unit, reference)
        for a, b in zip(y, slow_decode(payload, unit, state, rotation, reference), strict=True):
            assert np.array_equal(bits_of(a), b)


def test_independent_decoder_agrees_without_a_sample():
    geometry = LayerGeometry(2, 7, 5, "BF16")
    codec, state = started(geometry, 2)
    unit, keys, values = unit_of(geometry, 300, 0, 0, scale=3)
    payload = codec.encode(unit, keys + np.asarray(9, keys.dtype), values)
    assert payload[0] == 2
    for a, b in zip(decoded(codec, payload, unit), slow_decode(payload, unit, state), strict=True):
        assert np.array_equal(bits_of(a), b)


@QUICK
@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 70), st.integers(0, 9), st.integers(1, 4),
    st.sampled_from(["normal", "bits", "zeros", "constant", "huge", "tiny"]), st.booleans(), st.integers(0, 1 << 30),
)  # fmt: skip
def test_anything_round_trips(dtype, heads, k_dim, v_dim, count, position, bits, kind, rope, seed):
    geometry = LayerGeometry(heads, k_dim, v_dim, dtype)
    rng = np.random.default_rng(seed)
    codec, _ = started(geometry, bits, [unit_of(geometry, 40, seed=seed)] if seed % 2 else [], ROPE if rope else None)
    unit = Unit(0, geometry, position, count, seed % 300)
    arrays = []
    for dim in (k_dim, v_dim):
        x = normal((heads, count, dim), dtype, seed)
        if kind == "bits":
            x = rng.integers(0, 256, (heads, count, dim * x.dtype.itemsize), dtype=np.uint8).view(x.dtype)
        elif kind in ("zeros", "constant"):
            x[:] = 0 if kind == "zeros" else 3
        elif kind in ("huge", "tiny"):
            with np.errstate(all="ignore"):
                x = (x.astype(np.float64) * (1e37 if kind == "huge" else 1e-39)).astype(x.dtype)
        arrays.append(x)
    payload = codec.encode(unit, *arrays)
    assert payload == codec.encode(unit, *[np.asfortranarray(a) for a in arrays])
    y = decoded(codec, payload, unit)
    sinks = max(0, SINK_TOKENS - position)
    finite = [np.isfinite(a.astype(np.float64)).all(axis=(0, 2)) for a in arrays]
    broken = ~(finite[0] & finite[1])
    for a, b in zip(arrays, y, strict=True):
        assert np.array_equal(bits_of(a)[:, :sinks], bits_of(b)[:, :sinks])
        assert np.array_equal(bits_of(a)[:, broken], bits_of(b)[:, broken])
        fine = ~broken
        fine[:sinks] = False
        if fine.any():
            x, z = a[:, fine].astype(np.float64), b[:, fine].astype(np.float64)
            assert np.isfinite(z).all()
            if kind == "normal" and dtype != "F8_E5M2":
                assert np.mean((x - z) ** 2) <= 0.6 * np.mean(x**2) + 1e-9
    wide = [np.zeros((heads, count + 5, d), DTYPES[dtype]) for d in (k_dim, v_dim)]
    codec.decode(memoryview(payload), unit, *[w[:, 2 : 2 + count] for w in wide])
    for a, b in zip(y, wide, strict=True):
        assert np.array_equal(bits_of(a), bits_of(b[:, 2 : 2 + count]))
        assert not bits_of(b[:, :2]).any() and not bits_of(b[:, 2 + count :]).any()


def test_references_help_and_useless_ones_do_not_hurt():
    geometry = LayerGeometry(2, 64, 64, "BF16")
    codec, _ = started(geometry, 3, [unit_of(geometry, 256, 4, seed=7)], ROPE)
    unit, keys, values = unit_of(geometry, 128, 0)
    plain = codec.encode(unit, keys, values)
    near = tuple((a.astype(np.float32) + 0.05 * normal(a.shape, "F32", 5)).astype(a.dtype) for a in (keys, values))
    near[0][:, :10], near[1][:, :10] = keys[:, :10], values[:, :10]
    small = codec.encode(unit, keys, values, near)
    assert small[0] == 1 and len(small) < len(plain) / 3
    y = decoded(codec, small, unit, near)
    for a, b in zip((keys, values), y, strict=True):
        assert np.array_equal(bits_of(a[:, :10]), bits_of(b[:, :10]))
        assert snr(a, b) > 16
    useless = unit_of(geometry, 128, 0, seed=77)[1:]
    assert codec.encode(unit, keys, values, useless) == plain
    with pytest.raises(ValueError, match="reference"):
        decoded(codec, small, unit)
    broken = tuple(np.full_like(a, np.nan) for a in (keys, values))
    assert codec.encode(unit, keys, values, broken) == plain


def test_unrotating_keys_pays_and_is_told_by_the_identity():
    geometry = LayerGeometry(1, 64, 64, "BF16")
    rotation = Rotation.of(ROPE, "rotated", 64)
    plain = normal((1, 1024, 64), "F32", 1, 0.1) + normal((1, 1, 64), "F32", 2, 3)
    keys = rotation.rotate(plain, 0).astype(DTYPES["BF16"])
    values = normal((1, 1024, 64), "BF16", 3)
    sizes = []
    for rope in (ROPE, None):
        codec, _ = started(geometry, 4, [(Unit(0, geometry, 0, 512), keys[:, :512], values[:, :512])], rope)
        unit = Unit(0, geometry, 512, 512, 1000)
        payload = codec.encode(unit, keys[:, 512:], values[:, 512:])
        sizes.append((snr(keys[:, 512:], decoded(codec, payload, unit)[0]), 8 * len(payload) / values[:, 512:].size))
    # A bit is worth 6 dB.
    assert sizes[0][0] - sizes[1][0] > 6.02 * (sizes[0][1] - sizes[1][1]) + 10


def test_same_bytes_again_and_from_threads():
    geometry = LayerGeometry(3, 64, 64, "BF16")
    codec, state = started(geometry, 4, [unit_of(geometry, 256, 0)], ROPE)
    other, again = started(geometry, 4, [unit_of(geometry, 256, 0)], ROPE)
    assert all(np.array_equal(state[name], again[name]) for name in state)
    units = [unit_of(geometry, 64, 64 * i, seed=i) for i in range(8)]
    one = [codec.encode(*u) for u in units]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda u: other.encode(*u), units)) == one
        many = list(pool.map(lambda i: decoded(codec, one[i], units[i][0]), range(8)))
    for payload, unit, y in zip(one, units, many, strict=True):
        for a, b in zip(decoded(codec, payload, unit[0]), y, strict=True):
            assert np.array_equal(bits_of(a), bits_of(b))


def test_vector_blocks_equal_the_scalar_tail():
    # Dimensions that differ only in how many channels fall into whole blocks of 16 pairs.
    wide, narrow = LayerGeometry(1, 64, 64, "BF16"), LayerGeometry(1, 62, 62, "BF16")
    for geometry in (wide, narrow):
        codec, state = started(geometry, 3, [unit_of(geometry, 256, 4)])
        unit, keys, values = unit_of(geometry, 32, 50, scale=4)
        payload = codec.encode(unit, keys, values)
        for a, b in zip(decoded(codec, payload, unit), slow_decode(payload, unit, state), strict=True):
            assert np.array_equal(bits_of(a), b)


# --- untrusted input ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    geometry = LayerGeometry(2, 32, 32, "BF16")
    codec, state = started(geometry, 4, [unit_of(geometry, 128, 0)], ROPE)
    unit, keys, values = unit_of(geometry, 40, 0, scale=1.5)
    return codec, state, unit, codec.encode(unit, keys, values), (keys, values)


def test_truncations_are_refused(small):
    codec, _, unit, payload, _ = small
    for size in [*range(0, 80), *range(80, len(payload), 61), len(payload) - 1]:
        with pytest.raises(ValueError):
            decoded(codec, payload[:size], unit)
    with pytest.raises(ValueError):
        decoded(codec, payload + b"\0\0", unit)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_altered_payloads_decode_or_are_refused(small, data):
    codec, _, unit, payload, arrays = small
    altered = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        # Most flips in the header and the token classes, where they do most.
        place = data.draw(st.one_of(st.integers(0, 60), st.integers(0, len(payload) - 1)))
        altered[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        decoded(codec, bytes(altered), unit, arrays if data.draw(st.booleans()) else None)


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, b"\x04"), (0, b"\x03"), (4, b"\xff" * 4), (8, b"\xff" * 4), (8, b"\x01"), (12, b"\xff" * 4), (16, b"\xff\x7f"),
     (24, b"\x1b")],
)  # fmt: skip
def test_bad_headers_are_refused(small, place, value):
    codec, _, unit, payload, _ = small
    with pytest.raises(ValueError):
        decoded(codec, payload[:place] + value + payload[place + len(value) :], unit)


def test_bad_states_are_refused(small):
    codec, state, unit, _, _ = small
    identity = Identity(layers=(unit.geometry,))
    for name in state:
        with pytest.raises(ValueError):
            GroupCodec(4).start({k: v for k, v in state.items() if k != name}, identity)
        with pytest.raises(ValueError):
            GroupCodec(4).start(state | {name: state[name][:-1]}, identity)
        with pytest.raises(ValueError):
            GroupCodec(4).start(state | {name: state[name].astype(np.float64)}, identity)
    for name, value in (("freqs", 7), ("shrink", np.nan), ("steps", 30000)):
        wrong = state[name].copy()
        wrong.flat[0] = value
        with pytest.raises(ValueError):
            GroupCodec(4).start(state | {name: wrong}, identity)
    with pytest.raises(ValueError):
        codec.encode(Unit(1, unit.geometry, 0, 1), *[np.zeros((2, 1, 32), DTYPES["BF16"])] * 2)
    with pytest.raises(ValueError):
        codec.encode(unit, *[np.zeros((2, 1, 32), DTYPES["BF16"])] * 2)


@pytest.mark.parametrize("config", [{"bits": 0}, {"bits": 5}, {"bits": True}, {"bits": "4"}, {"bit": 4}])
def test_bad_configurations_are_refused(config):
    with pytest.raises(ValueError):
        GroupCodec.from_config(config)


def test_configuration_round_trips():
    assert GroupCodec.from_config(GroupCodec(3).get_config()).bits == 3


# --- parts ----------------------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.tuples(st.sampled_from([*range(11), 14, 15]), st.integers(1, 40)), min_size=1, max_size=20))
def test_runs_round_trip(pieces):
    classes = np.repeat(np.array([c for c, _ in pieces], np.uint8), [n for _, n in pieces])
    packed = tokens.pack_runs(classes)
    assert np.array_equal(tokens.unpack_runs(packed, len(classes)), classes)
    for wrong in (len(classes) - 1, len(classes) + 1):
        with pytest.raises(ValueError):
            tokens.unpack_runs(packed, wrong)


def test_every_class_has_a_table_that_fits_its_deviation():
    freqs, shrink = levels.learn(np.random.default_rng(0).normal(size=(1 << 15, 2)))
    assert (freqs.sum(axis=1) == rans.PROB_SCALE).all() and (freqs[:, 0] > 0).all()
    assert (shrink >= 0).all() and (shrink < 0.5).all()
    entropy = [-sum(f / 4096 * np.log2(f / 4096) for f in row[row > 0].tolist()) / 2 + levels.raw_bits(k)
               for k, row in enumerate(freqs)]  # fmt: skip
    # Gaussian: log2(deviation over step) + log2(sqrt(2 pi e)).
    expected = [(k - levels.UNIT_CLASS) / 2 + 2.047 for k in range(levels.CLASSES)]
    assert np.allclose(entropy[8:], expected[8:], atol=0.12)


def test_tables_without_a_sample_do_not_depend_on_the_model():
    _, state = started(LayerGeometry(1, 4, 4, "BF16"), 4)
    _, other = started(LayerGeometry(2, 8, 6, "F16"), 1)
    assert np.array_equal(state["freqs"], other["freqs"]) and np.array_equal(state["shrink"], other["shrink"])
