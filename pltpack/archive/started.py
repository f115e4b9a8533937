"""Codecs of the same profile share what is made of it: tiers of one archive, generations, and archives of one model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from pltpack.codec.base import Codec, State
from pltpack.snapshot import Identity

_LOCK = threading.Lock()
# By codec, digest of the profile, and digest of the identity; for as long as a codec of the kind is in use.
_STARTED: weakref.WeakValueDictionary[tuple[str, str, str], Codec] = weakref.WeakValueDictionary()


def start(codec: Codec, profile: str | None, identity: Identity, state: Callable[[], State]) -> None:
    """Start a codec, from one that is in use with the same profile if there is one.

    Parameters
    ----------
    codec : Codec
    profile : str or None
        Digest of the profile that the state is, if it is one.
    identity : Identity
    state : callable
        Gives the arrays, checked.

    Raises
    ------
    ValueError
        As of `Codec.start`.
    """
    if profile is None:
        codec.start(state(), identity)
        return
    key = codec.codec_id, profile, identity.digest()
    with _LOCK:
        known = _STARTED.get(key)
    if known is None or not codec.share(known):
        codec.start(state(), identity)
    with _LOCK:
        _STARTED[key] = codec
