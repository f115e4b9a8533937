"""rANS kernels in the simulator: the CPU's bytes, both ways, and damage that is seen."""

from __future__ import annotations

import gpu_common  # noqa: F401 - before pltpack.gpu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pltpack.codec import rans as cpu
from pltpack.errors import UnsupportedError
from pltpack.gpu import device, rans


def draw(rng, rows, columns, tables, used=256):
    counts = rng.gamma(0.3, 1, (tables, 256)) * 100
    counts[:, used:] = 0
    freqs = cpu.normalize(counts)
    kinds = rng.integers(0, tables, rows)
    symbols = np.empty((rows, columns), np.uint8)
    for row, kind in enumerate(kinds):
        symbols[row] = rng.choice(256, columns, p=freqs[kind] / 4096)
    return symbols, kinds, freqs


def table_of(shapes, offsets=None, lengths=None):
    """A table of streams for matrices of these shapes, one after the other."""
    streams = np.zeros((len(shapes), rans.STREAM_COLUMNS), np.int64)
    row = symbol = 0
    for i, (rows, columns) in enumerate(shapes):
        places = [rans.ROWS, rans.FIRST_ROW, rans.TABLES, rans.COLUMNS, rans.SYMBOLS]
        streams[i, places] = rows, row, row, columns, symbol
        row, symbol = row + rows, symbol + rows * columns
        if offsets is not None:
            streams[i, [rans.AT, rans.WORDS]] = offsets[i], (lengths[i] - cpu.HEADER_BYTES) // 2
    return streams


def joined(matrices):
    return device.put(np.concatenate([m.reshape(-1) for m in matrices] + [np.zeros(1, np.uint8)]))


def decode(payloads, shapes, kinds, freqs, escape, weight, width=256):
    offsets = 1 + np.cumsum([0, *map(len, payloads)])[:-1]
    data = device.put(np.frombuffer(b"x" + b"".join(payloads) + bytes(4), np.uint8))
    return rans.decode(data, table_of(shapes, offsets, [len(p) for p in payloads]), device.put(kinds.astype(np.uint8)),
                       device.put(rans.starts(freqs, width)), device.put(escape), device.put(weight))  # fmt: skip


@pytest.mark.parametrize(("shapes", "tables", "used", "width"), [
    ([(5, 32), (3, 50), (2, 1)], 3, 256, 256), ([(4, 32), (0, 32), (1, 31)], 5, 64, 64), ([(2, 100)], 1, 3, 256),
])  # fmt: skip
def test_bytes_are_the_cpus_both_ways(shapes, tables, used, width):
    rng = np.random.default_rng(len(shapes))
    freqs = draw(rng, 0, 1, tables, used)[2]
    drawn = []
    for rows, columns in shapes:
        kinds = rng.integers(0, tables, rows)
        drawn.append((np.array([rng.choice(256, columns, p=freqs[k] / 4096) for k in kinds], np.uint8).reshape(
            rows, columns), kinds))  # fmt: skip
    payloads = [cpu.encode(symbols, kinds, freqs) for symbols, kinds in drawn]
    kinds = np.concatenate([kinds for _, kinds in drawn])
    symbols = joined([symbols for symbols, _ in drawn])
    cumulative = device.put(rans.starts(freqs, width))
    assert rans.encode(symbols, table_of(shapes), device.put(kinds.astype(np.uint8)), cumulative) == payloads

    escape, weight = rng.integers(-1, used, tables).astype(np.int32), rng.integers(0, 9, tables).astype(np.int32)
    found = decode(payloads, shapes, kinds, freqs, escape, weight, width)
    assert not found.damaged[: len(shapes)].any()
    assert np.array_equal(found.symbols[: len(symbols) - 1], symbols[:-1])
    row = 0
    for number, (matrix, mine) in enumerate(drawn):
        marked = (matrix == escape[mine][:, None]).sum(axis=1)
        part = slice(row, row + len(mine))
        assert np.array_equal(found.escapes_before[part], np.cumsum(marked) - marked)
        assert np.array_equal(found.weight_before[part], np.cumsum(weight[mine]) - weight[mine])
        assert found.escapes_of[number] == marked.sum()
        row += len(mine)


@settings(deadline=None, max_examples=8)
@given(st.data())
def test_damage_is_seen_or_harmless(data):
    rng = np.random.default_rng(0)
    symbols, kinds, freqs = draw(rng, 3, 20, 2)
    payload = bytearray(cpu.encode(symbols, kinds, freqs))
    if data.draw(st.booleans()):
        payload = payload[:-2]
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    none, zero = np.full(2, -1, np.int32), np.zeros(2, np.int32)
    found = decode([bytes(payload)], [symbols.shape], kinds, freqs, none, zero)
    out = np.empty_like(symbols)
    try:
        cpu.decode(bytes(payload), kinds, cpu.decode_tables(freqs), out)
    except ValueError:
        assert found.damaged[0] == 1
    else:
        assert found.damaged[0] == 0 and np.array_equal(found.symbols[: out.size], out.reshape(-1))


def test_symbols_without_frequency_are_refused():
    freqs = np.zeros((1, 256), np.uint16)
    freqs[0, 7] = 4096
    with pytest.raises(ValueError, match="frequency 0"):
        rans.encode(joined([np.full((1, 3), 8, np.uint8)]), table_of([(1, 3)]), device.put(np.zeros(1, np.uint8)),
                    device.put(rans.starts(freqs)))  # fmt: skip


def test_tables_beyond_shared_memory_are_refused():
    with pytest.raises(UnsupportedError, match="shared memory"):
        rans.starts(np.full((128, 256), 16, np.uint16))
