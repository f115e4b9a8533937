"""Who does the work on sessions: threads of this process, or the workers of an engine, here or on other machines.

An engine knows nothing of archives: it calls functions with values. What is worth a call is decided by those who ask
(`pltpack.archive.distributed`, `pltpack.quality.calibrate`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from pltpack.errors import UnsupportedError

ENGINES = ("local", "ray")

Out = TypeVar("Out")


class Engine(Protocol):
    """Calls functions in other processes."""

    def share(self, value: object) -> Any:
        """Hand a value over once; what is returned stands for it among the arguments of calls."""
        ...

    def in_order(self, work: Callable[..., Out], calls: Iterable[tuple[Any, ...]], cpus: int = 1) -> Iterator[Out]:
        """Call a function of a module with each of several lists of arguments; results in order.

        A call whose worker dies is made again elsewhere, so it must give the same whenever it is made.

        Parameters
        ----------
        work : callable
        calls : iterable of tuple
            Taken a little ahead of the consumer.
        cpus : int
            Cores that one call keeps busy; where no machine has as many, as many as the largest has.

        Raises
        ------
        PltpackError
            What `work` raised.
        EngineError
            If workers fail again and again.
        """
        ...


@contextlib.contextmanager
def open_engine(name: str | Engine = "local", address: str | None = None) -> Iterator[Engine | None]:
    """The engine of a name; None for ``local``, the threads of this process.

    Parameters
    ----------
    name : str or Engine
        One of `ENGINES`, or an engine, which stays open.
    address : str, optional
        Of a running cluster. Without it ``ray`` takes the one that RAY_ADDRESS names or this process is part of, else
        it starts workers on this machine and stops them at the end.

    Raises
    ------
    UnsupportedError
        If there is no such engine, it takes no address, or what it needs is not installed.
    EngineError
        If the cluster cannot be reached.
    """
    if not isinstance(name, str):
        yield name
        return
    if name not in ENGINES:
        raise UnsupportedError(f"no engine {name!r} (known: {', '.join(ENGINES)})")
    if name == "local":
        if address is not None:
            raise UnsupportedError("an address is that of a cluster: it goes with engine 'ray'")
        yield None
        return
    from pltpack.archive.ray_engine import RayEngine

    engine = RayEngine(address)
    try:
        yield engine
    finally:
        engine.close()
