"""How many times fewer bytes predictions from repeats take at equal KL divergence (docs/reuse.md has the figures).

One target says little: which way values happen to be rounded moves KL divergence by some percent. So dumps are
compressed for several targets, with predictions and without, and two parallel lines are put through the logarithms of
bytes and of KL divergence. That is measured over the true continuations and over some that the model samples from the
original caches, which makes it less a matter of one text.

Usage: python -m benchmarks.equal_kl DUMP... --profile FILE --model DIR --continuations FILE [--targets KL,...]
                                     [--sampled N] [--work FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pltpack
from pltpack.archive.settings import Target
from pltpack.dumps import open_dumps, to_dynamic_cache
from pltpack.quality.model import load_model
from pltpack.quality.probes import at_ends, read_continuations
from pltpack.quality.rebuilt import FromArchive
from pltpack.quality.scoring import score
from pltpack.snapshot import Snapshot

WORK = Path(".cache/equal-kl")
TARGETS = (0.0095, 0.01, 0.0105, 0.011)
SAMPLED_TOKENS = 150
SEED = 0
Texts = Mapping[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=Path, help="dumps with repeats, files or folders")
    parser.add_argument("--profile", type=Path, required=True, help="profile of the model")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--continuations", type=Path, required=True, help="what follows the dumps")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="KL divergences to aim at")
    parser.add_argument("--sampled", type=int, default=2, help="continuations that the model samples")
    parser.add_argument("--work", type=Path, default=WORK, help="scratch folder")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    network, snapshots = load_model(args.model).network, list(open_dumps(args.dumps))
    texts: list[Texts] = [read_continuations(args.continuations)]
    texts += sampled(network, snapshots, texts[0], args.sampled)
    rows = []
    for target in map(float, args.targets.split(",")):
        rows += at_target(network, snapshots, texts, target, args)
    found = fit(rows)
    print(found)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, **found}, indent=1) + "\n")


def sampled(network: Any, snapshots: Sequence[Snapshot], true: Texts, count: int) -> list[Texts]:
    """Continuations that a model draws token by token, each from the first token of the true one on."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    drawn: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for snapshot in snapshots:
        for each in drawn:
            cache, tokens = to_dynamic_cache(snapshot, dtype=torch.float32), [int(true[snapshot.session][0])]
            while len(tokens) < SAMPLED_TOKENS:
                with torch.no_grad():
                    out = network(torch.tensor([tokens[-1:]]), cache=cache, use_cache=True)
                shares = out.logits[0, -1].float().softmax(-1)
                tokens.append(int(torch.multinomial(shares, 1, generator=generator)))
            each[snapshot.session] = np.array(tokens, np.int32)
    return list(drawn)


def at_target(
    network: Any, snapshots: Sequence[Snapshot], texts: Sequence[Texts], target: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Bytes, the profile left out, and KL divergence in nats, the geometric mean over sessions, with and without."""
    rows: list[dict[str, Any]] = []
    for near in (False, True):
        path = args.work / ("near" if near else "plain")
        shutil.rmtree(path, ignore_errors=True)
        stats = pltpack.compress(args.dumps, path, quality="balanced", near=near, profile=args.profile,
                                 target=Target(kl=target))  # fmt: skip
        rows.append({"target": target, "near": near, "bytes": stats["archive_bytes"] - stats["profile_bytes"]})
    opened = [pltpack.open(args.work / name) for name in ("plain", "near")]
    try:
        ways = [FromArchive(archive) for archive in opened]
        scores = [score(network, snapshots, at_ends(snapshots, text), ways) for text in texts]
    finally:
        for archive in opened:
            archive.close()
    for index, row in enumerate(rows):
        sessions = [[each[index].rows["end"][s.session]["kl"] for each in scores] for s in snapshots]
        row["kl"] = float(np.exp(np.log(np.mean(sessions, axis=1)).mean()))
        print(row, flush=True)
    return rows


def fit(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Parallel lines through the logarithms: how many times fewer bytes, its standard error, and the slope."""
    near, kl, size = (np.array([float(row[key]) for row in rows]) for key in ("near", "kl", "bytes"))
    known = np.stack([np.ones(len(rows)), near, np.log(kl)], axis=1)
    lines, *_ = np.linalg.lstsq(known, np.log(size), rcond=None)
    left = np.log(size) - known @ lines
    spread = np.linalg.inv(known.T @ known) * (left @ left) / max(len(rows) - 3, 1)
    fewer = float(np.exp(-lines[1]))
    return {"fewer": round(fewer, 3), "error": round(fewer * float(np.sqrt(spread[1, 1])), 3),
            "slope": round(float(lines[2]), 2)}  # fmt: skip


if __name__ == "__main__":
    main()
