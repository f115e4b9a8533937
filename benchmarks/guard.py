"""What a guard does with ordinary sessions and with planted ones, on a real model.

``python -m benchmarks.guard --model DIR --dumps DUMPS --profile P [--tier small] [--sessions 100] [--planted DUMPS]``

Ordinary sessions are the dumps, cut at many places; their continuation is their own text. Each is written without
sharing, once under a guard and once without, and the latter is scored by `pltpack.quality.scoring`, so that one can see
whether the guard's decisions are what the scores justify. Planted are: a dump of another domain, one with 1 % of its
values times 50, one captured from the model with altered weights.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import numpy as np

import pltpack
from pltpack.archive.guard_record import record_of
from pltpack.dumps import open_dumps
from pltpack.dumps.torch_arrays import to_numpy
from pltpack.quality.guard import ModelGuard
from pltpack.quality.model import Model, load_model, prefill
from pltpack.quality.probes import at_ends
from pltpack.quality.rebuilt import FromArchive, in_memory
from pltpack.quality.scoring import score
from pltpack.snapshot import Snapshot

LEAST, EVERY, NEXT = 128, 96, 64


def cut_sessions(dumps: Path, most: int) -> tuple[list[Snapshot], dict[str, np.ndarray]]:
    """Sessions cut at every `EVERY` tokens, and what follows each."""
    found, texts = [], {}
    for whole in open_dumps(dumps):
        for cut in range(LEAST, len(whole) - NEXT, EVERY):
            name = f"{whole.session}@{cut}"
            found.append(renamed(in_memory(whole, cut), name))
            texts[name] = whole.tokens[cut : cut + NEXT]
    order = np.random.default_rng(0).permutation(len(found))[:most]
    return [found[i] for i in sorted(order)], texts


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
    cache = prefill(Model(network, model.folder, model.name), snapshot.tokens)
    layers = [(to_numpy(layer.keys[0].bfloat16()), to_numpy(layer.values[0].bfloat16())) for layer in cache.layers]
    return Snapshot.from_arrays("planted-altered-weights", snapshot.tokens, layers, snapshot.identity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dumps", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--planted", type=Path, help="a dump of another domain")
    parser.add_argument("--tier", default="small")
    parser.add_argument("--sessions", type=int, default=100)
    given = parser.parse_args()
    model = load_model(given.model)
    ordinary, texts = cut_sessions(given.dumps, given.sessions)
    planted = [times_50(ordinary[0]), altered(model, ordinary[-1])]
    texts |= {"planted-times-50": texts[ordinary[0].session], "planted-altered-weights": texts[ordinary[-1].session]}
    if given.planted is not None:
        foreign = next(open_dumps(given.planted))
        cut = min(len(foreign) - NEXT, 512)
        planted.append(renamed(in_memory(foreign, cut), "planted-other-domain"))
        texts["planted-other-domain"] = foreign.tokens[cut : cut + NEXT]
    settings = {"quality": given.tier, "external_profile": given.profile, "dedup": False}
    with tempfile.TemporaryDirectory(prefix="pltpack-guard-") as folder:
        begin = time.process_time()
        guard = ModelGuard(model, texts)
        stats = pltpack.compress([*ordinary, *planted], Path(folder) / "guarded", guard=guard, **settings)
        guarded = time.process_time() - begin
        begin = time.process_time()
        pltpack.compress(ordinary, Path(folder) / "plain", **settings)
        plain = time.process_time() - begin
        with pltpack.open(Path(folder) / "plain", profile=given.profile) as archive:
            (found,) = score(model.network, ordinary, at_ends(ordinary, texts), [FromArchive(archive)])
        with pltpack.open(Path(folder) / "guarded", profile=given.profile) as archive:
            records = {name: record_of(archive.shard(name)) for name in archive.sessions}
    rows = found.rows["end"]
    up = {name for name in rows if records[name].kept != given.tier}
    limit = next(iter(records.values())).limits["kl"]
    print(json.dumps({
        "tier": given.tier, "sessions": len(rows), "stepped_up": len(up),
        "above_promise": sum(row["kl"] > limit for row in rows.values()),
        "above_promise_not_stepped_up": sorted(n for n, row in rows.items() if row["kl"] > limit and n not in up),
        "stepped_up_below_promise": {n: records[n].tried[0].to_json() for n in up if rows[n]["kl"] <= limit},
        "kl_without_guard": found.total()["kl"], "kl": stats["kl"], "worst_kl": stats["worst_kl"],
        "kept": stats["guard"]["kept"],
        "planted": {n: r.to_json() for n, r in records.items() if n.startswith("planted")},
        "energy": {"least": min(r.range["energy"] for n, r in records.items() if n in rows),
                   "most": max(r.range["energy"] for n, r in records.items() if n in rows)},
        "cpu_seconds": {"guarded": guarded, "plain": plain},
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
