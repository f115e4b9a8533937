"""Names of places that are no paths of this machine: URLs, which join like paths and show themselves whole."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from urllib.parse import unquote

from pltpack.errors import UnsupportedError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Url(os.PathLike[str]):
    """A URL, without a slash at its end."""

    text: str

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.text.rpartition("/")[2]

    @property
    def scheme(self) -> str:
        """What precedes ``://``, in lower case."""
        return self.text.partition("://")[0].lower()


def located(location: str | os.PathLike[str]) -> Path | Url:
    """A path of this machine, ``file://`` URLs among them, or a URL.

    Raises
    ------
    UnsupportedError
        If a URL is nothing but a scheme.
    """
    text = os.fspath(location)
    found = _SCHEME.match(text)
    if found is None:
        return Path(location)
    if not text[found.end() :].strip("/"):
        raise UnsupportedError("a URL that names no archive", text)
    if found[1].lower() in ("file", "local"):
        return Path(unquote(text[found.end() :]))
    return Url(text.rstrip("/"))
