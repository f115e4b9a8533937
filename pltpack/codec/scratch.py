"""Memory for the steps of coding one unit, kept by each thread: fresh pages cost as much as what is written to them."""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import DTypeLike

#: Larger arrays are not kept.
_KEPT_BYTES = 1 << 23
_VIEWS = 256


class Scratch(threading.local):
    """Arrays by name; one that is asked for again has the same memory as before, in this thread."""

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}
        self._views: dict[tuple[str, tuple[int, ...], DTypeLike], np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """An array of this shape, C-contiguous, its content whatever was there."""
        # Units of a few sizes come again and again; a view takes as long to make as a short loop.
        key = (name, shape, dtype)
        view = self._views.get(key)
        if view is not None:
            return view
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size > _KEPT_BYTES:
            return np.empty(shape, kind)
        found = self._kept.get(name)
        if found is None or len(found) < size or len(self._views) >= _VIEWS:
            self._views.clear()
        if found is None or len(found) < size:
            found = self._kept[name] = np.empty(size, np.uint8)
        view = self._views[key] = found[:size].view(kind).reshape(shape)
        return view
