"""What kernels run on: a CUDA device through CuPy and numba-cuda, or numba's simulator.

Arrays are CuPy's on a device and NumPy's in the simulator (``NUMBA_ENABLE_CUDASIM=1``), which have the same functions;
`arrays` gives the one or the other module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import time
from typing import Any

import numpy as np

from pltpack.errors import UnsupportedError
from pltpack.gpu.simulator import WARP

#: Warps of a block on a device, and in the simulator, which makes a Python thread of each of their lanes.
WARPS, SIMULATED_WARPS = 8, 2
#: What a block may take of shared memory without asking for more.
SHARED_BYTES = 48 * 1024
#: Blocks of a grid that loops over its work: enough for any device.
MOST_BLOCKS, SIMULATED_BLOCKS = 4096, 2
_INSTALL = "pip install 'pltpack[cuda12]' or 'pltpack[cuda13]', beside an NVIDIA driver"


@functools.cache
def is_simulated() -> bool:
    """Whether numba simulates kernels; it decides that when it is imported."""
    from numba import cuda

    simulated = bool(getattr(cuda.config, "ENABLE_CUDASIM", False)) if hasattr(cuda, "config") else False
    return simulated or "simulator" in getattr(cuda.jit, "__module__", "")


def missing() -> str | None:
    """Why kernels cannot run here and what to install, or None if they can."""
    try:
        from numba import cuda
    except ImportError as error:
        return f"CUDA needs numba-cuda ({error}): {_INSTALL}"
    if is_simulated():
        return None
    if importlib.util.find_spec("cupy") is None:
        return f"CUDA needs CuPy: {_INSTALL}"
    try:
        found = cuda.is_available()
    except Exception as error:
        return f"CUDA does not start ({error}): {_INSTALL}"
    return None if found else f"no CUDA device was found: {_INSTALL}"


def require() -> None:
    """Check that kernels can run.

    Raises
    ------
    UnsupportedError
        Saying what is missing and how to install it.
    """
    why = missing()
    if why is not None:
        raise UnsupportedError(why)


@functools.cache
def arrays() -> Any:
    """The array module: `cupy` on a device, `numpy` in the simulator."""
    require()
    if is_simulated():
        return np
    # Kernels go to CuPy's own stream: waiting for it at each launch, as the array interface asks, would only stall.
    config = importlib.import_module("numba.cuda").config
    config.CUDA_ARRAY_INTERFACE_SYNC = False
    config.CUDA_LOW_OCCUPANCY_WARNINGS = False
    return importlib.import_module("cupy")


def put(array: np.ndarray) -> Any:
    """A copy of a host array on the device."""
    return np.array(array) if is_simulated() else arrays().asarray(np.ascontiguousarray(array))


def get(array: Any) -> np.ndarray:
    """A device array on the host."""
    found: np.ndarray = array if is_simulated() else arrays().asnumpy(array)
    return found


def stream() -> Any:
    """The stream that kernels are put on: CuPy's current one."""
    if is_simulated():
        return 0
    from numba import cuda

    return cuda.external_stream(arrays().cuda.get_current_stream().ptr)


def warps_of(count: int, shared: int = 0) -> tuple[int, int, Any, int]:
    """Launch shape of a kernel with one warp for each of `count` things; `shared` bytes of dynamic shared memory."""
    warps = SIMULATED_WARPS if is_simulated() else WARPS
    return max(1, -(-count // warps)), warps * WARP, stream(), shared


def loop_of(count: int) -> tuple[int, int, Any, int]:
    """Launch shape of a kernel whose threads loop over `count` things."""
    threads, most = (WARP, SIMULATED_BLOCKS) if is_simulated() else (WARPS * WARP, MOST_BLOCKS)
    return max(1, min(most, -(-count // threads))), threads, stream(), 0


def lines_of(lines: int, most: int, shared: int = 0) -> tuple[tuple[int, int], int, Any, int]:
    """Launch shape of a kernel with a grid row per line, whose warps share up to `most` things."""
    warps = SIMULATED_WARPS if is_simulated() else WARPS
    # Four things a warp or so: enough work to pay for a block, enough blocks to fill a device.
    wide = 1 if is_simulated() else max(1, min(MOST_BLOCKS, -(-most // (4 * warps))))
    return (wide, lines), warps * WARP, stream(), shared


def use(number: int) -> Any:
    """A context in which a device is the current one."""
    return contextlib.nullcontext() if is_simulated() else arrays().cuda.Device(number)


def staging(size: int) -> np.ndarray:
    """A host buffer uint8 ``[size]`` that a device can read by itself: pinned, where there is a device."""
    if is_simulated():
        return np.empty(size, np.uint8)
    memory = arrays().cuda.alloc_pinned_memory(size)
    return np.frombuffer(memory, np.uint8, size)


@functools.cache
def has_blas() -> bool:
    """Whether CuPy finds cuBLAS, which is a package of its own; NumPy has its BLAS."""
    xp = arrays()
    try:
        xp.ones((1, 1), np.float32) @ xp.ones((1, 1), np.float32)
    except (ImportError, RuntimeError):
        return False
    return True


class Stages:
    """Seconds between the marks that decoders set while this is entered, by their names; for measurements."""

    _open: Stages | None = None

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def __enter__(self) -> Stages:
        Stages._open = self
        self.add("start")
        return self

    def __exit__(self, *error: object) -> None:
        Stages._open = None

    def add(self, name: str) -> None:
        """A stage has been put on the stream."""
        if is_simulated():
            self._marks.append((name, time.perf_counter()))
            return
        event = arrays().cuda.Event()
        event.record()
        self._marks.append((name, event))

    def seconds(self) -> dict[str, float]:
        """Of each stage, summed over all calls; waits for the device."""
        found: dict[str, float] = {}
        if not is_simulated():
            arrays().cuda.get_current_stream().synchronize()
        for (_, before), (name, after) in itertools.pairwise(self._marks):
            taken = after - before if is_simulated() else arrays().cuda.get_elapsed_time(before, after) / 1000
            found[name] = found.get(name, 0.0) + taken
        return found


def mark(stage: str) -> None:
    """Say that a stage has been put on the stream; costs nothing unless somebody measures."""
    if Stages._open is not None:
        Stages._open.add(stage)
