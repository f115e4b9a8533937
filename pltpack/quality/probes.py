"""Where caches are cut and continued with their true text: at the end, at fractions, and where sessions branch off."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pltpack.errors import DumpError, NotFoundError, UnsupportedError
from pltpack.snapshot import Snapshot

#: Most tokens of true text that follow a cut inside a session.
CUT_TOKENS = 256
#: Names of the places where caches are cut; a fraction is its own name.
END, BRANCHES = "end", "branches"
#: Fewer have no perplexity: the first token is fed, the second is predicted.
LEAST_TOKENS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """One place where a session's cache is cut and continued.

    Attributes
    ----------
    session : str
    place : str
        `END`, `BRANCHES` or the fraction that was asked for.
    cut : int
        Tokens of the cache that are kept, at least 1.
    text : ndarray
        The true text that follows, int32 ``[C]``.
    """

    session: str
    place: str
    cut: int
    text: np.ndarray


def read_continuations(path: Path) -> dict[str, np.ndarray]:
    """The token ids that follow each session: a safetensors file with one I32 ``[C]`` tensor per session.

    Raises
    ------
    NotFoundError
        If there is no such file.
    DumpError
        If it is no such file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise NotFoundError("no such file" if not path.exists() else "is not a regular file", path)
    try:
        found = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DumpError(f"is not a safetensors file of continuations ({error})", path) from None
    for session, ids in found.items():
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DumpError(f"continuation of {session!r} is {ids.dtype} {list(ids.shape)}, not a list of ids", path)
    return found


def at_ends(snapshots: Iterable[Snapshot], continuations: Mapping[str, np.ndarray]) -> list[Probe]:
    """Each session's whole cache, continued with the text that is given for it.

    Raises
    ------
    NotFoundError
        If a session has no continuation.
    DumpError
        If a continuation or a cache is too short to be scored.
    """
    probes = []
    for snapshot in snapshots:
        if snapshot.session not in continuations:
            raise NotFoundError(f"no continuation for session {snapshot.session!r}", snapshot.origin)
        probes.append(_probe(snapshot, END, len(snapshot), continuations[snapshot.session]))
    return probes


def held_back(snapshots: Iterable[Snapshot], count: int) -> list[Probe]:
    """Each session's cache without its last `count` tokens, continued with these.

    Raises
    ------
    DumpError
        If a session has no more than `count` tokens.
    UnsupportedError
        If `count` is too small to be scored.
    """
    if count < LEAST_TOKENS:
        raise UnsupportedError(f"a tail of {count} tokens cannot be scored (at least {LEAST_TOKENS})")
    return [_probe(s, END, len(s) - count, s.tokens[len(s) - count :] if len(s) > count else ()) for s in snapshots]


def at_fractions(
    snapshots: Iterable[Snapshot], fractions: Sequence[str], texts: Mapping[str, np.ndarray] | None = None
) -> list[Probe]:
    """Caches cut at fractions of their length, continued with up to `CUT_TOKENS` tokens of their own text.

    Parameters
    ----------
    snapshots : iterable of Snapshot
    fractions : sequence of str
        Decimal numbers between 0 and 1; each is the name of its place.
    texts : mapping, optional
        What follows the sessions' ends.
    """
    probes = []
    for snapshot in snapshots:
        for name in fractions:
            cut = int(_fraction(name) * len(snapshot))
            probes.append(_probe(snapshot, name, cut, _following(snapshot, cut, texts or {})))
    return probes


def at_branches(snapshots: Sequence[Snapshot], texts: Mapping[str, np.ndarray] | None = None) -> list[Probe]:
    """Caches cut wherever their tokens branch off from another session's, continued as in `at_fractions`.

    Sessions of different salts share nothing, and so do not branch off from each other. A session without a branch
    point has no probe.
    """
    from pltpack.trie.radix import RadixTrie

    probes = []
    tries: dict[str | None, RadixTrie] = {}
    for salt in dict.fromkeys(s.identity.salt for s in snapshots):
        tries[salt] = RadixTrie.build(s.tokens for s in snapshots if s.identity.salt == salt)
    for snapshot in snapshots:
        trie = tries[snapshot.identity.salt]
        _, node = trie.lookup(snapshot.tokens)
        ends = [int(trie.depth[step] + trie.length[step]) for step in trie.path(node)]
        for cut in ends:
            text = _following(snapshot, cut, texts or {})
            if 0 < cut < len(snapshot) and len(text) >= LEAST_TOKENS:
                probes.append(_probe(snapshot, BRANCHES, cut, text))
    return probes


def _following(snapshot: Snapshot, cut: int, texts: Mapping[str, np.ndarray]) -> np.ndarray:
    after = np.asarray(texts.get(snapshot.session, ()), np.int32)
    return np.concatenate([snapshot.tokens[cut:], after])[:CUT_TOKENS]


def _fraction(name: str) -> float:
    try:
        value = float(name)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise UnsupportedError(f"{name!r} is neither a fraction between 0 and 1 nor {BRANCHES!r}")
    return value


def _probe(snapshot: Snapshot, place: str, cut: int, text: Sequence[int] | np.ndarray) -> Probe:
    if cut < 1 or len(text) < LEAST_TOKENS:
        raise DumpError(
            f"session {snapshot.session!r} of {len(snapshot)} tokens is too short to be cut at {place!r}: "
            f"{max(cut, 0)} tokens would be kept and {len(text)} follow (at least 1 and {LEAST_TOKENS})",
            snapshot.origin,
        )
    return Probe(snapshot.session, place, cut, np.asarray(text, np.int32))
