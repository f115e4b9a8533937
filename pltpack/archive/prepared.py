"""Codecs prepared for sessions: trials, library and shards of one generation encode a session in the same way."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from pltpack.codec.base import Codec
from pltpack.codec.transform import TransformCodec
from pltpack.errors import PromiseError
from pltpack.snapshot import Snapshot

#: Sessions that are kept: jobs come session by session, but library nodes and trials name them again and again.
MOST = 1024
#: A finer reference costs about what it saves two of those that it predicts.
WANTED_BY = 3


class Prepared:
    """Gives a codec as prepared for a session and a cut; for use by several threads at once.

    Parameters
    ----------
    codec : Codec
        A started one.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._lock = threading.Lock()
        # The snapshot is kept with what belongs to it, so that its id is not given to another one.
        self._held: collections.OrderedDict[tuple[int, int], tuple[Snapshot, Codec]] = collections.OrderedDict()
        self._steps: dict[tuple[int, int], tuple[Snapshot, np.ndarray]] = {}
        self._fine: dict[tuple[int, int], Codec] = {}

    def of(self, snapshot: Snapshot, cut: int) -> Codec:
        """The codec for a session that may be cut at `cut`.

        Raises
        ------
        PromiseError
            If it cannot keep its promise.
        """
        key = (id(snapshot), cut)
        with self._lock:
            if key not in self._held:
                self._held[key] = (snapshot, self._prepare(snapshot, cut))
                if len(self._held) > MOST:
                    self._held.popitem(last=False)
            self._held.move_to_end(key)
            return self._finer(key, self._held[key][1])

    def refine(self, snapshot: Snapshot, cut: int, start: int, steps: np.ndarray) -> None:
        """Encode tokens of a session, from `start` on, with no larger steps if enough others are predicted from them.

        Parameters
        ----------
        snapshot : Snapshot
        cut : int
            As of `of`.
        start : int
        steps : ndarray
            int32 ``[n]``, see `pltpack.codec.transform.TransformCodec.finer`; other codecs have no steps.
        """
        key = (id(snapshot), cut)
        with self._lock:
            if key not in self._steps:
                self._steps[key] = (snapshot, np.full((WANTED_BY, len(snapshot)), np.iinfo(np.int32).max, np.int32))
            part = self._steps[key][1][:, start : start + len(steps)]
            part[:] = np.sort(np.concatenate([part, np.asarray(steps, np.int32)[None]]), axis=0)[:WANTED_BY]
            self._fine.pop(key, None)

    def wanted(self, snapshot: Snapshot) -> dict[int, np.ndarray]:
        """What `refine` asked for, by cut: smallest steps of a session's tokens, int32 ``[WANTED_BY, T]``."""
        with self._lock:
            return {key[1]: steps for key, (of, steps) in self._steps.items() if of is snapshot}

    def found(self, snapshot: Snapshot) -> dict[int, dict[str, Any]]:
        """What codecs found that are prepared for a session (`pltpack.codec.base.Codec.found`), by cut."""
        with self._lock:
            return {key[1]: codec.found for key, (of, codec) in self._held.items() if of is snapshot}

    def adopt(
        self, snapshot: Snapshot, found: Mapping[int, dict[str, Any]], wanted: Mapping[int, np.ndarray] | None = None
    ) -> None:
        """Take over what another one found and was asked for of the same session."""
        with self._lock:
            for cut, each in found.items():
                if (id(snapshot), cut) not in self._held:
                    self._held[id(snapshot), cut] = (snapshot, self.codec.resumed(each))
            for cut, steps in (wanted or {}).items():
                self._steps.setdefault((id(snapshot), cut), (snapshot, steps))

    def _prepare(self, snapshot: Snapshot, cut: int) -> Codec:
        try:
            return self.codec.prepare(snapshot, (cut,))
        except ValueError as error:
            raise PromiseError(f"session {snapshot.session!r}: {error}", snapshot.origin) from None

    def _finer(self, key: tuple[int, int], codec: Codec) -> Codec:
        host = codec.on_host
        if key not in self._steps or not isinstance(host, TransformCodec):
            return codec
        if key not in self._fine:
            self._fine[key] = codec.like(host.finer(self._steps[key][1][-1]))
        return self._fine[key]
