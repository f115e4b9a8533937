"""The scheduler's side of the connector: which prefixes a step loads, and which prompts it completes."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pltpack.serve.follow import FollowedArchive

#: Loads whose failure may still be reported.
MOST_SENT = 64


@dataclasses.dataclass(frozen=True)
class Load:
    """A stored prefix to load: tokens ``[start, stop)`` to whole blocks; earlier ones are in the engine's cache."""

    request: str
    tokens: np.ndarray
    start: int
    stop: int
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Save:
    """A prompt whose caches are complete after this step, and its blocks."""

    request: str
    tokens: np.ndarray
    blocks: tuple[int, ...]


class Planner:
    """Matches prompts and notes what each step has to do.

    Parameters
    ----------
    archive : FollowedArchive
    block_size : int
        Tokens per block of the engine.
    salt : str or None
        The tenant.
    capture : bool
        Whether new prompts are kept.
    recompute : int
        Last tokens of a prompt that the engine computes though they are stored; at least 1.
    """

    def __init__(
        self, archive: FollowedArchive, block_size: int, salt: str | None, capture: bool, recompute: int = 2
    ) -> None:
        self._archive, self._size, self._salt, self._capture = archive, block_size, salt, capture
        self._recompute = recompute
        # Of requests that wait: tokens that the engine has, and tokens that are stored.
        self._asked: dict[str, tuple[int, int]] = {}
        self._loads: list[Load] = []
        # Of prompts that are to be kept and are not complete: tokens and blocks.
        self._open: dict[str, tuple[np.ndarray, list[int]]] = {}
        # A worker in another process reports what failed by its blocks, some steps later.
        self._sent: collections.deque[Load] = collections.deque(maxlen=MOST_SENT)

    def matched(self, request: Any, computed: int) -> int:
        """Tokens of a prompt that can be loaded beyond those computed: whole blocks, and never the last to compute."""
        tokens = self._ids(request)
        loader = self._archive.loader()
        if tokens is None:
            return 0
        hit = None if loader is None else loader.lookup(tokens)
        stored, left = (0, 0) if hit is None else (hit.tokens, hit.recompute)
        self._asked[request.request_id] = computed, stored + left
        whole = min(stored, len(tokens) - self._recompute) // self._size * self._size
        return max(0, whole - computed) if computed % self._size == 0 else 0

    def _ids(self, request: Any) -> np.ndarray | None:
        """A request's token ids, if nothing but them decides its caches and it may take them from elsewhere."""
        ids = request.prompt_token_ids
        plain = request.lora_request is None and not request.mm_features and request.prompt_embeds is None
        if not ids or not plain or request.cache_salt != self._salt or request.skip_reading_prefix_cache:
            return None
        return np.asarray(ids, np.int32)

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """Take note of a request that is admitted, its blocks, and how many of its tokens are to be loaded."""
        computed, stored = self._asked.pop(request.request_id, (0, 0))
        tokens = self._ids(request)
        if tokens is None:
            return
        if external > 0:
            stop = computed + external
            chosen = tuple(blocks[computed // self._size : stop // self._size])
            self._loads.append(Load(request.request_id, tokens, computed, stop, chosen))
        if self._capture and len(tokens) - stored >= self._size:
            self._open[request.request_id] = tokens, list(blocks)

    def plan(self, output: Any) -> tuple[list[Load], list[Save]]:
        """The loads and saves of a step, by vLLM's scheduler output."""
        for request in output.finished_req_ids:
            self._open.pop(request, None)
        saves = [
            self._saved(new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
            for new in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        for at, request in enumerate(cached.req_ids):
            added = cached.new_block_ids[at]
            # One that was preempted has been admitted anew, with all its blocks.
            if request in self._open and added and request not in cached.resumed_req_ids:
                self._open[request][1].extend(added[0])
            saves.append(
                self._saved(request, cached.num_computed_tokens[at] + output.num_scheduled_tokens[request])
            )
        loads, self._loads = self._loads, []
        self._sent.extend(loads)
        return loads, [save for save in saves if save is not None]

    def _saved(self, request: str, computed: int) -> Save | None:
        if request not in self._open or computed < len(self._open[request][0]):
            return None
        # It stays open: a step in which a load fails is done again.
        tokens, blocks = self._open[request]
        if computed > len(tokens) + self._size:
            del self._open[request]
            return None
        return Save(request, tokens, tuple(blocks[: -(-len(tokens) // self._size)]))

    def failed(self, blocks: set[int]) -> None:
        """Leave out what held the blocks that a worker could not load."""
        loader = self._archive.loader()
        for load in list(self._sent):
            if loader is not None and not blocks.isdisjoint(load.blocks):
                hit = loader.lookup(load.tokens)
                if hit:
                    self._archive.leave_out(hit.session)
