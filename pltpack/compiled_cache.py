"""A place for compiled loops where neither the package's folder nor the user's cache can be written."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

#: What numba reads when it is imported.
VARIABLE = "NUMBA_CACHE_DIR"


def settle() -> None:
    """Name a folder of this process's own, removed at its end, if numba would find none and refuse to start.

    Service users without a home and containers that are read-only have none. Each process then compiles anew, which
    takes some 20 seconds; a lasting folder in ``NUMBA_CACHE_DIR`` saves them. A name in a shared folder that others
    could guess would not do: numba unpickles what it finds.
    """
    if os.environ.get(VARIABLE) or any(map(_writable, _candidates())):
        return
    try:
        folder = tempfile.mkdtemp(prefix="pltpack-compiled-")
    except OSError:
        return
    os.environ[VARIABLE] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def is_empty() -> bool:
    """Whether no loop of the codecs is kept from an earlier process, so that the first use of each compiles it."""
    own, shared = _candidates()
    if given := os.environ.get(VARIABLE):
        places = [Path(given)]
    else:
        places = [shared]
        if any(own.glob("*.nbi")):
            return False
    # numba names folders in a shared place after the one that the module is in.
    return not any(True for place in places for _ in place.glob("codec_*/*.nbi"))


def _candidates() -> list[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(__file__).parent / "codec" / "__pycache__", Path(home) / "numba"]


def _writable(folder: Path) -> bool:
    for place in (folder, *folder.parents):
        try:
            if place.exists():
                return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
        except OSError:
            return False
    return False
