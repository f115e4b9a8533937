"""Untrusted JSON within bounds: what parsing may allocate is limited before it starts (spec/format.md, "JSON")."""

from __future__ import annotations

import json
from typing import Any

#: Most opening brackets and commas in one text: a parsed value is many times larger than its text.
MAX_BRACKETS = 1 << 20
MAX_COMMAS = 1 << 21


def parse(text: str | bytes) -> Any:
    """Parse UTF-8 JSON without repeated keys.

    Raises
    ------
    ValueError
        If it is anything else, too large or too deep.
    """
    decoded = text.decode() if isinstance(text, bytes) else text
    if decoded.count("{") + decoded.count("[") > MAX_BRACKETS or decoded.count(",") > MAX_COMMAS:
        raise ValueError("JSON text has too many parts")
    try:
        return json.loads(decoded, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("JSON text is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("repeated key")
    return out
