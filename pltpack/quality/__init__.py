"""What needs the model itself: capture of snapshots, calibration of profiles, scores of rebuilt caches.

Needs the extra ``eval`` (torch and transformers), imported lazily.
"""

from __future__ import annotations
