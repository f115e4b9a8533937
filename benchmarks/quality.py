"""What the model feels of the shipped sessions, tier by tier and after a cast to fp8: `pltpack score` in one command.

Makes the model and unpacks the sessions where they are missing. Needs the extra ``eval``.

Usage: python -m benchmarks.quality [--model DIR] [--dumps DIR --continuations FILE] [--no-dedup] [TIER]...
       (or: make demo-quality)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.demo import TIERS, WORK, unpacked
from benchmarks.model import DEFAULT, ensure
from pltpack.dumps import open_dumps
from pltpack.quality import model as models
from pltpack.quality.agreement import require_model
from pltpack.quality.baselines import Fp8
from pltpack.quality.capture import CONTINUATIONS
from pltpack.quality.probes import at_ends, read_continuations
from pltpack.quality.rebuilt import of_tiers
from pltpack.quality.scoring import score
from pltpack_cli.score import print_scores


def load_model(folder: Path) -> Any:
    """The transformers model itself, in float32."""
    return models.load_model(folder).network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", default=TIERS, metavar="TIER")
    parser.add_argument("--model", type=Path, default=DEFAULT, help="model folder; made if absent")
    parser.add_argument("--dumps", type=Path, help="folder of dumps (default: the sessions in fixtures/)")
    parser.add_argument("--continuations", type=Path, help="default: beside the dumps' folder")
    parser.add_argument("--no-dedup", action="store_true", help="store every session alone")
    args = parser.parse_args()
    dumps = args.dumps or unpacked(WORK)
    following = read_continuations(args.continuations or dumps.parent / CONTINUATIONS)
    snapshots = [snapshot for snapshot in open_dumps(dumps) if snapshot.session in following]
    model = models.load_model(ensure(args.model))
    require_model(model, snapshots)
    with of_tiers(snapshots, args.tiers, dedup=not args.no_dedup) as candidates:
        print_scores(score(model.network, snapshots, at_ends(snapshots, following), [*candidates, Fp8()]))


if __name__ == "__main__":
    main()
