"""Capture snapshots (``pltpack capture``) and pack them into one reproducible file, as in fixtures/; and unpack it.

Usage: python -m benchmarks.capture MODEL_DIR SESSIONS.json OUT_DIR [--name MODEL_NAME] [--tar FILE.tar.zst]

SESSIONS.json and what is written are those of ``pltpack capture`` (docs/capture.md). ``--tar`` packs OUT_DIR's parent
folder: dumps and continuations. Needs the extra ``eval``.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

import zstandard


def pack(folder: Path, target: Path) -> None:
    """Pack all files under `folder` into a tar.zst whose bytes depend on nothing but their names and contents.

    The window spans all sessions, so that a prefix they share is stored about once.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    settings = zstandard.ZstdCompressionParameters.from_level(19, window_log=26, enable_ldm=True)
    target.write_bytes(zstandard.ZstdCompressor(compression_params=settings).compress(raw.getvalue()))


def unpack(source: Path, folder: Path) -> None:
    """Inverse of `pack`; no entry can leave `folder`."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 26)
    with (
        source.open("rb") as file,
        decompressor.stream_reader(file) as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        tar.extractall(folder, filter="data")


def main() -> None:
    from pltpack.quality.capture import capture

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("sessions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", help="model name for the identity (default: the model folder's name)")
    parser.add_argument("--tar", type=Path, help="pack OUT's parent folder into this file")
    args = parser.parse_args()
    result = capture(args.model, args.sessions, args.out, name=args.name, force=True)
    print(f"{args.out}: {len(result['sessions'])} sessions, {result['tokens']:,} tokens")
    if args.tar:
        pack(args.out.parent, args.tar)
        print(f"{args.tar}: {args.tar.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
