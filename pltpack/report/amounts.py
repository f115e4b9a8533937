"""Amounts as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """A byte count in three or four figures, with a binary unit."""
    step = 0
    while abs(count) >= 1023.95 and step < len(_UNITS) - 1:
        count /= 1024
        step += 1
    return f"{count:,.0f} {_UNITS[0]}" if step == 0 else f"{count:,.1f} {_UNITS[step]}"


def percent(part: float, whole: float = 1.0, digits: int = 1) -> str:
    """A part of a whole in percent; nothing of nothing is none of it."""
    return f"{100 * part / whole if whole else 0.0:.{digits}f} %"


def signed(value: float, digits: int = 2) -> str:
    """A change in percent, with its sign."""
    return f"{value:+.{digits}f} %".replace("-", "−")


def times(value: float, digits: int = 2) -> str:
    """A ratio."""
    return f"{value:,.{digits}f}×"


def count(amount: int, singular: str) -> str:
    """An amount with its noun."""
    return f"{amount:,} {singular}{'' if amount == 1 else 's'}"


def nats(value: float) -> str:
    """A KL divergence."""
    return "0" if value == 0 else f"{value:.4f}" if abs(value) >= 0.0005 else f"{value:.1e}"
