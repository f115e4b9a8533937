"""Many units at once: compiled batches give what units give one by one, and threads that write and share work."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.archive.sink import Sink
from pltpack.archive.threads import together
from pltpack.codec import group_batch, group_decode, lossless_batch, planes, rans, rans_simd
from pltpack.codec.base import DecodeJob, EncodeJob, LayerSample, Unit
from pltpack.codec.group import GroupCodec
from pltpack.codec.lossless import LosslessCodec
from pltpack.snapshot import DTYPES, Identity, LayerGeometry

QUICK = settings(deadline=None, max_examples=15)
KERNELS = [*rans_simd.kernels(), "portable"]
BFLOAT = DTYPES["BF16"]


class Runs:
    def __init__(self, runs):
        self.runs = runs

    def layer(self, index):
        return self.runs[index]


def started(codec, geometries, rope=None):
    identity = Identity(layers=tuple(geometries), rope=rope, keys="rotated" if rope else None)
    runs = [[LayerSample(Unit(i, g, 0, 80), *arrays(g, 80, i))] for i, g in enumerate(geometries)]
    codec.start(codec.learn(Runs(runs), identity), identity)
    return codec


def arrays(geometry, count, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return tuple(
        (scale * rng.normal(size=(geometry.heads, count, dim))).astype(BFLOAT)
        for dim in (geometry.k_dim, geometry.v_dim)
    )


def inside(array, tokens_before, tokens_behind):
    """The same values as a part of a longer array, as the archive gives."""
    heads, count, dim = array.shape
    whole = np.zeros((heads, tokens_before + count + tokens_behind, dim), array.dtype)
    part = whole[:, tokens_before : tokens_before + count]
    part[...] = array
    return part


def words(array):
    return np.ascontiguousarray(array).view(np.uint16)


geometry = st.builds(LayerGeometry, st.integers(1, 3), st.sampled_from([4, 32, 64]), st.just(0), st.just("BF16")).map(
    lambda g: LayerGeometry(g.heads, g.k_dim, g.k_dim, "BF16")
)


@pytest.mark.parametrize("kernel", KERNELS)
@QUICK
@given(st.lists(geometry, min_size=1, max_size=3), st.lists(st.integers(1, 70), min_size=1, max_size=4),
       st.sampled_from([{}, {"style": "half"}, {"style": "interleaved"}, {"dim": 4}]),
       st.sampled_from([0.0, 1.0, 40.0]),
       st.lists(st.sampled_from([None, 0.0, 0.02, 0.3]), min_size=1, max_size=3))  # fmt: skip
def test_group_batches_decode_what_units_decode(kernel, geometries, counts, turn, scale, nearness):
    """Without references and with those that are equal, near or farther away."""
    codec = started(GroupCodec(3), geometries, {"type": "default", "theta": 10000.0, **turn} if turn else None)
    jobs, wanted = [], []
    for i, g in enumerate(geometries):
        for at, count in enumerate(counts):
            near = nearness[at % len(nearness)]
            unit = Unit(i, g, 64 * at, count, near=near is not None)
            mine, reference = arrays(g, count, at, scale), None
            if near is not None:
                reference = tuple(inside((x.astype(np.float32) * (1 + near)).astype(BFLOAT), 3, 1) for x in mine)
            payload = memoryview(codec.encode(unit, *mine, reference))
            out = tuple(inside(x, 1, 2) for x in arrays(g, count, 9))
            expected = tuple(np.zeros(x.shape, x.dtype) for x in out)
            group_decode.decode(payload, codec._layer(unit), unit, expected, reference, codec._tables, codec._shrink)
            jobs.append(DecodeJob(payload, unit, *out, reference))
            wanted.append(expected)
    batch = group_batch.Batch(codec._layers, codec._tables, codec._shrink)
    batch._loop = group_batch._LOOPS[kernel]
    assert batch.decode(jobs) == []
    for job, expected in zip(jobs, wanted, strict=True):
        for found, right in zip((job.keys, job.values), expected, strict=True):
            assert np.array_equal(words(found), words(right))
            # Tokens before and behind the unit's stay as they were.
            assert not words(found.base)[:, [0, -1, -2]].any()


@pytest.mark.parametrize("near", [False, True])
def test_a_damaged_unit_in_a_group_batch_is_given_back(near):
    g = LayerGeometry(2, 32, 32, "BF16")
    codec = started(GroupCodec(4), [g])
    unit = Unit(0, g, 8, 40, near=near)
    reference = tuple((1.1 * x.astype(np.float32)).astype(BFLOAT) for x in arrays(g, 40)) if near else None
    payload = codec.encode(unit, *arrays(g, 40), reference)
    rng = np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(payload)
        bad[rng.integers(len(bad))] ^= int(rng.integers(1, 256))
        if rng.integers(4) == 0:
            bad = bad[: rng.integers(len(bad))]
        outs = [tuple(np.zeros((2, 40, 32), BFLOAT) for _ in range(2)) for _ in range(2)]
        jobs = [DecodeJob(memoryview(p), unit, *out, reference) for p, out in zip((bad, payload), outs, strict=True)]
        left = codec._batch.decode(jobs)
        assert len(left) <= 1 and all(job is jobs[0] for job in left)
        alone = tuple(np.zeros((2, 40, 32), BFLOAT) for _ in range(2))
        try:
            group_decode.decode(jobs[0].payload, codec._layer(unit), unit, alone, reference, codec._tables,
                                codec._shrink)  # fmt: skip
        except ValueError:
            assert left
        else:
            assert not left
            assert all(np.array_equal(words(a), words(b)) for a, b in zip(alone, outs[0], strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@QUICK
@given(st.lists(geometry, min_size=1, max_size=3), st.lists(st.integers(1, 70), min_size=1, max_size=4),
       st.sampled_from([1e-30, 1.0, 40.0]))  # fmt: skip
def test_lossless_batches_write_what_units_write(kernel, geometries, counts, scale):
    codec = started(LosslessCodec(), geometries)
    jobs = [
        EncodeJob(Unit(i, g, 64 * at, count), *(inside(x, 3, 1) for x in arrays(g, count, at, scale)))
        for i, g in enumerate(geometries)
        for at, count in enumerate(counts)
    ]
    codec._batch._loop = lossless_batch._LOOPS[kernel]
    singly = [codec._encode(*job) for job in jobs]
    taken = codec._batch.encode(jobs)
    assert all(a is None or a == b for a, b in zip(taken, singly, strict=True))
    assert codec.encode_many(jobs) == singly


def test_the_usual_unit_is_encoded_by_the_lossless_batch():
    g = LayerGeometry(3, 64, 64, "BF16")
    codec = started(LosslessCodec(), [g])
    assert codec._batch.encode([EncodeJob(Unit(0, g, 0, 256), *arrays(g, 256))])[0] is not None


def test_marked_rows_are_those_with_a_symbol_that_is_not_plain():
    freqs = rans.normalize(np.array([[5.0, 3.0, 1.0] + [0.0] * 253]))
    plain = freqs > 0
    plain[0, 2] = False
    tables = rans.encode_tables(freqs, plain, np.array([2], np.uint8))
    symbols = np.array([[0, 1, 0], [0, 7, 1], [2, 0, 0]], np.uint8)
    stream, marks = rans.encode_with(symbols, np.zeros(3, np.int64), tables)
    assert marks.tolist() == [0, 1, 1]
    out = np.empty_like(symbols)
    rans.decode(b"".join(stream), np.zeros(3, np.int64), rans.decode_tables(freqs), out)
    assert out.tolist() == [[0, 1, 0], [0, 2, 1], [2, 0, 0]]


def test_a_sink_keeps_order_and_removes_what_is_not_committed(tmp_path):
    pieces = [bytes([i]) * (1 << 18) for i in range(200)]
    with Sink() as sink:
        one, two = sink.open(tmp_path / "one", 400), sink.open(tmp_path / "two", 400)
        for piece in pieces:
            sink.append(one, [piece])
            sink.append(two, [b"x"])
        info = sink.commit(one, {}, {}).result()
    data = (tmp_path / "one").read_bytes()
    assert info.payload_bytes == sum(map(len, pieces)) and data[-info.payload_bytes :] == b"".join(pieces)
    assert os.listdir(tmp_path) == ["one"]


def test_an_error_while_writing_comes_up_at_the_commit(tmp_path):
    with Sink() as sink:
        container = sink.open(tmp_path / "one", 400)
        container._file.close()
        sink.append(container, [b"x"])
        with pytest.raises(ValueError, match="closed file"):
            sink.commit(container, {}, {}).result()
    assert os.listdir(tmp_path) == []


def test_threads_share_work_and_tell_the_first_error():
    with ThreadPoolExecutor(2) as pool:
        seen = []
        together(seen.append, range(100), pool, 2)
        assert sorted(seen) == list(range(100))

        def fail(item):
            if item == 3:
                raise ValueError("three")
            seen.append(item)

        with pytest.raises(ValueError, match="three"):
            together(fail, range(10_000), pool, 2)
        assert len(seen) < 10_100
        # A pool that is busy holds nothing up.
        gate = threading.Event()
        busy = [pool.submit(gate.wait) for _ in range(2)]
        together(seen.append, [1, 2, 3], pool, 2)
        gate.set()
        assert all(future.result() for future in busy)


@QUICK
@given(st.integers(1, 3), st.integers(1, 70), st.sampled_from([1, 15, 16, 40, 64]), st.integers(0, 3))
def test_transposes_in_tiles(heads, count, dim, spare):
    rng = np.random.default_rng(dim)
    whole = rng.integers(1, 1 << 16, (heads, count + spare, dim), dtype=np.uint16)
    wanted = whole[:, :count].transpose(0, 2, 1).reshape(heads * dim, count)
    # Rows that are a part of longer ones, as those of a sample are.
    long = np.zeros((heads * dim, count + spare), np.uint16)
    planes.to_rows(whole[:, :count], long[:, :count])
    assert np.array_equal(long[:, :count], wanted)
    assert not long[:, count:].any()
    back = np.zeros_like(whole)
    planes.from_rows(long[:, :count], back[:, :count])
    assert np.array_equal(back[:, :count], whole[:, :count])
    assert not back[:, count:].any()
