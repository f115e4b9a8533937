"""Checks of what callers hand to the loader: a wrong kind of value gives one error that names it."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from pltpack.errors import UnsupportedError
from pltpack.serve.prefixes import Hit
from pltpack.snapshot import Identity


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
    hit = any_hit(value)
    if not hit:
        raise UnsupportedError("there is nothing to load: the look-up found nothing")
    return hit


def any_hit(value: Any) -> Hit:
    """What a look-up gave, empty or not, or `UnsupportedError`."""
    if not isinstance(value, Hit) or not isinstance(value.tokens, numbers.Integral):
        raise UnsupportedError(f"what is to be loaded must come from lookup, not be {value!r}")
    return value


def rise_of(value: Any) -> float:
    """A rise in percent, not a number included, or `UnsupportedError`."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise UnsupportedError(f"ppl_change_pct must be a number, not {value!r}")
    return float(value)


def of_kind(name: str, value: Any, kind: type, article: str) -> None:
    """Refuse what is neither None nor of a class, with `UnsupportedError`."""
    if value is not None and not isinstance(value, kind):
        raise UnsupportedError(f"{name} must be {article}, not {value!r}")


def called(name: str, value: Any) -> None:
    """Refuse what is neither None nor can be called, with `UnsupportedError`."""
    if value is not None and not callable(value):
        raise UnsupportedError(f"{name} must be a function, not {value!r}")


def field_names(name: str, value: Any) -> tuple[str, ...]:
    """Names of fields of an identity, or `UnsupportedError`."""
    try:
        names = None if isinstance(value, str) else tuple(value)
    except TypeError:
        names = None
    known = {field.name for field in dataclasses.fields(Identity)}
    if names is None or not all(isinstance(one, str) and one in known for one in names):
        raise UnsupportedError(f"{name} must be names of identity fields ({', '.join(sorted(known))}), not {value!r}")
    return names


def sized(what: str, value: Any) -> int:
    """How many there are of something that is numbered, or `UnsupportedError`."""
    try:
        return len(value)
    except TypeError:
        raise UnsupportedError(f"{what} must be arrays or tensors, not {value!r}") from None


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
