"""The codecs' hot loops on a device: CUDA kernels (numba-cuda), device memory and streams (CuPy).

Imports `pltpack.codec` and `pltpack.format` only, and CuPy and numba-cuda lazily, so that a machine without a GPU can
import it. A kernel writes the same bytes as its counterpart on the CPU, always. Its kernels come later: this version
encodes and decodes on the CPU.
"""

from __future__ import annotations
