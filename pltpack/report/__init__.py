"""One self-contained page about an archive: what was saved, where it came from, and what it costs in quality."""

from __future__ import annotations

from pltpack.report.document import page
from pltpack.report.gathering import gather

__all__ = ["gather", "page"]
