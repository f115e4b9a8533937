"""The group codec with a reference that is near: fewer bits at no more distortion, and the specification's decoder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import tokens
from pltpack.codec.base import LayerSample, Unit
from pltpack.codec.group import GroupCodec
from pltpack.codec.group_decode import HEADER, OWN_MEANS, REFERENCED, SHIFTED
from pltpack.codec.rope import Rotation
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

sys.path.append(str(Path(__file__).parents[1] / "spec"))
import reference_group
import reference_numbers

ROPE = {"type": "default", "theta": 10000.0}


class OneRun:
    """A sample of one run of one layer."""

    def __init__(self, unit, arrays):
        self._sample = LayerSample(unit, *arrays)

    def layer(self, index):
        return [self._sample]


def cache(rng, shape, dtype="BF16"):
    heads, count, *dims = shape
    out = []
    for dim in dims:
        sigma = np.exp(rng.normal(size=(heads, 1, dim)) / 2)
        x = sigma * (rng.normal(size=(heads, count, dim)) + 2 * rng.normal(size=(heads, 1, dim)))
        out.append(x.astype(np.float32).astype(DTYPES[dtype]))
    return tuple(out)


def elsewhere(rng, arrays, share):
    """The same passage elsewhere: noise of a share of each channel's deviation, far more in the first tokens."""
    token = np.exp(rng.normal(size=(1, arrays[0].shape[1], 1)) / 2)
    token[:, :16] *= 3
    return tuple((x := a.astype(np.float32)) + share * token * x.std(axis=1, keepdims=True)
                 * rng.standard_t(8, size=x.shape) for a in arrays)  # fmt: skip


def started(arrays, bits, dtype="BF16", position=100):
    heads, count, k_dim = arrays[0].shape
    geometry = LayerGeometry(heads, k_dim, arrays[1].shape[2], dtype)
    identity = Identity(layers=(geometry,), rope=ROPE, keys="rotated")
    codec = GroupCodec(bits)
    unit = Unit(0, geometry, position, count, 1000)
    state = codec.learn(OneRun(unit, arrays), identity)
    codec.start(state, identity)
    return codec, state, unit


def decoded(codec, payload, unit, reference=None):
    g = unit.geometry
    out = [np.zeros((g.heads, unit.tokens, d), DTYPES[g.dtype]) for d in (g.k_dim, g.v_dim)]
    codec.decode(memoryview(payload), unit, *out, reference)
    return out


def head_errors(arrays, found):
    """Squared errors of all heads of keys and values; rotation keeps them."""
    return np.concatenate([np.square(a.astype(np.float64) - b.astype(np.float64)).sum(axis=(1, 2))
                           for a, b in zip(arrays, found, strict=True)])  # fmt: skip


def spec_decoded(payload, unit, state, bits, reference):
    g = unit.geometry
    identity = {"layers": [{"heads": g.heads, "k_dim": g.k_dim, "v_dim": g.v_dim}], "rope": ROPE, "keys": "rotated"}
    group = reference_group.Group({"bits": bits}, state, identity)
    mine = reference_numbers.Unit(0, g.heads, g.k_dim, g.v_dim, g.dtype, unit.tokens, unit.position)
    words = tuple(np.ascontiguousarray(a).view(mine.word) for a in reference)
    return group.decode(payload, mine, words)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_near_reference_saves_at_no_more_distortion(bits):
    rng = np.random.default_rng(bits)
    arrays = cache(rng, (3, 128, 32, 32))
    codec, _, unit = started(arrays, bits)
    plain = codec.encode(unit, *arrays)
    reference = tuple(x.astype(arrays[0].dtype) for x in elsewhere(rng, decoded(codec, plain, unit), 0.1))
    usual = codec.encode(unit, *arrays, reference)
    near = dataclasses.replace(unit, near=True)
    payload = codec.encode(near, *arrays, reference)
    assert payload == codec.encode(near, *arrays, reference)
    assert usual[0] == REFERENCED and payload[0] == REFERENCED | SHIFTED
    assert len(payload) < 0.97 * len(usual) and len(payload) < 0.75 * len(plain)
    without = head_errors(arrays, decoded(codec, plain, unit))
    errors = head_errors(arrays, decoded(codec, payload, unit, reference))
    assert errors.sum() <= 1.01 * without.sum()
    assert (errors <= 1.1 * without).all()


@functools.cache
def small(bits):
    """A codec that learnt one unit, and that unit's arrays."""
    arrays = cache(np.random.default_rng(bits), (2, 48, 16, 16))
    codec, _, unit = started(arrays, bits)
    return codec, unit, arrays


@settings(max_examples=60)
@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from(["other", "words", "zeros", "near", "half", "huge"]),
       st.integers(0, 2**32 - 1))  # fmt: skip
def test_whatever_the_reference_distortion_stays(bits, kind, seed):
    rng = np.random.default_rng(seed)
    codec, unit, arrays = small(bits)
    if kind == "words":
        reference = tuple(rng.integers(0, 1 << 16, a.shape).astype(np.uint16).view(a.dtype) for a in arrays)
    elif kind == "zeros":
        reference = tuple(np.zeros_like(a) for a in arrays)
    elif kind == "huge":
        reference = tuple(np.full_like(a, 3e38) for a in arrays)
    else:
        reference = elsewhere(rng, cache(rng, (2, 48, 16, 16)) if kind == "other" else arrays, 0.2)
        reference = tuple(x.astype(arrays[0].dtype) for x in reference)
        if kind == "half":
            # Near in some tokens, of another passage in the rest.
            for mine, other in zip(reference, cache(rng, (2, 48, 16, 16)), strict=True):
                mine[:, 20:] = other[:, 20:]
    plain = codec.encode(unit, *arrays)
    payload = codec.encode(dataclasses.replace(unit, near=True), *arrays, reference)
    without = head_errors(arrays, decoded(codec, plain, unit))
    errors = head_errors(arrays, decoded(codec, payload, unit, reference))
    assert errors.sum() <= 1.1 * without.sum()
    if kind != "near":
        assert len(payload) <= 1.02 * len(plain) + 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(16, 16), (10, 7)])
def test_decodes_as_the_specification_says(dtype, dims):
    rng = np.random.default_rng(3)
    arrays = cache(rng, (2, 45, *dims), dtype)
    codec, state, unit = started(arrays, 4, dtype, position=2)
    reference = tuple(x.astype(DTYPES[dtype]) for x in elsewhere(rng, arrays, 0.15))
    for a, b in zip(arrays, reference, strict=True):
        b[:, 7] = a[:, 7]
    payload = codec.encode(dataclasses.replace(unit, near=True), *arrays, reference)
    assert payload[0] == REFERENCED | SHIFTED
    want = spec_decoded(payload, unit, state, 4, reference)
    for a, b in zip(want, decoded(codec, payload, unit, reference), strict=True):
        np.testing.assert_array_equal(a, np.ascontiguousarray(b).view(a.dtype))


def test_tokens_that_round_to_the_reference_are_copies():
    rng = np.random.default_rng(4)
    arrays = cache(rng, (2, 64, 16, 16))
    codec, _, unit = started(arrays, 3)
    reference = tuple(x.astype(arrays[0].dtype) for x in elsewhere(rng, arrays, 0.003))
    near = dataclasses.replace(unit, near=True)
    payload = codec.encode(near, *arrays, reference)
    found = decoded(codec, payload, unit, reference)
    for a, b in zip(found, reference, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))
    # What is left is the fixed part, four runs of copies and an empty stream.
    assert len(payload) == HEADER.size + 3 * 4 + 4 + 128


def test_shifts_come_back():
    for count in (1, 2, 7, 16):
        shifts = (np.arange(count) % 16 - 8).astype(np.int16)
        packed = tokens.pack_shifts(shifts)
        assert len(packed) == (count + 1) // 2
        np.testing.assert_array_equal(tokens.unpack_shifts(packed, count), shifts)


def test_keys_of_the_rotation_are_compared_without_it():
    # Keys that another position turned are no reference; turned to this one they are.
    rng = np.random.default_rng(5)
    flat = cache(rng, (2, 64, 16, 16))
    rotation = Rotation.of(ROPE, "rotated", 16)
    turned = [rotation.rotate(flat[0].astype(np.float32), at).astype(flat[0].dtype) for at in (100, 40)]
    codec, _, unit = started((turned[0], flat[1]), 4)
    near = dataclasses.replace(unit, near=True)
    right, wrong = (len(codec.encode(near, turned[0], flat[1], (keys, flat[1]))) for keys in turned)
    assert right < 0.2 * wrong


@settings(max_examples=120)
@given(st.data())
def test_damaged_payloads_are_refused_or_decode_to_something(data):
    rng = np.random.default_rng(6)
    codec, unit, arrays = small(2)
    reference = tuple(x.astype(arrays[0].dtype) for x in elsewhere(rng, arrays, 0.3))
    payload = bytearray(codec.encode(dataclasses.replace(unit, near=True), *arrays, reference))
    assert payload[0] & SHIFTED
    if data.draw(st.booleans()):
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    else:
        payload[data.draw(st.integers(0, min(120, len(payload) - 1)))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        decoded(codec, payload, unit, reference)


@pytest.mark.parametrize("flags", [SHIFTED, SHIFTED | OWN_MEANS, 7, 8])
def test_flags_that_do_not_exist_are_refused(flags):
    rng = np.random.default_rng(7)
    arrays = cache(rng, (1, 40, 8, 8))
    codec, _, unit = started(arrays, 2)
    payload = bytearray(codec.encode(unit, *arrays))
    struct.pack_into("<I", payload, 0, flags)
    assert HEADER.size <= len(payload)
    with pytest.raises(ValueError, match="header"):
        decoded(codec, payload, unit, arrays)
