"""What needs the model itself: capture of snapshots, calibration of profiles, scores of rebuilt caches.

Needs the extra ``eval`` (torch and transformers), imported lazily. Its modules come later: this version captures and
scores with the programs in ``benchmarks/``.
"""

from __future__ import annotations
