"""Time to first token, cold and warm, by depth; time per further token; and what the stages did meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive.extract import decompress
from pltpack.archive.reader import Archive
from pltpack.errors import NotFoundError, UnsupportedError
from pltpack.names import session_to_file
from pltpack.serve.cache import WarmCache
from pltpack.serve.loader import Loader
from pltpack.serve.timeline import Span
from pltpack.serve.warm import check_model, warm_cache, warm_generate

#: Tokens generated to tell a cache's own cost.
LATENCY_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Measured:
    """What `measure` found: the figures as JSON values, and the spans behind some of them, by title."""

    figures: dict[str, Any]
    timelines: dict[str, list[Span]]


def measure(
    model: Any,
    archives: Sequence[Archive],
    session: str | None = None,
    depths: Iterable[int] = range(1, 8),
    repeats: int = 3,
    bytes_per_second: float = 200e6,
    progress: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure how soon a model gives a session's next token, the session's last token being the rest of the prompt.

    Everything runs in this process in turn; figures are the medians of `repeats` runs, after one that is not counted.
    Loads keep no decoded centroids, so that each decodes everything.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    archives : sequence of Archive
        Of the same sessions; the first gives the raw safetensors file.
    session : str, optional
        By default the longest of the first archive.
    depths : iterable of int
    repeats : int
    bytes_per_second : float
        Speed of the disk that the throttled figures stand for.
    progress : callable, optional
        Told what comes next.

    Raises
    ------
    NotFoundError
        If an archive lacks the session.
    UnsupportedError
        If the session is shorter than two blocks.
    """
    depths = list(depths)
    session = session or _longest(archives[0])
    tokens = archives[0].snapshot(session).tokens
    if len(tokens) < 2 * archives[0].manifest.block:
        raise UnsupportedError(f"session {session!r} is too short to measure", archives[0].path)
    figures: dict[str, Any] = {"session": session, "tokens": len(tokens), "bytes_per_second": bytes_per_second}
    timelines: dict[str, list[Span]] = {}
    progress("cold")
    figures["cold_seconds"] = _median(repeats, lambda: _cold(model, tokens))
    cold_token = warm_generate(model, archives[0], tokens, 1, compressed=False).tokens[0]
    progress("raw safetensors")
    figures |= _raw(model, archives[0], session, tokens, repeats, bytes_per_second)
    rows = []
    for archive in archives:
        check_model(model, archive.identity)
        rows.append(_archive(model, archive, session, tokens, depths, repeats, bytes_per_second, timelines, progress))
        rows[-1]["first_token_is_the_cold_one"] = rows[-1].pop("token") == cold_token
        for row in rows[-1]["depths"]:
            row["sooner"] = figures["cold_seconds"] / row["seconds"]
    figures["archives"] = rows
    progress("time per token")
    figures["latency"] = _latency(model, archives[0], tokens)
    return Measured(figures, timelines)


def _longest(archive: Archive) -> str:
    if not archive.sessions:
        raise NotFoundError("holds no sessions", archive.path)
    return max(archive.sessions, key=lambda name: len(archive.shard(name).tokens))


def _median(repeats: int, run: Callable[[], float]) -> float:
    return statistics.median(run() for _ in range(repeats))


def _cold(model: Any, tokens: np.ndarray) -> float:
    return warm_generate(model, None, tokens, 1, compressed=False).seconds_to_first  # type: ignore[arg-type]


def _raw(model: Any, archive: Archive, session: str, tokens: np.ndarray, repeats: int, speed: float) -> dict[str, Any]:
    """First token over a cache that is stored as it is, in a safetensors file."""
    with tempfile.TemporaryDirectory() as folder:
        decompress(archive.path, folder, sessions=[session])
        file = Path(folder) / f"{session_to_file(session)}.safetensors"
        size = file.stat().st_size

        def run(pause: float) -> float:
            begin = time.perf_counter()
            time.sleep(pause)
            _first_token(model, _raw_cache(model, file, len(tokens) - 1), tokens)
            return time.perf_counter() - begin

        run(0)
        return {
            "raw_bytes": size,
            "raw_seconds": _median(repeats, lambda: run(0)),
            "raw_throttled_seconds": _median(repeats, lambda: run(size / speed)),
        }


def _raw_cache(model: Any, file: Path, tokens: int) -> Any:
    from safetensors import safe_open
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with safe_open(file, "pt") as opened:
        for layer in range(model.config.get_text_config(decoder=True).num_hidden_layers):
            pair = (opened.get_tensor(f"layers.{layer}.{name}") for name in ("keys", "values"))
            cache.update(*(array[None, :, :tokens].to(model.dtype) for array in pair), layer)
    return cache


def _first_token(model: Any, cache: Any, tokens: np.ndarray) -> int:
    import torch

    with torch.no_grad():
        batch = torch.as_tensor(tokens[None, -1:].astype(np.int64), device=model.device)
        return int(model(batch, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def _archive(
    model: Any, archive: Archive, session: str, tokens: np.ndarray, depths: Sequence[int], repeats: int, speed: float,
    timelines: dict[str, list[Span]], progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    kinds = {"seconds": None, "throttled_seconds": speed, "throttled_load_seconds": speed}
    with contextlib.ExitStack() as stack:
        loaders: dict[tuple[int, float | None], Loader] = {}
        for depth, limit in itertools.product(depths, (None, speed)):
            # What an engine that serves has ready, the index and the codec's tables, is made here.
            loader = archive.loader(depth=depth, memory=0, read_bytes_per_second=limit)
            loaders[depth, limit] = stack.enter_context(loader)
            start = warm_generate(model, loader, tokens, 1)
            if start.miss is not None or not start.cached_tokens:
                raise NotFoundError(f"session {session!r} cannot be loaded ({start.miss})", archive.path)
            if limit is not None and depth in (1, 3, max(depths)):
                title = f"{archive.manifest.quality}, depth {depth}, reads at {speed / 1e6:g} MB/s"
                timelines[title] = warm_generate(model, loader, tokens, 1).cache.stream.timeline.spans
        times: dict[tuple[int, str], list[float]] = {key: [] for key in itertools.product(depths, kinds)}
        # Depths take turns, so that what else the machine does falls on all of them.
        for repeat in range(repeats):
            progress(f"{archive.path.name}, run {repeat + 1} of {repeats}")
            for depth, kind in times:
                run = _load if kind == "throttled_load_seconds" else functools.partial(_warm, model)
                times[depth, kind].append(run(loaders[depth, kinds[kind]], tokens))
    rows = [{"depth": depth} | {kind: statistics.median(times[depth, kind]) for kind in kinds} for depth in depths]
    return {
        "archive": str(archive.path), "quality": archive.manifest.quality, "depths": rows, "token": start.tokens[0],
        "shard_bytes": int(archive.shard(session).units["length"].sum()),
    }  # fmt: skip


def _warm(model: Any, loader: Loader, tokens: np.ndarray) -> float:
    return warm_generate(model, loader, tokens, 1).seconds_to_first


def _load(loader: Loader, tokens: np.ndarray) -> float:
    """Seconds of a load alone, whose layers nobody works with."""
    hit = loader.lookup(tokens)
    begin = time.perf_counter()
    loader.load(hit)
    return time.perf_counter() - begin


def _latency(model: Any, archive: Archive, tokens: np.ndarray) -> dict[str, float]:
    """Seconds per further token over a plain cache and over a loaded one, which take turns token by token."""
    import torch
    from transformers import DynamicCache

    with archive.loader() as loader:
        hit = loader.lookup(tokens).first(len(tokens) - 1)
        warm: WarmCache = warm_cache(model, loader, hit, len(tokens) + LATENCY_TOKENS)
        plain = DynamicCache(config=model.config)
        for index, layer in enumerate(warm.layers):
            plain.update(layer.keys.clone(), layer.values.clone(), index)
        times: dict[str, list[float]] = {"plain": [], "warm": []}
        caches = [("plain", plain), ("warm", warm)]
        batch = torch.as_tensor(tokens[None, -1:].astype(np.int64), device=model.device)
        with torch.no_grad():
            for step in range(LATENCY_TOKENS):
                for name, cache in caches if step % 2 else caches[::-1]:
                    begin = time.perf_counter()
                    model(batch, cache=cache, use_cache=True, logits_to_keep=1)
                    times[name].append(time.perf_counter() - begin)
        warm.close()
    # The first tokens of each find memory that nobody has touched yet.
    found = {f"{name}_seconds": statistics.median(values[4:]) for name, values in times.items()}
    return found | {"change": found["warm_seconds"] / found["plain_seconds"] - 1}
