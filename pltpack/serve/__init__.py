"""Warm starts: a streaming loader, engine adapters, residency under a memory budget, quality guard and metrics.

Imports everything below it and is imported by the command line only. Its modules come later: this version reads
archives through `pltpack.open` and `pltpack.to_dynamic_cache`.
"""

from __future__ import annotations
