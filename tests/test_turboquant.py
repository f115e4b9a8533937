"""TurboQuant: quality against theory and a dense rotation, every dtype, an independent decoder, hostile payloads."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import registry, sphere
from pltpack.codec.base import SINK_TOKENS, Unit
from pltpack.codec.turboquant import TurboQuantCodec
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

LARGEST = {"F32": 3.4028234663852886e38, "BF16": 3.3895313892515355e38, "F16": 65504, "F8_E4M3": 448, "F8_E5M2": 57344}
MASK = (1 << 64) - 1


def started(heads, k_dim, v_dim, dtype, bits=4, seed=0):
    identity = Identity(layers=(LayerGeometry(heads, k_dim, v_dim, dtype),))
    codec = TurboQuantCodec(bits, seed)
    state = codec.learn(None, identity)
    codec.start(state, identity)
    return codec, state, identity.layers[0]


def normal(shape, dtype, seed=0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(DTYPES[dtype])


def bits_of(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def decoded(codec, payload, unit):
    g = unit.geometry
    out = [np.empty((g.heads, unit.tokens, d), DTYPES[g.dtype]) for d in (g.k_dim, g.v_dim)]
    codec.decode(memoryview(payload), unit, *out)
    return out


# --- an independent decoder, written from the module's docstring in plain numpy and integers -----------------------


def draws(seed, dim):
    n = 0
    while True:
        n += 1
        z = (seed * 2**32 + dim + n * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        yield z ^ z >> 31


def hadamard_step(x):
    size, h = x.shape[1], 1
    if not len(x):
        return x
    while h < size:
        y = x.reshape(len(x), -1, 2, h)
        x = np.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], axis=2).reshape(len(x), size)
        h *= 2
    return x * np.float32(1 / np.sqrt(size)) if size > 1 else x


def rotation_tables(seed, dim):
    size = 1 << (dim.bit_length() - 1)
    stream, signs, seconds, perms = draws(seed, dim), [], [], []
    for _ in range(4):
        signs.append(np.array([-1 if next(stream) >> 63 else 1 for _ in range(dim)], np.float32))
        perm = list(range(dim))
        if size < dim:
            seconds.append(np.array([-1 if next(stream) >> 63 else 1 for _ in range(dim)], np.float32))
            for i in range(dim - 1, 0, -1):
                j = (next(stream) >> 32) * (i + 1) >> 32
                perm[i], perm[j] = perm[j], perm[i]
        perms.append(perm)
    return size, signs, seconds, perms


def plain_vectors(indices, levels, norms, seed):
    dim = indices.shape[1]
    size, signs, seconds, perms = rotation_tables(seed, dim)
    x = levels[indices]
    for r in (3, 2, 1, 0):
        if size < dim:
            x[:, dim - size :] = hadamard_step(x[:, dim - size :])
            x = x * seconds[r]
        x[:, :size] = hadamard_step(x[:, :size])
        if size < dim:
            y = np.empty_like(x)
            y[:, perms[r]] = x
            x = y
        x = x * signs[r]
    return x * norms[:, None]


def plain_decode(payload, unit, state, bits, seed):
    g, at = unit.geometry, 0
    dtype = DTYPES[g.dtype]

    def take(count, kind):
        nonlocal at
        kind = np.dtype(kind)
        out = np.frombuffer(payload[at : at + count * kind.itemsize], kind)
        at += count * kind.itemsize
        return out

    escapes = take(int(take(1, "<u4")[0]), "<u4").tolist()
    exact = list(range(max(0, min(4 - unit.position, unit.tokens)))) + escapes
    rest = [t for t in range(unit.tokens) if t not in exact]
    dims = (g.k_dim, g.v_dim)
    raw = [take(g.heads * len(exact) * d, dtype).reshape(g.heads, -1, d) for d in dims]
    norms = [(take(g.heads * len(rest), "<u2").astype(np.uint32) << 16).view(np.float32) for _ in dims]
    out = []
    for d, exact_part, norm in zip(dims, raw, norms, strict=True):
        count = g.heads * len(rest) * d
        stream = np.unpackbits(take(-(-count * bits // 8), np.uint8), bitorder="little")
        indices = stream[: count * bits].reshape(count, bits) @ (1 << np.arange(bits))
        with np.errstate(over="ignore"):
            x = plain_vectors(indices.reshape(-1, d), state[f"levels.{d}"], norm, seed)
        limit = np.float32(LARGEST[g.dtype])
        whole = np.empty((g.heads, unit.tokens, d), dtype)
        whole[:, rest] = np.clip(x, -limit, limit).astype(dtype).reshape(g.heads, -1, d)
        whole[:, exact] = exact_part
        out.append(whole)
    assert at == len(payload)
    return out


# --- any bits, any shape, any dtype --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(st.data(), st.sampled_from(list(DTYPES)), st.sampled_from([2, 3, 4]))
def test_any_values_match_the_independent_decoder(data, dtype, bits):
    heads, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    k_dim, v_dim = (data.draw(st.sampled_from([1, 2, 3, 7, 8, 20, 32, 63])) for _ in range(2))
    position, seed = data.draw(st.sampled_from([0, 2, 4, 1000])), data.draw(st.integers(0, 2**32 - 1))
    codec, state, geometry = started(heads, k_dim, v_dim, dtype, bits, seed)
    unit = Unit(0, geometry, position, tokens)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = []
    for dim in (k_dim, v_dim):
        wild = rng.integers(0, 256, (heads, tokens, dim * DTYPES[dtype].itemsize), dtype=np.uint8).view(DTYPES[dtype])
        tame = rng.normal(size=wild.shape).astype(DTYPES[dtype])
        # Wild bits hold a NaN in nearly every long vector, so most tokens are tame.
        arrays.append(np.where(rng.random((1, tokens, 1)) < 0.2, wild, tame))
    payload = codec.encode(unit, *arrays)
    assert payload == codec.encode(unit, *(np.asfortranarray(a) for a in arrays))
    wide = [np.zeros((heads, tokens + 9, a.shape[2]), DTYPES[dtype]) for a in arrays]
    views = [w[:, 3 : 3 + tokens] for w in wide]
    codec.decode(memoryview(payload), unit, *views)
    for got, again, w, want in zip(views, plain_decode(payload, unit, state, bits, seed), wide, arrays, strict=True):
        assert np.array_equal(bits_of(got), bits_of(again))
        assert not bits_of(w[:, :3]).any() and not bits_of(w[:, 3 + tokens :]).any()
        sinks = max(0, SINK_TOKENS - position)
        assert np.array_equal(bits_of(got[:, :sinks]), bits_of(want[:, :sinks]))
    broken = ~np.logical_and(*(np.isfinite(a.astype(np.float32)).all((0, 2)) for a in arrays))
    for got, want in zip(views, arrays, strict=True):
        assert np.array_equal(bits_of(got[:, broken]), bits_of(want[:, broken]))
        assert np.isfinite(got[:, ~broken].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_extremes_stay_finite(dtype):
    codec, _, geometry = started(1, 8, 8, dtype, 2)
    top = LARGEST[dtype]
    smallest = np.array(1, f"u{DTYPES[dtype].itemsize}").view(DTYPES[dtype])
    keys = np.zeros((1, 6, 8), DTYPES[dtype])
    keys[0, 1], keys[0, 2, 3], keys[0, 3], keys[0, 4, 5] = top, top, smallest, -top
    unit = Unit(0, geometry, 4, 6)
    got, _ = decoded(codec, codec.encode(unit, keys, keys), unit)
    got, want = got.astype(np.float64), keys.astype(np.float64)
    assert np.isfinite(got).all()
    assert not got[:, [0, 5]].any()
    for t in (1, 2, 4):
        assert np.linalg.norm(got[0, t] - want[0, t]) < 0.7 * np.linalg.norm(want[0, t])


def test_strided_input_threads_and_reference():
    codec, _, geometry = started(3, 64, 32, "BF16")
    unit = Unit(0, geometry, 0, 100)
    keys, values = normal((3, 300, 64), "BF16")[:, ::3], normal((3, 200, 32), "BF16", 1)[:, 100:]
    payload = codec.encode(unit, keys, values)
    assert payload == codec.encode(unit, keys.copy(), values.copy(), (values, keys))
    first = decoded(codec, payload, unit)
    with ThreadPoolExecutor(4) as pool:
        for again in pool.map(lambda _: decoded(codec, codec.encode(unit, keys, values), unit), range(16)):
            assert all(np.array_equal(bits_of(a), bits_of(b)) for a, b in zip(first, again, strict=True))


def test_bytes_are_pinned():
    codec, _, geometry = started(2, 16, 12, "F32", 3, 7)
    levels = np.arange(-7, 8, 2, dtype=np.float32) / 16
    codec.start({"levels.16": levels, "levels.12": levels}, Identity(layers=(geometry,)))
    unit = Unit(0, geometry, 2, 9)
    keys, values = ((np.arange(18 * d, dtype=np.float32) * 37 % 101 - 50).reshape(2, 9, d) for d in (16, 12))
    payload = codec.encode(unit, keys, values)
    values_hash = hashlib.sha256(b"".join(a.tobytes() for a in decoded(codec, payload, unit))).hexdigest()
    assert (hashlib.sha256(payload).hexdigest()[:16], values_hash[:16]) == ("b92aae39990f878c", "913d3565f470bbf0")


# --- quality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "levels", "distortion"), [
    (2, [0.4528, 1.510], 0.1175),
    (3, [0.2451, 0.7560, 1.344, 2.152], 0.03454),
    (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
])  # fmt: skip
def test_codebook_tends_to_the_gaussian_one(bits, levels, distortion):
    """Max (1960), tables for the unit normal distribution: a coordinate times sqrt(D) tends to it."""
    book = sphere.lloyd_max(1 << 16, bits).astype(np.float64) * 2**8
    np.testing.assert_allclose(book[len(book) // 2 :], levels, rtol=1e-3)
    x = np.linspace(-8, 8, 400_001)
    density = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
    nearest = book[np.searchsorted((book[1:] + book[:-1]) / 2, x)]
    assert (density * (x - nearest) ** 2).sum() == pytest.approx(distortion, rel=2e-3)


@pytest.mark.parametrize("dim", [2, 3, 4, 5, 20, 64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebook_is_a_fixed_point_on_the_sphere(dim, bits):
    levels = sphere.lloyd_max(dim, bits).astype(np.float64)
    assert (np.diff(levels) > 0).all() and np.array_equal(levels, -levels[::-1])
    vectors = np.random.default_rng(dim).normal(size=(400_000 // dim, dim))
    x = np.sort((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).ravel())
    cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    means = np.bincount(cells, x, len(levels)) / np.bincount(cells, minlength=len(levels))
    np.testing.assert_allclose(levels, means, atol=0.04 / np.sqrt(dim))


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 16, 20, 24, 63, 64, 65, 80, 96, 127, 128])
def test_rotation_is_orthogonal_and_decoding_undoes_it(dim):
    rotation = sphere.Rotation.of(dim, 3)
    lanes = np.zeros((dim, sphere.LANES), np.float32)
    columns = []
    for first in range(0, dim, sphere.LANES):
        lanes[:] = 0
        for lane in range(min(sphere.LANES, dim - first)):
            lanes[first + lane, lane] = 1
        before, flat, spare = lanes.copy(), lanes.reshape(-1), np.empty(lanes.size, np.float32)
        tables = (rotation.signs, rotation.perms, rotation.size, rotation.scale)
        sphere._rotate(flat, spare, *tables)
        columns.append(lanes[:, : dim - first].copy())
        sphere._rotate_back(flat, spare, *tables)
        np.testing.assert_allclose(lanes, before, atol=2e-6)
    matrix = np.concatenate(columns, axis=1)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=2e-6)
    if dim >= 16:
        assert np.abs(matrix).max() < 6 / np.sqrt(dim)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_equals_a_dense_random_rotation(dim, bits):
    """The structured rotation must not cost quality, on vectors that lie badly for a codebook either."""
    rng = np.random.default_rng(1)
    single = np.eye(dim)
    pairs = np.array([single[i] - single[j] for i in range(dim) for j in range(i)]) / np.sqrt(2)
    decaying = rng.normal(size=(2000, dim)) * 0.9 ** np.arange(dim)
    levels = sphere.lloyd_max(dim, bits)
    borders = (levels[1:] + levels[:-1]) / 2
    for vectors, slack in ((single, 1.1), (pairs, 1.06), (decaying, 1.04)):
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        ours, dense = [], []
        for seed in range(8):
            codec, _, geometry = started(1, dim, dim, "F32", bits, seed)
            unit = Unit(0, geometry, 4, len(vectors))
            got, _ = decoded(codec, codec.encode(unit, vectors[None], vectors[None]), unit)
            ours.append(((got[0] - vectors) ** 2).sum(1).mean())
            rotated = vectors @ np.linalg.qr(rng.normal(size=(dim, dim)))[0]
            dense.append(((levels[np.searchsorted(borders, rotated)] - rotated) ** 2).sum(1).mean())
        assert np.mean(ours) < slack * np.mean(dense)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_size_is_bits_and_a_norm(bits):
    codec, _, geometry = started(3, 64, 64, "BF16", bits)
    keys = normal((3, 256, 64), "BF16")
    assert 8 * (len(codec.encode(Unit(0, geometry, 64, 256), keys, keys)) - 4) == keys.size * 2 * (bits + 0.25)


# --- untrusted input -----------------------------------------------------------------------------------------------


def test_malformed_payloads():
    codec, _, geometry = started(1, 5, 3, "BF16", 3)
    unit = Unit(0, geometry, 2, 6)
    keys, values = normal((1, 6, 5), "BF16"), normal((1, 6, 3), "BF16")
    keys[0, 4, 1] = np.nan
    good = codec.encode(unit, keys, values)
    assert good[:8] == bytes([1, 0, 0, 0, 4, 0, 0, 0])
    for size in range(len(good)):
        with pytest.raises(ValueError, match=r"turboquant|buffer"):
            decoded(codec, good[:size], unit)
    bad = {
        "bytes where its unit takes": good + b"\0",
        "escapes, more": b"\x05" + good[1:],
        "more than it can hold": b"\xff\xff\xff\xff" + good[4:],
        "not ascending": good[:4] + b"\x01" + good[5:],
    }
    norms_at = 8 + 3 * (5 + 3) * 2
    bad["negative or not finite"] = good[: norms_at + 1] + b"\x80" + good[norms_at + 2 :]
    bad["norm that is negative"] = good[:norms_at] + b"\x80\x7f" + good[norms_at + 2 :]
    bad["padding"] = good[:-1] + bytes([good[-1] | 0x80])
    for match, payload in bad.items():
        with pytest.raises(ValueError, match=match):
            decoded(codec, payload, unit)
    with pytest.raises(ValueError, match="not ascending"):
        decoded(codec, good[:4] + b"\x06" + good[5:], unit)


def test_every_flipped_bit_is_an_error_or_finite():
    codec, _, geometry = started(2, 8, 4, "F16", 2)
    unit = Unit(0, geometry, 3, 5)
    keys, values = normal((2, 5, 8), "F16"), normal((2, 5, 4), "F16")
    good = codec.encode(unit, keys, values)
    outcomes = set()
    for bit in range(8 * len(good)):
        payload = bytearray(good)
        payload[bit // 8] ^= 1 << bit % 8
        try:
            out = decoded(codec, bytes(payload), unit)
        except ValueError:
            outcomes.add("error")
            continue
        outcomes.add("values")
        assert all(np.isfinite(a[:, 1:].astype(np.float32)).all() for a in out)
    assert outcomes == {"error", "values"}


def test_malformed_states():
    codec, state, geometry = started(1, 8, 4, "BF16", 2)
    identity = Identity(layers=(geometry,))
    assert set(state) == {"levels.4", "levels.8"}
    book = state["levels.8"]
    for bad in (book[:3], book.astype(np.float64), book[::-1], book * np.float32(np.nan), book * np.float32(np.inf),
                np.zeros(4, np.float32), np.array([-3, 0, 1, 2], np.float32)):  # fmt: skip
        with pytest.raises(ValueError, match="codebook for length 8"):
            codec.start(state | {"levels.8": bad}, identity)
    for wrong in ({}, {"levels.8": book}, state | {"levels.5": book}):
        with pytest.raises(ValueError, match="one codebook per"):
            codec.start(wrong, identity)
    with pytest.raises(ValueError, match="no codebook for vectors of length 9"):
        other = Unit(0, LayerGeometry(1, 9, 4, "BF16"), 4, 1)
        codec.encode(other, normal((1, 1, 9), "BF16"), normal((1, 1, 4), "BF16"))


def test_configuration():
    codec = registry.tier("turboquant-3")
    assert isinstance(codec, TurboQuantCodec) and codec.get_config() == {"bits": 3, "seed": 0}
    assert TurboQuantCodec.from_config({"bits": 2, "seed": 9}).get_config() == {"bits": 2, "seed": 9}
    for bad in ({"bits": 5}, {"bits": True}, {"bits": 3.0}, {"seed": -1}, {"seed": 1 << 32}, {"seed": "0"}, {"x": 1}):
        with pytest.raises(ValueError, match="turboquant"):
            TurboQuantCodec.from_config(bad)
