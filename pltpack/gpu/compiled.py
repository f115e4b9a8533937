"""Compile kernels without a device: to PTX by libNVVM, and to machine code by ptxas.

``python -m pltpack.gpu.compiled 90`` prints as JSON what every kernel takes of a multiprocessor of compute capability
9.0. Needs numba-cuda and nvidia-cuda-nvcc-cu12, which bring both compilers, and no driver. It is a program of its own:
where there is a simulator, or kernels are to run, numba must not be told what it is told here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys
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

    _do_without_device(target)
    text, _ = cuda.compile(
        kernel.py_func, cuda.types.void(*signature), cc=target, device=False, abi="numba", output="ptx"
    )
    return str(text)


def _do_without_device(target: tuple[int, int]) -> None:
    """Keep numba from asking a driver, and NVRTC (which is large and not used here), for what is known."""
    from numba.cuda import cuda_paths, dispatcher
    from numba.cuda.core import config

    dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=target)
    config.FORCE_CUDA_CC = target
    found = {"nvvm": cuda_paths._get_nvvm_path(), "libdevice": cuda_paths._get_libdevice_path()}
    cuda_paths.get_cuda_paths._cached_result = found


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


def main() -> None:
    """Print the usage of all kernels on the target that the command line names."""
    target = divmod(int(sys.argv[1]), 10)
    found = {name: assemble(to_ptx(*kernel, target), target)._asdict() for name, kernel in kernels().items()}
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
