"""How well a cache serves that is cut before its end: at every n-th block, and at the ends of turns.

Rebuilds the sessions from an archive or through tiers, continues them at each cut with their own text, and prints KL
divergence by kind of session and place, for each number of tokens before the cut that the model computes again from the
cache before them, as it does after a loader's hit; JSON and a plot on demand. Needs the extra ``eval``, and ``plot``.

Usage: python -m benchmarks.cuts MODEL DUMPS CONTINUATIONS (--archive DIR | --profile FILE [--tier TIER])
       [--sessions NAME,...] [--every 4] [--length 128] [--recompute 0,8,16,32,64] [--json FILE] [--plot FILE.svg]...
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from pltpack.codec.registry import TIERS
from pltpack.dumps import open_dumps
from pltpack.quality import model as models
from pltpack.quality.agreement import require_model
from pltpack.quality.chat_tokens import turn_ends
from pltpack.quality.cuts import ALLOWED, TEXT, Cut, at_cuts, measure_cuts, plot_cuts, summary, with_recompute
from pltpack.quality.plot import check_plot
from pltpack.quality.probes import read_continuations
from pltpack.quality.rebuilt import FromArchive, of_archives, of_tiers
from pltpack.snapshot import Snapshot


@contextlib.contextmanager
def rebuilt(args: argparse.Namespace, snapshots: list[Snapshot]) -> Iterator[FromArchive]:
    """The sessions as an archive has them, or as a tier makes them without sharing."""
    made = of_archives([args.archive]) if args.archive else of_tiers(snapshots, [args.tier], args.profile, dedup=False)
    with made as candidates:
        yield candidates[0]


def show(found: list[Cut], promise: float | None) -> None:
    """Print means and worst by kind and place, and how many cuts are within what is allowed."""
    for kind, places in summary(found).items():
        cells = [f"{place} {row['kl']:.4f} ({row['worst']:.4f}; {row['cuts']})" for place, row in places.items()]
        print(f"  {kind:12s} " + "  ".join(cells))
    for place, times in ALLOWED.items() if promise else ():
        some = [cut for cut in found if cut.place == place]
        within = sum(cut.kl <= times * (promise or 0) for cut in some)
        print(f"  within {times:g} of the promise at {place}: {within} of {len(some)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("dumps", type=Path, nargs="+", help="folders of dumps, then the continuations of the sessions")
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--tier", default="balanced")
    parser.add_argument("--sessions", help="names, separated by commas; all if not given")
    parser.add_argument("--every", type=int, default=4, help="blocks between cuts")
    parser.add_argument("--length", type=int, default=TEXT, help="tokens that are read after a cut")
    parser.add_argument("--recompute", default="0,64", help="tokens computed again before a cut, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, action="append", default=[])
    args = parser.parse_args()
    for path in args.plot:
        check_plot(path)
    *folders, continuations = args.dumps
    following = read_continuations(continuations)
    wanted = set(args.sessions.split(",")) if args.sessions else set(following)
    snapshots = [s for folder in folders for s in open_dumps(folder) if s.session in wanted & set(following)]
    model = models.load_model(args.model)
    require_model(model, snapshots)
    ends = turn_ends(models.load_tokenizer(args.model), model.config, getattr(model.network, "generation_config", None))
    probes = at_cuts(snapshots, following, ends, every=args.every, length=args.length)
    with rebuilt(args, snapshots) as candidate:
        counts = sorted({int(count) for count in args.recompute.split(",")})
        found = measure_cuts(model.network, snapshots, probes, candidate, counts)
        name = candidate.name
    promise = TIERS[name][1].get("target_kl") if name in TIERS else None
    print(f"{name}: mean KL in nats (worst; number of cuts)" + (f"; promised {promise:g}" if promise else ""))
    for count in counts:
        print(f" {count} tokens computed again before a cut")
        show(with_recompute(found, count), promise)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(cut) for cut in found], indent=1), encoding="utf-8")
    for path in args.plot:
        plot_cuts(found, promise, path, f"Caches cut before their end, {name}")


if __name__ == "__main__":
    main()
