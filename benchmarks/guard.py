"""What a guard does with ordinary sessions and with planted ones, on a real model.

``python -m benchmarks.guard --model DIR --dumps DUMPS --profile P [--tier small] [--sessions 100] [--planted DUMPS]``

Ordinary sessions are passages of the dumps' texts, captured by the model anew, each continued with what follows it.
They are written without sharing, under a guard with the model, under one without, and under none; the last are scored
by `pltpack.quality.scoring`, so that one can see whether the guards' decisions are what the scores justify. Planted
are: a dump of another domain, one with 1 % of its values times 50, one captured from the model with altered weights.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pltpack
from pltpack.archive.guard import ProfileGuard
from pltpack.archive.guard_record import GuardRecord, record_of
from pltpack.dumps import open_dumps
from pltpack.dumps.torch_arrays import to_numpy
from pltpack.quality.guard import ModelGuard
from pltpack.quality.model import Model, load_model, prefill
from pltpack.quality.probes import at_ends
from pltpack.quality.rebuilt import FromArchive, in_memory
from pltpack.quality.scoring import score
from pltpack.snapshot import Identity, Snapshot

NEXT, EVERY = 64, 64


def passages(model: Model, dumps: Path, length: int, most: int) -> tuple[list[Snapshot], dict[str, np.ndarray]]:
    """Sessions of `length` tokens from anywhere in the dumps' texts, and what follows each."""
    places = [(whole, start) for whole in open_dumps(dumps) for start in range(0, len(whole) - length - NEXT, EVERY)]
    chosen = sorted(np.random.default_rng(0).permutation(len(places))[:most])
    found, texts = [], {}
    for whole, start in (places[i] for i in chosen):
        name = f"{whole.session}+{start}"
        tokens = whole.tokens[start : start + length + NEXT]
        found.append(captured(model, name, tokens[:length], whole.identity))
        texts[name] = tokens[length:]
    return found, texts


def captured(model: Model, name: str, tokens: np.ndarray, identity: Identity) -> Snapshot:
    """The cache that a model computes of tokens, in bfloat16."""
    cache = prefill(model, tokens)
    layers = [(to_numpy(layer.keys[0].bfloat16()), to_numpy(layer.values[0].bfloat16())) for layer in cache.layers]
    return Snapshot.from_arrays(name, tokens, layers, identity)


def renamed(snapshot: Snapshot, name: str) -> Snapshot:
    return dataclasses.replace(snapshot, session=name)


def times_50(snapshot: Snapshot, share: float = 0.01) -> Snapshot:
    """A session with some of its values times 50."""
    rng, layers = np.random.default_rng(5), []
    for index in range(len(snapshot.identity.layers)):
        pair = snapshot.layer(index)
        loud = [np.where(rng.random(x.shape) < share, 50 * x.astype(np.float32), x.astype(np.float32)).astype(x.dtype)
                for x in pair]  # fmt: skip
        layers.append((loud[0], loud[1]))
    return Snapshot.from_arrays("planted-times-50", snapshot.tokens, layers, snapshot.identity)


def altered(model: Model, snapshot: Snapshot, sigma: float = 0.1) -> Snapshot:
    """The session as the model computes it with noise of `sigma` standard deviations on its weights."""
    import torch

    rng = torch.Generator().manual_seed(0)
    network = copy.deepcopy(model.network)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.add_(torch.randn(parameter.shape, generator=rng) * parameter.std() * sigma)
    other = Model(network, model.folder, model.name)
    return captured(other, "planted-altered-weights", snapshot.tokens, snapshot.identity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dumps", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--planted", type=Path, help="a dump of another domain")
    parser.add_argument("--tier", default="small")
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256, help="of each session")
    given = parser.parse_args()
    model = load_model(given.model)
    ordinary, texts = passages(model, given.dumps, given.tokens, given.sessions)
    planted = [times_50(ordinary[0]), altered(model, ordinary[-1])]
    texts |= {"planted-times-50": texts[ordinary[0].session], "planted-altered-weights": texts[ordinary[-1].session]}
    if given.planted is not None:
        foreign = next(open_dumps(given.planted))
        cut = min(len(foreign) - NEXT, 512)
        planted.append(renamed(in_memory(foreign, cut), "planted-other-domain"))
        texts["planted-other-domain"] = foreign.tokens[cut : cut + NEXT]
    settings = {"quality": given.tier, "external_profile": given.profile, "dedup": False}
    guards = {"model": ModelGuard(model, texts), "profile": ProfileGuard(), "none": None}
    records: dict[str, dict[str, GuardRecord]] = {}
    seconds, stats = {}, {}
    with tempfile.TemporaryDirectory(prefix="pltpack-guard-") as folder:
        for name, guard in guards.items():
            path, begin = Path(folder) / name, time.process_time()
            stats[name] = pltpack.compress([*ordinary, *planted], path, guard=guard, **settings)
            seconds[name] = time.process_time() - begin
            with pltpack.open(path, profile=given.profile) as archive:
                if guard:
                    records[name] = {one: found for one in archive.sessions if (found := record_of(archive.shard(one)))}
                else:
                    (scored,) = score(model.network, ordinary, at_ends(ordinary, texts), [FromArchive(archive)])
    rows = scored.rows["end"]
    print(json.dumps({
        "tier": given.tier, "sessions": len(rows), "tokens": given.tokens, "kl_without_guard": scored.total()["kl"],
        "kl": stats["model"]["kl"], "worst_kl": stats["model"]["worst_kl"], "cpu_seconds": seconds,
        **{name: decisions(found, rows) for name, found in records.items()},
    }, indent=1))  # fmt: skip


def decisions(records: Mapping[str, GuardRecord], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A guard's decisions about ordinary sessions beside what their own scores without it say."""
    limits = next(iter(records.values())).limits
    over = {name for name, row in rows.items() if row["kl"] > limits["kl"] or row["ppl_change_pct"] > limits["ppl_pct"]}
    up = {name for name in rows if records[name].kept != records[name].asked}
    energy = [records[name].range["energy"] for name in rows]
    return {
        "stepped_up": len(up), "reasons": dict(Counter(records[name].tried[0].reason for name in up)),
        "kl_above_promise": sum(row["kl"] > limits["kl"] for row in rows.values()),
        "kl_or_perplexity_above": len(over),
        "stepped_up_without_cause": {n: records[n].to_json() for n in sorted(up - over)},
        "kl_above_promise_kept": sorted(n for n, row in rows.items() if row["kl"] > limits["kl"] and n not in up),
        "energy": [min(energy), max(energy)], "kept": dict(Counter(records[name].kept for name in rows)),
        "planted": {n: r.to_json() for n, r in records.items() if n.startswith("planted")},
    }  # fmt: skip


if __name__ == "__main__":
    main()
