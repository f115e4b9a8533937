"""An S3 server on loopback, and a proxy before it that can break answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.faulty_proxy import FaultyProxy
from benchmarks.remote import s3_server
from pltpack.store import Store, open_store
from pltpack.store.patience import Patience

__all__ = ["FaultyProxy", "at", "s3_server", "served"]

#: Requests that take half a second are given up, operations after ten.
HASTY = Patience(request_s=0.5, deadline_s=20.0, pause_s=0.01)


def at(url: str, name: str, patience: Patience = HASTY, **options: Any) -> Store:
    """An archive's store behind an endpoint."""
    return open_store(f"s3://archives/{name}", endpoint_url=url, key="k", secret="s", patience=patience, **options)


@contextlib.contextmanager
def served() -> Iterator[FaultyProxy]:
    """A proxy before an S3 server that has the bucket ``archives``."""
    with s3_server("archives") as port, FaultyProxy(port, slow_s=1.5) as proxy:
        yield proxy
