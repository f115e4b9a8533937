"""Token ids from logs of vLLM's KV events: what ``BlockStored`` says of each block, put together from block to block.

A log is a text of JSON lines, each an event batch as vLLM publishes it, ``[ts, events, rank]`` or ``{"ts", "events"}``,
or a single event. An event is an object with ``type`` or an array that begins with it; block hashes are integers or
hexadecimal text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pltpack.dumps import base
from pltpack.errors import DumpError

STORED = "BlockStored"
_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size")


def token_lists(text: str) -> dict[str, list[int]]:
    """The token ids of every longest chain of blocks in a log, by the hash of its last block.

    Raises
    ------
    DumpError
        If the text is no such log, a block's parent was never stored, or chains are longer than sessions may be.
    """
    blocks: dict[str, tuple[str | None, list[int]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            for event in _events(base.parse_json(line, f"line {number} of the event log"), number):
                _store(event, blocks, number)
    if not blocks:
        raise DumpError(f"the event log holds no {STORED} event")
    parents = {parent for parent, _ in blocks.values()}
    found: dict[str, list[int]] = {}
    for name in blocks:
        if name not in parents:
            found[name] = _chain(name, blocks)
            base.check_count(sum(map(len, found.values())))
    if not found:
        raise DumpError("the event log's blocks are each other's parents in a circle")
    return found


def _events(data: Any, number: int) -> Iterator[dict[str, Any]]:
    """The ``BlockStored`` events of one line."""
    if isinstance(data, list) and len(data) >= 2 and isinstance(data[1], list) and not isinstance(data[0], str):
        events: Any = data[1]
    elif isinstance(data, dict) and "events" in data:
        events = data["events"]
    else:
        events = [data]
    if not isinstance(events, list):
        raise DumpError(f"line {number} of the event log is no event batch")
    for event in events:
        if isinstance(event, list) and event and isinstance(event[0], str):
            event = {"type": event[0], **dict(zip(_FIELDS, event[1:], strict=False))}
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise DumpError(f"line {number} of the event log holds something that is no event")
        if event["type"] == STORED:
            yield event


def _store(event: dict[str, Any], blocks: dict[str, tuple[str | None, list[int]]], number: int) -> None:
    hashes, tokens, size = event.get("block_hashes"), event.get("token_ids"), event.get("block_size")
    if not isinstance(hashes, list) or not isinstance(tokens, list) or type(size) is not int or size < 1:
        raise DumpError(f"line {number} of the event log: a {STORED} event lacks hashes, tokens or block size")
    if len(tokens) != size * len(hashes) or not all(type(token) is int for token in tokens):
        raise DumpError(f"line {number} of the event log: {len(tokens)} tokens for {len(hashes)} blocks of {size}")
    parent = None if event.get("parent_block_hash") is None else _name(event["parent_block_hash"], number)
    for index, value in enumerate(hashes):
        name = _name(value, number)
        blocks.setdefault(name, (parent, tokens[index * size : (index + 1) * size]))
        parent = name


def _name(value: Any, number: int) -> str:
    if type(value) is int:
        return f"{value & (1 << 64) - 1:016x}"
    if isinstance(value, str) and 0 < len(value) <= 128:
        return value.lower()
    raise DumpError(f"line {number} of the event log: a block hash is neither an integer nor hexadecimal text")


def _chain(name: str, blocks: dict[str, tuple[str | None, list[int]]]) -> list[int]:
    parts: list[Sequence[int]] = []
    at: str | None = name
    length = 0
    while at is not None:
        if at not in blocks:
            raise DumpError(f"the event log holds no block {at}, the parent of another")
        at, tokens = blocks[at]
        parts.append(tokens)
        length += len(tokens)
        # Also what ends a circle of parents.
        base.check_count(length)
    return [token for part in reversed(parts) for token in part]
