"""The lossless codec: every bit of every dtype, differences, an independent decoder, hostile payloads and states."""

from __future__ import annotations

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import delta, registry
from pltpack.codec.base import LayerSample, Unit
from pltpack.codec.lossless import DENSE, INLINE, RAW, SAME, SPARSE, STATIC, ZSTD, LosslessCodec
from pltpack.dumps import open_dumps
from pltpack.format import state as states
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

LOW = {"BF16": (16, 4, 3, [(0, 4)]), "F16": (16, 8, 2, [(0, 8)]), "F32": (32, 20, 3, [(16, 4), (8, 8), (0, 8)]),
       "F8_E4M3": (8, 0, 3, []), "F8_E5M2": (8, 0, 2, [])}  # fmt: skip


class OneRun:
    """A sample of one run per layer, or of nothing."""

    def __init__(self, layers):
        self._layers = layers

    def layer(self, index):
        if self._layers is None:
            return []
        keys, values = self._layers[index]
        geometry = LayerGeometry(keys.shape[0], keys.shape[2], values.shape[2], "BF16")
        return [LayerSample(Unit(index, geometry, 0, keys.shape[1]), keys, values)]


def bits_of(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def gaussian(rng, heads, tokens, dims, dtype, scale=1.0):
    """Keys and values whose channels differ in mean and scale, as real caches do."""
    out = []
    for dim in dims:
        sigma = scale * np.exp(rng.normal(size=(heads, 1, dim)))
        x = sigma * (rng.normal(size=(heads, tokens, dim)) + 2 * rng.normal(size=(heads, 1, dim)))
        out.append(x.astype(np.float32).astype(DTYPES[dtype]))
    return tuple(out)


def noisy(rng, arrays, share):
    """The same arrays with a share of the words moved by one unit in the last place."""
    out = []
    for array in arrays:
        words = delta.ordered(bits_of(array))
        moved = words + np.where(rng.random(words.shape) < share, 1, 0).astype(words.dtype)
        out.append(delta.unordered(moved).view(array.dtype))
    return tuple(out)


def started(arrays, dtype="BF16", learn=True):
    """A codec for one layer of the arrays' shape, learnt from them or from nothing."""
    keys, values = arrays
    identity = Identity(layers=(LayerGeometry(keys.shape[0], keys.shape[2], values.shape[2], dtype),))
    codec = LosslessCodec()
    state = codec.learn(OneRun([arrays] if learn else None), identity)
    codec.start(states.unpack(states.pack(state)), identity)
    return codec, state, identity


def unit_of(arrays, identity):
    return Unit(0, identity.layers[0], 0, arrays[0].shape[1])


def decoded(codec, payload, unit, reference=None):
    g = unit.geometry
    # Slices of longer arrays, filled with a pattern that a forgotten word would keep.
    full = [np.full((g.heads, unit.tokens + 7, d), 0, DTYPES[g.dtype]) for d in (g.k_dim, g.v_dim)]
    for array in full:
        array.view(np.uint8)[...] = 0xA5
    out = [array[:, 3 : 3 + unit.tokens] for array in full]
    codec.decode(memoryview(payload), unit, out[0], out[1], reference)
    for array in full:
        assert (array[:, :3].view(np.uint8) == 0xA5).all() and (array[:, -4:].view(np.uint8) == 0xA5).all()
    return out


def check(codec, arrays, identity, reference=None):
    unit = unit_of(arrays, identity)
    payload = codec.encode(unit, *arrays, reference)
    assert isinstance(payload, bytes)
    for want, got in zip(arrays, decoded(codec, payload, unit, reference), strict=True):
        np.testing.assert_array_equal(bits_of(want), bits_of(got))
    assert len(payload) <= 1 + arrays[0].nbytes + arrays[1].nbytes
    return payload


# --- an independent decoder, written from the docstrings in plain Python -------------------------------------------


def rans_rows(stream, freqs, table_of_row, columns):
    states_, words, at = list(struct.unpack_from("<32I", stream)), np.frombuffer(stream, "<u2", offset=128), 0
    out = np.zeros((len(table_of_row), columns), int)
    slots = [np.repeat(np.arange(256), f) for f in freqs]
    starts = [np.cumsum(f) - f for f in freqs.astype(int)]
    for r, table in enumerate(table_of_row):
        for i in range(columns):
            x = states_[i % 32]
            symbol = int(slots[table][x & 4095])
            out[r, i] = symbol
            x = int(freqs[table, symbol]) * (x >> 12) + (x & 4095) - int(starts[table][symbol])
            if x < 1 << 16:
                x, at = x << 16 | int(words[at]), at + 1
            states_[i % 32] = x
    assert at == len(words) and states_ == [1 << 16] * 32
    return out


def symbol_rows(body, dtype, freqs, escape, base, kinds, columns):
    width, low, step, planes = LOW[dtype]
    count, length = struct.unpack_from("<II", body)
    escapes, at = list(np.frombuffer(body, "<u2", count, 8)), 8 + 2 * count + length
    symbols = rans_rows(body[at - length : at], freqs, kinds & 127, columns)
    half = -(-columns // 2)
    words = np.zeros((len(base), columns), np.uint64)
    for shift, bits in planes:
        size = len(base) * (columns if bits == 8 else half)
        if body[at]:
            n = struct.unpack_from("<I", body, at + 1)[0]
            data, at = zstandard.ZstdDecompressor().decompress(body[at + 5 : at + 5 + n]), at + 5 + n
        else:
            data, at = body[at + 1 : at + 1 + size], at + 1 + size
        plane = np.frombuffer(data, np.uint8).reshape(len(base), -1).astype(np.uint64)
        if bits == 4:
            plane = np.hstack([plane & 15, plane >> 4])[:, :columns] if columns % 2 == 0 else np.hstack(
                [plane & 15, (plane >> 4)[:, : columns - half]])  # fmt: skip
        words |= plane << np.uint64(shift)
    assert at == len(body)
    magnitudes = 1 << (width - low - 1)
    for (r, n), symbol in np.ndenumerate(symbols):
        if symbol == escape[kinds[r] & 127]:
            top = int(escapes.pop(0))
        else:
            top = ((symbol & 127) + (int(base[r]) << step)) % magnitudes
            top += magnitudes * ((symbol >> 7) ^ (int(kinds[r]) >> 7))
        words[r, n] |= np.uint64(top << low)
    assert not escapes
    return words


def reference_decode(payload, state, unit):
    g, n = unit.geometry, unit.tokens
    dtype, split = g.dtype, g.heads * g.k_dim
    channels = split + g.heads * g.v_dim
    if payload[0] == STATIC:
        model, body = (state["freqs"], state["escape"], state["base"], state["class"]), payload[1:]
    else:
        assert payload[0] == INLINE
        size = struct.unpack_from("<I", payload, 1)[0]
        blob, body = zstandard.ZstdDecompressor().decompress(payload[5 : 5 + size]), payload[5 + size :]
        c, rest = blob[0], np.frombuffer(blob, np.uint8, offset=1)
        model = (rest[: 512 * c].copy().view("<u2").reshape(c, 256), *np.split(rest[512 * c :], [c, c + channels]))
    rows = symbol_rows(body, dtype, *model, n).astype(f"u{LOW[dtype][0] // 8}")
    return [part.reshape(g.heads, d, n).transpose(0, 2, 1)
            for part, d in ((rows[:split], g.k_dim), (rows[split:], g.v_dim))]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learn", [True, False])
def test_decodes_from_its_description(dtype, learn):
    rng = np.random.default_rng(1)
    arrays = gaussian(rng, 2, 75, (8, 6), dtype)
    codec, state, identity = started(arrays, dtype, learn)
    arrays[0][0, 5] = 0
    bits_of(arrays[1])[1, 7] = 0
    payload = check(codec, arrays, identity)
    assert payload[0] == (STATIC if learn else INLINE) or dtype.startswith("F8")
    if payload[0] in (STATIC, INLINE):
        for want, got in zip(arrays, reference_decode(payload, state, unit_of(arrays, identity)), strict=True):
            np.testing.assert_array_equal(bits_of(want), got)


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def plus(word, z, width):
    """The word z (folded) steps after another in the order of the numbers, in unbounded integers."""
    sign, full = 1 << (width - 1), 1 << width
    place = full - 1 - word if word & sign else word + sign
    place = (place + (-(z + 1) // 2 if z % 2 else z // 2)) % full
    return place - sign if place & sign else full - 1 - place


def reference_difference(payload, reference, unit):
    g, n = unit.geometry, unit.tokens
    width = LOW[g.dtype][0]
    flat = np.concatenate([bits_of(a).ravel() for a in reference]).astype(object)
    if payload[0] == SPARSE:
        count, at, index = *struct.unpack_from("<I", payload, 1), 5, 0
        for _ in range(count):
            code, at = varint(payload, at)
            index += code // 4
            z = code % 4 + 1
            if z == 4:
                extra, at = varint(payload, at)
                z += extra
            flat[index] = plus(int(flat[index]), z, width)
            index += 1
        assert at == len(payload)
    else:
        assert payload[0] == DENSE
        at, split = 1, g.heads * g.k_dim
        z = np.zeros((split + g.heads * g.v_dim, n), object)
        for byte in range(width // 8):
            kind, at = payload[at], at + 1
            if kind == 1:
                plane, at = np.frombuffer(payload, np.uint8, z.size, at).reshape(z.shape), at + z.size
            elif kind == 2:
                size = struct.unpack_from("<I", payload, at)[0]
                model = zstandard.ZstdDecompressor().decompress(payload[at + 4 : at + 4 + size])
                at += 4 + size
                size = struct.unpack_from("<I", payload, at)[0]
                stream, at = payload[at + 4 : at + 4 + size], at + 4 + size
                rows = [int(r >= split) for r in range(len(z))]
                plane = rans_rows(stream, np.frombuffer(model, "<u2").reshape(2, 256), rows, n)
            else:
                plane = np.zeros(z.shape, int)
            z += plane.astype(object) << (8 * byte)
        assert at == len(payload)
        back = [part.reshape(g.heads, d, n).transpose(0, 2, 1).ravel()
                for part, d in ((z[:split], g.k_dim), (z[split:], g.v_dim))]  # fmt: skip
        flat = np.array([plus(int(w), int(d), width) for w, d in zip(flat, np.concatenate(back), strict=True)])
    flat = flat.astype(f"u{width // 8}")
    keys, values = np.split(flat, [reference[0].size])
    return keys.reshape(reference[0].shape), values.reshape(reference[1].shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("share", "mode"), [(0.004, SPARSE), (0.1, DENSE)])
def test_differences_decode_from_their_description(dtype, share, mode):
    rng = np.random.default_rng(2)
    reference = gaussian(rng, 2, 75, (8, 6), dtype)
    arrays = noisy(rng, reference, share)
    # Across zero, far away, and the other way round.
    bits_of_keys = arrays[0].view(f"u{arrays[0].itemsize}")
    for token, change in ((3, 1 << (LOW[dtype][0] - 1)), (9, 0x55), (11, 2), (12, 3)):
        bits_of_keys[0, token, 1] ^= bits_of_keys.dtype.type(change)
    codec, _, identity = started(reference, dtype)
    payload = check(codec, arrays, identity, reference)
    assert payload[0] == mode
    for want, got in zip(arrays, reference_difference(payload, reference, unit_of(arrays, identity)), strict=True):
        np.testing.assert_array_equal(bits_of(want), got)


# --- every bit -----------------------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 31, 32, 33, 70]), st.integers(1, 9), st.integers(1, 9))
kinds_of_data = st.sampled_from(["random", "gaussian", "constant", "repeated", "special", "tiny"])


def make(rng, kind, shape, dtype):
    heads, tokens, k_dim, v_dim = shape
    if kind in ("gaussian", "tiny"):
        return gaussian(rng, heads, tokens, (k_dim, v_dim), dtype, 1e-30 if kind == "tiny" else 1.0)
    word = np.dtype(f"u{DTYPES[dtype].itemsize}")
    out = []
    for dim in (k_dim, v_dim):
        words = rng.integers(0, 1 << 8 * word.itemsize, (heads, tokens, dim), dtype=np.uint64).astype(word)
        if kind == "constant":
            words[...] = words.flat[0]
        elif kind == "repeated":
            words[...] = words[:, :1]
        elif kind == "special":
            special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float32).astype(DTYPES[dtype]).view(word)
            special = np.concatenate([special, special ^ word.type(1), ~special])
            words[...] = special[rng.integers(0, len(special), words.shape)]
        out.append(words.view(DTYPES[dtype]))
    return tuple(out)


@settings(max_examples=120)
@given(st.sampled_from(list(DTYPES)), shapes, kinds_of_data, kinds_of_data, st.booleans(), st.integers(0, 2**32 - 1))
def test_every_bit_comes_back(dtype, shape, learnt_kind, kind, learn, seed):
    rng = np.random.default_rng(seed)
    codec, _, identity = started(make(rng, learnt_kind, shape, dtype), dtype, learn)
    check(codec, make(rng, kind, shape, dtype), identity)


@settings(max_examples=120)
@given(st.sampled_from(list(DTYPES)), shapes, kinds_of_data, st.sampled_from([0, 0.002, 0.05, 0.7, None]),
       st.integers(0, 2**32 - 1))  # fmt: skip
def test_every_bit_comes_back_with_a_reference(dtype, shape, kind, share, seed):
    rng = np.random.default_rng(seed)
    reference = make(rng, kind, shape, dtype)
    codec, _, identity = started(reference, dtype)
    arrays = make(rng, "random", shape, dtype) if share is None else noisy(rng, reference, share)
    payload = check(codec, arrays, identity, reference)
    if share == 0:
        assert payload == bytes([SAME])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_all_bit_patterns(dtype):
    word = np.dtype(f"u{DTYPES[dtype].itemsize}")
    every = np.arange(1 << 8 * word.itemsize, dtype=np.uint32).astype(word).reshape(1, -1, 16).view(DTYPES[dtype])
    arrays = (every, every[:, ::-1])
    for learn in (True, False):
        codec, _, identity = started(arrays, dtype, learn)
        check(codec, arrays, identity)
        check(codec, arrays, identity, gaussian(np.random.default_rng(0), 1, every.shape[1], (16, 16), dtype))


def test_strided_and_transposed_inputs():
    rng = np.random.default_rng(3)
    keys, values = gaussian(rng, 2, 90, (12, 8), "BF16")
    codec, _, identity = started((keys[:, 10:74], values[:, 10:74]))
    want = check(codec, (keys[:, 10:74], values[:, 10:74]), identity)
    turned = (np.ascontiguousarray(keys.transpose(1, 2, 0)).transpose(2, 0, 1)[:, 10:74],
              np.asfortranarray(values)[:, 10:74])  # fmt: skip
    assert codec.encode(unit_of(turned, identity), *turned) == want
    # Where a mapped file puts them: at odd addresses, and not to be written to.
    for shift in (1, 2):
        moved = []
        for array in (keys[:, 10:74], values[:, 10:74]):
            mapped = np.frombuffer(bytes(shift) + array.tobytes(), array.dtype, array.size, shift).reshape(array.shape)
            moved.append(mapped)
        assert codec.encode(unit_of(moved, identity), *moved) == want
        assert codec.encode(unit_of(moved, identity), *moved, tuple(moved)) == bytes([SAME])


# --- modes and rates -----------------------------------------------------------------------------------------------


def test_each_mode_is_chosen_where_it_is_smallest():
    rng = np.random.default_rng(4)
    shape = (2, 256, 32, 32)
    arrays = make(rng, "gaussian", shape, "BF16")
    codec, _, identity = started(arrays)
    assert check(codec, arrays, identity)[0] == STATIC
    assert check(codec, make(rng, "random", shape, "BF16"), identity)[0] == RAW
    assert check(codec, make(rng, "repeated", shape, "BF16"), identity)[0] == ZSTD
    # Another scale in every channel: the learnt windows miss.
    other = tuple((a.astype(np.float32) * np.float32(1e20)).astype(a.dtype) for a in arrays)
    payload = check(codec, other, identity)
    assert payload[0] == INLINE and len(payload) < 0.72 * (other[0].nbytes + other[1].nbytes)
    assert len(check(codec, make(rng, "constant", shape, "BF16"), identity)) < 100
    assert check(codec, noisy(rng, arrays, 0.003), identity, arrays)[0] == SPARSE
    assert check(codec, noisy(rng, arrays, 0.2), identity, arrays)[0] == DENSE
    # A reference that says nothing costs nothing.
    assert check(codec, arrays, identity, make(rng, "random", shape, "BF16"))[0] == STATIC


def test_float32_holding_bfloat16_costs_no_more_than_bfloat16():
    rng = np.random.default_rng(5)
    half = gaussian(rng, 2, 256, (32, 32), "BF16")
    full = tuple(a.astype(np.float32) for a in half)
    codec, _, identity = started(half)
    wide, _, wide_identity = started(full, "F32")
    assert len(check(wide, full, wide_identity)) < 1.05 * len(check(codec, half, identity))


@pytest.mark.parametrize("share", [0.001, 0.03, 0.3])
def test_differences_cost_close_to_their_entropy(share):
    rng = np.random.default_rng(6)
    reference = gaussian(rng, 3, 256, (64, 64), "BF16")
    codec, _, identity = started(reference)
    payload = check(codec, noisy(rng, reference, share), identity, reference)
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert 8 * len(payload) < 1.5 * entropy * 2 * reference[0].size


def test_real_dumps(real_dumps):
    snapshots = list(open_dumps(real_dumps))
    identity = snapshots[0].identity
    layers = [tuple(np.concatenate(parts, axis=1) for parts in zip(*(s.layer(i) for s in snapshots), strict=True))
              for i in range(len(identity.layers))]  # fmt: skip
    codec = LosslessCodec()
    state = codec.learn(OneRun(layers), identity)
    packed = states.pack(state)
    codec.start(states.unpack(packed), identity)
    size = elements = 0
    for snapshot in snapshots:
        for index, geometry in enumerate(identity.layers):
            arrays = snapshot.layer(index)
            unit = Unit(index, geometry, 0, len(snapshot))
            payload = codec.encode(unit, *arrays)
            for want, got in zip(arrays, decoded(codec, payload, unit), strict=True):
                np.testing.assert_array_equal(bits_of(want), bits_of(got))
            size += len(payload)
            elements += arrays[0].size + arrays[1].size
    assert 8 * size / elements < 10.5
    assert packed.nbytes < 40_000


# --- determinism, states, hostile payloads -------------------------------------------------------------------------


def test_same_bytes_from_every_thread():
    rng = np.random.default_rng(7)
    arrays = gaussian(rng, 2, 200, (16, 16), "BF16")
    codec, state, identity = started(arrays)
    again = codec.learn(OneRun([arrays]), identity)
    assert all(np.array_equal(state[name], again[name]) for name in state)
    jobs = [(noisy(rng, arrays, share), reference) for share in (0, 0.001, 0.1) for reference in (None, arrays)]
    jobs.append((make(rng, "random", (2, 200, 16, 16), "BF16"), None))
    alone = [codec.encode(unit_of(a, identity), *a, r) for a, r in jobs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: codec.encode(unit_of(job[0], identity), *job[0], job[1]), 5 * jobs))
    assert together == 5 * alone


def test_configuration_and_registry():
    assert isinstance(registry.tier("lossless"), LosslessCodec)
    assert LosslessCodec().get_config() == {} and LosslessCodec.exact
    with pytest.raises(ValueError, match="configuration"):
        LosslessCodec.from_config({"level": 3})


def test_a_state_is_checked():
    _, state, identity = started(gaussian(np.random.default_rng(8), 2, 200, (16, 16), "BF16"))
    wrong_sum, no_escape, class_range = (dict(state) for _ in range(3))
    wrong_sum["freqs"] = state["freqs"].copy()
    wrong_sum["freqs"][0, 0] += 1
    no_escape["freqs"] = np.zeros_like(state["freqs"])
    no_escape["freqs"][:, (int(state["escape"][0]) + 1) % 256] = 4096
    class_range["class"] = np.full_like(state["class"], 127)
    bad = [
        {}, dict(state, more=state["base"]), {k: v for k, v in state.items() if k != "escape"},
        wrong_sum, no_escape, class_range,
        dict(state, freqs=state["freqs"].astype(np.int32)), dict(state, freqs=state["freqs"][:, :255]),
        dict(state, freqs=np.tile(state["freqs"], (200, 1)), escape=np.tile(state["escape"], 200)),
        dict(state, base=state["base"][:-1]), dict(state, base=state["base"].astype(np.int16)),
        dict(state, escape=state["escape"][:0]),
    ]  # fmt: skip
    for candidate in bad:
        with pytest.raises(ValueError, match=r"lossless|rANS"):
            LosslessCodec().start(candidate, identity)


@settings(max_examples=150)
@given(st.sampled_from(["BF16", "F32", "F16", "F8_E4M3"]),
       st.sampled_from(["static", "inline", "zstd", "raw", "sparse", "dense", "same"]), st.data())  # fmt: skip
def test_damaged_payloads_are_refused_or_harmless(dtype, kind, data):
    rng = np.random.default_rng(9)
    shape = (2, 66, 4, 4)
    learnt = make(rng, "gaussian", shape, dtype)
    codec, _, identity = started(learnt, dtype, kind == "static")
    arrays, reference = learnt, None
    if kind in ("zstd", "raw"):
        arrays = make(rng, "repeated" if kind == "zstd" else "random", shape, dtype)
    elif kind in ("sparse", "dense", "same"):
        arrays, reference = noisy(rng, learnt, {"sparse": 0.003, "dense": 0.1, "same": 0}[kind]), learnt
    unit = unit_of(arrays, identity)
    payload = bytearray(codec.encode(unit, *arrays, reference))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.one_of(st.integers(0, min(40, len(payload) - 1)), st.integers(0, len(payload) - 1)))
        payload[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(payload)), st.integers(0, len(payload))))
    tail = data.draw(st.sampled_from([b"", b"", b"\0", b"\xff" * 9]))
    given_reference = reference if data.draw(st.booleans()) else None
    with contextlib.suppress(ValueError):
        decoded(codec, bytes(payload[:end]) + tail, unit, given_reference)


@settings(max_examples=150)
@given(st.integers(0, 8), st.binary(max_size=400), st.booleans())
def test_arbitrary_payloads_are_refused_or_harmless(mode, body, learn):
    arrays = gaussian(np.random.default_rng(10), 1, 5, (4, 4), "BF16")
    codec, _, identity = started(arrays, "BF16", learn)
    with contextlib.suppress(ValueError):
        decoded(codec, bytes([mode]) + body, unit_of(arrays, identity), arrays)


def test_every_truncation_is_refused():
    rng = np.random.default_rng(11)
    learnt = gaussian(rng, 2, 66, (4, 4), "BF16")
    codec, _, identity = started(learnt)
    unit = unit_of(learnt, identity)
    for arrays, reference in ((learnt, None), (make(rng, "random", (2, 66, 4, 4), "BF16"), None),
                              (noisy(rng, learnt, 0.005), learnt), (noisy(rng, learnt, 0.2), learnt)):  # fmt: skip
        payload = codec.encode(unit, *arrays, reference)
        for end in range(len(payload)):
            with pytest.raises(ValueError):
                decoded(codec, payload[:end], unit, reference)
        with pytest.raises(ValueError):
            decoded(codec, payload + b"\0", unit, reference)


def test_a_frame_that_declares_a_huge_size_is_not_decompressed():
    arrays = gaussian(np.random.default_rng(12), 2, 66, (4, 4), "BF16")
    codec, _, identity = started(arrays, learn=False)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 26))
    for payload in (bytes([ZSTD]) + bomb, bytes([INLINE]) + struct.pack("<I", len(bomb)) + bomb):
        with pytest.raises(ValueError, match="unexpected size"):
            decoded(codec, payload, unit_of(arrays, identity))


def test_units_that_do_not_fit_are_refused():
    arrays = gaussian(np.random.default_rng(13), 2, 66, (4, 4), "BF16")
    codec, _, identity = started(arrays)
    unit = unit_of(arrays, identity)
    payload = codec.encode(unit, *arrays)
    with pytest.raises(ValueError, match="shape"):
        codec.encode(unit, arrays[0][:, 1:], arrays[1])
    with pytest.raises(ValueError, match="no layer"):
        codec.encode(Unit(1, unit.geometry, 0, 66), *arrays)
    with pytest.raises(ValueError, match="reference"):
        decoded(codec, bytes([SAME]), unit)
    empty, _, _ = started(arrays, learn=False)
    with pytest.raises(ValueError, match="static"):
        decoded(empty, payload, unit)
