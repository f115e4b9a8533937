"""Untrusted JSON within bounds: what parsing may allocate is limited before it starts (spec/format.md, "JSON")."""

from __future__ import annotations

import json
from typing import Any

#: Most opening brackets and commas in one text: a parsed value is many times larger than its text.
MAX_BRACKETS = 1 << 20
MAX_COMMAS = 1 << 21
#: Most arrays and objects inside each other, the outermost counted.
MAX_DEPTH = 64
_TOO_DEEP = "JSON text is nested too deeply"


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
        value = json.loads(decoded, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            break
        level = [
            part
            for node in level
            for part in (node.values() if isinstance(node, dict) else node)
            if isinstance(part, dict | list)
        ]
    return bool(level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("repeated key")
    return out
