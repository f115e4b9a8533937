"""Open shards: a session's tokens, its mapping to library nodes, and its own units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pltpack.archive import recompute
from pltpack.archive.library import Library
from pltpack.archive.mapped import movable
from pltpack.archive.recompute import Rebuild, Recipe
from pltpack.archive.segments import Segment, strings
from pltpack.codec.base import Codec, KeyValue
from pltpack.codec.recompute import RecomputeCodec
from pltpack.errors import FormatError, UnsupportedError
from pltpack.format import tables
from pltpack.format.container import MINOR_PREDICTIONS, MINOR_RECOMPUTE, Container
from pltpack.format.manifest import SessionEntry
from pltpack.format.sealing import Seal
from pltpack.snapshot import Identity
from pltpack.store import Store


class Shard(Segment):
    """One session's shard.

    Parameters
    ----------
    store : Store
        Where the archive is.
    entry : SessionEntry
        What the manifest says of it.
    identity : Identity
        The archive's.
    libraries : sequence of Library
        All segments of the archive.

    Raises
    ------
    FormatError
        If the file breaks the specification or refers to a segment that the archive does not have.

    Attributes
    ----------
    runs : ndarray
        Checked mapping rows.
    exact_runs, predicted_runs : ndarray
        Those whose tokens have the node's values but for own units, and those that only predict what own units hold.
    predicted_rows : ndarray
        bool, which of `runs` are the latter.
    recipe : Recipe or None
        How a model makes the session again, if one does.
    rebuild : Rebuild or None
        What runs the model.
    """

    recipe: Recipe | None = None
    rebuild: Rebuild | None = None
    _tokens: np.ndarray | None = None

    def __init__(self, store: Store, entry: SessionEntry, identity: Identity, libraries: Sequence[Library],
                 seal: Seal | None = None) -> None:  # fmt: skip
        self.entry: SessionEntry = entry
        self.identity = identity
        self.container = Container(store.open(entry.file), entry.bytes, entry.head_sha256, seal)
        try:
            self._load({library.entry.head_sha256: library for library in libraries})
        except BaseException:
            self.close()
            raise

    def _load(self, known: dict[str, Library]) -> None:
        path, metadata = self.container.path, self.container.metadata
        self._check_kind("shard")
        if metadata.get("session") != self.entry.session or metadata.get("salt") != self.entry.salt:
            raise FormatError("shard belongs to another session than the manifest says", path)
        if recompute.METADATA in metadata and self.minor >= MINOR_RECOMPUTE:
            self.recipe = Recipe.parse(metadata[recompute.METADATA], path)
        self._check_names({*self._token_tensors(), "map", "unit.index"},
                          {"session", "libraries", "states", *([recompute.METADATA] if self.recipe else [])},
                          frozenset({"salt"}))  # fmt: skip
        digests = strings(tables.metadata_list(metadata, "libraries", path), path)
        missing = [digest for digest in digests if digest not in known]
        if missing:
            raise FormatError(f"shard refers to library segment {missing[0][:12]}…, which the archive lacks", path)
        self.libraries = [known[digest] for digest in digests]
        self.states = self._read_states(tables.metadata_list(metadata, "states", path))
        if self.recipe is None:
            self.tokens = self._token_ids("tokens")
            if len(self.tokens) != self.entry.tokens:
                raise FormatError(f"shard has {len(self.tokens)} tokens, the manifest says {self.entry.tokens}", path)
        self.units = tables.read_units(self.container, self._token_bytes(), len(self.states), self.minor)
        if (self.units["node"] != tables.NO_NODE).any():
            raise FormatError("a unit of a shard names a library node", path)
        ends = self.units["token_start"].astype(np.int64) + self.units["token_count"]
        if len(ends) and ends.max() > self.entry.tokens:
            raise FormatError("a unit reaches beyond the session's end", path)
        if len(ends) > 1:
            layer, count = (self.units[name].astype(np.int64) for name in ("layer", "layer_count"))
            same = layer[1:] == layer[:-1]
            starts = self.units["token_start"][1:].astype(np.int64)
            behind = (layer[1:] >= layer[:-1] + count[:-1]) | (same & (starts >= ends[:-1]) & (count[1:] == count[:-1]))
            if not behind.all():
                raise FormatError("units overlap or are out of order", path)
        self.layer_bounds = _layer_bounds(self.units, len(self.identity.layers))
        self.runs = tables.read_runs(self.container, self.entry.tokens, len(self.libraries), self.minor)
        self.predicted_rows = np.array([self._check_run(run) for run in self.runs], bool)
        self.exact_runs: np.ndarray = self.runs[~self.predicted_rows]
        self.predicted_runs: np.ndarray = self.runs[self.predicted_rows]
        self._predicted_tokens = TokenCount.of(self.predicted_runs)
        if self.recipe is None:
            self._check_references()
        else:
            self._check_recipe(self.recipe)

    @property
    def _brief(self) -> bool:
        return self.minor >= MINOR_RECOMPUTE and recompute.METADATA in self.container.metadata

    def _token_tensors(self) -> list[str]:
        if self.recipe is None:
            return ["tokens"]
        return [recompute.DIGESTS, *([recompute.CODED] if self.recipe.text is None else [])]

    def _check_recipe(self, recipe: Recipe) -> None:
        """A rebuilt session has no mapping, a digest a run, and lossless units over rebuilt values alone."""
        path = self.container.path
        if len(self.runs):
            raise FormatError("a session that a model makes again has a mapping table", path)
        if len(self.digests) != -(-self.entry.tokens // recipe.run):
            raise FormatError(f"digests do not fit {self.entry.tokens} tokens", path)
        if recipe.text is None:
            self.container.array(recompute.CODED, "U8")
        elif not self.states or self._state_codec(0) != RecomputeCodec.codec_id:
            raise FormatError("shard names no state that holds its tokens", path)
        if (self.units["flags"] != tables.FLAG_REBUILT).any():
            raise FormatError("a session that a model makes again has units of another kind", path)
        if any(self._state_codec(int(state)) != "lossless" for state in np.unique(self.units["state"])):
            raise FormatError("what differs from rebuilt values is in another codec than lossless", path)

    def _state_codec(self, index: int) -> str:
        library, state = self.states[index]
        return self.libraries[library].state_entry(state)[0]

    @property
    def digests(self) -> np.ndarray:
        """Digests of the rebuilt values, uint64; see `pltpack.archive.recompute.digests`."""
        return self.container.array(recompute.DIGESTS, "U64")

    @property
    def tokens(self) -> np.ndarray:
        """Token ids, int32 ``[T]``.

        Raises
        ------
        FormatError
            If they are coded and damaged.
        UnsupportedError
            If they are coded with a model's probabilities and there is no model.
        """
        if self._tokens is None:
            assert self.recipe is not None
            self._tokens = self._coded_tokens(self.recipe)
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def _coded_tokens(self, recipe: Recipe) -> np.ndarray:
        if recipe.text is None:
            return self.model().tokens(self)
        library, state = self.states[0]
        codec = self.libraries[library].codec(state)
        assert isinstance(codec, RecomputeCodec)
        try:
            return codec.session(recipe.text, self.entry.tokens)
        except ValueError as error:
            raise FormatError(f"tokens of session {self.entry.session!r}: {error}", self.container.path) from None

    def model(self) -> Rebuild:
        """What runs the model that makes the session again; `UnsupportedError` if there is none."""
        if self.rebuild is None:
            weights = self.recipe.weights if self.recipe else None
            raise UnsupportedError(f"session {self.entry.session!r} is made again by a model (weights {weights}): give "
                                   "its folder with --model", self.container.path)  # fmt: skip
        return self.rebuild

    def rebuilt(self, layer: int, start: int, stop: int) -> KeyValue:
        """What the model makes of tokens ``[start, stop)`` in one layer; not to be changed."""
        keys, values = self.model().layers(self)[layer]
        return keys[:, start:stop], values[:, start:stop]

    def _check_run(self, run: np.void) -> bool:
        """Whether a row only predicts: own units must hold all of its tokens."""
        library, path = self.libraries[run["library"]], self.container.path
        if run["node"] >= len(library.nodes):
            raise FormatError(f"mapping table names node {run['node']}, which the library lacks", path)
        node = library.nodes[run["node"]]
        start, length, shift = int(run["node_start"]), int(run["length"]), int(run["position_shift"])
        if start + length > node["length"] or int(node["position"]) + start + shift != run["session_start"]:
            raise FormatError("mapping table row does not fit its library node", path)
        if library.salts[node["tenant"]] != self.entry.salt:
            raise FormatError("mapping table points to another tenant's node", path)
        first = int(node["token_offset"]) + start
        mine = self.tokens[run["session_start"] : run["session_start"] + length]
        equal = np.array_equal(library.tokens[first : first + length], mine)
        if not equal and self.minor < MINOR_PREDICTIONS:
            raise FormatError("mapping table points to a node of other tokens", path)
        if shift and not movable(self.identity):
            raise FormatError("mapping table moves keys whose rotary embedding is not known", path)
        return shift != 0 or not equal

    def _check_references(self) -> None:
        """Every reference is in the mapping, and every predicted token in a unit of its own, in every layer."""
        starts = self.units["token_start"].astype(np.int64)
        counts = self.units["token_count"].astype(np.int64)
        flagged = np.flatnonzero(self.units["flags"] & tables.FLAG_REFERENCE)
        if len(flagged):
            inside = TokenCount.of(self.runs).within(starts[flagged], starts[flagged] + counts[flagged])
            lacks = inside < counts[flagged]
            if lacks.any():
                raise FormatError(f"unit {flagged[np.argmax(lacks)]} has a reference outside the mapping table",
                                  self.container.path)  # fmt: skip
        if not len(self.predicted_runs):
            return
        held = np.append(0, np.cumsum(self._predicted_tokens.within(starts, starts + counts)))
        for layer, (first, last) in enumerate(self.layer_bounds):
            if held[last] - held[first] < self._predicted_tokens.total:
                raise FormatError(f"predicted tokens are in no unit of layer {layer}", self.container.path)

    def predicts(self, start: int, stop: int) -> bool:
        """Whether any of the tokens ``[start, stop)`` are only predicted by the mapping."""
        return len(self.predicted_runs) > 0 and bool(self._predicted_tokens.within(np.array([start]), np.array([stop])))

    def _read_states(self, pairs: list[object]) -> list[tuple[int, int]]:
        out = []
        for pair in pairs:
            if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
                    and pair[0] < len(self.libraries) and pair[1] < len(self.libraries[pair[0]].states)):  # fmt: skip
                raise FormatError("shard names a codec state that no library has", self.container.path)
            out.append((pair[0], pair[1]))
        return out

    def position_of(self, record: np.void) -> int:
        """See `Segment.position_of`."""
        return int(record["token_start"])

    def codec_of(self, record: np.void) -> Codec:
        """See `Segment.codec_of`."""
        library, state = self.states[record["state"]]
        return self.libraries[library].codec(state)

    @property
    def has_predictions(self) -> bool:
        """Whether the shard holds what only versions from `MINOR_PREDICTIONS` on know."""
        flagged = (self.units["flags"] & tables.FLAG_REFERENCE) != 0
        return len(self.predicted_runs) > 0 or bool((flagged & (self.units["layer_count"] > 1)).any())

    @property
    def mapped_tokens(self) -> int:
        """Tokens that the mapping table covers."""
        return int(self.runs["length"].sum(dtype=np.int64))


class TokenCount:
    """Counts how many of the tokens of some ranges, ordered and without overlaps, lie in others."""

    def __init__(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._starts, self._lengths = starts.astype(np.int64), lengths.astype(np.int64)
        self._before = np.append(0, np.cumsum(self._lengths))
        self.total = int(self._before[-1])

    @classmethod
    def of(cls, runs: np.ndarray) -> TokenCount:
        """Those of mapping rows."""
        return cls(runs["session_start"], runs["length"])

    def within(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """How many of the tokens lie in each range."""
        return self._up_to(stops) - self._up_to(starts)

    def _up_to(self, ends: np.ndarray) -> np.ndarray:
        if not len(self._starts):
            return np.zeros_like(ends)
        row = np.searchsorted(self._starts, ends, "right") - 1
        inside = np.minimum(ends - self._starts[row], self._lengths[row])
        return np.where(row < 0, 0, self._before[row] + inside)


def _layer_bounds(units: np.ndarray, layers: int) -> list[tuple[int, int]]:
    """Per layer, the range of records in a shard's sorted index whose units hold it."""
    out = [(0, 0)] * layers
    firsts, starts = np.unique(units["layer"], return_index=True)
    ends = np.append(starts, len(units))[1:]
    for first, start, end in zip(firsts.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for layer in range(first, first + int(units["layer_count"][start])):
            out[layer] = (start, end)
    return out
