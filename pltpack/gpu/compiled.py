"""Compile kernels without a device: to PTX by libNVVM, and to machine code by ptxas.

Tells what a kernel takes of a multiprocessor. Needs numba-cuda and nvidia-cuda-nvcc-cu12, which bring both compilers,
and no driver; not for the simulator.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import subprocess
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple

#: Modules with kernels; each has `SIGNATURES`.
MODULES = ("rans", "place", "group", "words", "sphere", "spectrum")
#: Compute capabilities: A100, H100 and H200, B200.
TARGETS = ((8, 0), (9, 0), (10, 0))


class Usage(NamedTuple):
    """What one kernel takes: registers of a thread; bytes of stack, spilled stores and loads, and shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


def missing() -> str | None:
    """What must be installed to compile, or None."""
    for package, module in (("numba-cuda[cu12]", "numba_cuda"), ("nvidia-cuda-nvcc-cu12", "nvidia.cuda_nvcc")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"compiling kernels needs {package}"
    return None if ptxas().exists() else "compiling kernels needs ptxas, of nvidia-cuda-nvcc-cu12"


@functools.cache
def ptxas() -> Path:
    """The assembler that pip installed."""
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0] if places else ".") / "bin" / "ptxas"


def kernels() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """All kernels by name, with their argument types."""
    out = {}
    for name in MODULES:
        module = importlib.import_module(f"pltpack.gpu.{name}")
        for kernel, signature in module.SIGNATURES.items():
            out[f"{name}.{kernel.py_func.__name__}"] = (kernel, signature)
    return out


def to_ptx(kernel: Any, signature: tuple[Any, ...], target: tuple[int, int]) -> str:
    """PTX of a kernel for a compute capability."""
    from numba import cuda
    from numba.cuda import dispatcher

    kept = dispatcher.get_current_device
    # Device functions ask a device for its capability when they are compiled; there may be none.
    dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=target)
    try:
        text, _ = cuda.compile(kernel.py_func, cuda.types.void(*signature), cc=target, device=False, abi="numba",
                               output="ptx")  # fmt: skip
    finally:
        dispatcher.get_current_device = kept
    return str(text)


def assemble(ptx: str, target: tuple[int, int]) -> Usage:
    """Machine code of PTX: what it takes.

    Raises
    ------
    RuntimeError
        If ptxas refuses it.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        architecture, output = f"-arch=sm_{target[0]}{target[1]}", str(Path(folder) / "kernel.cubin")
        command = [str(ptxas()), "-v", architecture, "-o", output, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - pip's own program
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stderr)
        return int(found.group(1)) if found else 0

    patterns = r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores"
    return Usage(*map(number, (*patterns, r"(\d+) bytes spill loads", r"(\d+) bytes smem")))
