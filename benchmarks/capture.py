"""Capture real snapshots: run a model over prompts and keep its KV cache, one safetensors file per session.

Usage: python -m benchmarks.capture MODEL_DIR SESSIONS.json OUT_DIR [--name MODEL_NAME] [--tar FILE.tar.zst]

SESSIONS.json maps session names to ``{"prompt": ..., "continuation": ...}``, each a text or a list of token ids.
Writes OUT_DIR/<session>.safetensors (``tokens`` I32 [T]; ``layers.{i}.keys`` and ``layers.{i}.values`` BF16
[H_kv, T, D], keys rotated as an engine holds them) and OUT_DIR/../continuations.safetensors, the tokens that really
came next. ``--tar`` packs both into one reproducible file, as in fixtures/. Needs the extra ``eval``.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

CONTINUATIONS = "continuations.safetensors"


def capture(model_dir: Path, sessions: dict[str, dict[str, Any]], out: Path, name: str | None = None) -> None:
    """Write one dump per session to `out`, and their continuations beside it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def token_ids(text: str | list[int]) -> list[int]:
        return text if isinstance(text, list) else tokenizer(text).input_ids

    identity = json.dumps(model_identity(model.config, name or model_dir.name))
    out.mkdir(parents=True, exist_ok=True)
    continuations = {}
    for session, texts in sessions.items():
        prompt = token_ids(texts["prompt"])
        tensors = {"tokens": torch.tensor(prompt, dtype=torch.int32)}
        for index, (keys, values) in enumerate(run(model, prompt)):
            tensors[f"layers.{index}.keys"] = keys.bfloat16().contiguous()
            tensors[f"layers.{index}.values"] = values.bfloat16().contiguous()
        metadata = {"pltpack.dump": "1", "session": session, "identity": identity}
        save_file(tensors, out / f"{session}.safetensors", metadata)
        continuations[session] = torch.tensor(token_ids(texts["continuation"]), dtype=torch.int32)
        print(f"{session}: {len(prompt)} tokens", flush=True)
    save_file(continuations, out.parent / CONTINUATIONS)


def model_identity(config: Any, name: str) -> dict[str, Any]:
    """What the dumps say about their model; layer shapes follow from the tensors."""
    rope = {"type": "default", "theta": config.rope_parameters["rope_theta"], "dim": config.head_dim, "style": "half"}
    return {"model": name, "rope": rope, "keys": "rotated"}


def run(model: Any, prompt: list[int]) -> Iterator[tuple[Any, Any]]:
    """Keys and values, float32 [H_kv, T, D], of each layer after the prompt."""
    import torch
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        model.model(torch.tensor([prompt]), cache=cache, use_cache=True)
    for layer in cache.layers:
        yield layer.keys[0], layer.values[0]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("sessions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", help="model name for the identity (default: the model folder's name)")
    parser.add_argument("--tar", type=Path, help="pack OUT's parent folder into this file")
    args = parser.parse_args()
    capture(args.model, json.loads(args.sessions.read_text()), args.out, args.name)
    if args.tar:
        pack(args.out.parent, args.tar)
        print(f"{args.tar}: {args.tar.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
