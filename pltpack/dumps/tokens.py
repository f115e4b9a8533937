"""Token ids from outside a dump: sidecar files and the file that the caller names.

Most engines do not store token ids with their caches, so an importer takes them from ``<dump>.tokens.json`` beside the
dump (``a.safetensors.tokens.json`` or ``a.tokens.json``) or from one file for all dumps. Both hold a JSON list for one
session, or an object ``{session: list}``. The one file may also be a log of vLLM's KV events
(`pltpack.dumps.kv_events`), named ``.jsonl``. Formats whose file names are digests of tokens look through all lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.errors import DumpError, NotFoundError, PltpackError

SIDECAR = ".tokens.json"
EVENT_LOGS = {".jsonl", ".ndjson"}


def token_ids(values: Any, what: str) -> np.ndarray:
    """Check untrusted token ids and give them as int32 ``[T]``.

    Parameters
    ----------
    values : ndarray or list
        Integers from 0 to 2**31 - 1.
    what : str
        Name for the error message.

    Raises
    ------
    DumpError
        If they are not a flat list of integers in that range.
    """
    if isinstance(values, list):
        if not all(type(value) is int for value in values):
            raise DumpError(f"{what} is not a list of integers")
        if values and not (min(values) >= 0 and max(values) < 1 << 31):
            raise DumpError(f"{what} holds ids outside 0 to 2**31 - 1")
        return np.array(values, dtype=np.int32)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        raise DumpError(f"{what} is not a flat array of integers")
    if len(values) and not (values.min() >= 0 and values.max() < 1 << 31):
        raise DumpError(f"{what} holds ids outside 0 to 2**31 - 1")
    return np.ascontiguousarray(values, dtype=np.int32)


class TokenLookup:
    """Finds the token ids of dumps that hold none.

    Parameters
    ----------
    file : path, optional
        JSON file for all dumps; a plain list serves one session only.
    """

    def __init__(self, file: str | os.PathLike[str] | None = None) -> None:
        self._file = None if file is None else Path(file)
        self._given = None if self._file is None else _load(self._file)
        self._loaded: tuple[Path, Any] | None = None
        self._taken: dict[Path, str] = {}

    def find(self, dump: Path, session: str) -> np.ndarray | None:
        """Token ids int32 ``[T]`` from the sidecar of `dump`, else from the caller's file, else None.

        Raises
        ------
        DumpError
            If a token file is malformed, or one plain list would serve two sessions.
        """
        for sidecar in (dump.with_name(dump.name + SIDECAR), dump.with_name(dump.stem + SIDECAR)):
            if sidecar.is_file():
                if self._loaded is None or self._loaded[0] != sidecar:
                    self._loaded = (sidecar, _load(sidecar))
                found = self._pick(self._loaded[1], session, sidecar)
                if found is not None:
                    return found
        if self._file is None:
            return None
        return self._pick(self._given, session, self._file)

    def lists(self, dump: Path) -> Iterator[tuple[str | None, np.ndarray]]:
        """Every list of token ids that may belong to a dump: of its sidecar, then of the caller's file.

        Yields
        ------
        (name, ids)
            The name that the file gives it, if any, and int32 ``[T]``.

        Raises
        ------
        DumpError
            If a token file is malformed.
        """
        sidecars = (dump.with_name(dump.name + SIDECAR), dump.with_name(dump.stem + SIDECAR))
        files = [(file, _load(file)) for file in dict.fromkeys(sidecars) if file.is_file()]
        if self._file is not None:
            files.append((self._file, self._given))
        for file, data in files:
            try:
                yield from _lists(None, data)
            except PltpackError as error:
                raise error.at(file) from None

    def require(self, dump: Path, session: str, count: int, found: np.ndarray | None = None) -> np.ndarray:
        """Token ids of a session of `count` cached tokens: `found` in the dump itself, else those of `find`.

        Raises
        ------
        DumpError
            If there are none, or their number is not `count`.
        """
        ids = found if found is not None else self.find(dump, session)
        if ids is None:
            raise DumpError(f"session {session!r} has no token ids; put a JSON list into {dump.name}{SIDECAR} "
                            "or name a file of them (--tokens FILE)", dump)  # fmt: skip
        if len(ids) != count:
            raise DumpError(f"session {session!r} has {len(ids)} token ids but its caches hold {count} tokens", dump)
        return ids

    def _pick(self, data: Any, session: str, file: Path) -> np.ndarray | None:
        if isinstance(data, Mapping):
            if session not in data:
                return None
            data = data[session]
        elif self._taken.setdefault(file, session) != session:
            raise DumpError(f"one list of tokens cannot serve both {self._taken[file]!r} and {session!r}; "
                            "give an object {session: list}", file)  # fmt: skip
        try:
            if not isinstance(data, list):
                raise DumpError("token file is neither a list nor an object {session: list}")
            return token_ids(data, f"token list of {session!r}")
        except PltpackError as error:
            raise error.at(file) from None


def _lists(name: str | None, data: Any, depth: int = 2) -> Iterator[tuple[str | None, np.ndarray]]:
    """Lists of ids at the top of some JSON data, or one level or two below it."""
    if isinstance(data, Mapping) and depth:
        for key, value in data.items():
            yield from _lists(str(key) if name is None else f"{name}.{key}", value, depth - 1)
    elif isinstance(data, list) and data and all(isinstance(value, list) for value in data) and depth:
        for index, value in enumerate(data):
            yield from _lists(str(index) if name is None else f"{name}.{index}", value, depth - 1)
    elif isinstance(data, list):
        yield name, token_ids(data, "token list" if name is None else f"token list {name!r}")
    else:
        raise DumpError("token file holds something else than lists of token ids")


def _load(file: Path) -> Any:
    from pltpack.dumps.base import MAX_JSON, parse_json

    try:
        if not file.is_file():
            raise NotFoundError("no such token file", file)
        if file.stat().st_size > MAX_JSON:
            raise DumpError(f"token file is larger than {MAX_JSON} bytes", file)
        if file.suffix in EVENT_LOGS:
            from pltpack.dumps.kv_events import token_lists

            return token_lists(file.read_text(encoding="utf-8", errors="replace"))
        return parse_json(file.read_bytes(), "token file")
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", file) from None
    except PltpackError as error:
        raise error.at(file) from None
