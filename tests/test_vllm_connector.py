"""The parts of the vLLM connector, without vLLM: real archives, real blocks, stand-ins for its requests only."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

import pltpack
from pltpack.dumps.packed_blocks import AMX, VEC
from pltpack.dumps.packed_blocks import Packing as NumpyPacking
from pltpack.dumps.safetensors_header import read_header
from pltpack.errors import IdentityError, UnsupportedError
from pltpack.serve.follow import FollowedArchive
from pltpack.serve.vllm.settings import ConnectorSettings
from pltpack.serve.vllm.steps import Planner, Save
from pltpack.snapshot import Identity, LayerGeometry, Snapshot

torch = pytest.importorskip("torch")
from pltpack.serve.vllm.blocks import LayerBlocks, Packing  # noqa: E402
from pltpack.serve.vllm.capture import Keeper, session_name  # noqa: E402
from pltpack.serve.vllm.model import CacheShape, expected_of  # noqa: E402
from pltpack.serve.vllm.worker import Worker  # noqa: E402

HEADS, DIM, LAYERS, BLOCK = 2, 16, 3, 32
LAYER = LayerGeometry(HEADS, DIM, DIM, "BF16")
SHAPE = CacheShape(tuple(f"model.layers.{i}.attn" for i in range(LAYERS)), (LAYER,) * LAYERS, BLOCK)
ROPE = {"type": "default", "theta": 1e4, "dim": DIM, "style": "half"}
OWN = Identity("m", "sha256:aa", None, ROPE, "rotated", (LAYER,) * LAYERS, 0, 1)


def session(name, tokens, seed):
    rng = np.random.default_rng(seed)
    bf16 = pltpack.snapshot.DTYPES["BF16"]
    arrays = [
        tuple(rng.standard_normal((HEADS, len(tokens), DIM)).astype(bf16) for _ in range(2)) for _ in range(LAYERS)
    ]
    return Snapshot.from_arrays(name, tokens, arrays, OWN)


PREFIX = np.arange(300) % 97
LONG = np.concatenate([PREFIX, np.arange(212) + 500])


@pytest.fixture
def folder(tmp_path):
    pltpack.compress([session("a", LONG, 0)], tmp_path / "archive", quality="lossless")
    return tmp_path / "archive"


def followed(folder, **settings):
    return FollowedArchive(folder, lambda _: dataclasses.replace(OWN, model=None), **settings)


def request(tokens, name="r", **more):
    plain = {"lora_request": None, "mm_features": [], "prompt_embeds": None, "cache_salt": None,
             "skip_reading_prefix_cache": False}  # fmt: skip
    return SimpleNamespace(request_id=name, prompt_token_ids=list(tokens), **plain | more)


def step(new=(), cached=(), finished=()):
    """A scheduler output: new (name, blocks, computed, scheduled), cached (name, new blocks, computed, scheduled)."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        num_scheduled_tokens={name: count for name, _, _, count in (*new, *cached)},
        scheduled_new_reqs=[SimpleNamespace(req_id=n, block_ids=(b,), num_computed_tokens=c) for n, b, c, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in cached], resumed_req_ids=set(), new_block_ids=[(row[1],) for row in cached],
            num_computed_tokens=[row[2] for row in cached],
        ),
    )  # fmt: skip


# Blocks.


@pytest.mark.parametrize("known", [NumpyPacking(VEC, 32), NumpyPacking(AMX, 32)])
def test_a_packing_is_learnt_from_the_kernel_that_does_it(known):
    def store(keys, values, block):
        rows = known.pack(keys.float().numpy().transpose(1, 0, 2), values.float().numpy().transpose(1, 0, 2))
        block.copy_(torch.from_numpy(np.ascontiguousarray(rows)).transpose(0, 1)[None])

    if known.name == AMX:
        # Its packing is of pairs of 2-byte elements, so numbers go through as such.
        known = NumpyPacking(AMX, 32)
    packing = Packing.probe(store, 32, DIM, torch.bfloat16)
    tensor = torch.zeros(4, HEADS, 32, 2 * DIM, dtype=torch.bfloat16)
    blocks = LayerBlocks(tensor, LAYER, 32, packing)
    keys, values = (torch.randn(HEADS, 64, DIM).bfloat16() for _ in range(2))
    blocks.write([2, 1], keys, values)
    rows = tensor[[2, 1]].permute(0, 2, 1, 3).reshape(64, HEADS, 2 * DIM).float().numpy()
    for found, wanted in zip(known.unpack(rows), (keys, values), strict=True):
        np.testing.assert_array_equal(found, wanted.float().numpy())
    for found, wanted in zip(blocks.read([2, 1], 50), (keys, values), strict=True):
        assert torch.equal(found, wanted[:, :50])
    assert not tensor[0].any() and not tensor[3].any()


def test_a_kernel_that_changes_values_is_refused():
    with pytest.raises(UnsupportedError, match="as it is"):
        Packing.probe(lambda keys, values, block: block.fill_(1), 32, DIM, torch.bfloat16)


def test_blocks_of_the_scheduler_may_be_several_of_the_cache():
    tensor = torch.zeros(8, HEADS, 16, 2 * DIM)
    blocks = LayerBlocks(tensor, LAYER, 32)
    keys, values = torch.randn(HEADS, 64, DIM), torch.randn(HEADS, 64, DIM)
    blocks.write([3, 0], keys, values)
    assert torch.equal(tensor[6, :, :, :DIM], keys[:, :16]) and torch.equal(tensor[1, :, :, DIM:], values[:, 48:])
    with pytest.raises(UnsupportedError, match="outside 0:4"):
        blocks.write([4], keys[:, :32], values[:, :32])


# Matching.


def test_a_shared_prefix_hits_its_whole_blocks(folder):
    planner = Planner(followed(folder), BLOCK, None, capture=False)
    other = np.concatenate([PREFIX, np.arange(200) + 900])
    assert planner.matched(request(other), 0) == 288
    assert planner.matched(request(other), 64) == 224
    assert planner.matched(request(LONG), 0) == 480
    assert planner.matched(request(np.arange(400) + 5000), 0) == 0


def test_the_last_token_is_not_computed_alone_unless_that_is_asked_for(folder):
    prompts = [np.append(LONG, [7] * more) for more in (0, 1, 2)]
    for recompute, found in ((2, [480, 480, 512]), (1, [480, 512, 512]), (40, [448, 448, 448])):
        planner = Planner(followed(folder), BLOCK, None, capture=False, recompute=recompute)
        assert [planner.matched(request(prompt), 0) for prompt in prompts] == found
    assert Planner(followed(folder), BLOCK, None, capture=False).matched(request(prompts[1]), 0) == 480


def test_tokens_before_a_cut_are_computed_and_not_kept_again(folder):
    prompt = LONG[:400]
    for count, found in ((0, 384), (64, 320), (400, 0)):
        planner = Planner(followed(folder, recompute_at_cut=count), BLOCK, None, capture=True)
        assert planner.matched(request(prompt), 0) == found
        planner.allocated(request(prompt), list(range(13)), found)
        loads, saves = planner.plan(step(new=[("r", list(range(13)), found, 400 - found)]))
        assert [load.stop for load in loads] == [found] * bool(found) and saves == []


@pytest.mark.parametrize(
    "more", [{"cache_salt": "b"}, {"lora_request": object()}, {"mm_features": [1]}, {"prompt_embeds": object()},
             {"skip_reading_prefix_cache": True}]
)  # fmt: skip
def test_what_tokens_do_not_decide_is_not_matched(folder, more):
    assert Planner(followed(folder), BLOCK, None, capture=False).matched(request(LONG, **more), 0) == 0


def test_a_prompt_in_parts_is_kept_when_it_is_complete(folder):
    planner = Planner(followed(folder), BLOCK, None, capture=True)
    new = request(np.arange(100) + 3000)
    assert planner.matched(new, 0) == 0
    planner.allocated(new, [1, 2], 0)
    assert planner.plan(step(new=[("r", [1, 2], 0, 64)])) == ([], [])
    _, saves = planner.plan(step(cached=[("r", [3, 4], 64, 36)]))
    assert saves[0].blocks == (1, 2, 3, 4) and len(saves[0].tokens) == 100
    assert planner.plan(step(finished=["r"]))[1] == []


# Loading and keeping.


def worker_of(folder, keeper=None):
    worker = Worker(followed(folder), SHAPE, "auto", keeper)
    tensors = [torch.zeros(40, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    worker._blocks = [LayerBlocks(tensor, LAYER, BLOCK) for tensor in tensors]
    return worker, tensors


def planned(folder, tokens, computed=0):
    planner = Planner(followed(folder), BLOCK, None, capture=False)
    asked = request(tokens)
    external = planner.matched(asked, computed)
    planner.allocated(asked, list(range(3, 3 + -(-len(tokens) // BLOCK))), external)
    return planner, planner.plan(step())[0]


@pytest.mark.parametrize("computed", [0, 64])
def test_a_prefix_is_loaded_layer_by_layer(folder, computed):
    _, loads = planned(folder, LONG, computed)
    worker, tensors = worker_of(folder)
    worker.start(loads)
    for index, name in enumerate(SHAPE.names):
        worker.fill(name)
        keys, values = session("a", LONG, 0).layer(index, computed, 480)
        rows = tensors[index][3 + computed // BLOCK : 18].permute(1, 0, 2, 3).reshape(HEADS, -1, 2 * DIM).float()
        np.testing.assert_array_equal(rows[..., :DIM].numpy(), keys.astype(np.float32))
        np.testing.assert_array_equal(rows[..., DIM:].numpy(), values.astype(np.float32))
        assert not tensors[index][: 3 + computed // BLOCK].any() and not tensors[index][18:].any()
    worker.finish(())
    assert worker.failed() == set()


def test_a_damaged_shard_is_blocks_to_compute_and_is_not_offered_again(folder):
    for shard in (folder / "shards").iterdir():
        payload = read_header(shard).tensors["unit.payload"]
        data = bytearray(shard.read_bytes())
        data[payload.offset + payload.length - 1] ^= 1
        shard.write_bytes(bytes(data))
    planner, loads = planned(folder, LONG)
    worker, _ = worker_of(folder)
    worker.start(loads)
    for name in SHAPE.names:
        worker.fill(name)
    worker.finish(())
    failed = worker.failed()
    assert failed == set(range(3, 18)) and worker.failed() == set()
    planner.failed(failed)
    assert planner.matched(request(LONG), 0) == 0


@pytest.mark.parametrize("target", ["dumps", "archive"])
def test_prompts_are_kept_once(folder, tmp_path, target):
    settings = ConnectorSettings.of({"archive": str(folder), "capture": True, "capture_to": target})
    keeper = Keeper(settings, OWN, lambda: None)
    worker, tensors = worker_of(folder, keeper)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    tokens = np.arange(40, dtype=np.int32)
    for _ in range(2):
        worker.finish([Save("r", tokens, (5, 7))])
    worker.close()
    name = session_name(tokens, None)
    if target == "dumps":
        (kept,) = pltpack.open_dumps(settings.dumps)
    else:
        with pltpack.open(folder) as archive:
            kept = archive.read(name)
    assert kept.session == name and kept.identity.weights == OWN.weights
    keys, _ = kept.layer(1)
    np.testing.assert_array_equal(keys[:, 32:].astype(np.float32), tensors[1][7, :, :8, :DIM].float().numpy())


def test_a_shard_that_cannot_be_opened_does_not_keep_the_engine_from_starting(folder):
    for shard in (folder / "shards").iterdir():
        shard.write_bytes(shard.read_bytes()[:-1])
    archive = followed(folder)
    archive.warm_up().join(60)
    assert Planner(archive, BLOCK, None, capture=False).matched(request(LONG), 0) == 0


def test_a_generation_is_made_ready_as_it_comes(folder):
    archive = followed(folder)
    archive.warm_up().join(60)
    assert archive.loader().read_bytes > 0
    pltpack.append(folder, [session("b", np.arange(64) + 7000, 1)])
    archive.refresh()
    loader = archive.loader()
    archive.warm_up().join(60)
    assert loader is archive.loader() and loader.read_bytes > 0


# Identity and settings.


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights": "sha256:bb"}, "weights"), ({"rope": {**ROPE, "theta": 5e5}}, "rope"),
        ({"layers": (dataclasses.replace(LAYER, dtype="F32"),) * LAYERS}, r"layers\[0\]\.dtype"),
        ({"layers": (LAYER,) * 2}, "layers"),
    ],
)  # fmt: skip
def test_archives_of_another_model_are_refused_by_the_field(folder, change, field):
    own = dataclasses.replace(OWN, **change)
    with pytest.raises(IdentityError, match=field):
        FollowedArchive(folder, lambda identity: expected_of(own, identity, ()))


def test_an_engine_that_does_not_know_its_weights_says_so(folder):
    own = dataclasses.replace(OWN, weights=None)
    with pytest.raises(UnsupportedError, match='"accept_unknown"'):
        FollowedArchive(folder, lambda identity: expected_of(own, identity, ()))
    assert FollowedArchive(folder, lambda identity: expected_of(own, identity, ("weights",))).loader() is not None


def test_the_archive_s_word_is_taken_for_the_style_of_rotation(folder):
    own = dataclasses.replace(OWN, rope={key: value for key, value in ROPE.items() if key != "style"})
    assert FollowedArchive(folder, lambda identity: expected_of(own, identity, ())).loader() is not None


@pytest.mark.parametrize(
    ("extra", "fact"),
    [
        ({}, "'archive'"), ({"archive": "a", "capture": 1}, "'capture'"), ({"archive": "a", "x": 1}, "'x'"),
        ({"archive": "a", "capture_to": "moon"}, "capture_to"), ({"archive": "a", "depth": True}, "'depth'"),
        ({"archive": "a", "accept_unknown": ["shoe"]}, "shoe"),
        ({"archive": "a", "recompute_last": 0}, "recompute_last"),
    ],
)  # fmt: skip
def test_settings_that_are_wrong_are_named(extra, fact):
    with pytest.raises(UnsupportedError, match=fact):
        ConnectorSettings.of(extra)
