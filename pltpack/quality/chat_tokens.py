"""What a tokenizer knows of sessions: how chats begin, and which tokens end a turn."""

from __future__ import annotations

from typing import Any

import numpy as np

_MESSAGE = "Hello"


def chat_start(tokenizer: Any, count: int) -> np.ndarray | None:
    """The first tokens of a chat with one user message, int32 ``[count]``; None without a template, or if fewer."""
    ids = _rendered(tokenizer, [{"role": "user", "content": _MESSAGE}], True)
    return None if len(ids) < count else np.array(ids[:count], np.int32)


def turn_ends(tokenizer: Any, *configs: Any) -> list[int]:
    """Token ids after which another party may go on: ends of text of tokenizer and configurations, and of chat turns.

    Parameters
    ----------
    tokenizer : transformers tokenizer or None
    configs : objects
        With ``eos_token_id``, a number, a list or None.
    """
    found: set[int] = set()
    for source in (tokenizer, *configs):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    special = set(getattr(tokenizer, "all_special_ids", None) or ()) - {getattr(tokenizer, "unk_token_id", None)}
    user, reply = {"role": "user", "content": _MESSAGE}, {"role": "assistant", "content": _MESSAGE}
    for messages in ([user], [user, reply]):
        # A newline or the like may follow what ends the turn.
        found.update(token for token in _rendered(tokenizer, messages, False)[-2:] if token in special)
    return sorted(int(token) for token in found if 0 <= int(token) < 1 << 31)


def _rendered(tokenizer: Any, messages: list[dict[str, str]], prompt: bool) -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return []
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)["input_ids"]
        return [int(token) for token in ids]
    # Templates are programs of their own and fail as they like; without them there is less to know.
    except Exception:
        return []
