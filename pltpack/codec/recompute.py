"""The codec ``recompute``: no units at all; its state holds the tokens from which a model makes the caches again.

**State.** ``streams`` u8: the streams of `pltpack.codec.token_texts`, one behind the other; ``bytes`` and ``texts`` u32
``[s]``: length and number of texts of each; ``tokens`` u32 ``[n]``: tokens of each text, at most `STREAM_TOKENS` in a
stream. A session is one text, or, if it is longer, several that follow each other.

Spec: spec/codecs.md, section "recompute".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pltpack.codec import token_texts
from pltpack.codec.base import Codec, KeyValue, Samples, State, Unit
from pltpack.codec.token_texts import STREAM_TOKENS
from pltpack.snapshot import Identity


class RecomputeCodec(Codec):
    """Holds tokens; has no units, so `encode` and `decode` refuse all. Takes no configuration."""

    codec_id: ClassVar[str] = "recompute"

    def learn(self, samples: Samples, identity: Identity) -> dict[str, np.ndarray]:
        """See `Codec.learn`: a state without texts."""
        return pack([])[0]

    def start(self, state: State, identity: Identity) -> None:
        """See `Codec.start`."""
        if set(state) != {"streams", "bytes", "texts", "tokens"}:
            raise ValueError("recompute state does not hold the arrays streams, bytes, texts and tokens")
        streams, sizes, texts, tokens = (state[name] for name in ("streams", "bytes", "texts", "tokens"))
        if streams.dtype != np.uint8 or any(array.dtype != np.uint32 for array in (sizes, texts, tokens)):
            raise ValueError("recompute state has an array of another dtype")
        if any(array.ndim != 1 for array in state.values()) or len(sizes) != len(texts):
            raise ValueError("recompute state has an array of another shape")
        if int(sizes.sum(dtype=np.uint64)) != len(streams) or int(texts.sum(dtype=np.uint64)) != len(tokens):
            raise ValueError("recompute state has streams that do not fit it")
        self._streams = np.split(streams, np.cumsum(sizes.astype(np.int64))[:-1]) if len(sizes) else []
        self._first = np.append(0, np.cumsum(texts.astype(np.int64)))
        self._tokens = tokens.astype(np.int64)
        if any(self._tokens[a:b].sum() > STREAM_TOKENS for a, b in zip(self._first, self._first[1:], strict=False)):
            raise ValueError("recompute state has a stream of too many tokens")
        self._last: tuple[int, list[np.ndarray]] | None = None

    def session(self, text: int, tokens: int) -> np.ndarray:
        """The token ids of a session of so many tokens that begins with a text: int32 ``[tokens]``.

        Raises
        ------
        ValueError
            If texts do not end with it, or their stream is damaged.
        """
        parts, left = [np.empty(0, np.int32)], tokens
        while left > 0:
            if not 0 <= text < len(self._tokens) or not 0 < self._tokens[text] <= left:
                raise ValueError(f"no texts of {tokens} tokens are where the session's should be")
            parts.append(self._text(text))
            left -= len(parts[-1])
            text += 1
        return np.concatenate(parts)

    def _text(self, index: int) -> np.ndarray:
        stream = int(np.searchsorted(self._first, index, "right")) - 1
        held = self._last
        if held is None or held[0] != stream:
            lengths = self._tokens[self._first[stream] : self._first[stream + 1]].tolist()
            held = self._last = stream, token_texts.decode(self._streams[stream], lengths)
        return held[1][index - int(self._first[stream])]

    def encode(self, unit: Unit, keys: np.ndarray, values: np.ndarray, reference: KeyValue | None = None) -> bytes:
        """See `Codec.encode`: there are no units."""
        raise ValueError("the codec recompute has no units")

    def decode(
        self,
        payload: memoryview,
        unit: Unit,
        keys: np.ndarray,
        values: np.ndarray,
        reference: KeyValue | None = None,
    ) -> None:
        """See `Codec.decode`: there are no units."""
        raise ValueError("the codec recompute has no units")


def pack(groups: Sequence[Sequence[np.ndarray]]) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """A state of sessions, coded one after the other within a group, never across groups.

    Parameters
    ----------
    groups : sequence of sequence of ndarray
        Sessions' token ids, int32 ``[T]``: one group a tenant.

    Returns
    -------
    state : dict
    places : list of list of int
        Number of each session's first text.
    """
    streams: list[list[np.ndarray]] = []
    places: list[list[int]] = []
    count = 0
    for sessions in groups:
        room, mine = 0, []
        for tokens in sessions:
            mine.append(count)
            for at in range(0, len(tokens), STREAM_TOKENS):
                part = tokens[at : at + STREAM_TOKENS]
                if len(part) > room:
                    streams.append([])
                    room = STREAM_TOKENS
                streams[-1].append(part)
                room -= len(part)
                count += 1
        places.append(mine)
    coded = [token_texts.encode(texts) for texts in streams]
    lengths = [len(text) for texts in streams for text in texts]
    state: dict[str, np.ndarray] = {
        "streams": np.frombuffer(b"".join(coded), np.uint8),
        "bytes": np.array([len(data) for data in coded], np.uint32),
        "texts": np.array([len(texts) for texts in streams], np.uint32),
        "tokens": np.array(lengths, np.uint32),
    }
    return state, places
