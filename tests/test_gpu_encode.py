"""Units encoded by kernels in the simulator, through the codec that stands for a started one: the CPU's bytes."""

from __future__ import annotations

import gpu_common  # noqa: F401 - before pltpack.gpu
import numpy as np
import profiles_common as toy
import pytest
import test_group
import test_lossless
import test_turboquant
from gpu_common import decoded
from test_gpu_units import GROUP_CASES, lossless

from pltpack.codec import delta, tokens
from pltpack.codec.base import DecodeJob, EncodeJob, Unit
from pltpack.gpu.backend import CpuBackend, CudaBackend
from pltpack.gpu.codec import DeviceCodec
from pltpack.snapshot import DTYPES, LayerGeometry


@pytest.fixture(scope="module")
def cuda():
    return CudaBackend()


def counted(codec, calls):
    """The codec, which notes how many units it is given to encode."""
    many, span = codec.encode_many, codec.encode_span
    codec.encode_many = lambda jobs: calls.extend(["unit"] * len(jobs)) or many(jobs)
    codec.encode_span = lambda *given: calls.append("span") or span(*given)
    return codec


@pytest.mark.parametrize("case", GROUP_CASES)
def test_group_units_have_the_cpus_bytes(cuda, case):
    geometry, size, count, position, rope, scale = case
    codec, _ = test_group.started(geometry, size, [test_group.unit_of(geometry, 64, 4)], rope)
    jobs = []
    for seed, shift in ((0, 0.0), (1, 3.0), (2, 0.0)):
        unit, keys, values = test_group.unit_of(geometry, count + seed, position, scale=scale, seed=seed)
        keys = (keys.astype(np.float32) + np.float32(shift * scale)).astype(keys.dtype)
        if seed == 2:
            # A value beyond all steps, and one that is none.
            keys[0, 1, 2], values[-1, 2, 1] = DTYPES[geometry.dtype].type(3e4), np.nan
        jobs.append(EncodeJob(unit, keys, values))
    wanted, calls = codec.encode_many(jobs), []
    assert DeviceCodec(counted(codec, calls), cuda).encode_many(jobs) == wanted
    assert calls == []


def test_group_units_with_escapes_exact_tokens_and_no_sample(cuda):
    geometry = LayerGeometry(2, 40, 9, "BF16")
    codec, _ = test_group.started(geometry, 2)
    unit, keys, values = test_group.unit_of(geometry, 40, 0)
    wild = keys.astype(np.float32)
    wild[:, 5::7, 3::5] *= 40
    wild[1, 11, 3] = 1e30
    values = (values.astype(np.float32) + 9).astype(values.dtype)
    first, huge = EncodeJob(unit, keys, values), EncodeJob(unit, wild.astype(keys.dtype), values)
    wanted, calls = codec.encode_many([first, huge]), []
    classes = np.zeros(40, np.uint8)
    assert int.from_bytes(wanted[1][8:12], "little") > 10 and {payload[0] for payload in wanted} == {2}
    runs = int.from_bytes(wanted[1][4:8], "little")
    tokens.unpack(np.frombuffer(wanted[1][16 + 12 : 16 + 12 + runs], np.uint8), False, classes)
    assert classes[11] == tokens.EXACT and classes[0] == tokens.EXACT
    assert DeviceCodec(counted(codec, calls), cuda).encode_many([first, huge]) == wanted and calls == []


def test_units_with_a_reference_are_the_cpus(cuda):
    geometry = LayerGeometry(1, 8, 8, "BF16")
    codec, _ = test_group.started(geometry, 4, [test_group.unit_of(geometry, 64, 4)])
    unit, keys, values = test_group.unit_of(geometry, 6, 8)
    near = tuple((x.astype(np.float32) * 1.01).astype(x.dtype) for x in (keys, values))
    jobs, calls = [EncodeJob(unit, keys, values, near), EncodeJob(unit, keys, values)], []
    wanted = codec.encode_many(jobs)
    assert DeviceCodec(counted(codec, calls), cuda).encode_many(jobs) == wanted and calls == ["unit"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_units_have_the_cpus_bytes(cuda, dtype):
    codec, geometry = lossless(dtype, dims=(20, 9))
    rng, jobs = np.random.default_rng(5), []
    sample = test_lossless.gaussian(np.random.default_rng(1), 2, 200, (20, 9), dtype)
    for count in (1, 40):
        arrays = [x[:, :count] for x in sample]
        jobs.append(EncodeJob(Unit(0, geometry, 10, count), *arrays))
    # Words of another kind: all alike, and drawn at random.
    alike = [np.repeat(x[:, :1], 40, axis=1) for x in arrays]
    noise = [rng.integers(0, 256, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape) for x in arrays]
    jobs += [EncodeJob(jobs[-1].unit, *alike), EncodeJob(jobs[-1].unit, *noise)]
    wanted, calls = codec.encode_many(jobs), []
    device = DeviceCodec(counted(codec, calls), cuda)
    assert device.encode_many(jobs) == wanted and 0 < len(calls) < len(jobs)
    for job, payload in zip(jobs, wanted, strict=True):
        out = np.empty_like(job.keys), np.empty_like(job.values)
        device.decode_many([DecodeJob(memoryview(payload), job.unit, *out)])
        assert all(a.tobytes() == b.tobytes() for a, b in zip(out, job[1:3], strict=True))


def test_turboquant_units_have_the_cpus_bytes(cuda):
    codec, _, geometry = test_turboquant.started(2, 16, 12, "BF16", 3, 3)
    jobs = []
    for position, count in ((0, 7), (9, 11)):
        keys, values = (test_turboquant.normal((2, count, dim), "BF16", dim) for dim in (16, 12))
        keys[1, 5, 3] = np.inf
        jobs.append(EncodeJob(Unit(0, geometry, position, count), keys, values))
    wanted, calls = codec.encode_many(jobs), []
    assert DeviceCodec(counted(codec, calls), cuda).encode_many(jobs) == wanted and calls == []


@pytest.mark.parametrize(("position", "count"), [(0, 9), (7, 17)])
def test_transform_units_are_as_good_as_the_cpus(cuda, position, count):
    codec = toy.started(toy.random_profile(), step=0.5)
    prepared = codec.prepare(toy.session("s", np.arange(position + count)))
    values, units = toy.values_of(np.arange(position + count)), []
    for group in codec.layer_groups(len(toy.LAYERS)):
        unit = toy.unit_of(group, count, position)
        arrays = [(k[:, position:].copy(), v[:, position:].copy()) for k, v in values[group.start : group.stop]]
        arrays[0][0][0, 3, 1], arrays[0][1][0, 5, 2] = np.nan, 3e38
        units.append((unit, arrays))
    calls = []
    device = DeviceCodec(counted(codec, calls), cuda).like(counted(prepared, calls))
    ours = [device.encode_span(*given) for given in units]
    assert calls == []
    theirs = [prepared.encode_span(*given) for given in units]
    for mine, their, (unit, _) in zip(ours, theirs, units, strict=True):
        # Another product may round a coefficient to the next integer, rarely.
        assert mine[:5] == their[:5] and abs(len(mine) - len(their)) <= 4
        found = [decoded(CpuBackend(), codec, [(payload, unit, None)], "BF16") for payload in (mine, their)]
        apart = np.abs(delta.ordered(found[0]).astype(int) - delta.ordered(found[1]).astype(int))
        assert np.mean(apart > 2) <= 0.01
    near = [tuple((x.astype(np.float32) * 1.02).astype(x.dtype) for x in pair) for pair in units[0][1]]
    assert device.encode_span(*units[0], near) == prepared.encode_span(*units[0], near)
