"""llama.cpp state files: structure, byte-identical rewriting, quantized caches, order of channels."""

from __future__ import annotations

import dataclasses
import json
import struct

import numpy as np
import pytest
from dumps_common import assert_same, bits
from engines_common import GGUF, HALF, MODEL, TOKENS, unpacked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pltpack
from pltpack.dumps import ggml
from pltpack.dumps.quantized import as_values
from pltpack.dumps.registry import open_dumps, write_dump
from pltpack.errors import DumpError, IdentityError, PltpackError, UnsupportedError
from pltpack.snapshot import DTYPES, Identity, LayerGeometry, Snapshot

ARCH = {"arch": "llama", "head_dim": "8"}
NUMBERS = {"F32": 0, "F16": 1, "BF16": 30}


def state(rows, cells, *, magic=0x67677371, version=3, tokens=(), arch=None, kind="F16", transposed=False,
          packed=False):  # fmt: skip
    """A file made by hand: `rows` per layer (keys, values) `[C, columns]`; `cells` as (position, sequences)."""
    words = [-1, 1, len(tokens), *tokens, 0] if packed else list(tokens)
    out = [struct.pack("<III", magic, version, len(words)), np.array(words, "<i4").tobytes()]
    if arch is not None:
        out += [struct.pack("<I", len(arch)), arch.encode()]
    out += [struct.pack("<I", 1), memory(rows, cells, kind, transposed)]
    return b"".join(out)


def memory(rows, cells, kind="F16", transposed=False):
    """One stream."""
    out = [struct.pack("<I", len(cells))]
    for position, sequences in cells:
        out.append(struct.pack(f"<iI{len(sequences)}i", position, len(sequences), *sequences))
    out.append(struct.pack("<II", transposed, len(rows)))
    for part in (0, 1):
        for layer in rows:
            array, size = layer[part], DTYPES[kind].itemsize
            if part and transposed:
                out += [struct.pack("<iII", NUMBERS[kind], size, array.shape[1]), array.T.tobytes()]
            else:
                out += [struct.pack("<iQ", NUMBERS[kind], array.shape[1] * size), array.tobytes()]
    return b"".join(out)


def layers(count, kind="F16", seed=0):
    """Rows of two layers with two heads of 8 channels."""
    rng = np.random.default_rng(seed)
    return [(bits(rng, (count, 16), kind), bits(rng, (count, 16), kind)) for _ in range(2)]


def heads(rows):
    """Rows ``[T, 16]`` as ``[2, T, 8]``."""
    return rows.reshape(len(rows), 2, 8).swapaxes(0, 1)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 40), kind=st.sampled_from(list(NUMBERS)), transposed=st.booleans(), packed=st.booleans(),
       session=st.booleans(), old=st.booleans(), start=st.integers(0, 39))  # fmt: skip
def test_read_and_written_back_byte_for_byte(tmp_path, count, kind, transposed, packed, session, old, start):
    rows, tokens = layers(count, kind), list(range(7, 7 + count))
    version = (9 if old else 10) if session else (2 if old else 3)
    magic = 0x6767736E if session else 0x67677371
    data = state(rows, [(i, (3,)) for i in range(count)], magic=magic, version=version, tokens=tokens,
                 arch="llama" if session else None, kind=kind, transposed=transposed, packed=packed)  # fmt: skip
    file = tmp_path / "s.bin"
    file.write_bytes(data)
    (found,) = open_dumps(file, options={"head_dim": "8"} if session else ARCH)
    assert found.session == "s" and found.tokens.tolist() == tokens
    assert found.identity == Identity(rope={"style": "interleaved", "permuted": True}, keys="rotated",
                                      layers=(LayerGeometry(2, 8, 8, kind),) * 2)  # fmt: skip
    start = min(start, count - 1)
    for index, pair in enumerate(rows):
        for read, row in zip(found.layer(index, start, count), pair, strict=True):
            assert read.tobytes() == np.ascontiguousarray(heads(row)[:, start:]).tobytes()
    options = {"v_trans": "yes" if transposed else "no", "token_list": "packed" if packed else "plain",
               "version": str(version), "seq_id": "3", "kind": "session" if session else "sequence",
               "arch": "llama"}  # fmt: skip
    (written,) = write_dump(found, tmp_path / "out", "llama.cpp", options)
    assert written.read_bytes() == data


def test_several_sequences_share_cells_out_of_order(tmp_path):
    rows = layers(5)
    # Sequence 0 holds cells 4, 0, 1; sequence 2 holds cells 4, 3: one cell is of both.
    cells = [(1, (0,)), (2, (0,)), (9, ()), (1, (2,)), (0, (0, 2))]
    file = tmp_path / "many.bin"
    file.write_bytes(state(rows, cells, tokens=[5, 6, 7]))
    with pytest.raises(DumpError, match=r"'many\.seq2' has no token ids; put a JSON list into many\.bin\.tokens\.json"):
        list(open_dumps(file, options=ARCH))
    (tmp_path / "many.bin.tokens.json").write_text(json.dumps({"many.seq2": [5, 8]}))
    first, second = open_dumps(file, options=ARCH)
    assert [first.session, second.session] == ["many.seq0", "many.seq2"]
    assert first.tokens.tolist() == [5, 6, 7] and second.tokens.tolist() == [5, 8]
    for found, own in ((first, [4, 0, 1]), (second, [4, 3])):
        for index, pair in enumerate(rows):
            for read, row in zip(found.layer(index), pair, strict=True):
                assert read.tobytes() == np.ascontiguousarray(heads(row[own])).tobytes()


def test_streams_of_their_own(tmp_path):
    rows = layers(3), layers(2, seed=1)
    head = struct.pack("<III3i", 0x6767736E, 10, 3, 1, 2, 3) + struct.pack("<I", 5) + b"qwen2" + struct.pack("<I", 3)
    cells = [(i, (0,)) for i in range(3)], [(i, (1,)) for i in range(2)]
    file = tmp_path / "s.bin"
    file.write_bytes(head + memory(rows[0], cells[0]) + struct.pack("<I", 0) + memory(rows[1], cells[1]))
    (tmp_path / "s.tokens.json").write_text(json.dumps({"s.seq1": [4, 5]}))
    first, second = open_dumps(file, options={"head_dim": "8"})
    assert first.tokens.tolist() == [1, 2, 3] and second.tokens.tolist() == [4, 5]
    assert first.identity.rope == {"style": "half"}
    assert second.layer(1)[0].tobytes() == np.ascontiguousarray(heads(rows[1][1][0])).tobytes()


def test_damaged_files_are_refused(tmp_path):
    data = state(layers(6), [(i, (0,)) for i in range(6)], tokens=range(6))
    file = tmp_path / "s.bin"
    for length in range(0, len(data), 13):
        file.write_bytes(data[:length])
        with pytest.raises(PltpackError, match=r"s\.bin"):
            list(open_dumps(file, format="llama.cpp", options=ARCH))
    for what, text, error in (
        (data + b"1234", "holds 4 bytes after its cache", UnsupportedError),
        (state(layers(2), [(0, (0,)), (2, (0,))], tokens=[1, 2]), "does not hold every position", UnsupportedError),
        (state(layers(2), [(0, (0,)), (0, (0,))], tokens=[1, 2]), "does not hold every position", UnsupportedError),
        (state(layers(2), [(0, ()), (1, ())], tokens=[1, 2]), "cells of no sequence", DumpError),
        (data[:4] + struct.pack("<I", 7) + data[8:], "version 7", UnsupportedError),
        (state(layers(3), [(i, (0,)) for i in range(3)], tokens=[1, 2]), "no token ids", DumpError),
        (data[:12] + struct.pack("<iIII", -1, 1, 2, 5) + data[28:], "tokens in 6 words|images", PltpackError),
    ):
        file.write_bytes(what)
        with pytest.raises(error, match=text):
            list(open_dumps(file, options=ARCH))


def test_what_no_file_says_must_be_told(tmp_path):
    file = tmp_path / "s.bin"
    file.write_bytes(state(layers(3), [(i, (0,)) for i in range(3)], tokens=[1, 2, 3]))
    with pytest.raises(DumpError, match="does not say how many heads"):
        list(open_dumps(file))
    (found,) = open_dumps(file, options={"head_dim": "8"})
    assert found.identity.rope == {"style": "unrecorded"}
    for format in ("transformers", "mlx"):
        with pytest.raises(UnsupportedError, match=r"'rope\.style' is not recorded"):
            write_dump(found, tmp_path / format, format)
    # Back to llama.cpp it goes as it came; to a half-style engine only with the channels reordered.
    (written,) = write_dump(found, tmp_path / "back", "llama.cpp")
    assert written.read_bytes() == file.read_bytes()
    with pytest.raises(UnsupportedError, match="has no option 'colour'"):
        write_dump(found, tmp_path / "x", "llama.cpp", {"colour": "red"})
    with pytest.raises(UnsupportedError, match="no option 'colour'"):
        list(open_dumps(file, options={"colour": "red"}))


def test_a_half_style_cache_needs_the_architecture(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [(bits(rng, (2, 5, 8), "F16"), bits(rng, (2, 5, 8), "F16"))]
    half = Snapshot.from_arrays("s", range(5), arrays, Identity(rope={**HALF, "dim": 8}, keys="rotated"))
    with pytest.raises(UnsupportedError, match=r"'rope\.style' is half as far as is known"):
        write_dump(half, tmp_path / "x", "llama.cpp")
    (file,) = write_dump(half, tmp_path / "llama", "llama.cpp", {"arch": "llama"})
    (found,) = open_dumps(file, options=ARCH)
    keys, values = found.layer(0)
    # Channel i of the half style is 2i here, i + 4 is 2i + 1.
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    assert keys.tobytes() == np.ascontiguousarray(arrays[0][0][..., order]).tobytes()
    assert values.tobytes() == arrays[0][1].tobytes()
    (back,) = write_dump(found, tmp_path / "hf", "transformers")
    (again,) = open_dumps(back)
    assert_same(dataclasses.replace(again, identity=half.identity), half)
    qwen = {"arch": "qwen2"}
    (same,) = open_dumps(write_dump(half, tmp_path / "q", "llama.cpp", qwen), options={**ARCH, **qwen})
    assert same.layer(0)[0].tobytes() == arrays[0][0].tobytes() and same.identity.rope == {"style": "half"}


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0"])
def test_block_quantization(scheme):
    rng = np.random.default_rng(1)
    values = rng.standard_normal((20, 96)).astype(np.float32)
    values[0] = 0
    scales, integers = ggml.quantize(values, scheme)
    rebuilt = ggml.dequantize(scales, integers, scheme)
    worst = np.abs(values).reshape(20, 3, 32).max(-1)[..., None] / (127 if scheme == "q8_0" else 8)
    # A step of 1/8 of the largest reaches only 7/8 of it on the other side.
    assert (np.abs(rebuilt - values).reshape(20, 3, 32) <= worst * (0.6 if scheme == "q8_0" else 1.01)).all()
    rows = ggml.join_rows(scales, integers)
    assert rows.shape == (20, 3 * (34 if scheme == "q8_0" else 18))
    again = ggml.split_rows(rows, scheme)
    assert np.array_equal(again[0], scales) and np.array_equal(again[1], integers)
    turned = ggml.rotated(values, 32)
    np.testing.assert_allclose(ggml.rotated(turned, 32), values, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(values, axis=-1), rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-f16", "llama-f16-transposed", "llama-bf16", "llama-q8_0", "llama-q4_0"])
def test_files_of_the_real_engine_are_rewritten_byte_for_byte(tmp_path, name):
    file = unpacked(f"{name}.bin", tmp_path)
    assert pltpack.compress([file], tmp_path / "a", quality="lossless", identity=GGUF)["sessions"] == 1
    options = {"v_trans": "yes" if "transposed" in name else "no"}
    (written,) = pltpack.decompress(tmp_path / "a", tmp_path / "out", to="llama.cpp", options=options)
    assert written.read_bytes() == file.read_bytes()
    report = pltpack.verify(tmp_path / "a", against=[file], identity=GGUF)
    assert report["differences"] == [] and report["compared"][name]["bit_exact"]


def test_values_of_all_files_agree(tmp_path):
    """Half style, Hadamard rotation undone: all are the values of one model, within what each rounds."""
    def values(name):
        (found,) = open_dumps(unpacked(f"{name}.bin", tmp_path), identity=GGUF, options={"keys": "half"})
        assert found.identity.rope == HALF
        return found

    reference = values("llama-f16")
    # llama.cpp rounds what it multiplies with 4-bit weights to 8 bits, so small differences grow from layer to layer.
    for name, tolerance in (("llama-f16-transposed", 0.08), ("llama-bf16", 0.08), ("llama-q8_0", 0.08),
                            ("llama-q4_0", 0.35)):  # fmt: skip
        found = values(name)
        for index in (0, 7, 29):
            for a, b in zip(found.layer(index), reference.layer(index, 0, len(found)), strict=True):
                a, b = a.astype(np.float32), b.astype(np.float32)
                assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b), (name, index)


def test_sessions_of_the_real_engine(tmp_path):
    tokens = {f"llama-session{s}.seq{n}": TOKENS[:c] for s in ("", "-streams") for n, c in ((0, 6), (1, 4))}
    for name in ("llama-session.bin", "llama-session-streams.bin"):
        file = unpacked(name, tmp_path)
        (tmp_path / f"{name}.tokens.json").write_text(json.dumps(tokens))
        first, second = open_dumps(file, identity=GGUF)
        assert (first.tokens.tolist(), second.tokens.tolist()) == (TOKENS[:6], TOKENS[:4])
        # Both sequences begin with the same four tokens.
        for a, b in zip(first.layer(3, 0, 4), second.layer(3), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=0.2, rtol=0.1)


def test_hadamard_rotation_is_told_or_detected(tmp_path):
    file = unpacked("llama-q8_0.bin", tmp_path)
    (detected,) = open_dumps(file, identity=GGUF)
    (told,) = open_dumps(file, identity=GGUF, options={"hadamard": "yes"})
    (denied,) = open_dumps(file, identity=GGUF, options={"hadamard": "no"})
    assert detected.layer(2)[0].tobytes() == told.layer(2)[0].tobytes() != denied.layer(2)[0].tobytes()
    (integers,) = open_dumps(file, identity=GGUF, options={"quantized": "integers"})
    assert integers.identity.quantized["hadamard"] == [64, 64] and len(integers.identity.layers) == 60
    unknown = dict(integers.identity.quantized)
    del unknown["hadamard"]
    vague = dataclasses.replace(integers, identity=dataclasses.replace(integers.identity, quantized=unknown))
    with pytest.raises(UnsupportedError, match="may have Hadamard-rotated this quantized cache"):
        as_values(vague)
    # Channels of equal energy tell nothing.
    assert ggml.looks_rotated([np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)], 64) is None


def test_integers_for_lossless_and_values_for_the_rest(tmp_path):
    file = unpacked("llama-q8_0.bin", tmp_path)
    pltpack.compress([file], tmp_path / "exact", quality="lossless", identity=GGUF)
    pltpack.compress([file], tmp_path / "lossy", quality="q4", identity=GGUF)
    with pltpack.open(tmp_path / "exact") as exact, pltpack.open(tmp_path / "lossy") as lossy:
        assert exact.identity.quantized["scheme"] == "q8_0" and exact.identity.rope is None
        assert lossy.identity.quantized is None and lossy.identity.layers == GGUF.layers
        with pytest.raises(IdentityError, match="'quantized' differs"):
            exact.identity.require_loadable(MODEL, ("rope", "keys", "layers"))
        values = as_values(exact.snapshot("llama-q8_0")).layer(4)[1].astype(np.float32)
        near = lossy.snapshot("llama-q8_0").layer(4)[1].astype(np.float32)
        assert np.linalg.norm(near - values) < 0.2 * np.linalg.norm(values)
    (written,) = pltpack.decompress(tmp_path / "exact", tmp_path / "hf", to="transformers", target=MODEL)
    (found,) = open_dumps(written)
    assert found.layer(4)[1].astype(np.float32).tobytes() == values.tobytes() and found.identity.rope == HALF
    (again,) = write_dump(found, tmp_path / "q8", "llama.cpp", {"arch": "llama", "type": "q8_0"})
    (back,) = open_dumps(again, identity=GGUF, options={"keys": "half"})
    for a, b in zip(back.layer(4), found.layer(4), strict=True):
        assert np.linalg.norm(a.astype(np.float32) - b.astype(np.float32)) < 0.1 * np.linalg.norm(b.astype(np.float32))
