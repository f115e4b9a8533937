"""Every error that pltpack raises on purpose; all carry the file they speak of and map to one exit code.

Exit codes (the command line's contract): 0 done, 1 a check found a difference, 2 bad input or usage,
3 a promise could not be kept, 130 interrupted.
"""

from __future__ import annotations

import os


class PltpackError(Exception):
    """Base of all deliberate errors.

    Parameters
    ----------
    fact : str
        What is wrong, as one sentence without a trailing period.
    path : str or os.PathLike, optional
        The file the fact is about; it is put in front of the message.
    """

    exit_code = 2

    def __init__(self, fact: str, path: str | os.PathLike[str] | None = None) -> None:
        self.fact = fact
        self.path = None if path is None else os.fspath(path)
        super().__init__(fact if path is None else f"{self.path}: {fact}")

    def at(self, path: str | os.PathLike[str]) -> PltpackError:
        """The same error, naming `path` if it named no file yet."""
        return self if self.path is not None else type(self)(self.fact, path)


class DumpError(PltpackError):
    """A dump is damaged, or is not in the format it claims or was said to be."""


class UnsupportedError(PltpackError):
    """A valid file or request uses a layout, dtype or feature that this version does not handle."""


class FormatError(PltpackError):
    """An archive's bytes break the specification: truncated, altered, or hostile."""


class IdentityError(PltpackError):
    """Two caches do not belong to the same model, or a loader's own identity differs; names the field."""


class NotFoundError(PltpackError):
    """A named file, session, codec or dump format does not exist."""


class ConflictError(PltpackError):
    """The output exists already, or another writer holds the archive."""


class DifferenceError(PltpackError):
    """`verify --against` found values that differ from the dump."""

    exit_code = 1


class PromiseError(PltpackError):
    """A quality or size target could not be kept."""

    exit_code = 3


class EngineError(PltpackError):
    """Workers of other processes or machines failed again and again, or cannot be reached."""


class StoreError(PltpackError):
    """An object store refused, failed, or did not answer before the deadline."""


class EncryptionError(PltpackError):
    """A key is missing, malformed, or not the one that an archive is encrypted with."""
