"""rANS streams: round trips on every loop, agreement with a plain decoder, damage, and the frequency tables."""

from __future__ import annotations

import ctypes
import heapq
import mmap
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pltpack.codec import rans, rans_scalar, rans_simd
from pltpack.errors import UnsupportedError

KERNELS = [*rans_simd.kernels(), "portable"]
GOLDEN = bytes.fromhex(
    "19109d038b00a103ee025a2ecdccd4b7fff39944a7518201307201003a24820128cc6a36cb6203007a509f0d24902544"
    "7a509f0dcb62030028cc6a36f64301009d8138019d813801f643010028cc6a36cb6203007a509f0d249025447a509f0d"
    "cb62030028cc6a36f64301009d8138019d813801f643010028cc6a36cb620300b5e101a001a004f004f001a001a004f0"
    "04f001a052212683a4336230bc8993803a56"
)


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    use_kernel(monkeypatch, request.param)
    return request.param


def use_kernel(monkeypatch, name):
    encode_rows, decode_rows = rans._choose(name)
    monkeypatch.setattr(rans, "_ENCODE_ROWS", encode_rows)
    monkeypatch.setattr(rans, "_DECODE_ROWS", decode_rows)


def random_problem(seed, rows, columns, tables):
    """Symbols drawn from `tables` distributions: a single symbol, all 256 evenly, or a peak of random width."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((tables, 256))
    for row in weights:
        kind = rng.integers(4)
        if kind == 0:
            row[rng.integers(256)] = 1
        elif kind == 1:
            row[:] = 1
        else:
            row[:] = np.floor(1e4 * np.exp(-np.abs(np.arange(256) - rng.integers(256)) / rng.uniform(0.2, 40)))
    freqs = rans.normalize(weights)
    table_of_row = rng.integers(tables, size=rows)
    symbols = np.empty((rows, columns), dtype=np.uint8)
    for r, table in enumerate(table_of_row):
        symbols[r] = rng.choice(256, size=columns, p=freqs[table] / 4096)
    return symbols, table_of_row, freqs


def decoded(stream, table_of_row, freqs, shape):
    out = np.full(shape, 0xAA, dtype=np.uint8)
    rans.decode(stream, table_of_row, rans.decode_tables(freqs), out)
    return out


def plain_decode(stream, table_of_row, freqs, rows, columns):
    """The stream's definition, one symbol at a time; gives the symbols, the unread bytes and the final states."""
    lanes = list(struct.unpack_from("<32I", stream))
    unread = 128
    symbols = np.zeros((rows, columns), dtype=np.uint8)
    for r in range(rows):
        freq = [int(f) for f in freqs[table_of_row[r]]]
        for i in range(columns):
            high, slot = divmod(lanes[i % 32], 4096)
            symbol = 0
            while slot >= freq[symbol]:
                slot -= freq[symbol]
                symbol += 1
            symbols[r, i] = symbol
            state = freq[symbol] * high + slot
            if state < 65536:
                state = state * 65536 + struct.unpack_from("<H", stream, unread)[0]
                unread += 2
            lanes[i % 32] = state
    return symbols, stream[unread:], lanes


problems = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(0, 12), st.one_of(st.integers(0, 100), st.just(256)), st.integers(1, 5)
)


@settings(deadline=None, max_examples=60)
@given(problems)
@example((1, 0, 5, 1))
@example((2, 5, 0, 1))
@example((3, 0, 0, 1))
@example((4, 12, 1, 3))
@example((5, 12, 85, 5))
@example((6, 3, 31, 2))
def test_every_loop_writes_the_same_bytes_and_reads_them_back(problem):
    symbols, table_of_row, freqs = random_problem(*problem)
    streams = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            use_kernel(patch, name)
            stream = rans.encode(symbols, table_of_row, freqs)
            np.testing.assert_array_equal(decoded(stream, table_of_row, freqs, symbols.shape), symbols, err_msg=name)
            streams.add(stream)
    assert len(streams) == 1


@settings(deadline=None, max_examples=15)
@given(problems)
@example((7, 4, 85, 2))
def test_a_plain_decoder_reads_the_stream_to_its_last_byte(problem):
    symbols, table_of_row, freqs = random_problem(*problem)
    stream = rans.encode(symbols, table_of_row, freqs)
    plain, unread, lanes = plain_decode(stream, table_of_row, freqs, *symbols.shape)
    np.testing.assert_array_equal(plain, symbols)
    assert unread == b""
    assert lanes == [65536] * 32


def test_many_rows_of_many_tables(kernel):
    symbols, table_of_row, freqs = random_problem(8, 384, 256, 48)
    stream = rans.encode(symbols, table_of_row, freqs)
    np.testing.assert_array_equal(decoded(stream, table_of_row, freqs, symbols.shape), symbols)
    ideal_bits = (12 - np.log2(freqs[table_of_row[:, None], symbols])).sum()
    assert len(stream) * 8 < 1.005 * ideal_bits + 32 * 32


@pytest.mark.parametrize("freq", [1, 2, 3, 2047, 2048, 2049, 4093, 4094, 4095, 4096])
def test_extreme_frequencies(kernel, freq):
    freqs = np.zeros((1, 256), dtype=np.uint16)
    freqs[0, 7], freqs[0, 200] = freq, 4096 - freq
    symbols = np.where(np.random.default_rng(freq).random((40, 85)) < 0.5, 7, 200).astype(np.uint8)
    if freq == 4096:
        symbols[:] = 7
    stream = rans.encode(symbols, np.zeros(40, dtype=int), freqs)
    np.testing.assert_array_equal(decoded(stream, np.zeros(40, dtype=int), freqs, symbols.shape), symbols)
    assert (len(stream) == 128) == (freq == 4096)


def golden_problem():
    rows, columns = np.mgrid[0:3, 0:40]
    symbols = (100 + (rows * 7 + columns * columns) % 11).astype(np.uint8)
    counts = np.zeros((2, 256))
    counts[0, 100:111] = np.arange(1, 12)
    counts[1, 100:111] = 2.0 ** np.arange(11)
    return symbols, np.array([0, 1, 0]), rans.normalize(counts)


def test_golden_stream(kernel):
    symbols, table_of_row, freqs = golden_problem()
    assert freqs[0, 100:111].tolist() == [62, 124, 186, 248, 310, 372, 434, 497, 559, 621, 683]
    assert freqs[1, 100:111].tolist() == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1025, 2049]
    assert rans.encode(symbols, table_of_row, freqs) == GOLDEN
    np.testing.assert_array_equal(decoded(GOLDEN, table_of_row, freqs, symbols.shape), symbols)


def test_any_bytes_like_stream_is_read(kernel):
    symbols, table_of_row, freqs = golden_problem()
    odd = bytearray(b"x" + GOLDEN)
    for stream in (bytearray(GOLDEN), memoryview(GOLDEN), memoryview(odd)[1:]):
        np.testing.assert_array_equal(decoded(stream, table_of_row, freqs, symbols.shape), symbols)
    assert odd == b"x" + GOLDEN


def test_every_flipped_bit_and_every_wrong_length_is_an_error(kernel):
    symbols, table_of_row, freqs = golden_problem()
    tables = rans.decode_tables(freqs)
    out = np.empty_like(symbols)
    for bit in range(8 * len(GOLDEN)):
        damaged = bytearray(GOLDEN)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="damaged"):
            rans.decode(damaged, table_of_row, tables, out)
    for length in range(len(GOLDEN)):
        with pytest.raises(ValueError, match=r"damaged|truncated"):
            rans.decode(GOLDEN[:length], table_of_row, tables, out)
    for extra in (b"\0", b"\0\0", bytes(200)):
        with pytest.raises(ValueError, match=r"damaged|truncated"):
            rans.decode(GOLDEN + extra, table_of_row, tables, out)


def guarded(data):
    """A uint8 array that ends where the next byte is unreadable, so that any access behind it kills the process."""
    pages = -(-len(data) // mmap.PAGESIZE)
    block = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(block, pages * mmap.PAGESIZE))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0
    array = np.frombuffer(block, dtype=np.uint8, count=len(data), offset=pages * mmap.PAGESIZE - len(data))
    array[:] = np.frombuffer(data, dtype=np.uint8)
    return array


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("columns", [1, 15, 32, 49, 256])
def test_no_loop_touches_memory_behind_its_arrays(kernel, columns):
    symbols, table_of_row, freqs = random_problem(9, 20, columns, 3)
    stream = rans.encode(guarded(symbols.tobytes()).reshape(symbols.shape), table_of_row, freqs)
    tables = guarded(rans.decode_tables(freqs).tobytes()).view(np.uint32).reshape(3, 4096)
    out = guarded(bytes(symbols.size)).reshape(symbols.shape)
    rans.decode(guarded(stream), table_of_row, tables, out)
    np.testing.assert_array_equal(out, symbols)
    # All states 0 is the hungriest stream: no lane ever recovers, so each symbol takes a word.
    for hostile in (bytes(len(stream)), bytes(128), bytes(130), stream[:128], b"\xff" * len(stream)):
        with pytest.raises(ValueError, match="damaged"):
            rans.decode(guarded(hostile), table_of_row, tables, out)


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=0, max_size=400), st.integers(0, 6), st.integers(0, 70))
def test_every_loop_judges_arbitrary_bytes_alike(data, rows, columns):
    freqs = random_problem(10, 1, 1, 2)[2]
    tables = rans.decode_tables(freqs)
    table_of_row = np.arange(rows) % 2
    verdicts = []
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            use_kernel(patch, name)
            out = np.zeros((rows, columns), dtype=np.uint8)
            try:
                rans.decode(data, table_of_row, tables, out)
                verdicts.append(out.tobytes())
            except ValueError as error:
                verdicts.append(str(error))
    assert len(set(verdicts)) == 1


def test_a_symbol_without_frequency_is_an_error(kernel):
    freqs = rans.normalize(np.eye(256)[3:5])
    symbols = np.full((4, 45), 3, dtype=np.uint8)
    assert len(rans.encode(symbols, np.zeros(4, dtype=int), freqs)) == 128
    for r, i in ((0, 0), (3, 44), (2, 31), (1, 32)):
        wrong = symbols.copy()
        wrong[r, i] = 4
        with pytest.raises(ValueError, match="frequency 0"):
            rans.encode(wrong, np.zeros(4, dtype=int), freqs)


def test_arrays_that_do_not_fit_are_errors():
    symbols, table_of_row, freqs = golden_problem()
    tables = rans.decode_tables(freqs)
    out = np.empty_like(symbols)
    for wrong in (np.array([0, 2, 0]), np.array([0, -1, 0]), np.array([0, 1])):
        with pytest.raises(ValueError, match="table"):
            rans.encode(symbols, wrong, freqs)
        with pytest.raises(ValueError, match="table"):
            rans.decode(GOLDEN, wrong, tables, out)
    for target in (out.astype(np.int8), np.empty((40, 3), np.uint8).T, out.ravel()):
        with pytest.raises(ValueError, match="C-contiguous uint8"):
            rans.decode(GOLDEN, table_of_row, tables, target)
    with pytest.raises(ValueError, match="4096 entries"):
        rans.decode(GOLDEN, table_of_row, tables[:, :100], out)
    with pytest.raises(ValueError, match="256 symbols"):
        rans.encode(symbols, table_of_row, freqs[:, :101])
    with pytest.raises(ValueError, match="sum to 4096"):
        rans.decode_tables(freqs + np.eye(2, 256, dtype=np.uint16))


def test_decode_table_entries_follow_their_definition():
    freqs = random_problem(11, 1, 1, 6)[2]
    for freq, table in zip(freqs.astype(int), rans.decode_tables(freqs), strict=True):
        start = np.cumsum(freq) - freq
        symbol = table & 0xFF
        np.testing.assert_array_equal(symbol, np.repeat(np.arange(256), freq))
        np.testing.assert_array_equal((table >> 8 & 0xFFF) + 1, freq[symbol])
        np.testing.assert_array_equal(table >> 20, np.arange(4096) - start[symbol])


counts_rows = st.lists(st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 10**9)), min_size=256, max_size=256)


def least_code_length(counts):
    """Bits of the best 12-bit table: slots given one by one to the symbol that gains most, which is optimal."""
    used = counts[counts > 0].astype(float)
    freq = np.ones(len(used))
    gains = [(-count, k) for k, count in enumerate(used)]
    heapq.heapify(gains)
    for _ in range(4096 - len(used)):
        k = gains[0][1]
        freq[k] += 1
        heapq.heapreplace(gains, (-used[k] * np.log2((freq[k] + 1) / freq[k]), k))
    return float((used * (12 - np.log2(freq))).sum())


@settings(deadline=None, max_examples=40)
@given(counts_rows)
@example([0] * 255 + [9])
@example([1] * 256)
@example([10**9] + [1] * 255)
def test_normalized_tables_are_complete_and_near_the_optimum(counts):
    counts = np.array(counts)
    (freq,) = rans.normalize(counts).astype(int)
    assert freq.sum() == 4096
    if not counts.any():
        assert freq[0] == 4096
        return
    np.testing.assert_array_equal(freq > 0, counts > 0)
    used = counts > 0
    bits = (counts[used] * (12 - np.log2(freq[used]))).sum()
    assert bits <= 1.001 * least_code_length(counts) + 1e-6


def test_normalize_keeps_what_is_already_exact_and_takes_many_rows():
    freqs = random_problem(12, 1, 1, 8)[2]
    np.testing.assert_array_equal(rans.normalize(freqs), freqs)
    assert rans.normalize(np.zeros((0, 256))).shape == (0, 256)
    assert rans.normalize(np.ones(256)).tolist() == [[16] * 256]


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_normalize_refuses_impossible_counts(value):
    counts = np.ones((2, 256))
    counts[1, 9] = value
    with pytest.raises(ValueError, match="counts"):
        rans.normalize(counts)
    with pytest.raises(ValueError, match="counts"):
        rans.normalize(np.ones((2, 255)))


def test_the_fastest_loops_are_chosen_unless_one_is_named():
    assert rans._choose("") == rans._choose(KERNELS[0])
    assert rans._choose("portable") == (rans_scalar.encode_rows, rans_scalar.decode_rows)
    with pytest.raises(UnsupportedError, match=r"PLTPACK_RANS_KERNEL=altivec: this processor can run .*portable"):
        rans._choose("altivec")


def in_new_process(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_environment_names_the_loops():
    program = "from pltpack.codec import rans; print(rans._DECODE_ROWS.__name__)"
    assert in_new_process(program, PLTPACK_RANS_KERNEL="portable") == ["decode_rows"]


def test_a_processor_without_vectors_gets_the_portable_loops():
    program = "from pltpack.codec import rans, rans_simd; print(rans_simd.kernels(), rans._ENCODE_ROWS.__name__)"
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "PLTPACK_RANS_KERNEL": ""}
    assert in_new_process(program, **generic) == ["[]", "encode_rows"]


def test_the_registry_does_not_import_numba():
    program = "import sys, pltpack.codec.registry; print('numba' in sys.modules)"
    assert in_new_process(program) == ["False"]
