"""The engine on Ray: calls are tasks, shared values are objects; retries, spilling and lost nodes are Ray's own."""

from __future__ import annotations

import collections
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pltpack
from pltpack.errors import EngineError, PltpackError, UnsupportedError

#: Times that a call is made again after its worker or its machine died.
RETRIES = 8
_CONNECT_SECONDS = 10

Out = TypeVar("Out")


class RayEngine:
    """An `pltpack.archive.engine.Engine` on a Ray cluster.

    Parameters
    ----------
    address : str, optional
        See `pltpack.archive.engine.open_engine`.

    Raises
    ------
    UnsupportedError
        If Ray is not installed.
    EngineError
        If the cluster cannot be reached.
    """

    def __init__(self, address: str | None = None) -> None:
        # An offline program tells nobody that it was used.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise UnsupportedError("engine 'ray' needs Ray: pip install 'pltpack[ray]'") from None
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            _check_answers(address or os.environ.get("RAY_ADDRESS"))
            try:
                ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False,
                         logging_level="ERROR", configure_logging=False)  # fmt: skip
            except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
                where = "" if address is None else f" at {address}"
                raise EngineError(f"no Ray cluster can be reached{where} ({error})") from error

    def close(self) -> None:
        """Leave the cluster, if this engine joined it; stop it, if this engine started it."""
        if self._started:
            self._ray.shutdown()

    def share(self, value: object) -> Any:
        """See `pltpack.archive.engine.Engine.share`."""
        return self._ray.put(value)

    def in_order(self, work: Callable[..., Out], calls: Iterable[tuple[Any, ...]], cpus: int = 1) -> Iterator[Out]:
        """See `pltpack.archive.engine.Engine.in_order`."""
        # No machine would ever take a call that asks for more than it has, and Ray would wait for one for ever.
        cpus = max(1, min(cpus, self._largest()))
        task = self._ray.remote(num_cpus=cpus, max_retries=RETRIES)(_called)
        waiting: collections.deque[Any] = collections.deque()
        window = 2
        # After an error the few calls that still wait are left to end by themselves: to cancel one that is just ending
        # takes the process down (seen with Ray 2.60).
        for call in calls:
            if len(waiting) >= window:
                # Machines come and go.
                window = 2 * max(1, int(self._ray.cluster_resources().get("CPU", 0)) // cpus) + 2
            waiting.append(task.remote(pltpack.__version__, work, *call))
            while len(waiting) >= window:
                yield self._result(waiting.popleft())
        while waiting:
            yield self._result(waiting.popleft())

    def _largest(self) -> int:
        """Cores of the largest machine."""
        nodes = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        return int(max(nodes, default=0))

    def _result(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ImportError | errors.RayError):
                raise EngineError(f"a worker could not begin ({_first_line(cause)}): install pltpack and its extras "
                                  "on all machines") from error  # fmt: skip
            if isinstance(cause, PltpackError | MemoryError):
                raise cause from None
            raise
        except errors.RayError as error:
            raise EngineError(f"workers failed {RETRIES + 1} times ({type(error).__name__}: {_first_line(error)})"
                              ) from error  # fmt: skip


def _check_answers(address: str | None) -> None:
    """Refuse an address at which nothing answers: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"no Ray cluster can be reached at {address} ({error})") from None


def _called(version: str, work: Callable[..., Out], *arguments: Any) -> Out:
    if version != pltpack.__version__:
        raise EngineError(f"a worker has pltpack {pltpack.__version__}, not {version}: install one version everywhere")
    return work(*arguments)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
