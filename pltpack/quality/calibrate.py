"""``pltpack calibrate``: learn a model's profile, from text and the model or from dumps alone.

With a model, windows of text are prefilled, and labels sampled from what the model predicts after three quarters of a
window give gradients with respect to the keys and values before. What every window gave is kept in ``OUT.partial``
until the profile is written, so that an interrupted calibration goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.archive import profiles
from pltpack.archive.distributed import scanned
from pltpack.archive.engine import Engine, open_engine
from pltpack.codec.base import SINK_TOKENS
from pltpack.codec.profile import VERSION, pack_about
from pltpack.codec.rate import NOT_MEASURED
from pltpack.codec.rows import from_rows
from pltpack.dumps import open_dumps
from pltpack.errors import ConflictError, NotFoundError, UnsupportedError
from pltpack.format import state
from pltpack.quality.kl_fit import UNKNOWN
from pltpack.quality.passes import dump_rows, model_cache, model_passes
from pltpack.quality.profile_fit import Fitted, Fitter, group_size
from pltpack.quality.rows import Blocks, joined, to_bits
from pltpack.quality.windows import Windows
from pltpack.snapshot import DTYPES, Identity, Snapshot

#: Default tokens of calibration, and of a window.
TOKENS, WINDOW = 40960, 1024
#: Share of a window's tokens that are cached; the others follow.
CACHED = 0.75
#: Shortest window, and shortest session of dumps that is used.
LEAST_WINDOW = 16
#: Tokens that are read after a cache where KL divergence is measured, at most: a guard reads as many (docs/guard.md).
READ = 128
#: How many times shorter than windows' caches others are by which it is measured, and their least tokens and reading.
SHORTER, LEAST_SHORT, LEAST_READ = 4, 12, 8
#: Most shared components of a group without a rank given, and the share of the model's BF16 bytes for the profile.
MAX_RANK, PROFILE_SHARE = 1500, 0.06
# Bytes of a quantized entry of a basis, compressed: on the safe side of what is measured.
_ENTRY_BYTES = 0.5

PathLike = str | os.PathLike[str]
Progress = Callable[[str, int, int], None]


def calibrate(
    model: PathLike,
    texts: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    profile_rank: int | None = None,
    layer_group: int | None = None,
    name: str | None = None,
    compute: str = "F32",
    device: str = "cpu",
    seed: int = 0,
    force: bool = False,
    engine: str | Engine = "local",
    address: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Learn a profile from a model and text, and write it.

    Parameters
    ----------
    model : path
        Folder of a transformers model.
    texts : path or paths
        Plain text or prompt files, mixed evenly.
    output : path
        The profile, a safetensors file.
    tokens, window : int
        Tokens of all windows, and of one.
    profile_rank : int, optional
        Shared components of a layer group; what `PROFILE_SHARE` of the model's bytes can hold if not given.
    layer_group : int, optional
        Layers in a group; all that fit if not given.
    name, compute, device : str
        As in `pltpack.quality.capture.capture`.
    seed : int
        Of the labels that are sampled.
    force : bool
        Replace a profile that exists.
    engine, address
        As in `pltpack.archive.create.compress`: workers of a cluster run the model over the windows, each call with as
        many threads as this process would take, so that the profile is the same. They must see the model's folder, or
        the dumps, at the same path.
    progress : callable, optional
        ``progress(stage, done, total)``, in bytes of cache while the model runs, else in parts of the stage.

    Returns
    -------
    dict
        ``output``, ``digest``, ``bytes`` (compressed, as an archive holds it), ``share`` (of the model's BF16 bytes),
        ``tokens``, ``rank``, ``layer_group``, ``importance`` (R² and gain), ``kl``, ``kl_length``, ``seconds``
        (``model``: its passes over the windows, ``rest``, and ``all``).

    Raises
    ------
    ConflictError
        If the profile exists and `force` is not set, or ``OUTPUT.partial`` is something else.
    UnsupportedError
        If the text is too short, or the model's caches cannot be calibrated for.
    """
    from pltpack.quality import kl_fit
    from pltpack.quality.calibration_text import cut_windows
    from pltpack.quality.chat_tokens import turn_ends
    from pltpack.quality.model import load_model, load_tokenizer

    started, output = time.perf_counter(), Path(output)
    _check_new(output, force)
    _check_sizes(tokens, window, profile_rank, layer_group)
    tokenizer = load_tokenizer(Path(model))
    files = [texts] if isinstance(texts, str | os.PathLike) else list(texts)
    loaded = load_model(Path(model), name, compute, device)
    window = min(window, loaded.max_tokens or window)
    with ThreadPoolExecutor(1, thread_name_prefix="pltpack-identity") as aside:
        # Weights are hashed while the text becomes tokens.
        hashing = aside.submit(loaded.identity, "BF16")
        ids = cut_windows(files, tokenizer, max(1, tokens // window), window)
        identity = hashing.result()
    vocabulary = int(loaded.config.vocab_size)
    if int(ids.max()) >= vocabulary:
        raise UnsupportedError(f"text has token {int(ids.max())}, but the model knows {vocabulary}")
    cut = int(CACHED * window)
    blocks = Blocks(identity.layers)
    size = group_size(blocks, layer_group)
    settings = {
        "version": VERSION, "identity": identity.digest(), "compute": compute, "seed": seed, "cut": cut,
        "windows": list(ids.shape), "tokens": hashlib.sha256(ids.tobytes()).hexdigest(),
    }  # fmt: skip
    windows = Windows(output.with_name(output.name + ".partial"), settings, len(ids), blocks)
    stage = progress or _silent
    per_window = window * sum(layer.bytes_per_token for layer in identity.layers)
    passes = 0.0
    missing = windows.missing()
    with open_engine(engine, address) as workers:
        found = model_passes(workers, loaded, Path(model), (name, compute, device), ids, missing, cut, identity, seed)
        for index in missing:
            stage("model", index * per_window, len(ids) * per_window)
            before = time.perf_counter()
            window_found = next(found)
            passes += time.perf_counter() - before
            windows.put(index, *window_found)
    weights = 2 * int(loaded.network.num_parameters())
    rank = profile_rank or default_rank(blocks, size, PROFILE_SHARE * weights)
    fitted = Fitter(windows, size, rank, cut, stage).fit()
    sinks = _sinks(windows, _templates(loaded, tokenizer, ids))
    source = {"kind": "model", "tokens": int(ids.size), "window": window, "files": len(files), "seed": seed}
    ends = turn_ends(tokenizer, loaded.config, getattr(loaded.network, "generation_config", None))
    arrays = _arrays(fitted, sinks, UNKNOWN, ends, source)
    probes = _probes(windows, ids, cut, kl_fit.WINDOWS, identity)
    few = cut // SHORTER
    short = _probes(windows, ids, few, kl_fit.SHORT_WINDOWS, identity) if few >= LEAST_SHORT else []
    found_kl = kl_fit.measure(loaded, arrays, identity, probes, short, stage)
    kl, length = found_kl.kl, found_kl.length
    arrays["about"] = _about(fitted, kl, ends, {**source, "kl": found_kl.measured}, length)
    report = _write(output, arrays, identity, windows)
    learned = fitted.importance
    assert learned is not None
    return {
        **report, "share": report["bytes"] / weights, "tokens": int(ids.size), "rank": rank, "layer_group": size,
        "importance": {"r2": learned.explained, "gain_bits": learned.gain, "possible_bits": learned.possible},
        "kl": kl, "kl_length": length, "seconds": _seconds(started, passes),
    }  # fmt: skip


def calibrate_from_dumps(
    dumps: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    tokens: int = TOKENS,
    profile_rank: int | None = None,
    layer_group: int | None = None,
    force: bool = False,
    engine: str | Engine = "local",
    address: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Learn a profile from dumps alone: errors are weighed by variance, and all tokens alike.

    Parameters and what is returned are as of `calibrate`. KL divergence cannot be predicted by such a profile.

    Raises
    ------
    NotFoundError
        If there are no dumps.
    IdentityError
        If they are of different models.
    UnsupportedError
        If none of them is long enough.
    """
    started, output = time.perf_counter(), Path(output)
    _check_new(output, force)
    _check_sizes(tokens, WINDOW, profile_rank, layer_group)
    with open_engine(engine, address) as workers:
        return _from_dumps(dumps, output, tokens, profile_rank, layer_group, workers, progress or _silent, started)


def _from_dumps(
    dumps: PathLike | Sequence[PathLike], output: Path, tokens: int, profile_rank: int | None, layer_group: int | None,
    engine: Engine | None, stage: Progress, started: float,
) -> dict[str, Any]:  # fmt: skip
    paths = [dumps] if isinstance(dumps, str | os.PathLike) else dumps
    if engine is None:
        snapshots = [snapshot for path in paths for snapshot in open_dumps(path)]
    else:
        snapshots = [snapshot for path in paths for snapshot in scanned(engine, [path])]
    if not snapshots:
        raise NotFoundError("there are no dumps to calibrate on")
    for snapshot in snapshots[1:]:
        snapshots[0].identity.require_same(snapshot.identity, snapshot.origin)
    identity = snapshots[0].identity
    parts = _dump_windows(snapshots, tokens)
    if not parts:
        raise UnsupportedError(f"no session has the {LEAST_WINDOW} tokens that calibration needs")
    blocks = Blocks(identity.layers)
    size = group_size(blocks, layer_group)
    settings = {"version": VERSION, "identity": identity.digest(), "started": time.time_ns()}
    windows = Windows(output.with_name(output.name + ".partial"), settings, len(parts), blocks)
    found = dump_rows(engine, parts)
    for index in range(len(parts)):
        stage("dumps", index, len(parts))
        windows.put(index, *next(found))
    rank = profile_rank or default_rank(blocks, size, None)
    fitted = Fitter(windows, size, rank, None, stage).fit()
    count = sum(stop - start for _, start, stop in parts)
    arrays = _arrays(fitted, _sinks(windows, []), UNKNOWN, [], {"kind": "dumps", "tokens": count, "kl": NOT_MEASURED})
    report = _write(output, arrays, identity, windows)
    return {**report, "tokens": count, "rank": rank, "layer_group": size, "importance": None, "kl": None,
            "kl_length": None, "seconds": _seconds(started)}  # fmt: skip


def default_rank(blocks: Blocks, layer_group: int, budget: float | None) -> int:
    """Shared components that keep a profile within `budget` bytes; at most `MAX_RANK` and a quarter of the rows."""
    count = len(blocks.layers)
    rows = [blocks.layer_rows[min(i + layer_group, count)] - blocks.layer_rows[i] for i in range(0, count, layer_group)]
    most = max(1, min(MAX_RANK, min(rows) // 4))
    if budget is None:
        return most
    own = sum((b - a) ** 2 for a, b in zip(blocks.layer_rows[:-1], blocks.layer_rows[1:], strict=True))
    fixed = _ENTRY_BYTES * own + 2 * sum(width**2 for width in blocks.widths) + 20 * blocks.rows
    return int(np.clip((budget - fixed) / (_ENTRY_BYTES * sum(rows)), 1, most))


def _probes(
    windows: Windows, ids: np.ndarray, cut: int, count: int, identity: Identity
) -> list[tuple[Snapshot, np.ndarray]]:
    """The caches of the first tokens of some windows, and what is read after them."""
    chosen = np.unique(np.linspace(0, len(ids) - 1, count).round().astype(int))
    stop = cut + min(READ, max(cut // 4, LEAST_READ))
    return [(_snapshot(windows, index, ids[index][:cut], identity), ids[index][cut:stop]) for index in chosen]


def _snapshot(windows: Windows, index: int, tokens: np.ndarray, identity: Identity) -> Snapshot:
    """The cache of a window's first tokens, of its stored rows."""
    shapes = [[(layer.heads, len(tokens), width) for width in (layer.k_dim, layer.v_dim)] for layer in identity.layers]
    out = [(np.empty(keys, DTYPES["BF16"]), np.empty(values, DTYPES["BF16"])) for keys, values in shapes]
    from_rows(windows.rows(index, first=0)[: len(tokens)], out, identity.layers, identity, 0)
    return Snapshot.from_arrays("calibration", tokens, out, identity)


def _dump_windows(snapshots: Sequence[Snapshot], tokens: int) -> list[tuple[Snapshot, int, int]]:
    """Windows of sessions: first ones of all sessions, then second ones, and so on."""
    found, left, start = [], tokens, 0
    while left > 0:
        parts = [(s, start, min(start + WINDOW, len(s), start + left)) for s in snapshots if len(s) > start]
        if not parts:
            break
        for snapshot, first, stop in parts:
            stop = min(stop, first + left)
            if stop - first >= LEAST_WINDOW:
                found.append((snapshot, first, stop))
                left -= stop - first
        start += WINDOW
    return found


def _templates(model: Any, tokenizer: Any, ids: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids and rows as stored of what sessions often begin with; a shorter start is all of a template."""
    from pltpack.quality.chat_tokens import chat_start

    chat, start = chat_start(tokenizer, SINK_TOKENS), getattr(tokenizer, "bos_token_id", None)
    known = set(ids[:, 0].tolist())
    if chat is not None and int(chat.max()) < int(model.config.vocab_size):
        known.add(int(chat[0]))
        yield chat, joined(*model_cache(model, chat))
    if start is not None and start not in known:
        yield np.array([start], np.int32), joined(*model_cache(model, np.array([start])))


def _sinks(windows: Windows, templates: Any) -> dict[str, np.ndarray]:
    """The arrays of templates: the mean of all windows' first tokens, then the others, filled up with the mean."""
    mean = np.mean([windows.first(index) for index in range(windows.count)], axis=0)
    tokens, bits = [np.full(SINK_TOKENS, -1)], [to_bits(mean)]
    for ids, rows in templates:
        tokens.append(np.concatenate([ids, np.full(SINK_TOKENS - len(ids), -1)]))
        bits.append(to_bits(np.concatenate([rows, mean[len(ids) :]])))
    return {"sink.tokens": np.stack(tokens).astype("<i4"), "sink.bits": np.stack(bits).astype("<u2")}


def _arrays(
    fitted: Fitted, sinks: dict[str, np.ndarray], kl: list[float], ends: list[int], source: dict[str, Any]
) -> dict[str, np.ndarray]:
    return {**fitted.arrays, **sinks, "about": _about(fitted, kl, ends, source)}


def _about(
    fitted: Fitted, kl: list[float], ends: list[int], source: dict[str, Any], length: list[float] | None = None
) -> np.ndarray:
    more = {} if length is None else {"kl_length": length}
    return pack_about({"version": VERSION, "layer_group": fitted.layer_group, "floor": fitted.floor, "kl": kl,
                       "turn_ends": ends, "source": source, **more})  # fmt: skip


def _write(output: Path, arrays: dict[str, np.ndarray], identity: Identity, windows: Windows) -> dict[str, Any]:
    digest = profiles.save(output, arrays, identity)
    windows.remove()
    return {"output": output, "digest": digest, "bytes": len(state.pack(arrays))}


def _seconds(started: float, passes: float = 0.0) -> dict[str, float]:
    whole = time.perf_counter() - started
    return {"model": passes, "rest": whole - passes, "all": whole}


def _check_new(output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise ConflictError("exists already (replace it with --force)", output)


def _check_sizes(tokens: int, window: int, profile_rank: int | None, layer_group: int | None) -> None:
    if window < LEAST_WINDOW or tokens < 1:
        raise UnsupportedError(f"windows of {window} tokens and {tokens} in all: at least {LEAST_WINDOW} are needed")
    for name, value in (("profile rank", profile_rank), ("layer group", layer_group)):
        if value is not None and value < 1:
            raise UnsupportedError(f"{name} of {value}: at least 1 is needed")


def _silent(stage: str, done: int, total: int) -> None:
    """Nobody watches."""
    del stage, done, total
