"""How long a store is waited for, and how often it is asked again."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from pltpack.errors import PltpackError, StoreError, UnsupportedError

Result = TypeVar("Result")

#: Environment variables in place of the defaults, in seconds.
REQUEST_VARIABLE, DEADLINE_VARIABLE = "PLTPACK_REQUEST_SECONDS", "PLTPACK_DEADLINE_SECONDS"
#: Longest pause between two attempts, in seconds.
_LONGEST_PAUSE = 5.0
# Packages whose own exceptions stand for a network or a server that failed, beside `OSError`.
_NETWORK = frozenset({"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "http", "httpx", "requests", "urllib3"})


class ChangedError(Exception):
    """A conditional write was refused: the object is not what it was said to be."""


class ShortError(OSError):
    """A store answered with fewer bytes than it was asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Patience:
    """Limits of waiting.

    Attributes
    ----------
    request_s : float
        Seconds that one request may take, plus what its bytes take at `bytes_per_second`.
    deadline_s : float
        Seconds that one operation may take, with all repeats of its requests; plus the same.
    pause_s : float
        Pause before the first repeat; it doubles from one to the next, up to 5 seconds, less a random part.
    bytes_per_second : float
        What a transfer reaches at least.
    """

    request_s: float = 10.0
    deadline_s: float = 60.0
    pause_s: float = 0.05
    bytes_per_second: float = 1e6

    @classmethod
    def default(cls) -> Patience:
        """What the environment says."""
        return cls(_seconds(REQUEST_VARIABLE, cls().request_s), _seconds(DEADLINE_VARIABLE, cls().deadline_s))

    def deadline(self, size: int = 0) -> float:
        """Until when an operation that moves `size` bytes may take, on the clock of `time.monotonic`."""
        return time.monotonic() + self.deadline_s + size / self.bytes_per_second

    def insist(
        self, what: str, where: os.PathLike[str], attempt: Callable[[float], Result], size: int = 0,
        deadline: float | None = None,
    ) -> Result:  # fmt: skip
        """What `attempt` returns, which is given the seconds it may take, repeated where the network or a server fails.

        Parameters
        ----------
        what : str
            What is tried, for the error.
        where : path-like
        attempt : callable
        size : int
            Bytes that are moved.
        deadline : float, optional
            In place of `deadline`.

        Raises
        ------
        StoreError
            If the deadline has come, or the store refuses.
        """
        end = self.deadline(size) if deadline is None else deadline
        pause, tries = self.pause_s, 0
        while True:
            tries += 1
            left = end - time.monotonic()
            try:
                return attempt(max(0.001, min(self.request_s + size / self.bytes_per_second, left)))
            except (FileNotFoundError, ChangedError, PltpackError):
                raise
            except PermissionError as error:
                raise StoreError(f"{what} is refused ({_short(error)})", where) from error
            except Exception as error:
                if not _transient(error):
                    raise StoreError(f"{what} is not possible ({_short(error)})", where) from error
                wait = pause * (0.5 + random.random() / 2)  # noqa: S311 - spreads clients, guards nothing
                if time.monotonic() + wait >= end:
                    times = f"{tries} attempt{'s' if tries > 1 else ''}"
                    raise StoreError(f"{what} failed before its deadline, after {times} ({_short(error)})",
                                     where) from error  # fmt: skip
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _transient(error: Exception) -> bool:
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "NoRegionError"):
        return False
    return isinstance(error, OSError | TimeoutError) or type(error).__module__.split(".")[0] in _NETWORK


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise UnsupportedError(f"{variable} is not a number of seconds: {text!r}")
    return found
