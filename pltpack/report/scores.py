"""What ``pltpack score --json`` measured, read from its file and checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from pltpack.errors import DumpError, NotFoundError
from pltpack.format import json_text

#: Larger files are not scores.
_MOST_BYTES = 1 << 28
_FIGURES = ("kl", "ppl_change_pct", "top1_pct")


class Point(NamedTuple):
    """One way to store the caches, scored.

    Attributes
    ----------
    name, family : str
    bits : float or None
        Per element, profiles left out; None where nothing was stored.
    stored_bytes : int or None
        With profiles.
    total : dict
        ``kl`` (nats), ``ppl_change_pct``, ``top1_pct``.
    sessions : dict
        The same for each session.
    """

    name: str
    family: str
    bits: float | None
    stored_bytes: int | None
    total: dict[str, float]
    sessions: dict[str, dict[str, float]]


def read_scores(path: Path) -> list[Point]:
    """The points of a file that ``pltpack score --json`` printed.

    Raises
    ------
    NotFoundError
        If there is no such file.
    DumpError
        If it is anything else.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DumpError("too large for what pltpack score --json prints", path)
        data = json_text.parse(path.read_bytes())
    except FileNotFoundError:
        raise NotFoundError("no such file", path) from None
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from None
    except ValueError as error:
        raise DumpError(f"not what pltpack score --json prints: {error}", path) from None
    try:
        return [_point(one) for one in data["scores"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(f"not what pltpack score --json prints: {type(error).__name__} {error}", path) from None


def _point(one: dict[str, Any]) -> Point:
    total = one["total"]
    bits = total.get("bits_without_profile", total.get("bits_per_element"))
    stored = total.get("archive_bytes")
    name, family = one["name"], one["family"]
    if not (isinstance(name, str) and isinstance(family, str)):
        raise TypeError("a name is not text")
    return Point(
        name, family, None if bits is None else _number(bits, least=1e-9), None if stored is None else int(stored),
        _figures(total), {str(session): _figures(row) for session, row in one["sessions"].items()},
    )  # fmt: skip


def _figures(row: dict[str, Any]) -> dict[str, float]:
    return {name: _number(row[name]) for name in _FIGURES}


def _number(value: Any, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError(f"{str(value)[:40]!r} is not a number in range")
    return float(value)
