"""Session names as file names: percent-quoting that is reversible and cannot leave a folder."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from pltpack.errors import UnsupportedError

#: Longest session name in UTF-8 bytes.
MAX_NAME_BYTES = 200
# Quoting triples a byte at worst and file systems end names at 255 bytes, so long quoted names are refused too.
_MAX_QUOTED = 220


def check_session(name: str) -> str:
    """The name itself, if it may name a session.

    Raises
    ------
    UnsupportedError
        If it is empty, too long, or holds control characters or lone surrogates.
    """
    if not isinstance(name, str):
        raise UnsupportedError(f"session name {name!r} is not text")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise UnsupportedError(f"session name {name!r} is not valid Unicode") from None
    if not 0 < size <= MAX_NAME_BYTES:
        raise UnsupportedError(f"session name of {size} bytes (allowed: 1 to {MAX_NAME_BYTES})")
    if re.search(r"[\x00-\x1f\x7f]", name):
        raise UnsupportedError(f"session name {name!r} holds control characters")
    return name


def session_to_file(name: str) -> str:
    """Quote a session name for use as a file name: ``A-Z a-z 0-9 _ . - ~`` stay, a leading dot does not.

    Raises
    ------
    UnsupportedError
        If the name is not allowed, or its quoted form is too long for a file name.
    """
    quoted = quote(check_session(name), safe="")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > _MAX_QUOTED:
        raise UnsupportedError(f"session name {name[:40]!r}… is too long for a file name once quoted")
    return quoted


def session_from_file(stem: str) -> str:
    """Inverse of `session_to_file`."""
    return unquote(stem)
