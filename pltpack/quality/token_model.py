"""Token ids coded with a model's own next-token probabilities, at the model's cross-entropy.

Floating-point results depend on the shapes that a model is run with, so coder and decoder run it alike: one token at a
time over a growing cache, on one machine. The first token is the one that begins texts in half of all cases, where the
model's configuration names one, else any of the vocabulary, all alike. Probabilities become frequencies of the range
coder (`pltpack.codec.range_coder`): of a total near 2^28 each token has at least 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pltpack.codec import range_coder
from pltpack.errors import PromiseError, UnsupportedError
from pltpack.quality.model import Model

#: What frequencies sum to, about.
TOTAL = 1 << 28


def encode(model: Model, tokens: np.ndarray) -> bytes:
    """Code token ids int32 ``[T]``; what is returned has been decoded again and compared.

    Raises
    ------
    UnsupportedError
        If the model does not know a token.
    PromiseError
        If the model does not give the same probabilities again.
    """
    vocabulary = int(model.config.vocab_size)
    if len(tokens) and not 0 <= int(tokens.max()) < vocabulary:
        raise UnsupportedError(f"token {int(tokens.max())} is not one of the model's {vocabulary}", model.folder)
    out = np.zeros(range_coder.SYMBOL_BYTES * len(tokens) + range_coder.END_BYTES, np.uint8)
    state, steps = range_coder.begin_encoding(), _Steps(model, len(tokens))
    for token, ends in zip(tokens.tolist(), steps, strict=True):
        start = int(ends[token - 1]) if token else 0
        range_coder.encode(state, out, start, int(ends[token]) - start, int(ends[-1]))
        steps.token = token
    data = out[: range_coder.end_encoding(state, out)].tobytes()
    if not np.array_equal(decode(model, data, len(tokens)), tokens):
        raise PromiseError("the model does not give the same probabilities twice, which coding with them needs",
                           model.folder)  # fmt: skip
    return data


def decode(model: Model, data: bytes, count: int) -> np.ndarray:
    """The token ids, int32 ``[count]``; of damaged data, or with another model, any."""
    coded, out = np.frombuffer(data, np.uint8), np.zeros(count, np.int32)
    state, steps = np.zeros(3, np.uint64), _Steps(model, count)
    range_coder.begin_decoding(state, coded)
    for index, ends in enumerate(steps):
        token = int(np.searchsorted(ends, range_coder.slot(state, int(ends[-1])), "right"))
        start = int(ends[token - 1]) if token else 0
        range_coder.consume(state, coded, start, int(ends[token]) - start, int(ends[-1]))
        out[index] = steps.token = token
    return out


class _Steps:
    """Frequencies of one token after the other, summed up: int64 ``[vocabulary]``; `token` is the last one coded."""

    def __init__(self, model: Model, count: int) -> None:
        self._model, self._count, self.token = model, count, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        import torch
        from transformers import DynamicCache

        vocabulary, network = int(self._model.config.vocab_size), self._model.network
        cache = DynamicCache()
        for index in range(self._count):
            if not index:
                yield _first(vocabulary, getattr(self._model.config, "bos_token_id", None))
                continue
            with torch.no_grad():
                batch = torch.tensor([[self.token]], device=network.device)
                logits: Any = network(batch, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            yield _ends(logits.float().cpu().numpy().astype(np.float64)[:vocabulary])


def _first(vocabulary: int, begin: object) -> np.ndarray:
    frequencies = np.ones(vocabulary, np.int64)
    if type(begin) is int and 0 <= begin < vocabulary:
        frequencies[begin] = vocabulary
    return np.cumsum(frequencies)


def _ends(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max())
    p *= (TOTAL - len(p)) / p.sum()
    return np.cumsum(p.astype(np.int64) + 1)
