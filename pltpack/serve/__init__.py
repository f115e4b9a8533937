"""Warm starts: a streaming loader, engine adapters, residency under a memory budget, quality guard and metrics.

Imports everything below it and is imported by the command line only; `pltpack.Archive.loader` names it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Contiguous": "pltpack.serve.destinations",
    "Hit": "pltpack.serve.prefixes",
    "LoadedLayer": "pltpack.serve.stream",
    "Loader": "pltpack.serve.loader",
    "MissError": "pltpack.serve.misses",
    "Paged": "pltpack.serve.pages",
    "Stream": "pltpack.serve.stream",
    "WarmCache": "pltpack.serve.cache",
    "WarmStart": "pltpack.serve.warm",
    "warm_generate": "pltpack.serve.warm",
}

__all__ = [
    "Contiguous",
    "Hit",
    "LoadedLayer",
    "Loader",
    "MissError",
    "Paged",
    "Stream",
    "WarmCache",
    "WarmStart",
    "warm_generate",
]

if TYPE_CHECKING:
    from pltpack.serve.cache import WarmCache
    from pltpack.serve.destinations import Contiguous
    from pltpack.serve.loader import Loader
    from pltpack.serve.misses import MissError
    from pltpack.serve.pages import Paged
    from pltpack.serve.prefixes import Hit
    from pltpack.serve.stream import LoadedLayer, Stream
    from pltpack.serve.warm import WarmStart, warm_generate


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pltpack.serve' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
