"""Near windows: sessions are predicted from equal tokens at other places, which move to the library if need be.

Matches of tokens (`pltpack.trie.matching`) and of captured predictions (`pltpack.trie.ann`) are tried before anything
is written. Those that pay for their rows, and for the nodes that must be made for them, become mapping rows
(docs/reuse.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from pltpack.archive.draft import KERNEL_NOISE, token_error
from pltpack.archive.encoding import Promise, in_order
from pltpack.archive.files import container_metadata, header_reserve
from pltpack.archive.library import Library
from pltpack.archive.mapped import movable
from pltpack.archive.places import CodecPlace, keeps
from pltpack.archive.prepared import Prepared
from pltpack.archive.promotion import Candidate, promote, worth
from pltpack.archive.reader import Archive
from pltpack.archive.roots import Roots
from pltpack.archive.settings import Settings
from pltpack.archive.sharing import Role, Sharing, prefix_end
from pltpack.archive.similar import similar_matches
from pltpack.archive.tails import find_tails, fitting
from pltpack.archive.trial import Text, Trial
from pltpack.codec.base import Codec
from pltpack.codec.transform import TransformCodec
from pltpack.format import tables
from pltpack.snapshot import Snapshot
from pltpack.trie.matching import Match, find_matches

#: Bytes that a cut costs in each layer group besides the unit's record: heads of streams, tables.
CUT_BYTES = 192


class Attempt:
    """Tries matches of new sessions, in any thread.

    Parameters
    ----------
    place : CodecPlace
    prepared : Prepared
    texts : sequence of Text
        The last ones are the new sessions.
    snapshots : sequence of Snapshot
        The new sessions.

    Attributes
    ----------
    texts : sequence of Text
        As given.
    node_bytes : int
        What a node takes besides its units and tokens, and the row and the cuts of the session it comes from.
    """

    def __init__(
        self, place: CodecPlace, prepared: Prepared, texts: Sequence[Text], snapshots: Sequence[Snapshot]
    ) -> None:
        layers = len(snapshots[0].identity.layers)
        cuts = 2 * len(place.codec.layer_groups(layers)) * (tables.UNIT.itemsize + CUT_BYTES)
        self._row_bytes = cuts + tables.RUN.itemsize
        self.node_bytes = self._row_bytes + tables.NODE.itemsize
        self._trial, self.texts, self._snapshots = Trial(prepared, layers), texts, snapshots

    def session(self, match: Match) -> Snapshot:
        """The new session of a match."""
        return self._snapshots[match.session - len(self.texts) + len(self._snapshots)]

    def __call__(self, match: Match) -> Candidate:
        """What a match would save as a prediction."""
        return self.candidate(match, *self._trial(self.session(match), match, self.texts[match.source]))

    def weigh(self, match: Match) -> Candidate:
        """What a match would save if its values are the source's."""
        return self.candidate(match, None, self._trial.plain(self.session(match), match.start, match.length))

    def candidate(self, match: Match, promise: Promise | None, saved: float) -> Candidate:
        """A match with what a trial of it said."""
        return Candidate(match, promise, saved - self._row_bytes)


class Tries(Protocol):
    """Makes attempts, several at once; candidates come in the order of the matches."""

    def attempts(self, attempt: Attempt, matches: Sequence[Match], weigh: bool = False) -> Iterator[Candidate]:
        """What `attempt`, or its method `weigh`, says of each match."""
        ...


def add_near(
    sharing: Sharing,
    archive: Archive | None,
    snapshots: Sequence[Snapshot],
    settings: Settings,
    place: CodecPlace,
    prepared: Prepared,
    pool: ThreadPoolExecutor,
    crew: Tries,
) -> Sharing:
    """Add to what new sessions share what they can be predicted from.

    Parameters
    ----------
    sharing : Sharing
        Exact prefixes.
    archive : Archive or None
        The present generation.
    snapshots : sequence of Snapshot
        The new sessions.
    settings : Settings
    place : CodecPlace
    prepared : Prepared
    pool : ThreadPoolExecutor
    crew : Tries

    Returns
    -------
    Sharing
        `sharing` itself if nothing pays.
    """
    texts = _texts(sharing, archive.libraries if archive is not None else [], snapshots)
    first = len(texts) - len(snapshots)
    attempt = Attempt(place, prepared, texts, snapshots)
    # Matches of one source follow each other, so that it is decoded once.
    found = _matches(texts, snapshots, settings, place.codec) if place.codec.predicts else []
    matches = sorted(found, key=lambda match: (match.source, match.source_start))
    tried = [candidate for candidate in crew.attempts(attempt, matches) if candidate.gain > 0]
    if isinstance(place.codec.on_host, TransformCodec):
        roots = Roots(range(first, len(texts)), lambda text: _steps(prepared, snapshots[text - first]),
                      lambda turned: crew.attempts(attempt, turned))  # fmt: skip
        tried = roots.choose(tried)

    def usable(match: Match) -> bool:
        snapshot, source = snapshots[match.session - first], texts[match.source]
        if source.library is not None and not keeps(source.library, source.node or 0, place.codec):
            return False
        return source.snapshot is None or _same_values(snapshot, source.snapshot, match.start, match.length)

    tails = fitting(find_tails(archive, sharing, snapshots, texts), [candidate.match for candidate in tried])
    tails = [match for match, good in zip(tails, in_order(usable, tails, pool), strict=True) if good]
    tried += [candidate for candidate in crew.attempts(attempt, tails, weigh=True) if candidate.gain > 0]
    fixed = 0 if place.library is None or sharing.nodes else segment_bytes(place)
    kept = worth(tried, range(first, len(texts)), attempt.node_bytes, fixed)
    if not kept:
        return sharing
    shared = promote(sharing, texts, snapshots, kept)
    _refine(shared, snapshots, prepared)
    return shared


def _refine(sharing: Sharing, snapshots: Sequence[Snapshot], prepared: Prepared) -> None:
    """Have new nodes encoded as finely as what is predicted from them."""
    if not isinstance(prepared.codec.on_host, TransformCodec):
        return
    wanted = []
    for snapshot, runs in zip(snapshots, sharing.runs, strict=True):
        for run in runs:
            if run.role is Role.NEAR and run.library is None:
                steps = _steps(prepared, snapshot)[run.session_start : run.stop]
                wanted.append((sharing.nodes[run.node], run.node_start, steps))
    # All steps are asked for before any is refined: a session's own are not finer for what it serves.
    for node, start, steps in wanted:
        prepared.refine(node.owner, node.stop + node.boundary, node.position + start, steps)


def _steps(prepared: Prepared, snapshot: Snapshot) -> np.ndarray:
    """Steps of a session's tokens, by a codec that has some."""
    codec = prepared.of(snapshot, len(snapshot)).on_host
    assert isinstance(codec, TransformCodec)
    return codec.token_steps


def library_texts(libraries: Sequence[Library]) -> list[Text]:
    """Nodes of the library: of those with equal tokens the newest predicts, as it may be the mean of the others."""
    texts = []
    for library in reversed(libraries):
        for index, node in enumerate(library.nodes):
            offset = int(node["token_offset"])
            tokens, salt = library.tokens[offset : offset + int(node["length"])], library.salts[node["tenant"]]
            texts.append(Text(tokens, salt, library.identity, int(node["position"]), library=library, node=index))
    return texts


def _texts(sharing: Sharing, libraries: Sequence[Library], snapshots: Sequence[Snapshot]) -> list[Text]:
    """Nodes of the library, those to be written, and the new sessions."""
    texts = library_texts(libraries)
    for index, new in enumerate(sharing.nodes):
        tokens, of = new.owner.tokens[new.position : new.stop], new.owner.identity
        texts.append(Text(tokens, of.salt, of, new.position, node=index, snapshot=new.owner, cut=new.stop))
    for snapshot, runs in zip(snapshots, sharing.runs, strict=True):
        of = snapshot.identity
        texts.append(Text(snapshot.tokens, of.salt, of, own_from=prefix_end(runs), snapshot=snapshot,
                          cut=len(snapshot)))  # fmt: skip
    return texts


def _matches(
    texts: Sequence[Text], snapshots: Sequence[Snapshot], settings: Settings, codec: Codec
) -> list[Match]:
    first, own_from = len(texts) - len(snapshots), [text.own_from for text in texts]
    found = _token_matches(texts, snapshots, settings, codec)
    similar = similar_matches(snapshots, own_from[first:], found, first, settings.window, settings.tau)
    return _possible([*(match for each in found for match in each), *similar], texts)


def token_matches(
    texts: Sequence[Text], snapshots: Sequence[Snapshot], settings: Settings, codec: Codec
) -> list[Match]:
    """Runs of the new sessions, the last texts, whose tokens come again in a text that a codec may predict from."""
    found = _token_matches(texts, snapshots, settings, codec)
    return _possible([match for each in found for match in each], texts)


def _token_matches(
    texts: Sequence[Text], snapshots: Sequence[Snapshot], settings: Settings, codec: Codec
) -> list[list[Match]]:
    groups = [text.salt if _serves(text, codec) else object() for text in texts]
    return find_matches([text.tokens for text in texts], groups, range(len(texts) - len(snapshots), len(texts)),
                        [text.own_from for text in texts], window=settings.window)  # fmt: skip


def _possible(matches: list[Match], texts: Sequence[Text]) -> list[Match]:
    """Matches that keys can be moved for, if need be."""
    if movable(texts[-1].identity):
        return matches
    return [match for match in matches if texts[match.source].position + match.source_start == match.start]


def _serves(text: Text, codec: Codec) -> bool:
    """Whether a codec may predict from a text: what `transform` coded is not the same bits everywhere."""
    if text.library is None or text.node is None or isinstance(codec.on_host, TransformCodec):
        return True
    states = np.unique(text.library.units_of(text.node)["state"])
    return all(text.library.state_entry(int(state))[0] != TransformCodec.codec_id for state in states)


def _same_values(a: Snapshot, b: Snapshot, start: int, count: int) -> bool:
    """Whether two sessions have the same values at the same places but for kernel noise."""
    layers = range(len(a.identity.layers))
    pairs = ((a.layer(layer, start, start + count), b.layer(layer, start, start + count)) for layer in layers)
    return all(token_error(mine, others) <= KERNEL_NOISE for mine, others in pairs)


def segment_bytes(place: CodecPlace) -> int:
    """What a library segment takes that holds a copy of the state and no units."""
    assert place.library is not None
    about = container_metadata("library", place.library.identity)
    return place.packed.nbytes + header_reserve(about) + 512
