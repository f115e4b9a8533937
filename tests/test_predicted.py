"""The lossless codec's mode *predicted*: every bit, the specification's decoder, its tables, and what it is worth."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import delta, predicted, predicted_words, rans, rans_mixed
from pltpack.codec.base import Unit
from pltpack.codec.lossless import DENSE, PREDICTED, SAME, LosslessCodec
from pltpack.codec.payload import Reader
from pltpack.codec.predicted_tables import MANTISSA, static
from pltpack.codec.rans_scalar import LANES, STATE_LOW
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

SPEC = Path(__file__).parents[1] / "spec"
sys.path.append(str(SPEC))
import reference_lossless  # noqa: E402
import reference_numbers  # noqa: E402

HAVE_IT = sorted(MANTISSA)
shapes = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 31, 32, 33, 70]), st.integers(1, 9), st.integers(1, 9))


def words_of(arrays):
    return tuple(np.ascontiguousarray(array).view(np.uint16) for array in arrays)


def cache(rng, shape, dtype, scale=1.0):
    """Keys and values whose channels differ in mean and scale."""
    heads, tokens, *dims = shape
    out = []
    for dim in dims:
        sigma = scale * np.exp(rng.normal(size=(heads, 1, dim)))
        x = sigma * (rng.normal(size=(heads, tokens, dim)) + 2 * rng.normal(size=(heads, 1, dim)))
        with np.errstate(over="ignore"):
            out.append(x.astype(np.float32).astype(DTYPES[dtype]))
    return tuple(out)


def elsewhere(rng, arrays, share, offset=0.0):
    """The same passage elsewhere: noise of a share of each channel's deviation, more in some tokens, and an offset."""
    token = np.exp(rng.normal(size=(1, arrays[0].shape[1], 1)) / 2)
    out = []
    for array in arrays:
        x = array.astype(np.float32)
        sigma = share * x.std(axis=1, keepdims=True)
        moved = x + sigma * (token * rng.standard_t(8, size=x.shape) + offset * rng.normal(size=sigma.shape))
        with np.errstate(over="ignore", invalid="ignore"):
            out.append(moved.astype(np.float32).astype(array.dtype))
    return tuple(out)


def random_words(rng, shape, special):
    heads, tokens, *dims = shape
    out = []
    for dim in dims:
        words = rng.integers(0, 1 << 16, (heads, tokens, dim)).astype(np.uint16)
        # Zeros of both signs, the smallest, infinities, and what is not a number.
        rare = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7C00, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80], np.uint16)
        out.append(np.where(rng.random(words.shape) < special, rare[rng.integers(0, len(rare), words.shape)], words))
    return tuple(out)


def spec_unit(arrays, dtype):
    heads, tokens, k_dim = arrays[0].shape
    return reference_numbers.Unit(0, heads, k_dim, arrays[1].shape[2], dtype, tokens, 0)


def check(words, reference, dtype):
    """Code, decode with package and specification, and give the body."""
    body = predicted.encode(words, reference, dtype)
    out = tuple(np.full((array.shape[0], array.shape[1] + 5, array.shape[2]), 0xA5A5, np.uint16) for array in words)
    inner = tuple(array[:, 2:-3] for array in out)
    predicted.decode(Reader(memoryview(body)), inner, reference, dtype)
    spec = reference_lossless.predicted(reference_numbers.Reader(body), spec_unit(words, dtype), reference)
    for want, got, again, whole in zip(words, inner, spec, out, strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(again, want)
        assert (whole[:, :2] == 0xA5A5).all() and (whole[:, -3:] == 0xA5A5).all()
    return body


def codec_for(shape, dtype):
    heads, _, k_dim, v_dim = shape
    identity = Identity(layers=(LayerGeometry(heads, k_dim, v_dim, dtype),))
    codec = LosslessCodec()
    channels = identity.layers[0].elements_per_token
    codec.start({"freqs": np.zeros((0, 256), np.uint16), "escape": np.zeros(0, np.uint8),
                 "base": np.zeros(channels, np.uint8), "class": np.zeros(channels, np.uint8)}, identity)  # fmt: skip
    return codec, Unit(0, identity.layers[0], 0, shape[1], near=True)


# --- every bit -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.sampled_from(HAVE_IT), shapes, st.sampled_from([0.0, 0.01, 0.2, 3.0]),
       st.sampled_from([1e-39, 1e-6, 1.0, 1e4]), st.sampled_from([0.0, 0.1]), st.integers(0, 2**32 - 1))  # fmt: skip
def test_every_bit_comes_back(dtype, shape, share, scale, special, seed):
    rng = np.random.default_rng(seed)
    reference = words_of(cache(rng, shape, dtype, scale))
    with np.errstate(over="ignore", invalid="ignore"):
        words = words_of(elsewhere(rng, tuple(a.view(DTYPES[dtype]) for a in reference), share, 2.0))
    for ours, theirs, odd, odd_reference in zip(words, reference, random_words(rng, shape, 0.9),
                                                random_words(rng, shape, 0.9), strict=True):  # fmt: skip
        for target, source in ((ours, odd), (theirs, odd_reference)):
            place = rng.random(target.shape) < special
            target[place] = source[place]
    check(words, reference, dtype)


@settings(max_examples=30)
@given(st.sampled_from(HAVE_IT), shapes, st.sampled_from([0.0, 0.5]), st.integers(0, 2**32 - 1))
def test_every_bit_comes_back_whatever_the_reference(dtype, shape, special, seed):
    rng = np.random.default_rng(seed)
    check(random_words(rng, shape, special), random_words(rng, shape, special), dtype)


@pytest.mark.parametrize("dtype", HAVE_IT)
def test_all_bit_patterns(dtype):
    every = np.arange(1 << 16, dtype=np.uint16).reshape(1, -1, 16)
    near = delta.unordered(delta.ordered(every) + np.uint16(3))
    for reference in (every, near, every[:, ::-1].copy(), np.full_like(every, 0x3F80)):
        check((every, every), (reference, every), dtype)


# --- the specification ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HAVE_IT)
def test_tables_are_those_of_the_specification(dtype):
    ours = static(MANTISSA[dtype]).freqs
    np.testing.assert_array_equal(ours, reference_lossless.predicted_tables(MANTISSA[dtype]))
    assert (ours.sum(axis=1, dtype=int) == rans.PROB_SCALE).all() and (ours[:, 0] > 0).all()
    stated = re.findall(r"`([0-9a-f]{16})` for `(B?F16)`", (SPEC / "codecs.md").read_text())
    digest = hashlib.sha256(ours.astype("<u2").tobytes()).hexdigest()
    assert (digest[:16], dtype) in stated


def test_all_loops_write_and_read_the_same_bytes():
    rng = np.random.default_rng(3)
    tables = static(7)
    for columns in (1, 31, 32, 33, 100):
        kinds = rng.integers(0, len(tables.freqs), (9, columns)).astype(np.uint8)
        symbols = np.array([[rng.choice(256, p=tables.freqs[k] / 4096) for k in row] for row in kinds], np.uint8)
        stream = rans_mixed.encode(symbols, kinds, tables.coding)
        np.testing.assert_array_equal(
            reference_numbers.rans_decode(stream, tables.freqs, kinds.astype(int), columns), symbols)  # fmt: skip
        for name in [*rans.rans_simd.kernels(), "portable"]:
            encode, decode = rans_mixed.LOOPS[name]
            states, words = np.full(LANES, STATE_LOW, np.uint32), np.empty(symbols.size, np.uint16)
            first = encode(symbols, kinds, tables.coding, words, states)
            assert states.tobytes() + words[first:].tobytes() == stream
            count = len(words) - first
            padded = np.concatenate([words[first:], np.zeros(columns + LANES, np.uint16)])
            out = np.empty_like(symbols)
            assert decode(padded, count, states, tables.slots, tables.coding, kinds, out) == count
            np.testing.assert_array_equal(out, symbols)
            assert (states == STATE_LOW).all()


@pytest.mark.parametrize("mantissa", sorted(MANTISSA.values()))
@pytest.mark.parametrize("columns", [1, 3, 64, 70])
def test_low_bits_stand_one_behind_the_other(mantissa, columns):
    rng = np.random.default_rng(columns)
    kinds = rng.integers(0, len(static(mantissa).freqs), (5, columns)).astype(np.uint8)
    near, far = [max(table // 2 - 8, 0) for table in range(static(mantissa).near)], mantissa - 3
    widths = np.array([near[k] if k < len(near) else far for k in kinds.ravel()])
    rest = (rng.integers(0, 256, kinds.shape) & ((1 << widths.reshape(kinds.shape)) - 1)).astype(np.uint8)
    bits = [value >> i & 1 for value, width in zip(rest.ravel().tolist(), widths, strict=True) for i in range(width)]
    packed, again = np.empty(kinds.size // 4 + 8, np.uint32), np.empty_like(rest)
    assert predicted_words.pack(rest, kinds, mantissa, packed) == len(bits)
    wanted = np.packbits(np.array(bits, np.uint8), bitorder="little")
    assert packed.astype("<u4").tobytes()[: len(wanted)] == wanted.tobytes()
    assert predicted_words.unpack(packed, kinds, mantissa, again) == len(bits)
    np.testing.assert_array_equal(again, rest)
    # What is cut short is read as what stands at its end, and no further.
    assert predicted_words.unpack(packed[:2].copy(), kinds, mantissa, again) == len(bits)


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_differences_are_folded_as_the_specification_says(seed, columns):
    ours, theirs = np.random.default_rng(seed).integers(0, 1 << 16, (2, 3, columns), np.uint16)
    folded = delta.fold(ours, theirs)
    delta.fold_in_place(ours, theirs)
    np.testing.assert_array_equal(ours, folded)


# --- the codec -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HAVE_IT)
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_it_costs_little_more_than_the_noise(dtype, share):
    rng = np.random.default_rng(5)
    shape = (3, 200, 64, 64)
    reference = cache(rng, shape, dtype)
    arrays = elsewhere(rng, reference, share, 0.3)
    codec, unit = codec_for(shape, dtype)
    payload = codec.encode(unit, *arrays, reference)
    assert payload[0] == PREDICTED
    assert payload == codec.encode(unit, *arrays, reference)
    dense = delta.encode_dense(words_of(arrays), words_of(reference))
    assert len(payload) < 0.95 * len(dense)
    # Without the reference an element has a deviation of one channel, with it of a share: log2 of that is saved.
    saved = 8 * (len(codec.encode(unit, *arrays)) - len(payload)) / (arrays[0].size + arrays[1].size)
    assert saved > -np.log2(share) - 0.6


def test_only_rows_that_predict_use_it():
    rng = np.random.default_rng(6)
    shape = (2, 64, 32, 32)
    reference = cache(rng, shape, "BF16")
    arrays = elsewhere(rng, reference, 0.1)
    codec, unit = codec_for(shape, "BF16")
    assert codec.encode(unit, *arrays, reference)[0] == PREDICTED
    assert codec.encode(Unit(0, unit.geometry, 0, 64), *arrays, reference)[0] == DENSE
    assert codec.encode(unit, *reference, reference) == bytes([SAME])


@settings(max_examples=30)
@given(st.sampled_from(HAVE_IT), st.sampled_from(["words", "values", "zeros"]), st.integers(0, 2**32 - 1))
def test_a_useless_reference_costs_nothing(dtype, kind, seed):
    rng = np.random.default_rng(seed)
    shape = (2, 40, 8, 8)
    arrays = cache(rng, shape, dtype)
    reference = cache(rng, shape, dtype, 5.0)
    if kind == "words":
        reference = tuple(words.view(DTYPES[dtype]) for words in random_words(rng, shape, 0.2))
    elif kind == "zeros":
        reference = tuple(np.zeros_like(array) for array in reference)
    codec, unit = codec_for(shape, dtype)
    payload = codec.encode(unit, *arrays, reference)
    assert len(payload) <= len(codec.encode(unit, *arrays))
    out = tuple(np.empty_like(array) for array in arrays)
    codec.decode(memoryview(payload), unit, *out, reference)
    for want, got in zip(words_of(arrays), words_of(out), strict=True):
        np.testing.assert_array_equal(want, got)


# --- damage --------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_damaged_payloads_are_refused_or_decode_to_something(data):
    rng = np.random.default_rng(7)
    shape = (1, 40, 6, 4)
    reference = cache(rng, shape, "BF16")
    arrays = elsewhere(rng, reference, 0.1)
    codec, unit = codec_for(shape, "BF16")
    payload = bytearray(bytes([PREDICTED]) + predicted.encode(words_of(arrays), words_of(reference), "BF16"))
    kind = data.draw(st.sampled_from(["flip", "cut", "add", "length"]))
    if kind == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    elif kind == "add":
        payload += bytes(data.draw(st.integers(1, 5)))
    else:
        at = data.draw(st.integers(1, 16 if kind == "length" else len(payload) - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    out = tuple(np.empty_like(array) for array in arrays)
    if kind in ("cut", "add"):
        with pytest.raises(ValueError):
            codec.decode(memoryview(payload), unit, *out, reference)
    else:
        with contextlib.suppress(ValueError):
            codec.decode(memoryview(payload), unit, *out, reference)


def test_the_mode_needs_a_reference_and_words_of_16_bits():
    codec, unit = codec_for((1, 4, 2, 2), "F32")
    out = np.zeros((1, 4, 2), np.float32), np.zeros((1, 4, 2), np.float32)
    with pytest.raises(ValueError, match="no reference"):
        codec.decode(memoryview(bytes([PREDICTED])), unit, *out)
    with pytest.raises(ValueError, match="F32"):
        codec.decode(memoryview(bytes([PREDICTED]) + bytes(16)), unit, *out, out)
