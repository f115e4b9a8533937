"""pltpack: an offline compressor and archive format for LLM KV-cache snapshots."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pltpack import compiled_cache

__version__ = "0.1.0"

# Names are looked up on first use, so that `import pltpack` and `pltpack --help` stay fast.
_HOMES = {
    "compress": "pltpack.archive.create",
    "append": "pltpack.archive.create",
    "decompress": "pltpack.archive.extract",
    "verify": "pltpack.archive.extract",
    "convert": "pltpack.archive.convert",
    "compact": "pltpack.archive.maintain",
    "gc": "pltpack.archive.maintain",
    "export_session": "pltpack.archive.transfer",
    "import_session": "pltpack.archive.transfer",
    "Archive": "pltpack.archive.reader",
    "open": "pltpack.archive.reader",
    "Snapshot": "pltpack.snapshot",
    "Identity": "pltpack.snapshot",
    "LayerGeometry": "pltpack.snapshot",
    "open_dumps": "pltpack.dumps",
    "write_dump": "pltpack.dumps",
    "from_dynamic_cache": "pltpack.dumps",
    "to_dynamic_cache": "pltpack.dumps",
    "PltpackError": "pltpack.errors",
    "MissError": "pltpack.serve.misses",
    "serve": "pltpack.serve",
}

__all__ = [
    "__version__",
    "compress",
    "append",
    "decompress",
    "verify",
    "convert",
    "compact",
    "gc",
    "export_session",
    "import_session",
    "Archive",
    "open",
    "Snapshot",
    "Identity",
    "LayerGeometry",
    "open_dumps",
    "write_dump",
    "from_dynamic_cache",
    "to_dynamic_cache",
    "PltpackError",
    "MissError",
    "serve",
]

if TYPE_CHECKING:
    from pltpack import serve
    from pltpack.archive.convert import convert
    from pltpack.archive.create import append, compress
    from pltpack.archive.extract import decompress, verify
    from pltpack.archive.maintain import compact, gc
    from pltpack.archive.reader import Archive
    from pltpack.archive.reader import Archive as open  # noqa: N813
    from pltpack.archive.transfer import export_session, import_session
    from pltpack.dumps import from_dynamic_cache, open_dumps, to_dynamic_cache, write_dump
    from pltpack.errors import PltpackError
    from pltpack.serve.misses import MissError
    from pltpack.snapshot import Identity, LayerGeometry, Snapshot


compiled_cache.settle()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pltpack' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    value = module if name == "serve" else getattr(module, "Archive" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
