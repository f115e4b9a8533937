"""Windows of calibration text: evenly cut from files that are mixed evenly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pltpack.errors import NotFoundError, UnsupportedError
from pltpack.quality.prompts import read_prompts


def cut_windows(files: Sequence[str | os.PathLike[str]], tokenizer: Any, count: int, window: int) -> np.ndarray:
    """Token ids of up to `count` windows, int32 ``[windows, window]``.

    Parameters
    ----------
    files : sequence of path
        Plain text, or prompts; see `pltpack.quality.prompts`. The sessions of a file follow one another.
    tokenizer : transformers tokenizer or None
    count : int
        Each file gives its share; where one is too short, the others give more.
    window : int

    Raises
    ------
    NotFoundError
        If there are no files.
    UnsupportedError
        If no file has as many tokens as a window, or the model has no tokenizer.
    """
    if not files:
        raise NotFoundError("there is no text to calibrate on")
    texts = [_tokens(file, tokenizer) for file in files]
    room = [len(ids) // window for ids in texts]
    if not any(room):
        longest = max(len(ids) for ids in texts)
        raise UnsupportedError(f"has {longest:,} tokens, fewer than a window of {window:,}", files[0])
    found = [part for ids, share in zip(texts, _shares(room, count), strict=True) for part in _cut(ids, share, window)]
    windows = np.stack(found).astype(np.int32)
    start = _start_token(tokenizer)
    if start is not None:
        # A session begins with it; its place in the middle of a text would make other sinks.
        windows[:, 0] = start
    return windows


def _tokens(file: str | os.PathLike[str], tokenizer: Any) -> np.ndarray:
    parts = []
    for prompt in read_prompts([file], tokenizer):
        parts += [prompt.tokens] if prompt.continuation is None else [prompt.tokens, prompt.continuation]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _shares(room: Sequence[int], count: int) -> list[int]:
    """How many windows each file gives: equally many, at most its room."""
    shares = [0] * len(room)
    while sum(shares) < min(count, sum(room)):
        open_files = [index for index, most in enumerate(room) if shares[index] < most]
        # The file that has given least goes on.
        shares[min(open_files, key=lambda index: shares[index])] += 1
    return shares


def _cut(ids: np.ndarray, count: int, window: int) -> list[np.ndarray]:
    starts = np.linspace(0, len(ids) - window, count).round().astype(int) if count > 1 else [0]
    return [ids[start : start + window] for start in starts[:count]]


def _start_token(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before every text, if it does."""
    start = getattr(tokenizer, "bos_token_id", None)
    if start is None:
        return None
    ids = tokenizer("a").input_ids
    return int(start) if len(ids) > 1 and ids[0] == start else None
