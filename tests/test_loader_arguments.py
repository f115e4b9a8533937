"""What callers hand to the loader by mistake: one error that names it, before anything is read."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from archives import HEADS, K_DIM, LAYERS, V_DIM, session

import pltpack
from pltpack.errors import UnsupportedError
from pltpack.serve import Paged

TOKENS = list(range(40))
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("arguments") / "a"
    pltpack.compress([session("s", TOKENS)], out, quality="lossless", block=4)
    return out


@pytest.fixture(scope="module")
def loader(path):
    with pltpack.open(path) as archive:
        yield archive.loader()


@pytest.mark.parametrize(
    "settings",
    [{"depth": "3"}, {"memory": None}, {"workers": 10**9}, {"timeout": -1}, {"timeout": math.nan}, {"device": None},
     {"accept_unknown": 5}, {"accept_unknown": "model"}, {"accept_unknown": ["colour"]}, {"quality": 5},
     {"on_alert": "log"}, {"limits": 5}, {"fallback": "raw"}],
    ids=str,
)  # fmt: skip
def test_settings(path, settings):
    with pltpack.open(path) as archive, pytest.raises(UnsupportedError, match=next(iter(settings))):
        archive.loader(**settings)


@pytest.mark.parametrize(
    "ids", [[1.5], ["a"], None, [[1, 2], [3, 4]], [[1], [2, 3]], b"abc", [2**63], [2**70], [-1], [True], {1, 2}],
    ids=str,
)
def test_token_ids(loader, ids):
    with pytest.raises(UnsupportedError, match="token"):
        loader.lookup(ids)


@pytest.mark.parametrize("layer", [LAYERS, -1, "0", None, 1.5, True])
def test_layers(loader, layer):
    with loader.stream(loader.lookup(TOKENS)) as stream, pytest.raises(UnsupportedError, match="layer must be"):
        stream.wait(layer)


@pytest.mark.parametrize("hit", [None, 5, "s"])
def test_hits(loader, hit):
    for call in (loader.stream, loader.load, loader.pin, loader.unpin, lambda given: loader.report(given, 1.0)):
        with pytest.raises(UnsupportedError, match="lookup"):
            call(hit)
    with pytest.raises(UnsupportedError, match="lookup"):
        loader.load(dataclasses.replace(loader.lookup(TOKENS), tokens="x"))


@pytest.mark.parametrize("rise", ["x", None, True])
def test_reports(loader, rise):
    with pytest.raises(UnsupportedError, match="ppl_change_pct"):
        loader.report(loader.lookup(TOKENS), rise)
    assert not loader.guard.all_barred()


@pytest.mark.parametrize("timeout", [-1, math.nan, "x", True])
def test_timeouts(loader, timeout):
    with pytest.raises(UnsupportedError, match="timeout"):
        loader.stream(loader.lookup(TOKENS), timeout=timeout)


@pytest.mark.parametrize("settings", [{"block_size": "x"}, {"block_size": True}, {"block_size": 2.5}, {"layout": 5},
                                      {"layout": ["B"]}], ids=str)  # fmt: skip
def test_pages(settings):
    with pytest.raises(UnsupportedError, match=r"block_size|layout"):
        Paged([], [0], **settings)


@pytest.mark.parametrize(("arrays", "layout"), [(5, "vllm"), ([1] * LAYERS, "vllm"), ([None] * LAYERS, "sglang"),
                                                ([(1,)] * LAYERS, "sglang")], ids=str)  # fmt: skip
def test_what_pages_are_of(loader, arrays, layout):
    with pytest.raises(UnsupportedError, match="destination"):
        loader.load(loader.lookup(TOKENS), Paged(arrays, list(range(10)), layout, 4))


def _destinations():
    keys, values = np.zeros((LAYERS, HEADS, 50, K_DIM), BF16), np.zeros((LAYERS, HEADS, 50, V_DIM), BF16)
    frozen = values.copy()
    frozen.flags.writeable = False
    shifted = np.zeros((HEADS, 50 + LAYERS, K_DIM), BF16)
    again = np.lib.stride_tricks.as_strided(keys[0], keys.shape, (0, *keys[0].strides))
    block = np.zeros((12, HEADS, 4, K_DIM + V_DIM), BF16)
    still = block.copy()
    still.flags.writeable = False
    table = list(range(10))
    return [
        ((keys, frozen), "values of layer 0 are read-only"),
        (([keys[0]] * LAYERS, values), "keys of layer 0 and its keys of layer 1 share"),
        (([shifted[:, at : at + 50] for at in range(LAYERS)], values), "keys of layer 0 and its keys of layer 1 share"),
        ((again, values), "keys of layer 0 and its keys of layer 1 share"),
        (([*keys[:-1], np.broadcast_to(np.zeros((1, 1, K_DIM), BF16), keys[0].shape)], values), "read-only"),
        (Paged([block] * LAYERS, table, "vllm", 4), "blocks of layer 0 and its blocks of layer 1 share"),
        (Paged([block.copy() for _ in range(LAYERS - 1)] + [still], table, "vllm", 4), "layer 2 are read-only"),
    ]


@pytest.mark.parametrize(("into", "fact"), _destinations(), ids=[fact for _, fact in _destinations()])
def test_destinations_that_cannot_hold_every_layer(loader, into, fact):
    before = loader.misses, loader.read_bytes
    with pytest.raises(UnsupportedError, match=fact):
        loader.stream(loader.lookup(TOKENS), into)
    assert (loader.misses, loader.read_bytes) == before


def test_layers_may_lie_between_one_another(loader):
    whole = np.zeros((HEADS, 50, 2, LAYERS, K_DIM), BF16)
    keys, values = (np.moveaxis(whole[:, :, half], 2, 0) for half in (0, 1))
    loaded = loader.load(loader.lookup(TOKENS), (keys[..., :K_DIM], np.zeros((LAYERS, HEADS, 50, V_DIM), BF16)))
    assert len(loaded) == LAYERS
    assert not whole[:, :, 1].any()
    assert values.shape == keys.shape


def test_a_closed_archive_is_said_to_be_closed(path, caplog):
    archive = pltpack.open(path)
    loader = archive.loader()
    hit = loader.lookup(TOKENS)
    archive.close()
    for call in (lambda: loader.lookup(TOKENS), lambda: loader.load(hit), loader.prepare, lambda: loader.pin(hit),
                 archive.loader, lambda: archive.read("s")):  # fmt: skip
        with pytest.raises(UnsupportedError, match="archive is closed"):
            call()
    assert not caplog.records
    with pltpack.open(path) as other:
        loader = other.loader()
        loader.close()
        with pytest.raises(UnsupportedError, match="loader is closed"):
            loader.lookup(TOKENS)


def test_only_plain_dynamic_caches_are_filled(loader):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, MistralConfig, cache_utils

    shape = {"hidden_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": K_DIM}
    config = LlamaConfig(num_hidden_layers=LAYERS, **shape)
    hit = loader.lookup(TOKENS)
    refused = [
        cache_utils.StaticCache(config=config, max_cache_len=64),
        cache_utils.EncoderDecoderCache(cache_utils.DynamicCache(), cache_utils.DynamicCache()),
        cache_utils.DynamicCache(offloading=True),
        cache_utils.Cache(layers=[cache_utils.StaticLayer(64)] * LAYERS),
        cache_utils.DynamicCache(config=LlamaConfig(num_hidden_layers=LAYERS + 1, **shape)),
    ]
    for cache in refused:
        with pytest.raises(UnsupportedError, match=r"cache|Cache"):
            loader.load(hit, cache)
    plain = cache_utils.DynamicCache(config=config)
    loader.load(hit, plain)
    assert plain.get_seq_length() == hit.tokens
    # The archive knows of no window; the cache does.
    sliding = cache_utils.DynamicCache(config=MistralConfig(num_hidden_layers=LAYERS, sliding_window=8, **shape))
    loader.load(hit, sliding)
    assert all(layer.is_sliding and layer.sliding_window == 8 for layer in sliding.layers)
