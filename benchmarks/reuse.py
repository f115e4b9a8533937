"""What predictions from equal tokens at other places bring, on real caches (docs/reuse.md has the figures).

Without ``--model``: archives of some dumps with predictions and without, tier by tier, and how well each layer is
predicted. With it also a family of sessions from one template with three slots that are filled differently, captured
here, and the KL divergence of the calibrated tier.

Usage: python -m benchmarks.reuse DUMP... [--profile FILE] [--tiers TIER,...] [--model DIR [--continuations FILE]]
                                  [--work FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pltpack
from pltpack.archive.mapped import reference_values
from pltpack.archive.reader import Archive
from pltpack.dumps import open_dumps
from pltpack.format.tables import FLAG_REFERENCE
from pltpack.snapshot import Snapshot

WORK = Path(".cache/reuse")
TIERS = ("lossless", "q4")
CALIBRATED = "balanced"
FAMILY = 32

TEMPLATE = """You write the weekly letter of a small public library. Follow the rules below and change nothing else.

The reader of this letter is {reader}. Greet the reader by name, once, in the first line, and never again. Keep the \
letter under three hundred words. Write in plain sentences, in the present tense where you can, and avoid exclamation \
marks. Begin with the opening hours: the library opens at nine in the morning from Monday to Friday, at ten on \
Saturday, and stays closed on Sunday and on public holidays. Say that the reading room on the second floor is quiet \
and that the children's corner beside the entrance is not. Then say what is new. Twelve boxes of donated books arrived \
last month, most of them novels and travel guides, and the volunteers have sorted about half of them. The old card \
catalogue has been moved to the cellar, where it can be seen on request, because the screens by the stairs now do its \
work faster. The lift is being repaired until the end of the month; anyone who cannot take the stairs may ring the \
bell at the side door and will be helped.

In the second part recommend one thing and only one: {thing}. Explain in three or four sentences why it is worth the \
time, without giving away how it ends, and name the shelf where it stands. Shelves are named by a letter for the room \
and a number for the row, as in C4. If somebody has borrowed it already, say that it can be reserved at the desk, that \
a reservation holds for eight days, and that the library sends a short message when the item is back. Mention that two \
copies of the most wanted titles can be read in the building only, and that they are marked with a red dot.

In the third part remind the reader of the rules that are most often forgotten. A book may be kept for four weeks and \
a film for one. Each may be extended twice, unless another person waits for it. Late returns cost twenty cents a day \
for grown readers and nothing for children, but no more than the price of the item. Food stays outside; water in a \
closed bottle is fine. Telephones are silent in every room. Bags larger than a sheet of paper go into the lockers by \
the entrance, which take a coin and give it back. Whoever finds a torn page should tell the desk and not mend it with \
tape, since tape turns yellow and hurts the paper more than the tear does.

Close with the event of the week: {event}. Give the day and the hour, say that it is free, that the hall holds sixty \
people, and that the doors open half an hour earlier. Thank the volunteers, wish a calm week, and sign as the team of \
the library at the old mill. Do not add a postscript, a list, a heading or a picture, and do not mention these rules. \
Write the letter now."""

#: What fills the slots, each time in another combination; no session has another's first slot.
NAMES = ("Amara", "Tom", "Elena", "Paolo", "Yusuf", "Old Mr", "Aiko", "Professor")
SURNAMES = ("Okafor", "Lindqvist", "Petrova", "Marchetti")
THINGS = ("a long novel about two lighthouse keepers", "the new atlas of river birds", "a film about a moving village",
          "a book of short recipes")  # fmt: skip
FOR = ("who stop talking", "for one person", "with drawings by a child", "from the far north", "in two volumes",
       "that nobody finished", "about patience", "printed in blue")  # fmt: skip
EVENTS = ("a talk on bees", "the repair evening for lamps and radios", "a reading for children", "a chess night")
HOURS = ("Monday at six", "Tuesday at eight", "Wednesday at five", "Thursday at seven", "Friday at four",
         "Saturday at eleven in the morning", "Saturday at three", "Monday at half past seven")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", type=Path, help="dumps with repeats, files or folders")
    parser.add_argument("--profile", type=Path, help=f"profile of the model, for the tier {CALIBRATED}")
    parser.add_argument("--tiers", default=",".join(TIERS), help="other tiers")
    parser.add_argument("--model", type=Path, help="folder of the model: to capture the family, and for KL")
    parser.add_argument("--continuations", type=Path, help="what follows the dumps, for KL")
    parser.add_argument("--family", type=int, default=FAMILY, help="sessions of the family")
    parser.add_argument("--work", type=Path, default=WORK, help="scratch folder")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tiers = [tier for tier in args.tiers.split(",") if tier] + ([CALIBRATED] if args.profile else [])
    found: dict[str, Any] = {"dumps": [compared(args.dumps, tier, args) for tier in tiers]}
    found["layers"] = by_layer(open_dumps(args.dumps), args.work / f"{tiers[0]}-near")
    print("keys and values of predicted tokens, energy of what is left, per cent by layer: ", found["layers"])
    if args.model:
        found["family"] = family(args, tiers)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def compared(dumps: Sequence[Path], tier: str, args: argparse.Namespace, texts: Path | None = None) -> dict[str, Any]:
    """One tier's row: bytes with predictions and without, the profile left out, and CPU seconds."""
    row: dict[str, Any] = {"tier": tier}
    for near in (False, True):
        path = args.work / f"{tier}-{'near' if near else 'plain'}"
        shutil.rmtree(path, ignore_errors=True)
        began = time.process_time()
        stats = pltpack.compress(dumps, path, quality=tier, near=near,
                                 profile=args.profile if tier == CALIBRATED else None)  # fmt: skip
        kind = "near" if near else "plain"
        row[f"{kind}_seconds"] = round(time.process_time() - began, 2)
        row[f"{kind}_bytes"] = stats["archive_bytes"] - stats["profile_bytes"]
    row["fewer"] = round(row["plain_bytes"] / row["near_bytes"], 3)
    with pltpack.open(args.work / f"{tier}-near") as archive:
        row |= kinds_of_tokens(archive)
    texts = texts or args.continuations
    if args.model and texts and tier == CALIBRATED:
        row |= divergence(args.model, dumps, texts, [args.work / f"{tier}-{kind}" for kind in ("plain", "near")])
    print(row, flush=True)
    return row


def kinds_of_tokens(archive: Archive) -> dict[str, float]:
    """Shares of tokens that are predicted, and that are a library node's."""
    shards = [archive.shard(name) for name in archive.sessions]
    total = sum(len(shard.tokens) for shard in shards)
    predicted, mapped = 0, 0
    for shard in shards:
        mapped += int(shard.runs["length"].sum())
        first, last = shard.layer_bounds[0]
        for unit in shard.units[first:last]:
            inside = (shard.runs["session_start"] <= unit["token_start"]) & (
                shard.runs["session_start"] + shard.runs["length"] > unit["token_start"])  # fmt: skip
            if inside.any():
                predicted += int(unit["token_count"])
    return {"predicted": round(predicted / total, 3), "of_nodes": round((mapped - predicted) / total, 3)}


def by_layer(originals: Sequence[Snapshot], path: Path) -> list[list[float]]:
    """Per layer, energy of predicted keys and values less their predictions, per cent of that about the mean."""
    with pltpack.open(path) as archive:
        layers = range(len(archive.identity.layers))
        left, whole = np.zeros((len(layers), 2)), np.zeros((len(layers), 2))
        for original in originals:
            shard = archive.shard(original.session)
            flagged = shard.units[(shard.units["flags"] & FLAG_REFERENCE) != 0]
            for start, count in sorted({(int(u["token_start"]), int(u["token_count"])) for u in flagged}):
                mapped = reference_values(shard.runs, shard.libraries, layers, start, start + count)
                for layer in layers:
                    for part, (x, y) in enumerate(
                        zip(original.layer(layer, start, start + count), mapped[layer], strict=True)
                    ):
                        a, b = x.astype(np.float64), y.astype(np.float64)
                        left[layer, part] += np.square(a - b).sum()
                        whole[layer, part] += np.square(a - a.mean(axis=1, keepdims=True)).sum()
    return [[round(100 * value, 2) for value in row] for row in (left / np.maximum(whole, 1e-30)).tolist()]


def divergence(model: Path, dumps: Sequence[Path], texts: Path, archives: Sequence[Path]) -> dict[str, float]:
    """KL divergence in nats of what the model says from each archive's caches."""
    from pltpack.quality.model import load_model
    from pltpack.quality.probes import at_ends, read_continuations
    from pltpack.quality.rebuilt import FromArchive
    from pltpack.quality.scoring import score

    snapshots = list(open_dumps(dumps))
    known = read_continuations(texts)
    probes = at_ends(snapshots, {snapshot.session: known[snapshot.session] for snapshot in snapshots})
    opened = [pltpack.open(path) for path in archives]
    try:
        scores = score(load_model(model).network, snapshots, probes, [FromArchive(archive) for archive in opened])
    finally:
        for archive in opened:
            archive.close()
    totals = [found.total() for found in scores]
    return {"plain_kl": round(totals[0]["kl"], 5), "near_kl": round(totals[1]["kl"], 5)}


def family(args: argparse.Namespace, tiers: Sequence[str]) -> list[dict[str, Any]]:
    """Sessions of one template: bytes of all of them over those of the first."""
    from pltpack.quality.capture import capture

    folder = args.work / "family"
    follows = "Dear reader, the library opens at nine in the morning from Monday to Friday and at ten on Saturday. The \
reading room on the second floor is quiet, and the children are welcome in the corner beside the entrance."
    prompts = {
        f"family-{index:02}": {
            "prompt": TEMPLATE.format(
                reader=f"{NAMES[index % 8]} {SURNAMES[index // 8 % 4]}",
                thing=f"{THINGS[index % 4]} {FOR[index // 4 % 8]}",
                event=f"{EVENTS[index // 8 % 4]}, {HOURS[index % 8]}",
            ),
            "continuation": follows,
        }
        for index in range(args.family)
    }
    texts = args.work / "family.safetensors"
    capture(args.model, prompts, folder, continuations=texts, force=True)
    paths = sorted(folder.glob("*.safetensors"))
    rows = []
    for tier in tiers:
        row = compared(paths, tier, args, texts)
        one = args.work / f"{tier}-one"
        shutil.rmtree(one, ignore_errors=True)
        stats = pltpack.compress(paths[:1], one, quality=tier, profile=args.profile if tier == CALIBRATED else None)
        row["one_bytes"] = stats["archive_bytes"] - stats["profile_bytes"]
        row["sessions_of_bytes"] = round(row["near_bytes"] / row["one_bytes"], 2)
        print({"tier": tier, "one_bytes": row["one_bytes"], "all_over_one": row["sessions_of_bytes"]}, flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
