"""Where archives live: folders of this machine, and object stores by their URLs (docs/remote.md)."""

from __future__ import annotations

import os
from typing import Any

from pltpack.store.base import Store, Stored, Writing
from pltpack.store.local import LocalStore
from pltpack.store.location import Url, located

__all__ = ["LocalStore", "Store", "Stored", "Url", "Writing", "open_store"]


def open_store(location: str | os.PathLike[str] | Store, key_bytes: bytes | None = None, **options: Any) -> Store:
    """The store of an archive's location; what is one already is given back.

    Parameters
    ----------
    location : path-like or Store
        A path, or a URL that fsspec knows: ``s3://``, ``gs://``, ``memory://``, …; ``file://`` is a path.
    key_bytes : bytes, optional
        Of an encrypted archive, 32 bytes; else `pltpack.format.sealing.current_key` gives it.
    **options
        For a URL: what its file system takes (``endpoint_url``, ``key``, …), and ``patience``, a
        `pltpack.store.patience.Patience`.

    Raises
    ------
    UnsupportedError
        If the packages for such a URL are not installed.
    """
    if isinstance(location, Store):
        return location
    place = located(location)
    if isinstance(place, Url):
        from pltpack.store.remote import RemoteStore

        store = RemoteStore(place, **options)
        store.key = key_bytes
        return store
    return LocalStore(place, key_bytes)
