"""Codecs prepared for sessions: trials, library and shards of one generation encode a session in the same way."""

from __future__ import annotations

import collections
import threading

from pltpack.codec.base import Codec
from pltpack.errors import PromiseError
from pltpack.snapshot import Snapshot

#: Sessions that are kept: jobs come session by session, but library nodes and trials name them again and again.
MOST = 256


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
                try:
                    self._held[key] = (snapshot, self.codec.prepare(snapshot, (cut,)))
                except ValueError as error:
                    raise PromiseError(f"session {snapshot.session!r}: {error}", snapshot.origin) from None
                if len(self._held) > MOST:
                    self._held.popitem(last=False)
            self._held.move_to_end(key)
            return self._held[key][1]
