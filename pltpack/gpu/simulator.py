"""Warp instructions for numba's CUDA simulator, and a scheduler that needs no polling.

The simulator that numba brings runs each thread of a block as a Python thread. It knows no warps, so kernels that vote
cannot run in it, and it polls its threads for as long as they work. `install` gives it blocks whose threads hand on
one baton: exactly one runs, until it waits for its warp or its block. Order is fixed, so results repeat. Kernels are
the same as on a device, line by line.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

WARP = 32


class _Stopped(Exception):  # noqa: N818 - it is no error of the thread that gets it
    """Another thread of the block failed."""


class _Team:
    """Threads that wait for each other: a warp, or a block."""

    def __init__(self) -> None:
        self.live = 0
        self.waiting: list[_Lane] = []
        self.votes: dict[int, Any] = {}

    def complete(self) -> bool:
        return 0 < self.live == len(self.waiting)


class _Lane(threading.Thread):
    """One CUDA thread; numba's simulator finds `threadIdx`, `blockIdx` and `thread_id` here."""

    def __init__(self, block: Block, place: tuple[Any, Any], number: int, target: Callable[[], None]) -> None:
        super().__init__(target=target, daemon=True)
        self.blockIdx, self.threadIdx = place
        self.thread_id = number
        self.vote: Any = 0
        self.turn = threading.Lock()
        self.turn.acquire()
        self._block = block

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self._block.failed:
                super().run()
        except _Stopped:
            pass
        except BaseException as error:
            self._block.failed.append(error)
        self._block.leave(self)

    def syncthreads(self) -> None:
        """Wait for the block."""
        self._block.wait(self, self._block.all)

    def warp_votes(self, value: Any) -> dict[int, Any]:
        """Wait for the warp; values of all its lanes."""
        self.vote = value
        warp = self._block.warps[self.thread_id // WARP]
        self._block.wait(self, warp)
        return warp.votes


class Block:
    """Takes the place of numba's ``BlockManager``: runs the threads of one block."""

    def __init__(self, f: Callable[..., None], grid_dim: Any, block_dim: tuple[int, ...], debug: bool) -> None:
        from numba.cuda.simulator.kernelapi import Dim3

        self._f, self._block_dim, self._dim3 = f, block_dim, Dim3
        self.failed: list[BaseException] = []
        self._done = threading.Lock()

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        """Run all threads of the block at `grid_point`; the first exception of one is raised."""
        points = [point[::-1] for point in np.ndindex(*self._block_dim[::-1])]
        self.all, self.warps = _Team(), [_Team() for _ in range(-(-len(points) // WARP))]
        where = self._dim3(*grid_point)
        lanes = [_Lane(self, (where, self._dim3(*point)), number, lambda: self._f(*args))
                 for number, point in enumerate(points)]  # fmt: skip
        for lane in lanes:
            self.warps[lane.thread_id // WARP].live += 1
            lane.start()
        self.all.live = len(lanes)
        self._ready = collections.deque(lanes)
        self._done.acquire()
        self._next()
        self._done.acquire()
        if self.failed:
            raise self.failed[0]

    def wait(self, lane: _Lane, team: _Team) -> None:
        """Let others run until all of the team wait."""
        team.waiting.append(lane)
        self._release(team)
        self._next()
        lane.turn.acquire()
        if self.failed:
            raise _Stopped

    def leave(self, lane: _Lane) -> None:
        """The lane ends: nobody waits for it any more."""
        for team in (self.warps[lane.thread_id // WARP], self.all):
            team.live -= 1
            self._release(team)
        self._next()

    def _release(self, team: _Team) -> None:
        if team.complete():
            team.votes = {lane.thread_id % WARP: lane.vote for lane in team.waiting}
            self._ready.extend(team.waiting)
            team.waiting = []

    def _next(self) -> None:
        if not self._ready and self.all.live:
            stuck = [lane for team in (*self.warps, self.all) for lane in team.waiting]
            self.failed.append(RuntimeError("threads of a block wait at different places"))
            for team in (*self.warps, self.all):
                team.waiting = []
            self._ready.extend(stuck)
        if self._ready:
            self._ready.popleft().turn.release()
        else:
            self._done.release()


def _ballot(self: Any, mask: int, predicate: Any) -> int:
    votes = threading.current_thread().warp_votes(bool(predicate))  # type: ignore[attr-defined]
    return sum(1 << lane for lane, vote in votes.items() if vote)


def _syncwarp(self: Any, mask: int = 0xFFFFFFFF) -> None:
    threading.current_thread().warp_votes(0)  # type: ignore[attr-defined]


def _shfl(self: Any, mask: int, value: Any, lane: Any) -> Any:
    return threading.current_thread().warp_votes(value)[int(lane) % WARP]  # type: ignore[attr-defined]


def install() -> None:
    """Teach numba's simulator warps; does nothing the second time."""
    from numba.cuda.simulator import kernel, kernelapi

    kernel.BlockManager = Block
    kernelapi.FakeCUDAModule.ballot_sync = _ballot
    kernelapi.FakeCUDAModule.syncwarp = _syncwarp
    kernelapi.FakeCUDAModule.shfl_sync = _shfl
