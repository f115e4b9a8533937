"""Foreign files that hold snapshots: the door by which caches come in and go out again.

One module per format, each a `DumpFormat` behind a registry. This package may import `pltpack.snapshot`,
`pltpack.names` and `pltpack.errors`; only the archive, the serving floor and the command line import it.
"""

from __future__ import annotations

from pltpack.dumps.base import DumpFormat
from pltpack.dumps.dynamic_cache import from_dynamic_cache, to_dynamic_cache
from pltpack.dumps.registry import dump_format, format_names, open_dumps, write_dump
from pltpack.dumps.tokens import TokenLookup

__all__ = [
    "DumpFormat",
    "TokenLookup",
    "dump_format",
    "format_names",
    "open_dumps",
    "write_dump",
    "from_dynamic_cache",
    "to_dynamic_cache",
]
