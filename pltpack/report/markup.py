"""HTML from untrusted text: the only place where text becomes markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

#: Characters of a name that are shown; the rest is in its tooltip.
LONGEST = 4000


class Markup(str):
    """Text that is HTML already; everything else is escaped when it is put into HTML."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Text as HTML shows it: control, bidirectional and other invisible characters as escapes."""
    if isinstance(value, Markup):
        return value
    raw = str(value)
    shown = raw if len(raw) <= LONGEST else raw[: LONGEST - 1] + "…"
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    return Markup(html.escape(printable))


def element(name: str, *children: object, **attributes: object) -> Markup:
    """An element; attributes of value None are left out, ``class_`` is ``class``, ``data_tip`` is ``data-tip``.

    Parameters
    ----------
    name : str
        Of the element; never untrusted.
    *children : object
        `Markup` as it is, anything else escaped.
    **attributes : object
        Values are escaped.
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    given = "".join(f' {key}="{text(value)}"' for key, value in named.items())
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def joined(parts: Iterable[object], between: str = "") -> Markup:
    """Parts one after the other, escaped where they are not `Markup`."""
    return Markup(text(between).join(text(part) for part in parts))


_VOID = frozenset({"br", "col", "input", "meta"})
