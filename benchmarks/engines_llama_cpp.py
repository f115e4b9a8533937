"""llama.cpp's side of the engine runs: prompts through it cold, their states saved; and again from files.

Runs under an interpreter that has llama-cpp-python, and imports nothing of this project.

Usage: python benchmarks/engines_llama_cpp.py capture|warm JOB.json
       python benchmarks/engines_llama_cpp.py fixtures MODEL.gguf OUT      (the short files in fixtures/engines)
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

KINDS = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}


class Context:
    """A context of one model; with flash attention unless values are to be transposed."""

    def __init__(self, model: Any, job: dict[str, Any]) -> None:
        settings = llama.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = 2048, 2048, 512
        settings.n_threads = settings.n_threads_batch = job["threads"]
        settings.n_seq_max, settings.kv_unified = job.get("sequences", 1), job.get("unified", True)
        settings.flash_attn_type = 0 if job["transposed"] else 1
        settings.type_k = settings.type_v = KINDS[job["type"]]
        self.context = llama.llama_init_from_model(model, settings)
        self.words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def run(self, ids: list[int], position: int, sequence: int = 0) -> int:
        """The most probable token after `ids`, which start at a position."""
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + at, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, at == len(ids) - 1
        if llama.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, len(ids) - 1), (self.words,))
        found = int(logits.argmax())
        llama.llama_batch_free(batch)
        return found

    def save(self, file: str, ids: list[int]) -> None:
        """Write the state of sequence 0."""
        array = (llama.llama_token * len(ids))(*ids)
        if not llama.llama_state_seq_save_file(self.context, file.encode(), 0, array, len(ids)):
            raise RuntimeError(f"{file}: not saved")

    def load(self, file: str) -> list[int]:
        """Restore sequence 0; returns its tokens."""
        array, count = (llama.llama_token * 4096)(), ctypes.c_size_t(0)
        if not llama.llama_state_seq_load_file(self.context, file.encode(), 0, array, 4096, ctypes.byref(count)):
            raise RuntimeError(f"{file}: refused by llama.cpp")
        return list(array[: count.value])

    def close(self) -> None:
        """Free the context."""
        llama.llama_free(self.context)


#: Tokens of the short files; some occur twice.
FIXTURE = [504, 3575, 282, 260, 6330, 314, 260, 3575, 30, 504, 6330, 30]


def load_model(path: str) -> Any:
    """A model on the CPU."""
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers = 0
    return llama.llama_model_load_from_file(path.encode(), settings)


def fixtures(model: Any, out: Path) -> None:
    """Short states: types of the cache, values transposed, several sequences in one stream and in several."""
    for kind, transposed in (("f16", False), ("f16", True), ("q8_0", False), ("q4_0", False), ("bf16", False)):
        tokens = FIXTURE if kind != "bf16" else FIXTURE[:4]
        context = Context(model, {"type": kind, "transposed": transposed, "threads": 1})
        context.run(tokens, 0)
        context.save(str(out / f"llama-{kind}{'-transposed' if transposed else ''}.bin"), tokens)
        context.close()
    for unified in (True, False):
        job = {"type": "q8_0", "transposed": False, "threads": 1, "sequences": 2, "unified": unified}
        context = Context(model, job)
        for sequence, tokens in enumerate((FIXTURE[:6], FIXTURE[:4])):
            context.run(tokens, 0, sequence)
        array = (llama.llama_token * 6)(*FIXTURE[:6])
        file = out / f"llama-session{'' if unified else '-streams'}.bin"
        llama.llama_state_save_file(context.context, str(file).encode(), array, 6)
        context.close()


def main() -> None:
    # Loading is talkative.
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    if sys.argv[1] == "fixtures":
        fixtures(load_model(sys.argv[2]), Path(sys.argv[3]))
        return
    mode, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    model = load_model(job["model"])
    warmed = Context(model, job)
    warmed.run([1, 2, 3], 0)
    warmed.close()
    results = {}
    for name, ids in job["prompts"].items():
        # A context of its own for each, so that a shared prefix comes out the same in all.
        context, file = Context(model, job), str(Path(job["folder"]) / f"{name}.bin")
        begin, busy = time.perf_counter(), time.process_time()
        if mode == "capture":
            context.run(ids[:-1], 0)
            elapsed, worked = time.perf_counter() - begin, time.process_time() - busy
            context.save(file, ids[:-1])
            begin, busy, held = time.perf_counter() - elapsed, time.process_time() - worked, len(ids) - 1
        else:
            held = len(context.load(file))
        tokens = [context.run(ids[held:], held)]
        first, worked = time.perf_counter() - begin, time.process_time() - busy
        while len(tokens) < job["new_tokens"]:
            tokens.append(context.run(tokens[-1:], held + len(ids[held:]) + len(tokens) - 1))
        results[name] = {"tokens": tokens, "seconds_to_first": first, "cpu_seconds_to_first": worked, "held": held}
        context.close()
    Path(job["result"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
