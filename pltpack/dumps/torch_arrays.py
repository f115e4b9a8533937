"""Between torch tensors and numpy arrays, bit by bit, for the dtypes that numpy knows through ml_dtypes only."""

from __future__ import annotations

from typing import Any

import numpy as np

from pltpack.errors import UnsupportedError
from pltpack.snapshot import DTYPES, dtype_name

_TORCH_NAMES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NAMES = {name: key for key, name in _TORCH_NAMES.items()}
_BITS = {1: ("uint8", np.uint8), 2: ("int16", np.int16), 4: ("int32", np.int32)}


def cache_dtype(dtype: Any) -> str:
    """The name in `DTYPES` of a torch dtype.

    Raises
    ------
    UnsupportedError
        If it is not a KV cache dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _NAMES:
        raise UnsupportedError(f"dtype {name} is not a KV cache dtype (known: {', '.join(DTYPES)})")
    return _NAMES[name]


def to_numpy(tensor: Any) -> np.ndarray:
    """A copy of a tensor on any device, in C order."""
    import torch

    dtype = DTYPES[cache_dtype(tensor.dtype)]
    bits = getattr(torch, _BITS[dtype.itemsize][0])
    copy = tensor.detach().contiguous().view(bits).cpu().numpy()
    return np.array(copy, order="C").view(dtype)


def to_torch(array: np.ndarray) -> Any:
    """A copy of an array of a cache dtype as a tensor on the CPU."""
    import torch

    name = dtype_name(array.dtype)
    bits = np.array(array, order="C").view(_BITS[array.dtype.itemsize][1])
    return torch.from_numpy(bits).view(getattr(torch, _TORCH_NAMES[name]))


def torch_view(array: np.ndarray) -> Any:
    """An array of a cache dtype as a tensor on the CPU that shares its memory; it must be writable."""
    import torch

    name = dtype_name(array.dtype)
    bits = array.view(_BITS[array.dtype.itemsize][1])
    return torch.from_numpy(bits).view(getattr(torch, _TORCH_NAMES[name]))
