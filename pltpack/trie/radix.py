"""A radix trie over int32 token ids: exact prefixes of everything stored, as a structure of arrays.

Each node stands for the edge that leads to it: a run of tokens in one shared token array. Node 0 is the root, its edge
is empty. Children are found through one open-addressing hash table keyed by (parent, first token of the edge), whose
slots hold node indices only; the key is read back from the node, so equality never rests on a hash. A stored sequence
ends at a node's end, so a new one adds at most two nodes: 150 million tokens cost their own 600 MB and little else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Run(NamedTuple):
    """Whole blocks ``[start, stop)`` of a path that lie on the edge of `node`."""

    node: int
    start: int
    stop: int


@numba.njit(nogil=True, cache=True)
def _slot(node: Any, token: Any, tokens: Any, parent: Any, offset: Any, slots: Any) -> Any:
    """Slot of the child of `node` whose edge starts with `token`, or the empty slot where it belongs."""
    mask = slots.size - 1
    key = (np.uint64(node) << np.uint64(32)) | (np.uint64(token) & np.uint64(0xFFFFFFFF))
    key = (key ^ (key >> np.uint64(29))) * _MIX
    at = np.int64((key ^ (key >> np.uint64(32))) & np.uint64(mask))
    while slots[at] != 0:
        child = slots[at]
        if parent[child] == node and tokens[offset[child]] == token:
            break
        at = (at + 1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def _descend(query: Any, tokens: Any, parent: Any, offset: Any, length: Any, slots: Any) -> Any:
    """(tokens matched, last node touched, tokens matched on that node's edge)."""
    node, matched, within = 0, 0, 0
    while matched < query.size:
        child = slots[_slot(node, query[matched], tokens, parent, offset, slots)]
        if child == 0:
            break
        start, limit = offset[child], min(length[child], query.size - matched)
        within = 1
        while within < limit and tokens[start + within] == query[matched + within]:
            within += 1
        node = child
        matched += within
        if within < length[child]:
            break
    return matched, node, within


@numba.njit(nogil=True, cache=True)
def _split(node: Any, within: Any, new: Any, tokens: Any, parent: Any, offset: Any, length: Any, depth: Any,
           visits: Any, owner: Any, slots: Any) -> None:  # fmt: skip
    """Give the first `within` tokens of the edge of `node` to node `new`, above it."""
    # The lower part keeps its index, so its children and the sessions that end there stay valid.
    slots[_slot(parent[node], tokens[offset[node]], tokens, parent, offset, slots)] = new
    parent[new], offset[new], length[new] = parent[node], offset[node], within
    depth[new], visits[new], owner[new] = depth[node], visits[node], owner[node]
    parent[node] = new
    offset[node] += within
    length[node] -= within
    depth[node] += within
    slots[_slot(new, tokens[offset[node]], tokens, parent, offset, slots)] = node


@numba.njit(nogil=True, cache=True)
def _insert(query: Any, session: Any, former_end: Any, former_node: Any, count: Any, used: Any, tokens: Any,
            parent: Any, offset: Any, length: Any, depth: Any, visits: Any, owner: Any, slots: Any) -> Any:  # fmt: skip
    """Store `query`; returns (last node or -1 if it does not extend the former path, node count, tokens used)."""
    matched, node, within = _descend(query, tokens, parent, offset, length, slots)
    step = node
    while step != former_node and step != 0:
        step = parent[step]
    # A partly matched edge is not passed, so the former end must lie within what matched, too.
    if step != former_node or matched < former_end:
        return -1, count, used
    if within < length[node]:
        _split(node, within, count, tokens, parent, offset, length, depth, visits, owner, slots)
        node = count
        count += 1
    if matched < query.size:
        rest = query.size - matched
        tokens[used : used + rest] = query[matched:]
        parent[count], offset[count], length[count] = node, used, rest
        depth[count], visits[count], owner[count] = matched, 0, session
        used += rest
        slots[_slot(node, query[matched], tokens, parent, offset, slots)] = count
        node = count
        count += 1
    step = node
    while depth[step] + length[step] > former_end:
        visits[step] += 1
        step = parent[step]
    return node, count, used


@numba.njit(nogil=True, cache=True)
def _rehash(count: Any, tokens: Any, parent: Any, offset: Any, slots: Any) -> None:
    for node in range(1, count):
        slots[_slot(parent[node], tokens[offset[node]], tokens, parent, offset, slots)] = node


def token_array(tokens: Any) -> np.ndarray:
    """Token ids as a C-contiguous int32 array.

    Raises
    ------
    ValueError
        If `tokens` is not one-dimensional, not of an integer type, or holds an id beyond int32.
    """
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens have {array.ndim} dimensions, not 1")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens are of type {array.dtype}, not of an integer type")
    limits = np.iinfo(np.int32)
    if array.dtype != np.int32 and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise ValueError("a token id does not fit int32")
    return np.ascontiguousarray(array, dtype=np.int32)


class RadixTrie:
    """Exact prefixes of a growing set of sessions.

    Not safe for concurrent `insert`; look-ups may run in parallel while nobody inserts.
    """

    _COLUMNS: ClassVar[dict[str, type]] = {
        "parent": np.int32, "offset": np.int64, "length": np.int64, "depth": np.int64, "visits": np.int32,
        "owner": np.int64,
    }  # fmt: skip

    def __init__(self) -> None:
        self._tokens = np.empty(1024, dtype=np.int32)
        self._used = 0
        self._count = 1
        self._columns: dict[str, np.ndarray] = {n: np.zeros(64, dtype=t) for n, t in self._COLUMNS.items()}
        self._slots = np.zeros(128, dtype=np.int32)
        self._columns["owner"][0] = -1
        # Session -> (tokens stored, node where they end).
        self._ends: dict[int, tuple[int, int]] = {}

    @classmethod
    def build(cls, sessions: Iterable[Any]) -> RadixTrie:
        """A trie of token arrays, numbered as sessions 0, 1, … in order."""
        arrays = [token_array(tokens) for tokens in sessions]
        trie = cls()
        # Untouched pages cost nothing, so the upper bound is reserved at once and never copied.
        trie._tokens = np.empty(max(1, sum(map(len, arrays))), dtype=np.int32)
        for session, tokens in enumerate(arrays):
            trie.insert(tokens, session)
        return trie

    def insert(self, tokens: Any, session: int) -> None:
        """Store a session's tokens; a session inserted before must now extend its former tokens.

        Parameters
        ----------
        tokens : array_like
            Token ids ``[T]``; may be empty.
        session : int
            Any non-negative number.

        Raises
        ------
        ValueError
            If the tokens are not int32 ids or do not extend what the session stored before.
        """
        if session < 0:
            raise ValueError(f"session number {session} is negative")
        query = token_array(tokens)
        self._reserve(len(query))
        former_end, former_node = self._ends.get(session, (0, 0))
        c = self._columns
        node, self._count, self._used = _insert(
            query, session, former_end, former_node, self._count, self._used, self._tokens, c["parent"], c["offset"],
            c["length"], c["depth"], c["visits"], c["owner"], self._slots)  # fmt: skip
        if node < 0:
            raise ValueError(f"session {session} was stored before with tokens that these do not extend")
        if session not in self._ends:
            self._columns["visits"][0] += 1
        self._ends[session] = (len(query), node)

    def _reserve(self, tokens: int) -> None:
        if self._used + tokens > len(self._tokens):
            self._tokens = _grown(self._tokens, self._used + tokens)
        if self._count + 2 > len(self._columns["parent"]):
            self._columns = {name: _grown(column, self._count + 2) for name, column in self._columns.items()}
        if 2 * (self._count + 2) > len(self._slots):
            self._slots = np.zeros(2 * len(self._slots), dtype=np.int32)
            _rehash(self._count, self._tokens, self._columns["parent"], self._columns["offset"], self._slots)

    def _find(self, query: np.ndarray) -> tuple[int, int, int]:
        columns = self._columns
        found = _descend(query, self._tokens, columns["parent"], columns["offset"], columns["length"], self._slots)
        return int(found[0]), int(found[1]), int(found[2])

    def lookup(self, tokens: Any) -> tuple[int, int]:
        """Longest common prefix with anything stored.

        Returns
        -------
        matched_length : int
        node : int
            The node whose edge holds the last matched token; 0, the root, when nothing matched.
        """
        return self._find(token_array(tokens))[:2]

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`, in order."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = int(self._columns["parent"][node])
        return nodes[::-1]

    def shared_runs(self, session_tokens: Any, block: int) -> list[Run]:
        """The part of a stored session's path that at least two sessions pass, edge by edge, in whole blocks.

        A block belongs to the edge that holds its last token: exactly the sessions that pass that token have it whole.

        Parameters
        ----------
        session_tokens : array_like
            Token ids ``[T]``.
        block : int
            Tokens per block; blocks count from position 0.

        Returns
        -------
        list of Run
            Adjacent and in order from position 0; edges that end no block are left out.
        """
        if block < 1:
            raise ValueError(f"block of {block} tokens")
        matched, node = self.lookup(session_tokens)
        runs = []
        for step in self.path(node):
            if self._columns["visits"][step] < 2:
                break
            start = int(self._columns["depth"][step])
            stop = min(start + int(self._columns["length"][step]), matched)
            first, last = start - start % block, stop - stop % block
            if first < last:
                runs.append(Run(step, first, last))
        return runs

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return self._count

    @property
    def tokens(self) -> np.ndarray:
        """The shared token array that edges point into, int32."""
        return _read_only(self._tokens[: self._used])

    @property
    def parent(self) -> np.ndarray:
        """Parent of each node, int32; the root is its own."""
        return self._column("parent")

    @property
    def offset(self) -> np.ndarray:
        """Where each node's edge starts in `tokens`, int64."""
        return self._column("offset")

    @property
    def length(self) -> np.ndarray:
        """Tokens on each node's edge, int64; 0 for the root only."""
        return self._column("length")

    @property
    def depth(self) -> np.ndarray:
        """Tokens from the root to the start of each node's edge, int64."""
        return self._column("depth")

    @property
    def visits(self) -> np.ndarray:
        """Sessions whose path passes each node's whole edge, int32; for the root, all sessions."""
        return self._column("visits")

    @property
    def owner(self) -> np.ndarray:
        """The session that brought each node's tokens, int64; -1 for the root."""
        return self._column("owner")

    def _column(self, name: str) -> np.ndarray:
        return _read_only(self._columns[name][: self._count])


def _grown(array: np.ndarray, needed: int) -> np.ndarray:
    out = np.zeros(max(needed, 2 * len(array)), dtype=array.dtype)
    out[: len(array)] = array
    return out


def _read_only(view: np.ndarray) -> np.ndarray:
    view.flags.writeable = False
    return view
