"""The codecs' hot loops on a device: CUDA kernels (numba-cuda), device memory and streams (CuPy).

Imports `pltpack.codec` only, and CuPy and numba-cuda lazily, so that a machine without a GPU can import this package;
its modules with kernels need numba-cuda, or numba's simulator (``NUMBA_ENABLE_CUDASIM=1``). Kernels write the bytes of
their counterparts on the CPU, and decode to the same bits (`transform`: within the specification's tolerance).

`backend` is the door: ``select("cuda").decode_units(codec, jobs)``. Behind it, a module per codec reads what stands at
fixed places of payloads and orders the kernels (`group_units`, `lossless_units`, `sphere_units`, `spectrum_units`); the
kernels are in `rans`, `group`, `words`, `sphere`, `spectrum` and `place`. docs/performance.md says what they can reach.
"""

from __future__ import annotations
