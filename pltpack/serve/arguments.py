"""Checks of what callers hand to the loader: a wrong kind of value gives one error that names it."""

from __future__ import annotations

import numbers
from typing import Any

from pltpack.errors import UnsupportedError
from pltpack.serve.prefixes import Hit


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number from `least` to `most`, or `UnsupportedError`."""
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UnsupportedError(f"{name} must be a whole number {limits}, not {value!r}")
    return int(value)


def positive(name: str, value: Any, zero: bool = False) -> float | None:
    """None or a number above 0, or 0 where `zero` says so; else `UnsupportedError`."""
    if value is None:
        return None
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not (value > 0 or (zero and value == 0)):
        raise UnsupportedError(f"{name} must be a number {'of at least' if zero else 'above'} 0, not {value!r}")
    return float(value)


def hit_of(value: Any) -> Hit:
    """What a look-up gave, or `UnsupportedError`."""
    if not isinstance(value, Hit):
        raise UnsupportedError(f"what is to be loaded must come from lookup, not be {value!r}")
    if not value:
        raise UnsupportedError("there is nothing to load: the look-up found nothing")
    return value


def is_destination(value: Any) -> bool:
    """Whether a load can go there: see `pltpack.serve.destinations.Destination`."""
    return all(callable(getattr(value, name, None)) for name in ("begin", "room", "put", "layer", "touched"))


def arrays_of(name: str, value: Any) -> list[Any]:
    """The arrays or tensors of a destination, one a layer, or `UnsupportedError`."""
    try:
        arrays = [value[index] for index in range(len(value))]
    except (TypeError, KeyError, IndexError):
        arrays = [None]
    if not all(hasattr(array, "shape") and hasattr(array, "dtype") for array in arrays):
        raise UnsupportedError(f"destination's {name} must be arrays or tensors, one a layer, not "
                               f"{type(value).__name__}")  # fmt: skip
    return arrays
