"""Units of every codec, decoded (and encoded) by kernels in the simulator: the words, and the bytes, of the CPU."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import profiles_common as toy
import pytest
import test_group
import test_lossless
import test_turboquant
from gpu_common import bits, decoded, flat
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import coefficients, delta, levels, quantize, rate, symbols, tokens
from pltpack.codec.base import LayerSample, Unit
from pltpack.codec.classes import LAYOUTS
from pltpack.codec.coefficients import Order
from pltpack.codec.lossless import STATIC, LosslessCodec
from pltpack.codec.rope import Rotation
from pltpack.errors import UnsupportedError
from pltpack.gpu import backend, device, group, jobs, place, spectrum
from pltpack.gpu.backend import CpuBackend, CudaBackend
from pltpack.gpu.group_units import GroupDecoder
from pltpack.gpu.jobs import Job, LayerPlace
from pltpack.gpu.lossless_units import LosslessDecoder
from pltpack.gpu.place import Pages
from pltpack.gpu.spectrum_units import SpectrumDecoder, encode_values
from pltpack.gpu.sphere_units import SphereDecoder
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

ROOT = Path(__file__).parents[1]
ROPE = test_group.ROPE
PARTIAL = {**ROPE, "dim": 6, "style": "interleaved"}


@pytest.fixture(scope="module")
def cuda():
    return CudaBackend()


def both(cuda, codec, units, dtype):
    """Words of both backends."""
    return decoded(cuda, codec, units, dtype), decoded(CpuBackend(), codec, units, dtype)


def left_of(decoder, units, dtype):
    """Numbers of the units that kernels leave to the CPU."""
    words = device.put(np.zeros(1 << 14, f"u{DTYPES[dtype].itemsize}"))
    return decoder.decode([
        Job(memoryview(payload), unit, jobs.places_of(unit.layers or (unit.geometry,), unit.tokens, words))
        for payload, unit, _ in units
    ])  # fmt: skip


# --- the tiers q1 to q4 ---------------------------------------------------------------------------------------------

GROUP_CASES = [
    (LayerGeometry(2, 16, 16, "BF16"), 4, 7, 0, ROPE, 1.0),
    (LayerGeometry(1, 10, 7, "F16"), 2, 6, 50, PARTIAL, 30.0),
    (LayerGeometry(2, 6, 4, "F32"), 1, 5, 50, ROPE, 4.0),
    (LayerGeometry(1, 8, 8, "F8_E4M3"), 3, 5, 2, None, 1.0),
    (LayerGeometry(1, 9, 5, "F8_E5M2"), 3, 4, 2, None, 1.0),
    (LayerGeometry(1, 70, 70, "BF16"), 4, 5, 100, ROPE, 4.0),
]


@pytest.mark.parametrize("case", GROUP_CASES)
def test_group_units_decode_to_the_cpus_words(cuda, case):
    geometry, size, count, position, rope, scale = case
    codec, _ = test_group.started(geometry, size, [test_group.unit_of(geometry, 64, 4)], rope)
    units = []
    for shift in (0.0, 2.0):
        unit, keys, values = test_group.unit_of(geometry, count, position, scale=scale, seed=int(shift))
        keys = (keys.astype(np.float32) + np.float32(shift * scale)).astype(keys.dtype)
        units.append((codec.encode(unit, keys, values), unit, None))
    assert left_of(GroupDecoder(codec), units, geometry.dtype) == []
    ours, theirs = both(cuda, codec, units, geometry.dtype)
    assert np.array_equal(ours, theirs)


def test_group_escapes_and_own_means(cuda):
    geometry = LayerGeometry(1, 40, 40, "BF16")
    codec, _ = test_group.started(geometry, 4, [test_group.unit_of(geometry, 64, 4)])
    unit, keys, values = test_group.unit_of(geometry, 40, 8)
    values = (values.astype(np.float32) + 9).astype(values.dtype)
    wild = keys.astype(np.float32)
    wild[:, 5::7, 3::5] *= 40
    payload = codec.encode(unit, wild.astype(keys.dtype), values)
    assert payload[0] == 2 and int.from_bytes(payload[8:12], "little") > 20
    ours, theirs = both(cuda, codec, [(payload, unit, None)], "BF16")
    assert np.array_equal(ours, theirs)


def test_group_units_of_the_widest_class_follow_the_specification(cuda):
    geometry = LayerGeometry(1, 8, 8, "F32")
    codec, state = test_group.started(geometry, 3, [test_group.unit_of(geometry, 64, 4)])
    unit, keys, values = test_group.unit_of(geometry, 8, 20, scale=300)
    payload = codec.encode(unit, keys, values)
    words = decoded(cuda, codec, [(payload, unit, None)], "F32")
    wanted = [array.reshape(-1) for array in test_group.slow_decode(payload, unit, state)]
    assert np.array_equal(words, np.concatenate(wanted))


def test_damaged_and_referenced_group_units_go_to_the_cpu(cuda):
    geometry = LayerGeometry(1, 8, 8, "BF16")
    codec, _ = test_group.started(geometry, 4, [test_group.unit_of(geometry, 64, 4)])
    unit, keys, values = test_group.unit_of(geometry, 6, 8)
    near = [(x.astype(np.float32) * 1.01).astype(x.dtype) for x in (keys, values)]
    referenced = codec.encode(unit, keys, values, (near[0], near[1]))
    assert referenced[0] & 1
    ours, theirs = both(cuda, codec, [(referenced, unit, [(near[0], near[1])])], "BF16")
    assert np.array_equal(ours, theirs)
    sound = codec.encode(unit, keys, values)
    for damage in (sound[:-2], sound[:40], bytes([9]) + sound[1:], sound[:-1] + bytes([sound[-1] ^ 3])):
        with pytest.raises(ValueError):
            decoded(cuda, codec, [(sound, unit, None), (damage, unit, None)], "BF16")


def test_group_encoder_kernels_write_the_cpus_symbols():
    geometry, count, codes = LayerGeometry(2, 9, 9, "F32"), 6, np.array([-9, -30], np.int16)
    codec, _ = test_group.started(geometry, 4)
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(2, count, 9)) * np.exp(rng.normal(size=(2, count, 1)) * 2)).astype(np.float32)
    x[0, 3, 4] = 1e9
    means = rng.normal(size=(2, 1, 10)).astype(np.float32)
    classes, bases = np.array([0, 3, 15, 10, 1, 0], np.uint8), np.array([9, 17], np.uint8)
    half, coded = 5, np.flatnonzero(classes <= tokens.FINEST)
    rows = len(coded) * 2
    part = np.zeros((1, group.PART_COLUMNS), np.int64)
    part[0, [group.HEADS, group.CODED, group.WIDTH, group.MEANS_HEAD, group.TOKENS]] = 2, len(coded), 9, 10, count
    quantized, wide = np.zeros(x.size, np.int32), np.zeros(count, np.uint8)
    shape = device.lines_of(1, rows)
    group.quantize_kernel[shape](x.reshape(-1), part, classes, codes, levels.POWERS.copy(), means.reshape(-1),
                                 quantized, wide)  # fmt: skip
    wanted, too_wide = np.zeros((2, count, 9), np.int32), np.zeros(count, bool)
    for h in range(2):
        quantize.quantize(x[h], means[h], 0, classes, int(codes[h]), wanted[h], too_wide)
    assert np.array_equal(quantized.reshape(wanted.shape), wanted) and np.array_equal(wide > 0, too_wide)

    numbers, ranks, kinds = coded.astype(np.int32), classes.astype(np.int16), np.zeros(rows, np.uint8)
    group.tables_kernel[shape](part, numbers, ranks, bases, kinds)
    plain, planes = (codec._freqs > 0).astype(np.uint8), levels.RAW_BITS[kinds]
    before = (np.cumsum(planes) - planes).astype(np.int32)
    found, low = np.zeros(rows * half, np.uint8), np.zeros(max(1, int(planes.sum()) * 2), np.uint8)
    escapes_in = np.zeros(rows, np.int32)
    group.emit_kernel[shape](quantized, part, numbers, kinds, before, plain, found, low, escapes_in)
    escapes = np.zeros(2 * max(1, int(escapes_in.sum())), np.int16)
    group.escapes_kernel[shape](quantized, part, numbers, found, (np.cumsum(escapes_in) - escapes_in).astype(np.int32),
                                escapes)  # fmt: skip
    their_symbols, their_low, their_escapes = [], [], []
    for h in range(2):
        out = np.empty((len(coded), half), np.uint8)
        mine = planes[h * len(coded) : (h + 1) * len(coded)].sum() * 2
        plane, some = np.zeros(mine, np.uint8), np.empty(2 * out.size, np.int16)
        used = quantize.emit(wanted[h], classes, ranks, int(bases[h]), half, codec._freqs[:27], out, plane, some)
        their_symbols.append(out.reshape(-1))
        their_low.append(plane)
        their_escapes.append(some[:used])
    assert np.array_equal(found, np.concatenate(their_symbols)) and escapes_in.sum() > 0
    assert np.array_equal(low[: planes.sum() * 2], np.concatenate(their_low))
    assert np.array_equal(escapes, np.concatenate(their_escapes))


# --- lossless -------------------------------------------------------------------------------------------------------


def lossless(dtype, heads=2, dims=(9, 5), tables=1):
    geometry = LayerGeometry(heads, *dims, dtype)
    identity = Identity(layers=(geometry,))
    codec = LosslessCodec()
    arrays = test_lossless.gaussian(np.random.default_rng(1), heads, 200, dims, dtype)
    sample = LayerSample(Unit(0, geometry, 0, 200), *arrays)
    codec.start(codec.learn(test_group.Runs([[sample]]), identity), identity)
    return codec, geometry


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 37])
def test_lossless_units_are_the_same_bit_by_bit_both_ways(cuda, dtype, count):
    codec, geometry = lossless(dtype)
    arrays = test_lossless.gaussian(np.random.default_rng(2), 2, count, (9, 5), dtype)
    wild = [bits(array).copy() for array in arrays]
    wild[0][:, 0] = np.random.default_rng(3).integers(0, 250, wild[0][:, 0].shape)
    keys, values = (words.view(DTYPES[dtype]) for words in wild)
    unit, layout = Unit(0, geometry, 10, count), LAYOUTS[dtype]
    body, _ = symbols.encode(delta.channel_rows((wild[0], wild[1])), codec._static(unit), codec._tables, layout)
    payload = b"".join([bytes([STATIC]), *body])
    units = [(payload, unit, None)] * 2
    decoder = LosslessDecoder(codec)
    assert left_of(decoder, units, dtype) == []
    words = decoded(cuda, codec, units, dtype)
    assert np.array_equal(words, np.tile(flat([(keys, values)]), 2))
    job = Job(memoryview(b""), unit, jobs.places_of((geometry,), count, device.put(words)))
    assert decoder.encode([job, job], layout) == [payload, payload]


def test_lossless_planes_in_frames_and_other_modes(cuda):
    codec, geometry = lossless("BF16")
    rng = np.random.default_rng(4)
    smooth = [(np.repeat(bits(x)[:, :1], 64, axis=1)).view(x.dtype)
              for x in test_lossless.gaussian(rng, 2, 1, (9, 5), "BF16")]  # fmt: skip
    unit = Unit(0, geometry, 0, 64)
    body, _ = symbols.encode(delta.channel_rows((bits(smooth[0]), bits(smooth[1]))), codec._static(unit), codec._tables,
                             LAYOUTS["BF16"])  # fmt: skip
    framed = b"".join([bytes([STATIC]), *body])
    assert left_of(LosslessDecoder(codec), [(framed, unit, None)], "BF16") == []
    arrays = test_lossless.gaussian(rng, 2, 64, (9, 5), "BF16")
    near = test_lossless.noisy(rng, arrays, 0.01)
    units = [
        (framed, unit, None),
        (codec.encode(unit, *smooth), unit, None),
        (codec.encode(unit, *arrays, near), unit, [near]),
        (codec.encode(unit, *arrays, arrays), unit, [arrays]),
    ]
    ours, theirs = both(cuda, codec, units, "BF16")
    assert np.array_equal(ours, theirs) and np.array_equal(ours, flat([smooth, smooth, arrays, arrays]))
    for damage in (framed[:-1], framed[:30], bytes([99]), framed[:9] + b"\xff" * 8 + framed[17:]):
        with pytest.raises(ValueError):
            decoded(cuda, codec, [(damage, unit, None)], "BF16")


# --- turboquant -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "dims", "size", "position"), [
    ("BF16", (16, 16), 4, 0), ("F16", (12, 7), 3, 2), ("F32", (8, 1), 2, 9), ("F8_E5M2", (8, 16), 3, 0),
])  # fmt: skip
def test_turboquant_units_are_the_same_both_ways(cuda, dtype, dims, size, position):
    codec, _, geometry = test_turboquant.started(2, *dims, dtype, size, 3)
    keys, values = (test_turboquant.normal((2, 7, dim), dtype, dim) for dim in dims)
    keys[1, 5, 3], values[0, 6] = np.inf, 0
    unit = Unit(0, geometry, position, 7)
    payload = codec.encode(unit, keys, values)
    units = [(payload, unit, None)] * 2
    decoder = SphereDecoder(codec)
    assert left_of(decoder, units, dtype) == []
    ours, theirs = both(cuda, codec, units, dtype)
    assert np.array_equal(ours, theirs)
    words = device.put(flat([(keys, values)]))
    job = Job(memoryview(b""), unit, jobs.places_of((geometry,), 7, words))
    assert decoder.encode([job]) == [payload]
    for damage in (payload[:-1], payload[:3], b"\xff" * 4 + payload[4:]):
        with pytest.raises(ValueError):
            decoded(cuda, codec, [(damage, unit, None)], dtype)


# --- transform ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transform():
    return toy.started(toy.random_profile(), step=0.5)


@pytest.mark.parametrize(("position", "count"), [(0, 6), (5, 11)])
def test_transform_units_decode_within_the_tolerance(cuda, transform, position, count):
    codec = copy.copy(transform)
    codec._classes = (np.arange(40) * 7 % 16).astype(np.uint8)
    # The second group's scales are the session's own.
    codec._shifts = {2: np.array([11], np.uint8)} if position else {}
    values, units = toy.values_of(np.arange(40)), []
    for group_ in codec.layer_groups(len(toy.LAYERS)):
        unit = toy.unit_of(group_, count, position)
        arrays = [(k[:, position : position + count].copy(), v[:, position : position + count].copy())
                  for k, v in values[group_.start : group_.stop]]  # fmt: skip
        arrays[0][0][0, 3, 1] = np.nan
        units.append((codec.encode_span(unit, arrays), unit, None))
    assert left_of(SpectrumDecoder(transform), units, "BF16") == []
    ours, theirs = both(cuda, transform, units, "BF16")
    places = np.abs(delta.ordered(ours).astype(np.int64) - delta.ordered(theirs).astype(np.int64))
    assert places.max() <= 2 and np.mean(places > 1) <= 0.001
    with pytest.raises(ValueError):
        decoded(cuda, transform, [(units[0][0][:-3], units[0][1], None)], "BF16")


def test_predicted_transform_units_decode_within_the_tolerance(cuda, transform):
    values = toy.values_of(np.arange(9))[:2]
    near = [tuple((x.astype(np.float32) * 1.02).astype(x.dtype) for x in pair) for pair in values]
    near[1][1][0, 2, 1] = np.inf
    unit = dataclasses.replace(toy.unit_of(range(2), 9), near=True)
    predicted, plain = transform.encode_span(unit, values, near), transform.encode_span(unit, values)
    old = transform.encode_span(dataclasses.replace(unit, near=False), values, near)
    assert [payload[0] for payload in (predicted, plain, old)] == [3, 0, 1]
    units = [(predicted, unit, near), (plain, unit, None), (old, unit, near)]
    words = device.put(np.zeros(1 << 12, np.uint16))
    left = SpectrumDecoder(transform).decode([
        Job(memoryview(p), u, jobs.places_of(u.layers, u.tokens, words), 0, r) for p, u, r in units])  # fmt: skip
    assert left == [2]
    ours, theirs = both(cuda, transform, units, "BF16")
    places = np.abs(delta.ordered(ours).astype(np.int64) - delta.ordered(theirs).astype(np.int64))
    assert places.max() <= 2 and np.mean(places > 1) <= 0.001


def test_value_streams_are_the_cpus_bytes(transform):
    rng, logs = np.random.default_rng(0), transform._bases_of(toy.unit_of(range(2), 5)).logs
    orders, quantized = [], []
    for count in (4, 9):
        order = Order.of(logs, rate.steps(-40), rng.integers(0, 17, count), transform._tables)
        shape = count, len(logs)
        quantized.append((rng.laplace(size=shape) * np.exp2(rng.integers(-2, 9, shape))).astype(np.int32))
        orders.append(order)
    wanted = [coefficients.encode(q, order, transform._tables) for q, order in zip(quantized, orders, strict=True)]
    assert any(int.from_bytes(stream[4:8], "little") for stream in wanted)
    assert encode_values(device.put(np.concatenate(quantized)), orders, transform._tables) == wanted


def test_coefficients_are_rounded_as_on_the_cpu(transform):
    rng = np.random.default_rng(1)
    found, classes = rng.normal(size=(5, 13)).astype(np.float32) * 9, np.array([0, 3, 16, 15, 7])
    steps = rate.steps(7)
    wanted = transform._bases_of(toy.unit_of(range(2), 5)).quantize(found, classes, steps)
    inverse = np.append(1 / rate.value_of(steps), 0.0).astype(np.float32)[classes]
    out = np.empty(found.shape, np.int32)
    spectrum.quantize_kernel[device.loop_of(found.size)](found, inverse, out)
    assert np.array_equal(out, wanted)


def test_products_and_centers():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(5, 23)).astype(np.float32), rng.normal(size=(20, 18)).astype(np.float32)
    out = rng.normal(size=(5, 21)).astype(np.float32)
    wanted = out.copy()
    wanted[:, 3:] += a[:, 2:21] @ b[:19]
    blas = out.copy()
    spectrum.add_product(a, b, blas, 2, 19, 3)
    spectrum.add_product_without_blas(a, b, out, 2, 19, 3)
    assert np.allclose(out, wanted, atol=1e-5) and np.allclose(blas, wanted, atol=1e-5)
    rows, mean = out.copy(), rng.normal(size=21).astype(np.float32)
    reference = rng.normal(size=(5, 21)).astype(np.float32)
    shares = np.array([0, 0.25, 1, 0, 0.5], np.float32)
    spectrum.center_kernel[device.loop_of(rows.size)](rows, mean, reference, shares)
    centers = np.where(shares[:, None] > 0, (reference - mean) * shares[:, None] + mean, mean)
    assert np.array_equal(rows, out + centers)


# --- places ---------------------------------------------------------------------------------------------------------


def pool(layout, heads, block, count, dim, layers, layer):
    """An engine's pool, every element its own number; views ``[pages, block, H, D]`` of a layer's keys and values."""
    page, size = (block, heads, dim), 2 * layers * count * block * heads * dim
    words = np.arange(size, dtype=np.uint32)
    if layout in ("flash", "flashinfer", "NHD", "HND"):
        shape = {"flash": (2, count, *page), "flashinfer": (count, 2, *page), "NHD": (count, block, heads, 2, dim),
                 "HND": (count, heads, block, 2, dim)}[layout]  # fmt: skip
        axes = {"flash": "spthd", "flashinfer": "psthd", "NHD": "pthsd", "HND": "phtsd"}[layout]
        x = words[: size // layers].reshape(shape)
        return words[: size // layers], np.einsum(f"{axes}->spthd", x)
    shape, axes = {
        "layer_first": ((2, layers, count, *page), "slpthd"),
        "page_first": ((2, count, block, layers, heads, dim), "sptlhd"),
        "page_first_direct": ((2, count, layers, *page), "splthd"),
        "page_head": ((2, count, heads, block, layers, dim), "sphtld"),
    }[layout]  # fmt: skip
    return words, np.einsum(f"{axes}->lspthd", words.reshape(shape))[layer]


@pytest.mark.parametrize("layout", ["flash", "flashinfer", "NHD", "HND", "layer_first", "page_first",
                                    "page_first_direct", "page_head"])  # fmt: skip
def test_pages_of_serving_engines(layout):
    heads, block, count, dim, layers, layer, table = 2, 4, 5, 3, 3, 1, (3, 0, 4)
    words, views = pool(layout, heads, block, count, dim, layers, layer)
    made = (Pages.vllm(layout, heads, dim, block, count, table) if layout in ("flash", "flashinfer", "NHD", "HND")
            else Pages.sglang(layout, layer, layers, heads, dim, block, count, table))  # fmt: skip
    for pages, view in zip(made, views, strict=True):
        for slot in (0, 3, 4, 11):
            for head in range(heads):
                at = pages.place(head, slot)
                assert np.array_equal(words[at : at + dim], view[table[slot // block], slot % block, head])
        assert pages.extent(heads, 12, dim) <= len(words)
    with pytest.raises(UnsupportedError):
        made[0].extent(heads, 13, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [ROPE, PARTIAL])
def test_rotation_rounding_and_pages_both_ways(dtype, rope):
    rng = np.random.default_rng(0)
    heads, count, dim = 2, 5, 10
    rotation = Rotation.of(rope, "rotated", dim)
    x = (rng.normal(size=(heads, count, dim)) * np.exp(rng.normal(size=(heads, count, dim)) * 6)).astype(np.float32)
    pages, targets = Pages.vllm("NHD", heads, dim, 2, 5, (4, 0, 2))[1], place.Targets()
    targets.add(heads, count, dim, pages, 1, rotation, 7)
    words, placed = np.zeros(400, f"u{DTYPES[dtype].itemsize}"), targets.upload()
    place.store(x.reshape(-1), targets, placed, dtype, words)
    limit = place.LARGEST[dtype]
    wanted = np.clip(rotation.rotate(x, 7), -limit, limit).astype(DTYPES[dtype])
    for head in range(heads):
        for token in range(count):
            at = pages.place(head, 1 + token)
            assert np.array_equal(words[at : at + dim], bits(wanted)[head, token])
    back = place.load(words, targets, placed, dtype).reshape(x.shape)
    assert np.array_equal(bits(back), bits(rotation.unrotate(wanted.astype(np.float32), 7)))


def test_units_go_to_pages_of_their_layers(cuda, transform):
    values, unit = toy.values_of(np.arange(7))[:2], toy.unit_of(range(2), 7)
    payload, block, table = transform.encode_span(unit, values), 4, (2, 0, 1)
    found = []
    for used in (cuda, CpuBackend()):
        places, words = [], []
        for g in unit.layers:
            words.append(used.buffer(3 * block * g.elements_per_token, "BF16"))
            row = g.heads * g.k_dim
            keys = Pages(0, block * row, row, g.k_dim, block, table)
            places.append(LayerPlace(words[-1], keys, Pages(3 * block * row, block * g.heads * g.v_dim,
                                                            g.heads * g.v_dim, g.v_dim, block, table)))  # fmt: skip
        used.decode_units(transform, [Job(memoryview(payload), unit, tuple(places), 3)])
        found.append([used.to_host(w) for w in words])
    for ours, theirs in zip(*found, strict=True):
        assert np.array_equal(ours == 0, theirs == 0)
        assert np.abs(delta.ordered(ours).astype(int) - delta.ordered(theirs).astype(int)).max() <= 2


def test_places_outside_buffers_are_refused(cuda):
    geometry = LayerGeometry(1, 4, 4, "BF16")
    codec, _ = test_group.started(geometry, 4)
    unit, keys, values = test_group.unit_of(geometry, 3, 8)
    payload = memoryview(codec.encode(unit, keys, values))
    words = cuda.buffer(20, "BF16")
    for used in (cuda, CpuBackend()):
        with pytest.raises(UnsupportedError, match="beyond"):
            used.decode_units(codec, [Job(payload, unit, jobs.places_of((geometry,), 3, words))])
        with pytest.raises(UnsupportedError, match="layers"):
            used.decode_units(codec, [Job(payload, unit, ())])
        with pytest.raises(UnsupportedError, match="buffer of uint32"):
            used.decode_units(codec, [Job(payload, unit, jobs.places_of((geometry,), 3, words.astype(np.uint32)))])


def test_missing_cuda_is_named_with_what_to_install():
    program = "from pltpack.gpu import backend, device; print(device.missing()); backend.select('cuda')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 0:
        pytest.skip("this machine has CUDA")
    assert "pip install 'pltpack[cuda12]'" in done.stdout and "UnsupportedError" in done.stderr


@pytest.mark.parametrize("quality", ["q3", "lossless", "turboquant"])
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_altered_payloads_are_the_same_on_both_sides(cuda, quality, data):
    if quality == "q3":
        geometry = LayerGeometry(1, 6, 6, "BF16")
        codec, _ = test_group.started(geometry, 3)
        unit, keys, values = test_group.unit_of(geometry, 5, 2)
    elif quality == "lossless":
        codec, geometry = lossless("BF16", 1, (3, 2))
        unit = Unit(0, geometry, 9, 8)
        keys, values = test_lossless.gaussian(np.random.default_rng(5), 1, 8, (3, 2), "BF16")
    else:
        codec, _, geometry = test_turboquant.started(1, 6, 4, "BF16", 3)
        unit, keys, values = Unit(0, geometry, 2, 5), *(test_turboquant.normal((1, 5, dim), "BF16") for dim in (6, 4))
    altered = bytearray(codec.encode(unit, keys, values))
    # Behind the header: most of what a header says is checked before any kernel runs.
    for _ in range(data.draw(st.integers(1, 2))):
        altered[data.draw(st.integers(min(30, len(altered) - 1), len(altered) - 1))] ^= data.draw(st.integers(1, 255))
    found = []
    for used in (cuda, CpuBackend()):
        try:
            found.append(decoded(used, codec, [(bytes(altered), unit, None)], "BF16").tolist())
        except ValueError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_backends_by_name():
    assert backend.select("cpu").name == "cpu" and backend.select("cuda:0").name == "cuda:0"
    assert backend.select("auto").name == "cpu"
    for name in ("gpu", "cuda:", "cuda:x", "cpu:1"):
        with pytest.raises(UnsupportedError):
            backend.select(name)
