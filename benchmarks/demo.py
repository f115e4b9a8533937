"""The main job on real snapshots: dumps in, archive out and back, in every tier, beside general tools.

Every number is measured by the run that prints it. The dumps are eight sessions of one help desk, captured from
SmolLM2-135M-Instruct (see fixtures/sessions.json); three of them share everything but the reply.

Usage: python -m benchmarks.demo [--dumps FOLDER] [--work FOLDER] [--json FILE]        (or: make demo)
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
from rich import box
from rich.console import Console
from rich.table import Table

import pltpack
from benchmarks.baselines import BASELINES, cache_size, cache_tensors, tensors
from benchmarks.capture import unpack

FIXTURE = Path(__file__).parents[1] / "fixtures" / "sessions.tar.zst"
WORK = Path(".cache/demo")
TIERS = ("lossless", "q4", "q3", "q2", "q1", "turboquant-4", "turboquant-3", "turboquant-2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dumps", type=Path, help="folder of dumps (default: the sessions in fixtures/)")
    parser.add_argument("--work", type=Path, default=WORK, help="scratch folder, emptied first")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    dumps = args.dumps or unpacked(args.work)
    paths = sorted(dumps.glob("*.safetensors"))
    # A pipe has no width of its own, and a wrapped table is hard to read.
    console = Console(width=max(Console().width, 120))
    rows = []
    with console.status("") as status:
        for name in (*TIERS, *BASELINES):
            status.update(f"{len(paths)} sessions: {name}")
            rows.append(tier_row(name, dumps, paths, args.work) if name in TIERS else baseline_row(name, paths))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table(rows))
    console.print(read_a_part(args.work / "lossless", paths[0].stem))
    console.print(f"{time.perf_counter() - began:.0f} s; archives in {args.work}", highlight=False)


def unpacked(work: Path) -> Path:
    """The dumps of fixtures/, unpacked to `work`."""
    unpack(FIXTURE, work)
    return work / "dumps"


def tier_row(tier: str, dumps: Path, paths: Sequence[Path], work: Path) -> dict[str, Any]:
    """Compress the dumps with one tier, bring them back, and compare.

    Raises
    ------
    SystemExit
        If a bit-exact tier gave back other bits, or any tier lost tokens.
    """
    archive, alone, rebuilt = work / tier, work / f"{tier}.alone", work / f"{tier}.rebuilt"
    stats = pltpack.compress([dumps], archive, quality=tier)
    pltpack.compress([dumps], alone, quality=tier, dedup=False)
    pltpack.decompress(archive, rebuilt)
    size = on_disk(archive)
    raw, elements = cache_size(paths)
    error = relative_error(paths, rebuilt)
    if tier == "lossless" and error:
        raise SystemExit(f"lossless gave back other bits than {dumps} holds")
    return {
        "name": tier,
        "sessions": stats["sessions"],
        "tokens": stats["tokens"],
        "raw_bytes": raw,
        "bytes": size,
        "ratio": raw / size,
        "bits_per_element": 8 * size / elements,
        "bits_alone": 8 * on_disk(alone) / elements,
        "dedup_hit_rate": stats["dedup_hit_rate"],
        "error": error,
    }


def baseline_row(name: str, paths: Sequence[Path]) -> dict[str, Any]:
    """What a general tool makes of the dumps."""
    size = BASELINES[name](paths)
    raw, elements = cache_size(paths)
    tokens = sum(len(tensors(path)["tokens"]) for path in paths)
    ratios = {"ratio": raw / size, "bits_per_element": 8 * size / elements}
    return {"name": name, "sessions": len(paths), "tokens": tokens, "raw_bytes": raw, "bytes": size, **ratios}


def on_disk(folder: Path) -> int:
    """Bytes of every file in an archive: library, shards and manifest."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def relative_error(paths: Sequence[Path], rebuilt: Path) -> float:
    """Root mean square error of the rebuilt caches over that of the originals' values; 0 only if every bit is equal."""
    squares = power = 0.0
    equal = True
    for path in paths:
        again = rebuilt / path.name
        if not np.array_equal(tensors(path)["tokens"], tensors(again)["tokens"]):
            raise SystemExit(f"{again} has other tokens than {path}")
        copies = cache_tensors(again)
        for name, array in cache_tensors(path).items():
            equal &= array.tobytes() == copies[name].tobytes()
            values = array.astype(np.float32)
            squares += float(np.square(values - copies[name].astype(np.float32)).sum(dtype=np.float64))
            power += float(np.square(values).sum(dtype=np.float64))
    return 0.0 if equal else max((squares / power) ** 0.5, np.finfo(np.float64).tiny)


def read_a_part(archive: Path, session: str) -> str:
    """Read one block of one session, as a loader would, and say so."""
    with pltpack.open(archive) as opened:
        part = opened.read(session, layers=range(2), tokens=slice(32, 64))
    keys, _ = part.layer(0)
    return f"Random access: layers 0 and 1 of {session}, tokens 32 to 63: keys of layer 0 are {list(keys.shape)}."


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table for people."""
    first = rows[0]
    title = (
        f"{first['sessions']} sessions, {first['tokens']:,} tokens, {first['raw_bytes']:,} raw bytes of keys and values"
    )
    out = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    out.add_column("stored as", no_wrap=True)
    counted = ("sessions", "tokens", "raw\nbytes", "stored\nbytes", "ratio", "bits per\nelement")
    for column in (*counted, "without\nsharing", "dedup\nhits", "error"):
        out.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        tier = "error" in row
        out.add_row(
            row["name"],
            str(row["sessions"]),
            f"{row['tokens']:,}",
            f"{row['raw_bytes']:,}",
            f"{row['bytes']:,}",
            f"{row['ratio']:.2f}×",
            f"{row['bits_per_element']:.3f}",
            f"{row['bits_alone']:.3f}" if tier else "",
            f"{100 * row['dedup_hit_rate']:.1f} %" if tier else "",
            ("bit-exact" if not row["error"] else f"{100 * row['error']:.2f} %") if tier else "",
            end_section=row["name"] == TIERS[-1],
        )
    out.caption = "everything on disk is counted; error: root mean square of the difference over that of the values"
    return out


if __name__ == "__main__":
    main()
