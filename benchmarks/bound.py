"""Tiers that need the model beside those that do not: bits a token, seconds a token, and where storing beats computing.

Usage: python -m benchmarks.bound MODEL_DIR DUMP... [--sessions A,B] [--coded A,B] [--tiers lossless,q4] [--json FILE]

`--coded` names the sessions whose tokens are also coded with the model's own probabilities: two of its steps
a token. Seconds are CPU seconds of this process, so run it with one thread; figures go to docs/bound.md.
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

import pltpack
from pltpack.quality import token_model
from pltpack.quality.model import load_model, prefill
from pltpack.quality.recompute import Rebuilder
from pltpack.quality.recompute import compress as compress_by_model
from pltpack.snapshot import Snapshot

#: Of the paper (arXiv 2604.15356): bits a token at perplexities of 10 to 20, and its ratio over TurboQuant at 3 bits.
PAPER_BITS, PAPER_RATIO = (3.3, 4.3), 914_000
#: Bytes a second: a spinning disk, an SATA and an NVMe device, and four of these.
DISKS = {"0.2 GB/s": 0.2e9, "0.5 GB/s": 0.5e9, "3 GB/s": 3e9, "12 GB/s": 12e9}


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


def row(name: str, archive: Path, snapshots: Sequence[Snapshot], encode: float, decode: float) -> dict[str, Any]:
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
    return row(tier, archive, snapshots, encode, decode)


def made(quality: str, predictor: str, snapshots: Sequence[Snapshot], model: Path, folder: Path) -> dict[str, Any]:
    """A tier that needs the model; what it gives back is compared with the dumps."""
    archive = folder / f"{quality}-{predictor}"
    _, encode = timed(lambda: compress_by_model(snapshots, archive, model, quality=quality, predictor=predictor))
    rebuild = Rebuilder(model)
    rebuild._predictor(predictor)
    assert rebuild.weights
    with pltpack.open(archive, rebuild=rebuild) as opened:
        found, decode = timed(lambda: [opened.read(snapshot.session) for snapshot in snapshots])
    exact = all(equal(a, b) for a, b in zip(snapshots, found, strict=True))
    return {**row(f"{quality} {predictor}", archive, snapshots, encode, decode), "bit_exact": exact}


def equal(a: Snapshot, b: Snapshot) -> bool:
    """Whether two snapshots have equal bits."""
    return all(
        x.tobytes() == y.tobytes()
        for index in range(len(a.identity.layers))
        for x, y in zip(a.layer(index), b.layer(index), strict=True)
    )


def coded(snapshots: Sequence[Snapshot], model: Path) -> list[dict[str, Any]]:
    """Tokens coded with the model's probabilities, beside its cross-entropy in one pass."""
    import torch

    loaded, out = load_model(model), []
    for snapshot in snapshots:
        ids = torch.as_tensor(np.asarray(snapshot.tokens, np.int64))[None]
        with torch.no_grad():
            logs = loaded.network(ids).logits[0].double().log_softmax(-1)
        entropy = -float(logs[:-1].gather(1, ids[0, 1:, None]).sum()) / math.log(2)
        data, seconds = timed(lambda snapshot=snapshot: token_model.encode(loaded, snapshot.tokens))
        tokens = len(snapshot)
        out.append({"session": snapshot.session, "tokens": tokens, "entropy_bits_per_token": entropy / tokens,
                    "bits_per_token": 8 * len(data) / tokens, "over_entropy": 8 * len(data) / entropy,
                    "encode_and_check_ms_per_token": 1000 * seconds / tokens})  # fmt: skip
    return out


def general(snapshots: Sequence[Snapshot]) -> float:
    """Bits a token of ``xz -9`` over all token ids as int32."""
    raw = b"".join(np.ascontiguousarray(snapshot.tokens, "<i4").tobytes() for snapshot in snapshots)
    return 8 * len(lzma.compress(raw, preset=9)) / sum(map(len, snapshots))


def break_even(rows: Sequence[dict[str, Any]], prefill_ms: float) -> list[dict[str, Any]]:
    """Milliseconds a token to get a cache back: read and decode, beside one prefill."""
    out = []
    for line in rows:
        if line["tier"].startswith(("recompute", "lossless+model")):
            continue
        for disk, speed in DISKS.items():
            read = 1000 * line["payload_bits_per_token"] / 8 / speed
            out.append({"tier": line["tier"], "disk": disk, "ms_per_token": read + line["decode_ms_per_token"],
                        "prefill_ms_per_token": prefill_ms,
                        "faster_by": prefill_ms / (read + line["decode_ms_per_token"])})  # fmt: skip
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("dumps", type=Path, nargs="+")
    parser.add_argument("--sessions", default="")
    parser.add_argument("--coded", default="")
    parser.add_argument("--tiers", default="lossless,q4,turboquant-3")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = set(filter(None, arguments.sessions.split(",")))
    snapshots = [s for s in pltpack.open_dumps(arguments.dumps) if not wanted or s.session in wanted]
    named = set(filter(None, arguments.coded.split(",")))
    tokens = sum(map(len, snapshots))
    loaded = load_model(arguments.model)
    prefill(loaded, snapshots[0].tokens)
    _, seconds = timed(lambda: [prefill(loaded, snapshot.tokens) for snapshot in snapshots])
    result: dict[str, Any] = {"tokens": tokens, "prefill_ms_per_token": 1000 * seconds / tokens,
                              "xz_bits_per_token": general(snapshots), "tiers": []}  # fmt: skip
    with tempfile.TemporaryDirectory() as temp:
        for tier in filter(None, arguments.tiers.split(",")):
            result["tiers"].append(stored(tier, snapshots, Path(temp)))
            print(json.dumps(result["tiers"][-1]), flush=True)
        runs = (("recompute", "float32"), ("lossless+model", "float32"), ("lossless+model", "bfloat16"),
                ("lossless+model", "int8"))  # fmt: skip
        for quality, predictor in runs:
            result["tiers"].append(made(quality, predictor, snapshots, arguments.model, Path(temp)))
            print(json.dumps(result["tiers"][-1]), flush=True)
    result["break_even"] = break_even(result["tiers"], result["prefill_ms_per_token"])
    result["coded"] = coded([s for s in snapshots if s.session in named], arguments.model)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
