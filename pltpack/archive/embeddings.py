"""Which rotary embeddings a library segment's codecs take off keys: those of its format version.

Codecs of earlier versions left the keys of some types as they were, and what they wrote must be read like that for ever
(spec/codecs.md, "RoPE").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pltpack.codec.base import Codec
from pltpack.errors import UnsupportedError
from pltpack.format.container import MINOR_PREDICTIONS
from pltpack.snapshot import Identity

#: Types that are known from minor version `MINOR_PREDICTIONS` on.
_ADDED = ("dynamic", "yarn", "longrope")


def _added(identity: Identity) -> bool:
    return identity.rope is not None and identity.rope.get("type") in _ADDED


def as_known(identity: Identity, minor: int) -> Identity:
    """An identity as codecs of a segment of this minor version know it."""
    return dataclasses.replace(identity, rope=None) if minor < MINOR_PREDICTIONS and _added(identity) else identity


def least_minor(identity: Identity, codec: Codec, former: int | None = None) -> int:
    """The least minor version that a segment must have for a codec to know the identity's embedding as it does.

    Parameters
    ----------
    identity : Identity
    codec : Codec
    former : int, optional
        Minor version of the segment that the codec's state is taken from, if it is.
    """
    knows = former is None or former >= MINOR_PREDICTIONS
    return MINOR_PREDICTIONS if _added(identity) and knows and not codec.exact else 0


def merged_minor(identity: Identity, states: Iterable[tuple[Codec, int]]) -> int:
    """The least minor version of one segment for codecs of several.

    Parameters
    ----------
    identity : Identity
    states : iterable of (Codec, int)
        Codecs, and the minor versions of the segments that they are from.

    Raises
    ------
    UnsupportedError
        If some took the embedding off keys and some did not.
    """
    found = {minor >= MINOR_PREDICTIONS for codec, minor in states if not codec.exact} if _added(identity) else set()
    if len(found) > 1:
        assert identity.rope is not None
        raise UnsupportedError(f"segments differ in whether keys of the rotary embedding {identity.rope['type']!r} "
                               "were coded without it, and cannot become one")  # fmt: skip
    return MINOR_PREDICTIONS if True in found else 0
