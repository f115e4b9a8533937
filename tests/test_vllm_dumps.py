"""Stores of vLLM, LMCache and SGLang: what engines wrote reads as their values, and what we write reads back."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import pltpack
from pltpack.dumps import open_dumps, write_dump
from pltpack.dumps.kv_events import token_lists
from pltpack.dumps.packed_blocks import AMX, PLAIN, VEC, Packing
from pltpack.dumps.paged_files import PageLayout
from pltpack.dumps.safetensors_header import read_header
from pltpack.dumps.token_chains import cbor, lmcache_chain, sglang_chain, vllm_chain
from pltpack.dumps.vllm_example import prompt_name
from pltpack.errors import DumpError, PltpackError, UnsupportedError
from pltpack.snapshot import Identity, LayerGeometry, Snapshot
from tests.dumps_common import bits

ENGINE = Path(__file__).parents[1] / "fixtures" / "engines" / "vllm"
TOKENS = ENGINE / "token_ids.json"
REAL = [("bf16-amx", Packing(AMX, 32)), ("f32-vec", Packing(VEC, 32))]


def one(path, **how):
    (found,) = open_dumps(path, **how)
    return found


def talk(count=96, layers=2, heads=2, dim=16, dtype="BF16", seed=0, **identity):
    """A snapshot whose first layer's values depend on the token alone, as a model's do."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, max(2, count // 4), count)
    table = bits(rng, (count, heads, dim), "BF16").view(np.uint16) & 0x3FFF
    table = table.view(pltpack.snapshot.DTYPES["BF16"]).astype(pltpack.snapshot.DTYPES[dtype])
    arrays = [(bits(rng, (heads, count, dim), dtype), bits(rng, (heads, count, dim), dtype)) for _ in range(layers)]
    arrays[0] = (arrays[0][0], np.ascontiguousarray(table[tokens].transpose(1, 0, 2)))
    return Snapshot.from_arrays(f"talk-{seed}", tokens, arrays, Identity(keys="rotated", **identity))


def same(a, b, count=None):
    count = len(a) if count is None else count
    np.testing.assert_array_equal(a.tokens[:count], b.tokens)
    for index in range(len(a.identity.layers)):
        for x, y in zip(a.layer(index, 0, count), b.layer(index), strict=True):
            assert x.dtype == y.dtype and np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()


# What a real engine wrote.


@pytest.mark.parametrize(("folder", "packing"), REAL)
def test_what_vllm_wrote_has_the_values_of_transformers(folder, packing):
    snapshot = one(ENGINE / folder, tokens=TOKENS)
    truth = np.load(ENGINE / "transformers.npz")
    assert snapshot.source.packing == packing
    np.testing.assert_array_equal(snapshot.tokens, truth["token_ids"][:32])
    noise = 0.02 if folder == "bf16-amx" else 1e-4
    for layer in (0, 3):
        for name, array in zip(("keys", "values"), snapshot.layer(layer), strict=True):
            wanted = truth[f"{name}_{layer}"]
            assert np.abs(array.astype(np.float32) - wanted).max() < noise * np.abs(wanted).max()


@pytest.mark.parametrize(("folder", "packing"), REAL)
def test_what_vllm_wrote_is_written_back_tensor_by_tensor(folder, packing, tmp_path):
    snapshot = one(ENGINE / folder, tokens=TOKENS)
    options = {"layout": packing.name, "block": str(packing.block)}
    (made,) = write_dump(snapshot, tmp_path, "vllm-example", options)
    source = ENGINE / folder / made.name
    assert sorted(file.name for file in made.iterdir()) == sorted(file.name for file in source.iterdir())
    for file in made.iterdir():
        contents = []
        for path in (file, source / file.name):
            (entry,) = read_header(path).tensors.values()
            contents.append((entry.dtype, entry.shape, path.read_bytes()[entry.offset :]))
        assert contents[0] == contents[1]


def test_a_folder_without_tokens_says_how_to_give_them(tmp_path):
    source = next((ENGINE / "bf16-amx").iterdir())
    folder = tmp_path / source.name
    shutil.copytree(source, folder)
    with pytest.raises(DumpError, match=r"no token ids.*tokens\.json.*--tokens"):
        one(folder)
    (tmp_path / f"{source.name}.tokens.json").write_text(json.dumps(json.loads(TOKENS.read_text())["warmup"]))
    assert len(one(folder)) == 32


def test_tokens_are_checked_against_the_folder_s_name(tmp_path):
    wrong = json.loads(TOKENS.read_text())["warmup"]
    wrong[5] += 1
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"a": wrong, "b": [1, 2, 3]}))
    with pytest.raises(DumpError, match="none of 2 token lists is that of this prompt"):
        one(ENGINE / "bf16-amx", tokens=file)


def test_tokens_come_from_a_log_of_kv_events(tmp_path):
    ids = json.loads(TOKENS.read_text())["warmup"][:48]
    first = {"type": "BlockStored", "block_hashes": ["aa", "bb"], "parent_block_hash": None, "token_ids": ids[:32],
             "block_size": 16, "lora_id": None}  # fmt: skip
    second = ["BlockStored", ["cc"], "bb", ids[32:], 16, None]
    lines = [json.dumps([1.5, [first], 0]), json.dumps({"ts": 2.0, "events": [second, ["AllBlocksCleared"]]})]
    log = tmp_path / "events.jsonl"
    log.write_text("\n".join(lines))
    assert token_lists(log.read_text()) == {"cc": ids}
    assert one(ENGINE / "bf16-amx", tokens=log).tokens.tolist() == ids[:32]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "7", "{", '[1, "x"]', '{"events": 3}', '["BlockStored"]', '["BlockStored", ["a"], null, [1], 2]',
        '["BlockStored", ["a"], "b", [1], 1]', '["BlockStored", [1.5], null, [1], 1]',
        '["BlockStored", ["a"], "a", [1], 1]', '{"type": "BlockStored", "block_hashes": [1]}', "[" * 5000,
    ],
)  # fmt: skip
def test_a_log_that_is_none_is_refused(text):
    with pytest.raises(PltpackError):
        token_lists(text)


# Layouts.


@pytest.mark.parametrize(
    "packing", [Packing(PLAIN), Packing(VEC, 32), Packing(VEC, 16), Packing(AMX, 32), Packing(AMX, 64)]
)
def test_packings_are_permutations_and_their_inverses(packing):
    rng = np.random.default_rng(1)
    keys, values = (bits(rng, (3, 128, 32), "BF16") for _ in range(2))
    rows = packing.pack(keys, values)
    assert rows.shape == (128, 3, 64)
    for found, wanted in zip(packing.unpack(rows), (keys, values), strict=True):
        assert np.ascontiguousarray(found).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("layout", [PLAIN, VEC, AMX])
@pytest.mark.parametrize("block", [32, 64])
def test_layouts_are_told_by_equal_tokens(layout, block, tmp_path):
    snapshot = talk(192)
    write_dump(snapshot, tmp_path, "vllm-example", {"layout": layout, "block": str(block)})
    found = one(tmp_path)
    assert found.source.packing == (Packing(PLAIN) if layout == PLAIN else Packing(layout, block))
    same(snapshot, found)
    keys, values = found.layer(1, 5, 70)
    whole = found.layer(1)
    np.testing.assert_array_equal(keys.view(np.uint16), np.ascontiguousarray(whole[0][:, 5:70]).view(np.uint16))
    np.testing.assert_array_equal(values.view(np.uint16), np.ascontiguousarray(whole[1][:, 5:70]).view(np.uint16))


def test_a_layout_that_cannot_be_told_is_asked_for(tmp_path):
    rng = np.random.default_rng(3)
    arrays = [(bits(rng, (2, 64, 16), "BF16"), bits(rng, (2, 64, 16), "BF16")) for _ in range(2)]
    snapshot = Snapshot.from_arrays("s", np.arange(64), arrays)
    write_dump(snapshot, tmp_path, "vllm-example", {"layout": AMX, "block": "32"})
    with pytest.raises(UnsupportedError, match="--layout plain"):
        one(tmp_path)
    same(snapshot, one(tmp_path, options={"layout": AMX, "block": "32"}))


def test_the_old_layout_needs_its_heads(tmp_path):
    snapshot = talk(64)
    write_dump(snapshot, tmp_path, "vllm-example", {"layout": "old"})
    with pytest.raises(UnsupportedError, match="heads=N"):
        one(tmp_path)
    same(snapshot, one(tmp_path, options={"heads": "2"}))


def test_tokens_behind_the_last_block_are_left_out(tmp_path):
    snapshot = talk(70)
    (folder,) = write_dump(snapshot, tmp_path, "vllm-example", {"block": "16"})
    assert folder.name == prompt_name(snapshot.tokens[:64])
    same(snapshot, one(tmp_path), 64)


def test_a_missing_layer_is_named(tmp_path):
    (folder,) = write_dump(talk(64), tmp_path, "vllm-example", {})
    (folder / "model.layers.0.self_attn.attn.safetensors").unlink()
    with pytest.raises(DumpError, match="layer 0 of 2 is missing"):
        one(tmp_path)


def test_latent_states_are_refused(tmp_path):
    folder = tmp_path / prompt_name(np.arange(32))
    folder.mkdir()
    save_file({"kv_cache": np.zeros((32, 16), np.float32)}, folder / "model.layers.0.self_attn.attn.safetensors")
    with pytest.raises(UnsupportedError, match="MLA"):
        one(folder)


# Stores of pages.

STORES = [
    ("sglang-hicache", {"layout": "page_first", "page": "16"}, {"page": "16", "layers": "2", "heads": "2"}, 96),
    ("sglang-hicache", {"layout": "page_head", "page": "32"}, {"page": "32", "layers": "2", "heads": "2"}, 96),
    ("sglang-hicache", {"layout": "layer_first", "page": "32"}, {"page": "32", "layers": "2", "heads": "2"}, 96),
    ("lmcache", {"chunk": "32"}, {"chunk": "32", "heads": "2"}, 110),
    ("lmcache", {"chunk": "32", "file": "pt"}, {"chunk": "32", "heads": "2", "layers": "2"}, 110),
    ("lmcache", {"chunk": "32", "hash": "builtin", "root": "0"}, {"chunk": "32", "heads": "2", "hash": "builtin"}, 110),
    ("vllm-offload", {"layout": "nhd", "block": "16"}, {"layout": "nhd", "heads": "2", "dim": "16"}, 96),
    ("vllm-offload", {"layout": "hnd", "block": "32", "hash": "sha256_cbor"},
     {"layout": "hnd", "heads": "2", "hash": "sha256_cbor", "dim": "16"}, 96),
]  # fmt: skip


@pytest.mark.parametrize(("name", "writing", "reading", "count"), STORES)
def test_stores_read_back_what_was_written(name, writing, reading, count, tmp_path):
    snapshots = [talk(110, seed=seed, model="org/small") for seed in range(2)]
    write_dump(snapshots, tmp_path / "store", name, writing)
    reading = reading | ({"dtype": "BF16"} if name == "sglang-hicache" else {})
    found = {snapshot.session: snapshot for snapshot in open_dumps(tmp_path / "store", name, options=reading)} if (
        name != "vllm-offload"
    ) else {snapshot.session: snapshot for snapshot in open_dumps(tmp_path / "store", options=reading)}  # fmt: skip
    assert set(found) == {"talk-0", "talk-1"}
    for snapshot in snapshots:
        same(snapshot, found[snapshot.session], count)
        assert found[snapshot.session].identity.keys == "rotated"
        part = found[snapshot.session].layer(1, 3, 50)[0]
        assert np.ascontiguousarray(part).tobytes() == np.ascontiguousarray(snapshot.layer(1, 3, 50)[0]).tobytes()


@pytest.mark.parametrize(("name", "writing", "reading", "count"), STORES)
def test_stores_are_sniffed_and_want_their_tokens(name, writing, reading, count, tmp_path):
    write_dump(talk(110), tmp_path / "store", name, writing)
    reading = reading | ({"dtype": "BF16"} if name == "sglang-hicache" else {})
    for sidecar in [*tmp_path.glob("*.tokens.json"), *tmp_path.rglob("*.tokens.json")]:
        sidecar.unlink(missing_ok=True)
    with pytest.raises(DumpError, match="no token ids"):
        list(open_dumps(tmp_path / "store", options=reading))
    tokens = tmp_path / "t.json"
    tokens.write_text(json.dumps([[5, 6, 7] * 40]))
    with pytest.raises(DumpError, match="none of 1 token lists"):
        list(open_dumps(tmp_path / "store", options=reading, tokens=tokens))


def test_pages_of_unknown_tokens_are_not_left_out_in_silence(tmp_path):
    a, b = talk(64, seed=1), talk(64, seed=2)
    write_dump([a, b], tmp_path / "store", "sglang-hicache", {"layout": "page_first", "page": "32"})
    (tmp_path / "store.tokens.json").write_text(json.dumps(a.tokens.tolist()))
    options = {"page": "32", "layers": "2", "heads": "2", "dtype": "BF16", "layout": "page_first"}
    with pytest.raises(DumpError, match="2 of 4 pages belong to none"):
        list(open_dumps(tmp_path / "store", options=options))
    same(a, one(tmp_path / "store", options=options | {"partly": "yes"}))


def test_the_order_of_pages_is_asked_for_where_it_cannot_be_told(tmp_path):
    rng = np.random.default_rng(3)
    arrays = [(bits(rng, (2, 64, 16), "BF16"), bits(rng, (2, 64, 16), "BF16")) for _ in range(2)]
    write_dump(Snapshot.from_arrays("s", np.arange(64), arrays), tmp_path / "s", "sglang-hicache",
               {"layout": "page_first", "page": "32"})  # fmt: skip
    with pytest.raises(UnsupportedError, match="--layout layer_first"):
        list(open_dumps(tmp_path / "s", options={"page": "32", "layers": "2", "heads": "2", "dtype": "BF16"}))


@pytest.mark.parametrize("axes", ["2LNHD", "2NLHD", "2HNLD", "LBNH2D", "LBHN2D"])
def test_page_layouts_put_elements_where_they_say(axes):
    layout = PageLayout(axes, 3, LayerGeometry(2, 4, 4, "F32"), 4)
    rng = np.random.default_rng(0)
    pairs = [(rng.random((2, 8, 4), np.float32), rng.random((2, 8, 4), np.float32)) for _ in range(3)]
    sizes = layout.sizes(8)
    page = layout.page(pairs).view(np.float32).reshape([sizes[axis] for axis in axes])
    for layer, half, head, token, element in [(0, 0, 0, 0, 0), (2, 1, 1, 7, 3), (1, 0, 1, 5, 2)]:
        places = {"2": half, "L": layer, "B": token // 4, "N": token % 4 if "B" in axes else token, "H": head,
                  "D": element}  # fmt: skip
        assert page[tuple(places[axis] for axis in axes)] == pairs[layer][half][head, token, element]


def test_chains_are_those_of_the_engines():
    # Made by vLLM 0.32.0 (hash_block_tokens) and LMCache 0.5.6 (ChunkedTokenDatabase); SGLang computes its own in Rust,
    # so that one is its definition, sha256(digest before ‖ ids as 32-bit little-endian numbers), by other code.
    ids = np.arange(40, dtype=np.int32) * 37 % 49152
    known = json.loads((ENGINE / "chains.json").read_text())
    for algorithm in ("sha256", "sha256_cbor"):
        assert vllm_chain(ids, 16, algorithm) == known[f"vllm-{algorithm}"]
        assert lmcache_chain(ids, 16, algorithm) == known[f"lmcache-{algorithm}"]
    assert sglang_chain(ids, 16) == known["sglang"]
    with pytest.raises(UnsupportedError):
        cbor(1.5)


# Hostile input.


def damaged(data, rng):
    data = bytearray(data)
    kind = rng.integers(0, 4)
    if kind == 0:
        del data[int(rng.integers(0, len(data) + 1)) :]
    elif kind == 1:
        data += bytes(int(rng.integers(1, 9)))
    else:
        for _ in range(int(rng.integers(1, 5))):
            data[int(rng.integers(0, min(len(data), 200)))] ^= 1 << int(rng.integers(0, 8))
    return bytes(data)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), case=st.sampled_from([("vllm-example", {}, {}), *[case[:3] for case in STORES]]))
def test_damage_is_an_error_of_ours_or_is_read(seed, case, tmp_path_factory):
    name, writing, reading = case
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("damaged")
    write_dump(talk(96), folder / "store", name, writing)
    reading = reading | ({"dtype": "BF16"} if name == "sglang-hicache" else {})
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file = files[int(rng.integers(0, len(files)))]
    file.write_bytes(damaged(file.read_bytes(), rng))
    try:
        for snapshot in open_dumps(folder / "store", options=reading):
            for layer in range(len(snapshot.identity.layers)):
                snapshot.layer(layer)
    except PltpackError:
        pass
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<7i", 1 << 30, 1, 3, 2, 1 << 20, 1 << 20, 1 << 20), struct.pack("<7i", -1, 1, 3, 2, -5, 4, 4),
        struct.pack("<7i", 0, 1, 3, 2, 0, 0, 0), struct.pack("<7i", 64, 6, 3, 1, 2, 4, 4), b"", b"\0" * 27,
    ],
)  # fmt: skip
def test_hostile_chunk_headers_are_refused(head, tmp_path):
    (tmp_path / "m@1@0@ab@bfloat16.data").write_bytes(head + bytes(64))
    (tmp_path.with_name(tmp_path.name + ".tokens.json")).write_text("[1, 2, 3]")
    with pytest.raises(PltpackError):
        list(open_dumps(tmp_path, options={"heads": "2"}))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_hash": 0}, {"tokens_per_hash": 1 << 40}, {"blocks_per_file": "x"}, {"kv_cache_groups": []},
        {"kv_cache_groups": [{"tokens_per_block": 16, "layer_names": "x"}]}, {"dtype": "int8"}, {"tp_size": 2},
        {"canonical_format": "v9-xyz"}, {"canonical_format": [1]}, {"tokens_per_hash": 7},
    ],
)  # fmt: skip
def test_hostile_configurations_are_refused(change, tmp_path):
    write_dump(talk(96), tmp_path / "store", "vllm-offload", {"layout": "nhd"})
    (config,) = (tmp_path / "store").glob("*/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(PltpackError):
        list(open_dumps(tmp_path / "store", options={"layout": "nhd", "heads": "2"}))
