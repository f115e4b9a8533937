"""What calibration learns of each window, here or by the workers of an engine; windows do not depend on each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive.engine import Engine
from pltpack.codec.base import SINK_TOKENS
from pltpack.codec.rows import to_rows
from pltpack.errors import IdentityError, UnsupportedError
from pltpack.quality.rows import joined
from pltpack.snapshot import Identity, Snapshot

#: Rows, first rows as stored, and gradients of a window.
Pass = tuple[np.ndarray, np.ndarray, np.ndarray]
#: Name, compute dtype and device of a model, as in `pltpack.quality.capture.capture`.
Choices = tuple[str | None, str, str]


def model_passes(
    engine: Engine | None, model: Any, folder: Path, choices: Choices, ids: np.ndarray, windows: Sequence[int],
    cut: int, identity: Identity, seed: int,
) -> Iterator[Pass]:  # fmt: skip
    """Run a model over windows.

    Parameters
    ----------
    engine : Engine or None
        None: here.
    model : Model
        Loaded from `folder` by `choices`, which is how workers load theirs.
    folder : Path
    choices : Choices
    ids : ndarray
        Token ids ``[windows, T]``.
    windows : sequence of int
        Which to run over, in this order.
    cut : int
        Tokens of a window that are cached.
    identity : Identity
    seed : int
        Of the first window's labels.
    """
    if engine is None:
        yield from (_pass(model, ids[index], cut, identity, seed + index) for index in windows)
        return
    import torch

    # The number of threads shows in the last bits.
    threads = torch.get_num_threads()
    calls = ((os.path.abspath(folder), choices, threads, ids[index], cut, identity, seed + index) for index in windows)
    yield from engine.in_order(_worker_pass, calls, threads)


def dump_rows(
    engine: Engine | None, parts: Sequence[tuple[Snapshot, int, int]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows, and first rows as stored, of windows ``[start, stop)`` of sessions."""
    if engine is None:
        yield from (_rows(*part) for part in parts)
    else:
        yield from engine.in_order(_rows, parts)


def _worker_pass(
    folder: str, choices: Choices, threads: int, tokens: np.ndarray, cut: int, identity: Identity, seed: int
) -> Pass:
    import torch

    torch.set_num_threads(threads)
    model = _loaded(folder, choices)
    if model.identity("BF16") != identity:
        raise IdentityError("the model is another one here than where calibration began", folder)
    return _pass(model, tokens, cut, identity, seed)


@functools.lru_cache(maxsize=1)
def _loaded(folder: str, choices: Choices) -> Any:
    from pltpack.quality.model import load_model

    return load_model(Path(folder), *choices)


def _pass(
    model: Any, tokens: np.ndarray, cut: int, identity: Identity, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, first rows as stored, and gradients of one window."""
    import torch

    from pltpack.quality.gradients import cache_gradients

    keys, values = model_cache(model, tokens)
    generator = torch.Generator().manual_seed(seed)
    cached = [[array[:, :cut] for array in side] for side in (keys, values)]
    gradients = cache_gradients(model, cached[0], cached[1], tokens[cut:], generator, identity.rope)
    first = joined([k[:, :SINK_TOKENS] for k in keys], [v[:, :SINK_TOKENS] for v in values])
    return _unrotated(list(zip(keys, values, strict=True)), identity, 0), first, joined(*gradients)


def model_cache(model: Any, tokens: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values per layer, float32 ``[H, T, D]`` rounded to bfloat16, keys as the model holds them."""
    from pltpack.quality.model import prefill

    layers = prefill(model, tokens).layers
    keys, values = ([getattr(layer, side)[0].bfloat16().float().cpu().numpy() for layer in layers]
                    for side in ("keys", "values"))  # fmt: skip
    return keys, values


def _unrotated(arrays: list[tuple[np.ndarray, np.ndarray]], identity: Identity, position: int) -> np.ndarray:
    rows, finite = to_rows(arrays, identity.layers, identity, position)
    if not finite.all():
        raise UnsupportedError("keys or values are not finite, or too large to calibrate on")
    return rows


def _rows(snapshot: Snapshot, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and first rows as stored of a window of a dump."""
    arrays = [snapshot.layer(index, start, stop) for index in range(len(snapshot.identity.layers))]
    try:
        rows = _unrotated(arrays, snapshot.identity, start)
    except UnsupportedError as error:
        raise error.at(snapshot.origin or snapshot.session) from None
    head = [snapshot.layer(index, 0, SINK_TOKENS) for index in range(len(arrays))]
    return rows, joined([k.astype(np.float32) for k, _ in head], [v.astype(np.float32) for _, v in head])
