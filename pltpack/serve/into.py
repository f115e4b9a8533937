"""What callers give as the place that a load goes to, made a `Destination`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pltpack.errors import UnsupportedError
from pltpack.serve.arguments import is_destination
from pltpack.serve.destinations import Contiguous, Destination, Fresh

if TYPE_CHECKING:
    from pltpack.gpu.backend import CudaBackend


def destination_of(into: Any, backend: CudaBackend | None) -> Destination:
    """See `pltpack.serve.loader.Loader.stream` for what it may be; on a device where there is a backend.

    Raises
    ------
    UnsupportedError
        If it is nothing that a load can go to.
    """
    found: Destination
    if into is None:
        found = Fresh()
    elif isinstance(into, tuple):
        if len(into) != 2:
            raise UnsupportedError(f"a load goes to a pair of keys and values, not to {len(into)} things")
        found = Contiguous(*into)
    elif hasattr(into, "layers") and not hasattr(into, "begin"):
        from pltpack.serve.cache import Filled

        found = Filled(into)
    else:
        if not is_destination(into):
            raise UnsupportedError(f"a load cannot go to {type(into).__name__}: give a pair of keys and values, a "
                                   "Paged, a DynamicCache or another Destination")  # fmt: skip
        found = into
    if backend is None:
        return found
    from pltpack.serve.device_destinations import on_device

    return on_device(found, backend)
