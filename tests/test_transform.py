"""The transform codec: errors bounded by the step, exact tokens, rate control, damage, the same bytes always."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles_common import (
    IDENTITY,
    LAYERS,
    TURN_END,
    empty_like,
    random_profile,
    same_tokens,
    session,
    started,
    unit_of,
    values_of,
    words,
)

from pltpack.codec import coefficients, importance, prediction, rate, scaling
from pltpack.codec.base import KeyValue
from pltpack.codec.blas import single_threaded
from pltpack.codec.coefficients import OCTAVE
from pltpack.codec.profile import NAMES, Length, Profile, pack_about
from pltpack.codec.rows import to_rows
from pltpack.codec.transform import TransformCodec
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

PROFILE = random_profile()
#: Largest relative rounding error, and half of the smallest difference of two numbers.
ROUNDING = {"F32": (2**-24, 0), "F16": (2**-11, 2**-25), "BF16": (2**-8, 0), "F8_E4M3": (2**-4, 2**-10),
            "F8_E5M2": (2**-3, 2**-17)}  # fmt: skip


def with_dtype(dtype: str) -> tuple[LayerGeometry, ...]:
    return tuple(dataclasses.replace(layer, dtype=dtype) for layer in LAYERS)


def turn(codec: TransformCodec, arrays: list[KeyValue], position: int, layers=LAYERS) -> tuple[list[bytes], list]:
    """All payloads of a run of tokens, and what they give."""
    payloads, out = [], []
    tokens = arrays[0][0].shape[1]
    for group in codec.layer_groups(len(layers)):
        unit = unit_of(group, tokens, position, layers)
        mine = arrays[group.start : group.stop]
        payloads.append(codec.encode_span(unit, mine))
        back = empty_like(mine)
        codec.decode_span(memoryview(payloads[-1]), unit, back)
        out += back
    return payloads, out


def whitened_errors(codec: TransformCodec, group: range, arrays, back, identity: Identity, position: int):
    """Errors of a layer group's tokens in whitened rows, and what rounding to the dtype may add to each."""
    profile, layers = codec.profile, identity.layers[group.start : group.stop]
    before, finite = to_rows(arrays, layers, identity, position)
    after, _ = to_rows(back, layers, identity, position)
    assert finite.all()
    error, at, root = [], 0, 0.0
    for layer in group:
        width = profile.layers[layer].elements_per_token
        error.append(profile.whiten(np.ascontiguousarray((after - before)[:, at : at + width]), layer))
        root = max(root, *(float(np.linalg.norm(m, 2)) for m in profile._roots))
        at += width
    relative, least = ROUNDING[layers[0].dtype]
    rounding = root * (relative * np.linalg.norm(np.abs(after) + np.abs(before), axis=1) + least * np.sqrt(at))
    return np.linalg.norm(np.concatenate(error, axis=1), axis=1), rounding


def bounds(codec: TransformCodec, group: range, arrays, back, identity: Identity, position: int, steps) -> None:
    """Check the error of a layer group's tokens in whitened rows."""
    norm, rounding = whitened_errors(codec, group, arrays, back, identity, position)
    at = sum(codec.profile.layers[layer].elements_per_token for layer in group)
    shared = len(codec._bases_of(unit_of(group, 1, layers=identity.layers)).logs) - at
    limit = 0.5 * steps * (np.sqrt(shared) + np.sqrt(at))
    assert (norm <= 1.001 * limit + rounding + 1e-5).all()


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    rope=st.sampled_from([("half", 8), ("interleaved", 8), ("half", 4), ("half", 64), None]),
    tokens=st.integers(1, 40),
    position=st.sampled_from([0, 0, 2, 5, 1000]),
    group=st.integers(1, 4),
    rank=st.sampled_from([0, 1, 9, 1000]),
    step=st.sampled_from([0.01, 0.3, 1.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_errors_are_bounded_by_the_step(dtype, rope, tokens, position, group, rank, step, seed) -> None:
    layers = with_dtype(dtype)
    style = None if rope is None else {"type": "default", "theta": 10000.0, "style": rope[0], "dim": rope[1]}
    identity = dataclasses.replace(IDENTITY, layers=layers, rope=style, keys="unrotated" if rope is None else "rotated")
    codec = started(random_profile(layers, seed, group, rank), identity, step=step)
    arrays = values_of(np.random.default_rng(seed).integers(0, 99, tokens), layers, seed)
    payloads, back = turn(codec, arrays, position, layers)
    assert turn(codec, arrays, position, layers)[0] == payloads
    for found in codec.layer_groups(len(layers)):
        part = slice(found.start, found.stop)
        # Without a look at the session, every token has the ordinary step.
        bounds(codec, found, arrays[part], back[part], identity, position, np.full(tokens, step))
    if position == 0:
        assert same_tokens(arrays, back)[0]


def test_a_finer_step_is_closer_and_longer() -> None:
    arrays = values_of(np.arange(60))
    found = []
    for step in (0.1, 1.0, 10.0):
        payloads, back = turn(started(PROFILE, step=step), arrays, 4)
        gap = sum(float(np.square(a.astype(np.float64) - b.astype(np.float64)).sum())
                  for x, y in zip(arrays, back, strict=True) for a, b in zip(x, y, strict=True))  # fmt: skip
        found.append((gap, -sum(map(len, payloads))))
    assert found == sorted(found)


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    odd=st.sets(st.integers(0, 19), max_size=5),
    where=st.integers(0, 2),
    word=st.sampled_from(["nan", "inf", "-inf", "huge"]),
    position=st.sampled_from([0, 3, 64]),
)
def test_tokens_that_are_not_finite_or_huge_keep_every_bit(dtype, odd, where, word, position) -> None:
    layers = with_dtype(dtype)
    identity = dataclasses.replace(IDENTITY, layers=layers)
    arrays = values_of(np.arange(20), layers)
    wide = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 1e37}[word]
    # Not every dtype has infinities or such numbers.
    wide = wide if word == "nan" or dtype in ("F32", "BF16") else np.nan
    for t in odd:
        with np.errstate(over="ignore", invalid="ignore"):
            arrays[where][t % 2][0, t, t % 4] = wide
    codec = started(random_profile(layers), identity, step=0.5)
    _, back = turn(codec, arrays, position, layers)
    group = next(g for g in codec.layer_groups(3) if where in g)
    part = slice(group.start, group.stop)
    equal = same_tokens(arrays[part], back[part])
    assert all(equal[t] for t in odd)
    assert all(np.isfinite(b.astype(np.float32)[:, t]).all() for x in back for b in x for t in set(range(20)) - odd)


def test_payloads_of_not_a_number_are_kept() -> None:
    arrays = values_of(np.arange(6))
    arrays[1][0].view(np.uint16)[0, 5, :3] = [0x7FC1, 0xFFA5, 0x7F80]
    _, back = turn(started(PROFILE), arrays, 10)
    assert same_tokens(arrays[:2], back[:2])[5]


def test_first_tokens_near_a_template_are_exact_and_cheap() -> None:
    arrays = values_of(np.arange(8))
    rng = np.random.default_rng(5)
    at = 0
    for pair in arrays:
        for array in pair:
            width = array.shape[0] * array.shape[2]
            bits = PROFILE["sink.bits"][0, :, at : at + width].reshape(4, array.shape[0], -1).transpose(1, 0, 2).copy()
            bits ^= (rng.random(bits.shape) < 0.05).astype(np.uint16)
            array.view(np.uint16)[:, :4] = bits
            at += width
    codec, bare = started(PROFILE), started(random_profile(templates=0))
    payloads, back = turn(codec, arrays, 0)
    assert same_tokens(arrays, back)[:4].all()
    assert not same_tokens(arrays, back)[4:].any()
    assert sum(map(len, payloads)) < sum(map(len, turn(bare, arrays, 0)[0]))
    assert same_tokens(arrays, turn(bare, arrays, 0)[1])[0]
    # Elsewhere the same values are nothing special.
    assert not same_tokens(arrays, turn(codec, arrays, 4)[1])[:4].any()


def test_values_far_beyond_their_expected_scale_are_escaped() -> None:
    arrays = values_of(np.arange(30))
    arrays[0][1][1, 7, 2] = 3000
    small = started(random_profile(logs=-96), step=0.02)
    _, back = turn(small, arrays, 9)
    for group in small.layer_groups(3):
        part = slice(group.start, group.stop)
        bounds(small, group, arrays[part], back[part], IDENTITY, 9, np.full(30, 0.02))


def test_components_below_the_floor_are_left_out() -> None:
    arrays = values_of(np.arange(30))
    codec = started(random_profile(logs=-600), step=100.0)
    payloads, back = turn(codec, arrays, 4)
    assert sum(map(len, payloads)) < 2 * (5 + 15 + 12 + 128 + 1)
    # What is left is the mean.
    rows, _ = to_rows(back, LAYERS, IDENTITY, 4)
    assert np.allclose(rows, PROFILE["mean"], atol=0.05, rtol=0.02)


def test_a_reference_is_coded_against() -> None:
    codec, group = started(PROFILE, step=0.3), range(0, 2)
    arrays = values_of(np.arange(40))[:2]
    near = [tuple((a.astype(np.float32) * 1.01).astype(a.dtype) for a in pair) for pair in arrays]
    unit = unit_of(group, 40, 8)
    payload = codec.encode_span(unit, arrays, near)
    assert len(payload) < len(codec.encode_span(unit, arrays))
    back = empty_like(arrays)
    codec.decode_span(memoryview(payload), unit, back, near)
    bounds(codec, group, arrays, back, IDENTITY, 8, np.full(40, 0.3))
    with pytest.raises(ValueError, match="reference"):
        codec.decode_span(memoryview(payload), unit, back)


def references(kind: str, arrays: list[KeyValue], layers, rng: np.random.Generator) -> list[KeyValue]:
    """Something to predict arrays from, good or bad."""
    other = values_of(rng.integers(100, 200, arrays[0][0].shape[1]), layers)
    out = []
    for pair, strange in zip(arrays, other, strict=True):
        found = []
        for a, b in zip(pair, strange, strict=True):
            wide, noise = a.astype(np.float32), rng.normal(size=a.shape)
            with np.errstate(over="ignore", invalid="ignore"):
                found.append({
                    "equal": wide, "near": wide * (1 + 0.05 * noise), "far": wide + 3 * noise, "strange": b,
                    "opposite": -wide, "huge": noise * 1e13, "beyond": noise * 3e37,
                    "lost": np.where(noise > 1.5, np.nan, wide), "endless": np.where(noise > 2, np.inf, wide),
                    "mixed": np.where(np.arange(a.shape[1])[:, None] % 2, wide, 1e4 * noise),
                }[kind].astype(a.dtype))  # fmt: skip
        out.append((found[0], found[1]))
    return out


def near_unit(group: range, tokens: int, position: int, layers=LAYERS):
    return dataclasses.replace(unit_of(group, tokens, position, layers), near=True)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["equal", "near", "far", "strange", "opposite", "huge", "beyond", "lost", "endless", "mixed"]),
    dtype=st.sampled_from(["BF16", "F16", "F32", "F8_E4M3"]),
    tokens=st.integers(1, 40),
    position=st.sampled_from([0, 3, 900]),
    group=st.integers(1, 3),
    step=st.sampled_from([0.02, 0.3, 2.0]),
    seed=st.integers(0, 1000),
)
def test_no_reference_makes_a_unit_worse_or_longer(kind, dtype, tokens, position, group, step, seed) -> None:
    layers = with_dtype(dtype)
    identity, rng = dataclasses.replace(IDENTITY, layers=layers), np.random.default_rng(seed)
    codec = started(random_profile(layers, seed, group), identity, step=step)
    codec._classes = rng.integers(0, importance.CLASSES, position + tokens).astype(np.uint8)
    widths = rate.value_of(rate.steps(rate.log_of(step)))[codec._classes[position:]]
    arrays = values_of(rng.integers(0, 99, tokens), layers, seed)
    guess = references(kind, arrays, layers, rng)
    for found in codec.layer_groups(len(layers)):
        part = slice(found.start, found.stop)
        unit = near_unit(found, tokens, position, layers)
        payload = codec.encode_span(unit, arrays[part], guess[part])
        assert codec.encode_span(unit, arrays[part], guess[part]) == payload
        plain = codec.encode_span(unit, arrays[part])
        assert len(payload) <= 1.001 * len(plain) + (tokens + 1) // 2 + 160
        back = empty_like(arrays[part])
        codec.decode_span(memoryview(payload), unit, back, guess[part])
        # All components are coded: without a reference none is off by more than half a step.
        error, rounding = whitened_errors(codec, found, arrays[part], back, identity, position)
        count = len(codec._bases_of(unit).logs)
        limit = np.sqrt(2 * 0.25 * count * tokens)
        assert np.linalg.norm(error / widths) <= 1.001 * limit + np.linalg.norm((rounding + 1e-5) / widths)


@settings(max_examples=60)
@given(
    spread=st.sampled_from([0.0, 0.02, 0.3, 1.0, 30.0]),
    scale=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 1e18]),
    broken=st.booleans(),
    step=st.integers(-60, 60),
    seed=st.integers(0, 1000),
)
def test_errors_of_a_unit_do_not_grow_by_a_reference(spread, scale, broken, step, seed) -> None:
    rng = np.random.default_rng(seed)
    tables = started(PROFILE).profile.coder
    tables = dataclasses.replace(tables, floor=-96)
    logs = np.sort(rng.integers(-120, 120, 50))[::-1].astype(np.int32)
    found = (rng.laplace(size=(20, 50)) * np.exp2(logs / OCTAVE)).astype(np.float32)
    guess = (scale * found + spread * rng.normal(size=found.shape)).astype(np.float32)
    if broken:
        guess[3, 7], guess[4, 9] = np.nan, np.inf
    steps, classes, exact = rate.steps(step), rng.integers(3, 9, 20), rng.random(20) < 0.2
    chosen, quantized = prediction.choose(found, guess, classes, exact, steps, logs, tables)

    def error(p: np.ndarray, q: np.ndarray) -> float:
        share = prediction.shares()[p][:, None]
        center = np.where(share > 0, share * np.where(share > 0, guess, 0), 0).astype(np.float64)
        gap = (found - center) / rate.value_of(steps)[classes][:, None] - q
        return float(np.square(gap[~exact]).sum())

    bounds = coefficients.bounds_of(logs, steps, tables)[:, 0]
    alone = np.rint(found / rate.value_of(steps)[classes][:, None])
    alone[np.arange(50)[None] >= bounds[classes][:, None]] = 0
    assert error(chosen, quantized) <= 1.0001 * error(np.zeros(20, int), alone) + 1e-6
    if scale == 1 and spread == 0 and not broken:
        assert (chosen[~exact] > 8).all()
        assert not quantized.any()


def test_a_prediction_is_worth_its_bytes_and_survives_what_is_not_finite() -> None:
    codec, group = started(PROFILE, step=0.3), range(0, 2)
    arrays = values_of(np.arange(40))[:2]
    guess = [tuple((a.astype(np.float32) * 1.02).astype(a.dtype) for a in pair) for pair in arrays]
    guess[1][0][0, 7, 1], guess[0][1][1, 9, 0] = np.nan, -np.inf
    arrays[0][0][0, 11, 2] = np.inf
    unit = near_unit(group, 40, 8)
    payload = codec.encode_span(unit, arrays, guess)
    assert len(payload) < 0.6 * len(codec.encode_span(unit, arrays))
    back = empty_like(arrays)
    codec.decode_span(memoryview(payload), unit, back, guess)
    assert same_tokens(arrays, back)[11]
    for array in (part for pair in back for part in pair):
        assert np.isfinite(np.delete(array.astype(np.float32), 11, axis=1)).all()
    with pytest.raises(ValueError, match="reference"):
        codec.decode_span(memoryview(payload), unit, back)
    for flags in (2, 8, 11):
        with pytest.raises(ValueError, match="flags"):
            codec.decode_span(memoryview(bytes([flags]) + payload[1:]), unit, back, guess)


def test_sessions_louder_than_the_calibration_take_tables_that_fit() -> None:
    codec = started(random_profile(), step=0.4)
    usual = session("usual", np.arange(96))
    layers = [tuple((part.astype(np.float32) * 5).astype(part.dtype) for part in usual.layer(i)) for i in range(3)]
    loud = Snapshot.from_arrays("loud", usual.tokens, layers, usual.identity)
    prepared, other = codec.prepare(loud, (96,)), codec.prepare(usual, (96,))
    assert all((prepared._shifts[first] > other._shifts[first]).all() for first in other._shifts)
    assert set(prepared._shifts) == {group.start for group in codec.layer_groups(3)}
    plain = copy.copy(prepared)
    plain._shifts = {}
    for group in codec.layer_groups(3):
        unit, arrays = unit_of(group, 96), [loud.layer(layer) for layer in group]
        payload, other = prepared.encode_span(unit, arrays), plain.encode_span(unit, arrays)
        assert payload[0] == 4 and other[0] == 0 and len(payload) < 0.95 * len(other)
        assert prepared.minor_of(payload) == 3 and plain.minor_of(other) == 0
        back, again = empty_like(arrays), empty_like(arrays)
        codec.decode_span(memoryview(payload), unit, back)
        codec.decode_span(memoryview(other), unit, again)
        bounds(codec, group, arrays, back, IDENTITY, 0, rate.value_of(prepared.token_steps))
        for cut in range(len(payload) - len(payload) // 3, len(payload), 7):
            with pytest.raises(ValueError, match=r".*"):
                codec.decode_span(memoryview(payload[:cut]), unit, back)


def test_what_is_as_calibration_says_keeps_its_scales() -> None:
    codec, rng = started(random_profile()), np.random.default_rng(3)
    logs = np.sort(rng.integers(-60, 100, 700))[::-1].astype(np.int32)
    steps = rate.steps(0)
    for shift in (0, 16):
        found = rng.laplace(size=(400, 700)) * rate.value_of(logs + shift)
        shifts = scaling.choose(found.astype(np.float32), np.full(400, 6), steps, rate.value_of(steps), logs,
                                codec.profile.coder)  # fmt: skip
        assert shifts is None if shift == 0 else (np.abs(shifts[:2].astype(int) - 10) <= 1).all()


@given(st.lists(st.integers(-500, 500), min_size=1, max_size=600), st.integers(0, 2**32))
def test_moved_scales_descend(logs, seed) -> None:
    given_logs = np.sort(np.array(logs, np.int32))[::-1]
    shifts = np.random.default_rng(seed).integers(0, 16, scaling.count(given_logs)).astype(np.uint8)
    found = scaling.shifted(given_logs, shifts)
    assert (np.diff(found) <= 0).all() and found[0] == given_logs[0] + 8 * (int(shifts[0]) - 8)
    assert np.array_equal(scaling.shifted(given_logs, np.full(len(shifts), scaling.NONE)), given_logs)


def test_one_layer_a_group_has_the_plain_interface_too() -> None:
    codec = started(random_profile(group=1), step=0.3)
    keys, values = values_of(np.arange(10))[1]
    unit = dataclasses.replace(unit_of(range(1, 2), 10), layers=())
    payload = codec.encode(unit, keys, values)
    ((again, more),) = empty_like([(keys, values)])
    codec.decode(memoryview(payload), unit, again, more)
    bounds(codec, range(1, 2), [(keys, values)], [(again, more)], IDENTITY, 0, np.full(10, 0.3))


class TestClasses:
    def test_a_step_follows_its_token(self) -> None:
        snapshot = session("s", np.arange(50), importance=np.exp2(np.arange(50) % 9).astype(np.float32))
        codec = started(PROFILE, step=0.5).prepare(snapshot, (50,))
        classes = rate.token_classes(codec.profile, snapshot, (50,))
        assert len(set(classes.tolist())) > 5
        steps = rate.value_of(rate.steps(rate.log_of(0.5)))[classes]
        assert (np.diff(steps[:9]) <= 0).all()
        # Below, tokens count for what they are before a block's end.
        assert np.allclose(np.diff(np.log2(steps[3:9])), -0.5), "an octave of importance is half an octave of the step"
        arrays = [snapshot.layer(index) for index in range(3)]
        _, back = turn(codec, arrays, 0)
        for group in codec.layer_groups(3):
            part = slice(group.start, group.stop)
            bounds(codec, group, arrays[part], back[part], IDENTITY, 0, steps)

    def test_captured_importance_takes_the_place_of_the_prediction(self) -> None:
        plain = session("s", np.arange(50))
        captured = dataclasses.replace(plain, importance=np.exp2(10 * np.eye(50)[17]).astype(np.float32))
        codec = started(PROFILE)
        before, after = (rate.token_classes(codec.profile, s, ()) for s in (plain, captured))
        assert len(set(before.tolist())) > 1
        assert np.argmax(after) == 17
        assert after[17] - np.delete(after, 17).max() >= 5

    def test_broken_importance_is_survived(self) -> None:
        values = np.array([np.nan, np.inf, -1, 0, 1e30], np.float32)
        snapshot = session("s", np.arange(5), importance=values)
        classes = rate.token_classes(started(PROFILE).profile, snapshot, ())
        assert classes.max() < importance.CLASSES

    def test_cuts_make_the_tokens_before_them_finer(self) -> None:
        snapshot = session("s", np.arange(100, 180))
        codec = started(PROFILE)
        plain = rate.token_classes(codec.profile, snapshot, ())
        cut = rate.token_classes(codec.profile, snapshot, (40,)).astype(int)
        assert (cut >= plain).all()
        assert (cut > plain)[36:40].any()
        assert (cut == plain)[40:].all()

    def test_turn_ends_are_cuts_at_a_distance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = np.arange(100, 180)
        ids[39] = TURN_END
        snapshot = session("s", ids)
        profile = started(PROFILE).profile
        found = []
        for less in (60.0, 0.0, -3.0):
            monkeypatch.setattr(importance, "_TURN_LESS", less)
            found.append(rate.token_classes(profile, snapshot, ()).astype(int))
        assert all((b >= a).all() for a, b in itertools.pairwise(found))
        assert (found[2] > found[1])[36:40].any()
        assert (found[1] > found[0])[:40].any()

    def test_the_turn_that_is_answered_next_is_finer(self) -> None:
        ids = np.arange(100, 180)
        ids[[19, 74]] = TURN_END
        profile, far = started(PROFILE).profile, np.append(ids, np.arange(20))
        asked, other = (rate.token_classes(profile, session("s", some), ()).astype(int)[:80] for some in (ids, far))
        assert (asked - other)[20:60].min() >= 2
        assert abs(asked - other)[:20].max() < 2

    def test_steps_are_made_finer_where_asked(self) -> None:
        codec = started(PROFILE, step=0.5).prepare(session("s", np.arange(60)))
        before = codec.token_steps
        most = np.where(np.arange(60) < 30, before - 60, np.iinfo(np.int32).max)
        most[5] = -100_000
        after = codec.finer(most).token_steps
        assert (after[30:] == before[30:]).all()
        assert (after[:30] <= before[:30]).all()
        reach = rate.steps(codec._log_step)[-1]
        assert after[5] == reach
        assert (codec.token_steps == before).all()
        rest = np.delete(np.arange(30), 5)
        assert (np.abs(after[rest] - np.maximum(most[rest], reach)) <= 6).all()

    def test_no_tokens_no_classes(self) -> None:
        codec = started(PROFILE, target_kl=0.01)
        assert codec.prepare(session("s", []))._classes.shape == (0,)


class TestTargets:
    @settings(max_examples=16)
    @given(bits=st.sampled_from([0.5, 1.0, 2.5, 5.0]), tokens=st.sampled_from([1, 5, 300, 700]), lost=st.booleans())
    def test_bits_are_met_from_below(self, bits: float, tokens: int, lost: bool) -> None:
        snapshot = session("s", np.arange(tokens))
        if lost:
            snapshot.source.arrays[0][0][0, 100:120, 0] = np.nan
        codec = started(PROFILE, target_bits=bits).prepare(snapshot)
        size = sum(
            len(codec.encode_span(unit_of(group, min(256, tokens - start), start),
                                  [snapshot.layer(i, start, min(start + 256, tokens)) for i in group]))
            for group in codec.layer_groups(3) for start in range(0, tokens, 256)
        )  # fmt: skip
        found = 8 * size / snapshot.elements
        if codec._log_step < rate.base_step(6 * OCTAVE):
            assert found <= 1.03 * bits
        if codec._log_step > rate.base_step(-6 * OCTAVE) and tokens >= 300:
            assert found >= 0.75 * bits

    @pytest.mark.parametrize("target", [1e-3, 1e-2, 0.3])
    def test_the_largest_step_that_keeps_a_predicted_divergence(self, target: float) -> None:
        snapshot = session("s", np.arange(90))
        codec = started(PROFILE, target_kl=target).prepare(snapshot)
        probe = rate.Probe(codec, snapshot, codec._classes)
        assert probe.kl(codec._log_step) <= target
        assert target < probe.kl(codec._log_step + 1) or codec._log_step == rate.base_step(6 * OCTAVE)

    def test_more_is_predicted_of_shorter_sessions(self) -> None:
        def predicted(tokens: int, **about: object) -> float:
            described = {**json.loads(PROFILE["about"].tobytes()), **about}
            codec = started({**PROFILE, "about": pack_about(described)})
            snapshot = session("s", np.arange(tokens))
            return rate.Probe(codec, snapshot, rate.token_classes(codec.profile, snapshot, ())).kl(0)

        for tokens, times in ((20, 3.0), (30, 3.0), (45, 2.0), (90, 1.0), (120, 1.0)):
            assert predicted(tokens, kl_length=[1, 30, 90]) == pytest.approx(times * predicted(tokens), rel=1e-9)
            assert predicted(tokens, kl_length=[0, 30, 90]) == predicted(tokens)

    def test_sessions_that_end_with_a_turn_count_twice(self) -> None:
        def octaves(ids: np.ndarray) -> float:
            described = {**json.loads(PROFILE["about"].tobytes()), "kl_length": [2, 1, 160]}
            codecs = [started(PROFILE), started({**PROFILE, "about": pack_about(described)})]
            snapshot = session("s", ids)
            classes = rate.token_classes(codecs[0].profile, snapshot, ())
            plain, longer = (rate.Probe(codec, snapshot, classes).kl(0) for codec in codecs)
            return float(np.log2(longer / plain))

        text = np.full(40, 100)
        assert octaves(text) == pytest.approx(4)
        text[[20, 36]] = TURN_END
        assert octaves(text) == pytest.approx(2), "three tokens of a header follow"
        assert octaves(text[:37]) == pytest.approx(2 * np.log2(80 / 37))
        assert octaves(text[:36]) == pytest.approx(2 * np.log2(160 / 36)), "in the midst of the turn"
        assert octaves(np.append(text, np.full(40, 100))) == pytest.approx(2), "in the answer"
        assert octaves(np.append(text, np.full(200, 100))) == 0

    def test_profiles_of_former_versions_have_the_usual_dependence_on_length(self) -> None:
        def length(**about: object) -> Length:
            described = {**json.loads(PROFILE["about"].tobytes()), **about}
            return Profile({**PROFILE, "about": pack_about(described)}, LAYERS).length

        assert length().octaves(1) == 0, "nothing says how long what was measured was"
        former = length(source={"kind": "model", "window": 1024})
        assert former.most == 768
        assert 0 == former.octaves(5000) == former.octaves(768) < former.octaves(400) < former.octaves(200)
        assert length(source={"kind": "model", "window": 16}).octaves(12) == 0
        assert length(kl_length=[0.5, 64, 256], source={"window": 1024}).octaves(64) == 1

    @given(tokens=st.integers(0, 1 << 31), power=st.floats(0, 8), ends=st.tuples(st.integers(1, 1 << 30),
                                                                                 st.integers(0, 1 << 30)))  # fmt: skip
    def test_predictions_by_length_are_bounded(self, tokens: int, power: float, ends: tuple[int, int]) -> None:
        found = Length(power, ends[0], sum(ends))
        assert 0 <= found.octaves(tokens + 1) <= found.octaves(tokens) <= found.octaves(0) <= 8 * 31

    def test_a_divergence_out_of_reach_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"finest step .* not 1e-06$"):
            started(PROFILE, target_kl=1e-6).prepare(session("s", np.arange(50)))
        about = {**json.loads(PROFILE["about"].tobytes()), "source": {"kl": rate.NOT_MEASURED}}
        with pytest.raises(ValueError, match=r"without a model .* bits or bytes"):
            started({**PROFILE, "about": pack_about(about)}, target_kl=1e-4).prepare(session("s", np.arange(50)))

    @pytest.mark.parametrize("config", [
        {"step": 1.0, "target_kl": 0.1}, {"step": 0}, {"step": True}, {"target_bits": -1}, {"target_kl": "1"},
        {"target_kl": float("nan")}, {"target": 3},
    ])  # fmt: skip
    def test_malformed_configurations_are_refused(self, config) -> None:
        with pytest.raises(ValueError, match="transform"):
            TransformCodec.from_config(config)

    def test_configurations_round_trip(self) -> None:
        for config in ({}, {"step": 0.5}, {"target_kl": 0.01}, {"target_bits": 2}):
            assert TransformCodec.from_config(config).get_config() == config


@pytest.fixture(scope="module")
def payload() -> bytes:
    arrays = values_of(np.arange(40))[:2]
    arrays[0][0][0, 9, 0] = np.nan
    arrays[1][1][0, 3, 1] = 900
    return started(PROFILE, step=0.1).encode_span(unit_of(range(0, 2), 40), arrays)


class TestDamage:
    def attempt(self, payload: bytes) -> bool:
        arrays = values_of(np.arange(40))[:2]
        guard = [tuple(np.full((a.shape[0], 44, a.shape[2]), 3, a.dtype) for a in pair) for pair in arrays]
        out = [tuple(g[:, 2:42] for g in pair) for pair in guard]
        try:
            with np.errstate(all="ignore"):
                started(PROFILE).decode_span(memoryview(payload), unit_of(range(0, 2), 40), out)
        except ValueError:
            return False
        finally:
            for pair in guard:
                for array in pair:
                    assert (array[:, :2] == 3).all()
                    assert (array[:, 42:] == 3).all()
        return True

    def test_whole_payloads_decode(self, payload: bytes) -> None:
        assert self.attempt(payload)

    @settings(max_examples=60)
    @given(cut=st.floats(0, 1), data=st.data())
    def test_other_lengths_are_refused(self, payload: bytes, cut: float, data) -> None:
        assert not self.attempt(payload[: int(cut * (len(payload) - 1))])
        assert not self.attempt(payload + data.draw(st.binary(min_size=1, max_size=9)))

    @settings(max_examples=150)
    @given(places=st.lists(st.tuples(st.floats(0, 0.9999), st.integers(1, 255)), min_size=1, max_size=4),
           early=st.booleans())  # fmt: skip
    def test_flipped_bits_do_no_harm(self, payload: bytes, places, early: bool) -> None:
        damaged = bytearray(payload)
        for place, mask in places:
            damaged[int(place * (40 if early else len(payload)))] ^= mask
        self.attempt(bytes(damaged))

    @settings(max_examples=30)
    @given(places=st.lists(st.tuples(st.floats(0, 0.9999), st.integers(1, 255)), max_size=4), early=st.booleans())
    def test_flipped_bits_of_predictions_do_no_harm(self, places, early: bool) -> None:
        codec, arrays = started(PROFILE, step=0.1), values_of(np.arange(40))[:2]
        guess = references("near", arrays, LAYERS[:2], np.random.default_rng(1))
        unit = near_unit(range(0, 2), 40, 0)
        damaged = bytearray(codec.encode_span(unit, arrays, guess))
        for place, mask in places:
            damaged[int(place * (60 if early else len(damaged)))] ^= mask
        out = empty_like(arrays)
        try:
            codec.decode_span(memoryview(bytes(damaged)), unit, out, guess)
        except ValueError:
            assert places

    @settings(max_examples=60)
    @given(st.binary(max_size=400))
    def test_noise_does_no_harm(self, noise: bytes) -> None:
        self.attempt(noise)

    def test_more_escapes_than_symbols_are_refused(self, payload: bytes) -> None:
        at = 5 + 2 * int.from_bytes(payload[3:5], "little") + 20
        damaged = bytearray(payload)
        damaged[at + 4 : at + 8] = (0xFFFFFFFF).to_bytes(4, "little")
        assert not self.attempt(bytes(damaged))


class TestProfiles:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_array_is_checked(self, name: str) -> None:
        whole = random_profile()
        array = whole[name]
        broken = [None, array.astype(np.float64), array[..., None], array[:-1]]
        if array.dtype.kind == "f":
            broken.append(np.where(np.arange(array.size).reshape(array.shape) == 0, np.nan, array).astype(array.dtype))
        for wrong in broken:
            arrays = {**whole, name: wrong} if wrong is not None else {n: a for n, a in whole.items() if n != name}
            if name in ("sink.tokens", "tables") and wrong is broken[3]:
                continue  # their length is free
            with pytest.raises(ValueError, match="profile"):
                Profile(arrays, LAYERS)

    @pytest.mark.parametrize(("name", "change"), [
        ("basis.rank", lambda a: a + 100_000), ("tables", lambda a: a + 1), ("basis.log", lambda a: a * 0 + 30_000),
        ("whiten", lambda a: a * 0),
    ])  # fmt: skip
    def test_values_out_of_range_are_refused(self, name: str, change) -> None:
        arrays = random_profile()
        arrays[name] = change(arrays[name]).astype(arrays[name].dtype)
        with pytest.raises(ValueError, match="profile"):
            started(arrays)

    def test_another_models_profile_does_not_start(self) -> None:
        with pytest.raises(ValueError, match="does not fit the model"):
            started(random_profile(LAYERS[:2]))

    def test_layers_that_are_no_group_are_refused(self) -> None:
        codec = started(PROFILE)
        with pytest.raises(ValueError, match="not a layer group"):
            codec.encode_span(unit_of(range(1, 3), 4), values_of(np.arange(4))[1:])

    def test_nothing_is_learnt_from_sessions(self) -> None:
        with pytest.raises(ValueError, match="pltpack calibrate"):
            TransformCodec().learn(None, IDENTITY)  # type: ignore[arg-type]


WIDE = (LayerGeometry(4, 64, 64, "BF16"),) * 2


def wide_digest() -> str:
    """SHA-256 of the payloads and the values of units large enough for a BLAS to share among threads."""
    identity = dataclasses.replace(IDENTITY, layers=WIDE)
    codec = started(random_profile(WIDE, rank=300), identity, target_kl=0.05)
    rng = np.random.default_rng(0)
    dtype = ml_dtypes.bfloat16
    arrays = [(rng.normal(size=(4, 256, 64)).astype(dtype), rng.normal(size=(4, 256, 64)).astype(dtype)) for _ in WIDE]
    prepared = codec.prepare(dataclasses.replace(session("s", []), tokens=np.arange(256, dtype=np.int32),
                                                 identity=identity, source=_Source(arrays)))  # fmt: skip

    def work(_: int) -> bytes:
        payloads, back = turn(prepared, arrays, 0, WIDE)
        return b"".join([*payloads, *(words(a).tobytes() for pair in back for a in pair)])

    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(work, range(6)))
    assert len(found) == 1
    return hashlib.sha256(found.pop()).hexdigest()


@dataclasses.dataclass
class _Source:
    arrays: list[KeyValue]

    def layer(self, index: int, start: int, stop: int) -> KeyValue:
        return tuple(array[:, start:stop] for array in self.arrays[index])


class TestThreads:
    def test_the_same_bytes_whatever_blas_is_told(self) -> None:
        code = "import test_transform; print(test_transform.wide_digest())"
        digests = set()
        for threads in ("1", "4"):
            names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
            environment = {**os.environ, **dict.fromkeys(names, threads)}
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                                  cwd=Path(__file__).parent, env=environment)  # fmt: skip
            digests.add(done.stdout.strip())
        assert digests == {wide_digest()}

    def test_products_have_one_thread_while_units_are_at_work(self) -> None:
        from threadpoolctl import threadpool_info, threadpool_limits

        def threads() -> list[int]:
            return [pool["num_threads"] for pool in threadpool_info() if "numpy" in pool["filepath"]]

        @single_threaded
        def inner(depth: int = 2) -> list[int]:
            return inner(depth - 1) if depth else threads()

        @single_threaded
        def fails() -> None:
            raise RuntimeError

        with threadpool_limits(2, "blas"):
            before = threads()
            if not before:
                pytest.skip("numpy uses a BLAS of the system")
            with ThreadPoolExecutor(4) as pool:
                assert [set(found) for found in pool.map(lambda _: inner(), range(50))] == [{1}] * 50
            assert threads() == before
            with pytest.raises(RuntimeError):
                fails()
            assert threads() == before
