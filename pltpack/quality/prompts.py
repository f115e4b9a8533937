"""Prompt files: what a model is to read before its cache is captured.

- ``.json``: an object of sessions, ``{"name": {"prompt": …, "continuation": …}}``, or ``{"name": prompt}``.
- ``.jsonl``: one object per line; its name is ``session`` (or ``name``, ``id``), else the file's stem and the line's
  number from 0.
- anything else is plain text: one session named by the file's stem, or one per window of N tokens.

A prompt is ``prompt`` or ``text`` (a text, or a list of token ids), or ``messages`` (a chat, put together by the
model's chat template, ready for the assistant's turn). ``continuation`` is what really came next: a text, without
special tokens, or a list of ids.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.dumps.base import MAX_JSON, MAX_TOKENS, parse_json
from pltpack.dumps.tokens import token_ids
from pltpack.errors import DumpError, NotFoundError, PltpackError, UnsupportedError
from pltpack.names import check_session

#: Tokens after a window of plain text that are kept as its continuation.
FOLLOWING = 256
_NAMES = ("session", "name", "id")
_PROMPTS = ("prompt", "text", "messages")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One session to capture.

    Attributes
    ----------
    session : str
    tokens : ndarray
        Int32 ``[T]``, T ≥ 1.
    continuation : ndarray or None
        What came next, int32 ``[C]``, C ≥ 1.
    """

    session: str
    tokens: np.ndarray
    continuation: np.ndarray | None = None


def read_prompts(files: Iterable[str | os.PathLike[str]], tokenizer: Any, window: int | None = None) -> list[Prompt]:
    """Read prompt files.

    Parameters
    ----------
    files : iterable of path
    tokenizer : transformers tokenizer or None
        Needed for text; ids pass without one.
    window : int, optional
        Split plain text into sessions of this many tokens, named ``stem-0``, ``stem-1``, …; up to `FOLLOWING` tokens
        after each are its continuation.

    Raises
    ------
    NotFoundError
        If a file does not exist.
    DumpError
        If a file is malformed, or two sessions have one name.
    UnsupportedError
        If text is to be read but the model has no tokenizer or no chat template.
    """
    prompts: dict[str, Prompt] = {}
    for name in files:
        path = Path(name)
        try:
            for prompt in _file_prompts(path, tokenizer, window):
                if prompt.session in prompts:
                    raise DumpError(f"session {prompt.session!r} is named twice")
                prompts[prompt.session] = prompt
        except PltpackError as error:
            raise error.at(path) from None
    return list(prompts.values())


def prompts_of(sessions: Mapping[str, Any], tokenizer: Any) -> list[Prompt]:
    """Prompts of an object as in a ``.json`` file; see `read_prompts`."""
    return [_prompt(name, value, tokenizer) for name, value in sessions.items()]


def _file_prompts(path: Path, tokenizer: Any, window: int | None) -> Iterator[Prompt]:
    text = _text(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        sessions = parse_json(text, "prompt file")
        if not isinstance(sessions, dict):
            raise DumpError("prompt file is not a JSON object of sessions")
        yield from prompts_of(sessions, tokenizer)
    elif suffix == ".jsonl":
        # Not `splitlines`: JSON strings may hold other line separators.
        for number, line in enumerate(text.split("\n")):
            if line.strip():
                yield _line_prompt(f"{path.stem}-{number}", parse_json(line, f"line {number + 1}"), tokenizer)
    elif window is None:
        yield _prompt(path.stem, text, tokenizer)
    else:
        ids = _ids(text, tokenizer, path.stem, special=True)
        for number, start in enumerate(range(0, len(ids), window)):
            end = start + window
            following = ids[end : end + FOLLOWING]
            yield Prompt(f"{path.stem}-{number}", ids[start:end], following if len(following) else None)


def _text(path: Path) -> str:
    if not path.is_file():
        raise NotFoundError("no such prompt file")
    try:
        if path.stat().st_size > MAX_JSON:
            raise DumpError(f"prompt file is larger than {MAX_JSON} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DumpError("prompt file is not UTF-8 text") from None


def _line_prompt(default: str, data: Any, tokenizer: Any) -> Prompt:
    if not isinstance(data, dict):
        raise DumpError(f"line of session {default!r} is not a JSON object")
    name = next((data[key] for key in _NAMES if data.get(key) is not None), default)
    return _prompt(str(name) if type(name) is int else name, data, tokenizer)


def _prompt(session: Any, value: Any, tokenizer: Any) -> Prompt:
    check_session(session)
    data = value if isinstance(value, Mapping) else {"prompt": value}
    given = [key for key in _PROMPTS if data.get(key) is not None]
    if len(given) != 1:
        raise DumpError(f"session {session!r} needs exactly one of {', '.join(_PROMPTS)}")
    if given[0] == "messages":
        tokens = _chat(data["messages"], tokenizer, session)
    else:
        tokens = _ids(data[given[0]], tokenizer, session, special=True)
    if not len(tokens):
        raise DumpError(f"session {session!r} has an empty prompt")
    following = data.get("continuation")
    continuation = None if following is None else _ids(following, tokenizer, session, special=False)
    return Prompt(session, tokens, continuation if continuation is not None and len(continuation) else None)


def _ids(value: Any, tokenizer: Any, session: str, special: bool) -> np.ndarray:
    if isinstance(value, str):
        if tokenizer is None:
            raise UnsupportedError(f"session {session!r} is text, but the model's folder holds no tokenizer")
        value = list(tokenizer(value, add_special_tokens=special).input_ids)
    if isinstance(value, list) and len(value) > MAX_TOKENS:
        raise DumpError(f"session {session!r} has {len(value)} tokens (allowed: {MAX_TOKENS})")
    if not isinstance(value, list):
        raise DumpError(f"session {session!r} is neither text nor a list of token ids")
    return token_ids(value, f"session {session!r}")


def _chat(messages: Any, tokenizer: Any, session: str) -> np.ndarray:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DumpError(f"session {session!r}: messages are not a list of objects")
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise UnsupportedError(f"session {session!r} is a chat, but the model has no chat template")
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    # Templates are programs of their own and fail as they like.
    except Exception as error:
        raise DumpError(f"session {session!r}: the chat template refuses the messages ({error})") from error
    return token_ids(list(ids), f"session {session!r}")
