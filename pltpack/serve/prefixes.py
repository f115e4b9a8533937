"""The longest stored prefix of a prompt: over all sessions of a tenant, and over all paths of the library."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import xxhash

from pltpack.archive.figures import recompute_at_cut
from pltpack.archive.library import Library
from pltpack.archive.shard import Shard, TokenCount
from pltpack.errors import FormatError, PltpackError, UnsupportedError
from pltpack.format import tables
from pltpack.format.manifest import SessionEntry
from pltpack.snapshot import token_ids
from pltpack.trie.radix import RadixTrie


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """A stored prefix of a prompt.

    Attributes
    ----------
    session : str
        The session that holds it, or ``library:FILE:NODE`` for a path of library nodes.
    tokens : int
        Its length: whole blocks unless cut by `first`; 0 if nothing is stored.
    block : int
        Tokens per block.
    generation : int
        The archive's generation that it was found in.
    source : str
        Empty, or ``raw`` for a hit in the archive that takes the place of barred sessions.
    prefix : (int, int) or None
        How many token ids it was found with, and their digest: a hit loads these tokens, in whatever archive, or
        nothing.
    recompute : int
        Tokens that are stored behind these, in whole blocks, and left to the model: see `PrefixIndex`.
    """

    session: str
    tokens: int
    block: int
    generation: int
    source: str = ""
    prefix: tuple[int, int] | None = dataclasses.field(default=None, compare=False, repr=False)
    recompute: int = 0

    def __bool__(self) -> bool:
        return self.tokens > 0

    @property
    def blocks(self) -> int:
        """Blocks that it fills, the last one perhaps in part."""
        return -(-self.tokens // self.block)

    def names(self, tokens: np.ndarray) -> bool:
        """Whether it was found as a prefix of a session with these token ids, as far as it knows."""
        if self.prefix is None:
            return self.tokens <= len(tokens)
        length, digest = self.prefix
        return self.tokens <= length <= len(tokens) and _digest(tokens[:length]) == digest

    def first(self, tokens: int) -> Hit:
        """The same, of at most so many tokens, which need not be whole blocks.

        Raises
        ------
        UnsupportedError
            If it is not a whole number.
        """
        if not isinstance(tokens, numbers.Integral) or isinstance(tokens, bool):
            raise UnsupportedError(f"tokens must be a whole number, not {tokens!r}")
        tokens = int(tokens)
        return dataclasses.replace(self, tokens=max(0, min(tokens, self.tokens)))


class PrefixIndex:
    """Everything that is stored for one tenant, as a radix trie.

    Parameters
    ----------
    sources : mapping of str to Shard
        By name; those that come first are preferred.
    block : int
    generation : int
    recompute_at_cut : int or None
        Tokens before a cut that hits leave to the model. A prompt that goes on elsewhere than the session that it was
        found in has its cut there; less than a block before the session's end is none. None for what each source's
        codecs ask for: importance is that of a session's end, and the first tokens after a cut look at those before it.
    """

    def __init__(
        self, sources: Mapping[str, Shard], block: int, generation: int, recompute_at_cut: int | None = 0
    ) -> None:
        self.sources = dict(sources)
        self.block, self.generation = block, generation
        self._recompute, self._asked = recompute_at_cut, dict[str, int]()
        self._names = list(self.sources)
        self._trie = RadixTrie.build(shard.tokens for shard in self.sources.values())

    def lookup(self, tokens: object) -> Hit:
        """The longest stored prefix of some token ids that is as good as its tier promises, in whole blocks."""
        length, node = self._trie.lookup(token_ids(tokens))
        whole = length - length % self.block
        name, kept = self._names[int(self._trie.owner[node])] if whole else "", whole
        left = self._left(name) if whole else 0
        if left and not self._ends_here(name, length):
            other = self._ending(node, length)
            if other is None:
                kept = max(0, length - left) // self.block * self.block
            name = (name if kept else "") if other is None else other
        prefix = (kept, _digest(self.sources[name].tokens[:kept])) if kept else None
        return Hit(name, kept, self.block, self.generation, prefix=prefix, recompute=whole - kept)

    def _left(self, name: str) -> int:
        if self._recompute is not None:
            return self._recompute
        if name not in self._asked:
            try:
                self._asked[name] = recompute_at_cut(self.sources[name])
            # Its load will be the miss that says why.
            except PltpackError:
                return 0
        return self._asked[name]

    def _ends_here(self, name: str, length: int) -> bool:
        return len(self.sources[name].tokens) - length < self.block

    def _ending(self, node: int, length: int) -> str | None:
        """A source on the way to a node that holds all whole blocks of `length` tokens and ends about there."""
        for step in reversed(self._trie.path(node)):
            if self._trie.depth[step] + self._trie.length[step] < length - length % self.block:
                break
            name = self._ends.get(step)
            if name is not None and self._ends_here(name, length):
                return name
        return None

    @functools.cached_property
    def _ends(self) -> dict[int, str]:
        """Node -> the first source that ends there."""
        return {self._trie.lookup(self.sources[name].tokens)[1]: name for name in reversed(self._names)}

    def without(self, *names: str) -> PrefixIndex:
        """The same without some sources."""
        rest = {key: shard for key, shard in self.sources.items() if key not in names}
        return PrefixIndex(rest, self.block, self.generation, self._recompute)


def _digest(tokens: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int64).data)


def library_paths(libraries: Sequence[Library], salt: str | None) -> Iterator[tuple[str, Shard]]:
    """Paths of library nodes from a session's beginning to a leaf, each as a shard that has no units of its own.

    Sessions that went through them may be gone; the values are those of one of them.

    Parameters
    ----------
    libraries : sequence of Library
    salt : str or None
        The tenant.
    """
    by_digest = {library.entry.head_sha256: index for index, library in enumerate(libraries)}
    parents = {parent for library in range(len(libraries)) for parent in _parents(libraries, by_digest, library)}
    for index, library in enumerate(libraries):
        for node in range(len(library.nodes)):
            if (index, node) in parents or library.salts[library.nodes[node]["tenant"]] != salt:
                continue
            path = _path(libraries, by_digest, index, node)
            if path:
                yield f"library:{library.entry.file}:{node}", _path_shard(libraries, path, salt)


def _parent(libraries: Sequence[Library], by_digest: dict[str, int], index: int, node: int) -> tuple[int, int] | None:
    library, record = libraries[index], libraries[index].nodes[node]
    if record["parent"] == tables.NO_NODE:
        return None
    where = int(record["parent_library"])
    other = index if where == 0 else by_digest.get(library.others[where - 1])
    if other is None or record["parent"] >= len(libraries[other].nodes):
        return None
    return other, int(record["parent"])


def _parents(libraries: Sequence[Library], by_digest: dict[str, int], index: int) -> Iterator[tuple[int, int]]:
    for node in range(len(libraries[index].nodes)):
        parent = _parent(libraries, by_digest, index, node)
        if parent is not None:
            yield parent


def _path(
    libraries: Sequence[Library], by_digest: dict[str, int], index: int, node: int
) -> list[tuple[int, int]] | None:
    """Nodes from position 0 down to a node; None if it does not hang from there."""
    path = [(index, node)]
    position = int(libraries[index].nodes[node]["position"])
    # Positions fall from node to parent, which also ends a circle that a damaged table may hold.
    while position > 0:
        parent = _parent(libraries, by_digest, *path[-1])
        if parent is None:
            return None
        record = libraries[parent[0]].nodes[parent[1]]
        if int(record["position"]) + int(record["length"]) != position or not record["length"]:
            return None
        path.append(parent)
        position = int(record["position"])
    return path[::-1]


def _path_shard(libraries: Sequence[Library], path: Sequence[tuple[int, int]], salt: str | None) -> Shard:
    last = libraries[path[-1][0]]
    runs, parts, at = np.zeros(len(path), tables.RUN), [], 0
    for row, (index, node) in zip(runs, path, strict=True):
        record = libraries[index].nodes[node]
        first, length = int(record["token_offset"]), int(record["length"])
        if libraries[index].salts[record["tenant"]] != salt:
            raise FormatError("a trie node hangs from another tenant's", libraries[index].container.path)
        parts.append(libraries[index].tokens[first : first + length])
        row["session_start"], row["length"], row["library"], row["node"] = at, length, index, node
        at += length
    shard = Shard.__new__(Shard)
    shard.identity, shard.container, shard.minor = last.identity, last.container, last.minor
    shard.tokens = np.concatenate(parts)
    shard.entry = SessionEntry(last.entry.file, 0, "", "", "", at, salt)
    shard.libraries, shard.states = list(libraries), []
    shard.units = np.zeros(0, tables.UNIT)
    shard.layer_bounds = [(0, 0)] * len(last.identity.layers)
    shard.runs = shard.exact_runs = runs
    shard.predicted_rows, shard.predicted_runs = np.zeros(len(runs), bool), runs[:0]
    shard._predicted_tokens = TokenCount.of(runs[:0])
    return shard
