"""Tiers that need the model beside those that do not: bits a token, seconds a token, and where storing beats computing.

Usage: python -m benchmarks.bound MODEL_DIR DUMP... [--sessions A,B] [--coded A,B] [--tiers lossless,q4]
           [--made recompute:float32] [--speeds 200,3000] [--continuations FILE] [--kernels A,B] [--json FILE]

Each line is printed, and FILE is written, as soon as it is known. `--coded` names the sessions whose tokens are also
coded with the model's own probabilities: two of its steps a token. `--kernels` names those whose cache is also made
with other kernels than the captured one (attention written out), and compared by what the model makes of the true
continuation, which `--continuations` holds. Seconds are CPU seconds of this process, so run it with one thread; only
loads at a disk's speed (`--speeds`, MB/s) are wall time, each the least of three. Figures go to docs/bound.md.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import pltpack
from pltpack.quality import token_model
from pltpack.quality.model import Model, load_model, prefill, torch_dtype
from pltpack.quality.recompute import Rebuilder
from pltpack.quality.recompute import compress as compress_by_model
from pltpack.quality.scoring import compare, log_probabilities
from pltpack.snapshot import Snapshot

#: Tiers that need the model, each with how it is run.
MADE = "recompute:float32,lossless+model:bfloat16,lossless+model:int8,lossless+model:float32"
#: Loads that are timed of each archive and speed.
LOADS = 3


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and its CPU seconds."""
    begin = time.process_time()
    return work(), time.process_time() - begin


def payload(archive: Path) -> int:
    """Bytes of an archive without headers, manifest and tables: units, digests and coded tokens."""
    with pltpack.open(archive) as opened:
        segments = [*opened.libraries, *map(opened.shard, opened.sessions)]
        total = sum(int(segment.units["length"].sum()) for segment in segments)
        for segment in segments:
            tables = segment.container.tables
            total += sum(tables[name].nbytes for name in ("recompute.digests", "recompute.tokens") if name in tables)
        for library in opened.libraries:
            for index in range(len(library.states)):
                if library.state_entry(index)[0] == "recompute":
                    total += library.state(index)["streams"].nbytes
        return total


def row(name: str, archive: Path, encode: float, decode: float) -> dict[str, Any]:
    """One line of the table."""
    with pltpack.open(archive) as opened:
        stats = opened.stats()
    tokens = stats["tokens"]
    return {
        "tier": name, "tokens": tokens, "bits_per_token": 8 * stats["archive_bytes"] / tokens,
        "payload_bits_per_token": 8 * payload(archive) / tokens,
        "payload_bits_per_element": 8 * payload(archive) / stats["elements"],
        "encode_ms_per_token": 1000 * encode / tokens, "decode_ms_per_token": 1000 * decode / tokens,
    }  # fmt: skip


def stored(tier: str, snapshots: Sequence[Snapshot], folder: Path) -> dict[str, Any]:
    """A tier that needs no model."""
    archive = folder / tier
    _, encode = timed(lambda: pltpack.compress(snapshots, archive, quality=tier, dedup=False))
    with pltpack.open(archive) as opened:
        _, decode = timed(lambda: [opened.read(name) for name in opened.sessions])
    return row(tier, archive, encode, decode)


def made(quality: str, predictor: str, snapshots: Sequence[Snapshot], model: Path, folder: Path) -> dict[str, Any]:
    """A tier that needs the model; what it gives back is compared with the dumps and with a fresh prefill."""
    archive = folder / f"{quality}-{predictor}"
    _, encode = timed(lambda: compress_by_model(snapshots, archive, model, quality=quality, predictor=predictor))
    rebuild = Rebuilder(model)
    rebuild._predictor(predictor)
    assert rebuild.weights
    with pltpack.open(archive, rebuild=rebuild) as opened:
        found, decode = timed(lambda: [opened.read(snapshot.session) for snapshot in snapshots])
    line = row(f"{quality} {predictor}", archive, encode, decode)
    line["bit_exact"] = all(equal(a, b) for a, b in zip(snapshots, found, strict=True))
    if quality == "recompute":
        loaded = load_model(model)
        line["as_a_fresh_prefill"] = all(equal(cache_of(loaded, each), each) for each in found)
    return line


def equal(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots have equal bits."""
    return all(
        x.tobytes() == y.tobytes()
        for index in range(len(a.identity.layers))
        for x, y in zip(a.layer(index), b.layer(index), strict=True)
    )


def cache_of(loaded: Model, snapshot: Snapshot) -> Snapshot:
    """The cache that one prefill makes, rounded as the session's."""
    from pltpack.dumps import from_dynamic_cache

    dtype = torch_dtype(snapshot.identity.layers[0].dtype)
    cache = prefill(loaded, snapshot.tokens)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    return from_dynamic_cache(cache, snapshot.tokens, snapshot.session, snapshot.identity)


def coded(loaded: Model, snapshot: Snapshot) -> dict[str, Any]:
    """Tokens coded with the model's probabilities, beside its cross-entropy in one pass."""
    import torch

    ids = torch.as_tensor(np.asarray(snapshot.tokens, np.int64))[None]
    with torch.no_grad():
        logs = loaded.network(ids).logits[0].double().log_softmax(-1)
    entropy = -float(logs[:-1].gather(1, ids[0, 1:, None]).sum()) / math.log(2)
    data, seconds = timed(lambda: token_model.encode(loaded, snapshot.tokens))
    tokens = len(snapshot)
    return {"session": snapshot.session, "tokens": tokens, "entropy_bits": entropy, "coded_bytes": len(data),
            "entropy_bits_per_token": entropy / tokens, "bits_per_token": 8 * len(data) / tokens,
            "over_entropy": 8 * len(data) / entropy,
            "encode_and_check_ms_per_token": 1000 * seconds / tokens}  # fmt: skip


def other_kernels(loaded: Model, snapshot: Snapshot, text: np.ndarray) -> dict[str, Any]:
    """How far a cache is from the captured one that is made with attention written out instead of fused."""
    fused = loaded.network.config._attn_implementation
    loaded.network.set_attn_implementation("eager")
    try:
        made = cache_of(loaded, snapshot)
    finally:
        loaded.network.set_attn_implementation(fused)
    before = log_probabilities(loaded.network, snapshot, text)
    found = compare(before, log_probabilities(loaded.network, made, text), text)
    pairs = [(x, y) for index in range(len(snapshot.identity.layers))
             for x, y in zip(snapshot.layer(index), made.layer(index), strict=True)]  # fmt: skip
    differ = sum(int((x.view(np.uint16) != y.view(np.uint16)).sum()) for x, y in pairs)
    return {"session": snapshot.session, "attention": [fused, "eager"], "kl": found["kl"],
            "elements_that_differ": differ / sum(x.size for x, _ in pairs)}  # fmt: skip


def general(snapshots: Sequence[Snapshot]) -> float:
    """Bits a token of ``xz -9`` over all token ids as int32."""
    raw = b"".join(np.ascontiguousarray(snapshot.tokens, "<i4").tobytes() for snapshot in snapshots)
    return 8 * len(lzma.compress(raw, preset=9)) / sum(map(len, snapshots))


def loads(tier: str, archive: Path, snapshots: Sequence[Snapshot], speeds: Sequence[float]) -> list[dict[str, Any]]:
    """Wall milliseconds a token until a whole cache is there, read at a disk's speed."""
    out = []
    with pltpack.open(archive) as opened:
        for speed in speeds:
            with opened.loader(memory=0, read_bytes_per_second=speed) as loader:
                hits = [loader.lookup(snapshot.tokens) for snapshot in snapshots]
                times = []
                for _ in range(LOADS):
                    begin = time.perf_counter()
                    for hit in hits:
                        loader.load(hit)
                    times.append(time.perf_counter() - begin)
            tokens = sum(hit.tokens for hit in hits)
            out.append({"tier": tier, "bytes_per_second": speed, "ms_per_token": 1000 * min(times) / tokens})
    return out


def names(text: str) -> list[str]:
    """What a comma separates."""
    return [part for part in text.split(",") if part]


class Report:
    """What was measured so far, printed and kept in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lists = path, dict[str, list[dict[str, Any]]]()

    def add(self, part: str, line: dict[str, Any]) -> None:
        """One more line."""
        self._lists.setdefault(part, []).append(line)
        print(part, json.dumps(line), flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self._lists, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("dumps", type=Path, nargs="+")
    parser.add_argument("--sessions", default="")
    parser.add_argument("--coded", default="")
    parser.add_argument("--tiers", default="lossless,q4,turboquant-3")
    parser.add_argument("--made", default=MADE)
    parser.add_argument("--speeds", default="200,3000")
    parser.add_argument("--continuations", type=Path)
    parser.add_argument("--kernels", default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = names(arguments.sessions)
    snapshots = [s for s in pltpack.open_dumps(arguments.dumps) if not wanted or s.session in wanted]
    report = Report(arguments.json)
    loaded = load_model(arguments.model)
    prefill(loaded, snapshots[0].tokens)
    _, seconds = timed(lambda: [prefill(loaded, snapshot.tokens) for snapshot in snapshots])
    tokens = sum(map(len, snapshots))
    report.add("all", {"tokens": tokens, "prefill_ms_per_token": 1000 * seconds / tokens,
                       "xz_bits_per_token": general(snapshots)})  # fmt: skip
    with tempfile.TemporaryDirectory() as temp:
        for tier in names(arguments.tiers):
            report.add("tiers", stored(tier, snapshots, Path(temp)))
            for line in loads(tier, Path(temp) / tier, snapshots, [1e6 * float(s) for s in names(arguments.speeds)]):
                report.add("loads", line)
        for quality, predictor in (each.rsplit(":", 1) for each in names(arguments.made)):
            report.add("tiers", made(quality, predictor, snapshots, arguments.model, Path(temp)))
    if arguments.kernels:
        texts = load_file(arguments.continuations)
        for snapshot in snapshots:
            if snapshot.session in names(arguments.kernels):
                report.add("kernels", other_kernels(loaded, snapshot, texts[snapshot.session]))
    for snapshot in snapshots:
        if snapshot.session in names(arguments.coded):
            report.add("coded", coded(loaded, snapshot))


if __name__ == "__main__":
    main()
