"""What new sessions share with, or can be predicted from, in the shards of earlier ones: it moves to the library first.

A session that is alone keeps all of its units in its shard. When later ones share its prefix or repeat its passages,
whole units move as they are to a new library segment, and the session's shard is written anew without them
(docs/reuse.md, "Append"). Everything else of an append then sees an archive that had them in its library all along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pltpack.archive.encoding import in_order, relative_error
from pltpack.archive.library import Library
from pltpack.archive.near import Attempt, library_texts, segment_bytes, token_matches
from pltpack.archive.places import CodecPlace, Places, keeps
from pltpack.archive.prepared import Prepared
from pltpack.archive.promotion import by_source, connected
from pltpack.archive.reader import Archive
from pltpack.archive.relocate import Part, relocate
from pltpack.archive.segments import fresh
from pltpack.archive.settings import Settings
from pltpack.archive.shard import Shard, TokenCount
from pltpack.archive.sharing import Sharing, share
from pltpack.archive.trial import Text
from pltpack.codec.base import Codec, Unit
from pltpack.codec.transform import TransformCodec
from pltpack.errors import PromiseError
from pltpack.format import tables
from pltpack.snapshot import Snapshot
from pltpack.trie.radix import RadixTrie


class Movable:
    """Tokens of a shard whose units can move: they are whole in every layer, and nothing else is needed for them.

    Parameters
    ----------
    shard : Shard

    Attributes
    ----------
    bounds : ndarray
        int64 ``[N, 2]``: first token and the one after the last of each such unit, in order.
    extents : list of (int, int)
        What of them lies without a gap.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        plain = shard.units[shard.units["flags"] == 0]
        ranges = np.stack([plain["token_start"], plain["token_start"] + plain["token_count"]], axis=1).astype(np.int64)
        bounds, index = np.unique(ranges, axis=0, return_inverse=True)
        held = np.bincount(index.reshape(-1), weights=plain["layer_count"], minlength=len(bounds))
        mapped = TokenCount.of(shard.runs).within(bounds[:, 0], bounds[:, 1])
        self.bounds = bounds[(held == len(shard.identity.layers)) & (mapped == 0)]
        gaps = np.flatnonzero(self.bounds[1:, 0] != self.bounds[:-1, 1]) + 1
        self.extents = [(int(part[0, 0]), int(part[-1, 1])) for part in np.split(self.bounds, gaps) if len(part)]

    def states(self, start: int, stop: int) -> set[int]:
        """Numbers of the codec states, as the shard names them, of units with any of the tokens."""
        units = self.shard.units
        first = units["token_start"].astype(np.int64)
        return set(units["state"][(first < stop) & (first + units["token_count"] > start)].tolist())

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens of all whole units that hold any of some tokens, which lie within one extent."""
        low = int(np.searchsorted(self.bounds[:, 1], start, "right"))
        high = int(np.searchsorted(self.bounds[:, 0], stop, "left"))
        return int(self.bounds[low, 0]), int(self.bounds[high - 1, 1])


@dataclasses.dataclass
class _Wanted:
    """What is to move, by session: ranges of whole units, and a new session that has the same tokens."""

    parts: dict[str, list[Part]] = dataclasses.field(default_factory=dict)

    def add(self, movable: Movable, start: int, stop: int, user: Snapshot, at: int) -> None:
        """Ask for tokens of one extent, which `user` has from `at` on."""
        low, high = movable.around(start, stop)
        part = Part(movable.shard, low, high, user, at, start, stop)
        mine = self.parts.setdefault(movable.shard.entry.session, [])
        touching = [other for other in mine if other.start <= high and low <= other.stop]
        for other in touching:
            mine.remove(other)
            part = dataclasses.replace(other, start=min(part.start, other.start), stop=max(part.stop, other.stop))
        mine.append(part)
        mine.sort(key=lambda each: each.start)

    @property
    def all(self) -> list[Part]:
        """Parts in the order in which sessions were asked for."""
        return [part for parts in self.parts.values() for part in parts]


@contextlib.contextmanager
def published(archive: Archive, snapshots: Sequence[Snapshot], settings: Settings) -> Iterator[Archive]:
    """The present generation with what new sessions can use in its library, which is not committed.

    Parameters
    ----------
    archive : Archive
        The present generation; the caller holds the writer's lock.
    snapshots : sequence of Snapshot
        The new sessions, of the archive's identity.
    settings : Settings
    """
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pltpack-publish") as pool:
        parts = to_publish(archive, snapshots, settings, pool)
    manifest = relocate(archive, parts) if parts else None
    if manifest is None:
        yield archive
    else:
        with archive.at(manifest) as base:
            yield base


def to_publish(
    archive: Archive, snapshots: Sequence[Snapshot], settings: Settings, pool: ThreadPoolExecutor
) -> list[Part]:
    """What to move from shards to the library before new sessions are written.

    Parameters
    ----------
    archive : Archive
    snapshots : sequence of Snapshot
        The new sessions, of the archive's identity.
    settings : Settings
    pool : ThreadPoolExecutor

    Returns
    -------
    list of Part
        Without overlaps. What is moved only to be predicted from saves more than its node takes.
    """
    if not settings.dedup or not archive.sessions:
        return []
    try:
        tier = settings.codec()
    except PromiseError:
        return []
    place = Places(archive.libraries, settings).find(tier)
    prepared = None if place is None else Prepared(place.codec)
    movables = {name: Movable(archive.shard(name)) for name in archive.sessions}
    wanted = _Wanted()
    own_from = _prefixes(archive, snapshots, settings, tier, place, movables, wanted)
    if settings.near and place is not None and prepared is not None and place.codec.predicts:
        _passages(archive, snapshots, settings, place, prepared, movables, own_from, wanted, pool)
    fitting = _within(wanted.all, archive, settings.library_budget)
    errors = _Errors(place, prepared)
    return [part for part in map(errors.of, fitting) if part is not None]


def _within(parts: Sequence[Part], archive: Archive, budget: int | None) -> list[Part]:
    """Those that a budget of the library has room for, in order."""
    if budget is None:
        return list(parts)
    room, out = budget - sum(int(library.units["length"].sum()) for library in archive.libraries), []
    for part in parts:
        size = int(part.units["length"].sum())
        if size <= room:
            out.append(part)
            room -= size
    return out


def _prefixes(
    archive: Archive, snapshots: Sequence[Snapshot], settings: Settings, tier: Codec, place: CodecPlace | None,
    movables: dict[str, Movable], wanted: _Wanted,
) -> list[int]:  # fmt: skip
    """Ask for what new sessions begin with; where what they do not share begins in each."""
    block = settings.block
    sharing = share(archive, snapshots, block, lambda library, node: keeps(library, node, tier))
    tries: dict[str | None, RadixTrie] = {}
    for index, name in enumerate(archive.sessions):
        shard = archive.shard(name)
        tries.setdefault(shard.entry.salt, RadixTrie()).insert(shard.tokens, index)
    out = []
    for index, snapshot in enumerate(snapshots):
        held = _held(sharing, index)
        trie = tries.get(snapshot.identity.salt)
        if trie is not None:
            matched, node = trie.lookup(snapshot.tokens)
            for step in trie.path(node):
                low = max(int(trie.depth[step]), held)
                high = min(int(trie.depth[step]) + int(trie.length[step]), matched // block * block)
                movable = movables[archive.sessions[int(trie.owner[step])]]
                held = _take(movable, low, high, snapshot, held, tier, place, wanted)
        out.append(held)
    return out


def _held(sharing: Sharing, session: int) -> int:
    """Tokens of a session that the library holds from its beginning on."""
    end = 0
    for run in sharing.runs[session]:
        if run.library is None or run.session_start != end:
            break
        end = run.stop
    return end


def _take(
    movable: Movable, low: int, high: int, snapshot: Snapshot, held: int, tier: Codec, place: CodecPlace | None,
    wanted: _Wanted,
) -> int:  # fmt: skip
    """Ask for tokens ``[low, high)`` of a session's prefix, as far as they are held without a gap; its new end."""
    for start, stop in movable.extents:
        if low == held and start <= low < stop and low < high:
            end = min(high, stop)
            states = movable.states(low, end)
            if not all(_keeps(movable.shard, state, tier, place) for state in states):
                break
            wanted.add(movable, low, end, snapshot, low)
            held = low = end
    return held


def _keeps(shard: Shard, state: int, tier: Codec, place: CodecPlace | None) -> bool:
    """Whether sessions of a tier may have units of a shard's codec state as their own."""
    library, number = shard.states[state]
    codec = shard.libraries[library]
    if codec.codec(number).exact:
        return True
    return place is not None and codec.state_entry(number) == (tier.codec_id, tier.get_config())


def _passages(
    archive: Archive, snapshots: Sequence[Snapshot], settings: Settings, place: CodecPlace, prepared: Prepared,
    movables: dict[str, Movable], own_from: Sequence[int], wanted: _Wanted, pool: ThreadPoolExecutor,
) -> None:  # fmt: skip
    """Ask for what new sessions repeat at other places, if trials say that it pays."""
    texts = library_texts(archive.libraries)
    first = len(texts)
    texts += _extents(movables, place.codec)
    news = len(texts)
    texts += [Text(s.tokens, s.identity.salt, s.identity, own_from=own, snapshot=s, cut=len(s))
              for s, own in zip(snapshots, own_from, strict=True)]  # fmt: skip
    attempt = Attempt(place, prepared, texts, snapshots)
    sources = range(first, news)
    found = token_matches(texts, snapshots, settings, place.codec)
    matches = sorted((match for match in found if match.source in sources), key=lambda m: (m.source, m.source_start))
    tried = [candidate for candidate in in_order(attempt, matches, pool) if candidate.gain > 0]
    parts, total = [], 0.0
    for source, mine in by_source(tried).items():
        text = texts[source]
        assert text.shard is not None
        movable = movables[text.shard.entry.session]
        for group in connected(mine):
            start = text.position + min(c.match.source_start for c in group)
            stop = text.position + max(c.match.source_start + c.match.length for c in group)
            low, high = movable.around(start, stop)
            net = sum(c.gain for c in group) - attempt.node_bytes - 4 * (high - low)
            if net > 0:
                parts.append((movable, start, stop, group[0].match))
                total += net
    if total > (0 if wanted.parts else segment_bytes(place)):
        for movable, start, stop, match in parts:
            user = snapshots[match.session - news]
            wanted.add(movable, start, stop, user, match.start)


def _extents(movables: dict[str, Movable], codec: Codec) -> Iterator[Text]:
    for movable in movables.values():
        shard = movable.shard
        for start, stop in movable.extents:
            coded = [shard.libraries[library].state_entry(number)[0]
                     for library, number in (shard.states[state] for state in movable.states(start, stop))]  # fmt: skip
            # What `transform` coded is not the same bits everywhere.
            if isinstance(codec, TransformCodec) or TransformCodec.codec_id not in coded:
                yield Text(shard.tokens[start:stop], shard.entry.salt, shard.identity, start, shard=shard)


class _Errors:
    """Relative RMS errors of units that move: by first layer and codec state of the shard, none of exact codecs.

    What a shard's units were made of is gone. A session that shares them must be as near as its own units would be,
    had their codec made them: that of the new sessions may be another one.

    Parameters
    ----------
    place : CodecPlace or None
        Of the new sessions' codec.
    prepared : Prepared or None
        Of that codec.
    """

    def __init__(self, place: CodecPlace | None, prepared: Prepared | None) -> None:
        self._prepared: dict[object, Prepared] = {}
        if place is not None and prepared is not None:
            entry = (place.codec.codec_id, place.codec.get_config(), place.entry.get("profile"))
            self._prepared[repr(entry) if place.codec.calibrated else id(place.codec)] = prepared

    def of(self, part: Part) -> Part | None:
        """The part with its errors; None if a codec cannot keep its promise with the new session."""
        out: dict[tuple[int, int], float] = {}
        for state in np.unique(part.units["state"]).tolist():
            library, number = part.shard.states[state]
            codecs = self._of(part.shard.libraries[library], number)
            if codecs.codec.exact:
                continue
            try:
                codec = codecs.of(part.user, len(part.user))
            except PromiseError:
                return None
            mine = part.units[part.units["state"] == state]
            for layer, count in np.unique(np.stack([mine["layer"], mine["layer_count"]], axis=1), axis=0).tolist():
                out[layer, state] = min(_error(part, codec, range(layer, layer + count)), 3e38)
        return dataclasses.replace(part, errors=out)

    def _of(self, library: Library, number: int) -> Prepared:
        codec = library.codec(number)
        # A profile is the same in every segment, and to prepare its codec takes long; others learn what is theirs.
        entry = (*library.state_entry(number), library.profile_digest(number))
        key = repr(entry) if codec.calibrated else id(codec)
        return self._prepared.setdefault(key, Prepared(codec))


def _error(part: Part, codec: Codec, layers: range) -> float:
    """Relative RMS error of what a new session has of a part, coded with a codec that is prepared for it."""
    user, stop = part.user, min(part.user_start + part.wanted_stop - part.wanted_start, len(part.user))
    stop = min(stop, part.user_start + tables.MAX_UNIT_TOKENS, part.user_start + 256)
    geometries = user.identity.layers[layers.start : layers.stop]
    unit = Unit(layers.start, geometries[0], part.user_start, stop - part.user_start, len(user) - stop, geometries)
    arrays = [user.layer(layer, part.user_start, stop) for layer in layers]
    again = [fresh(geometry, unit.tokens) for geometry in geometries]
    if codec.spans:
        codec.decode_span(memoryview(codec.encode_span(unit, arrays)), unit, again)
    else:
        unit = dataclasses.replace(unit, layers=())
        codec.decode(memoryview(codec.encode(unit, *arrays[0])), unit, *again[0])
    return max(relative_error(mine, other) for mine, other in zip(arrays, again, strict=True))
