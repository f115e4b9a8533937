"""Codecs ready to encode, and where in the archive their states are: found in a library segment, or started anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from pltpack.archive.backends import placed
from pltpack.archive.library import Library
from pltpack.archive.profiles import digest
from pltpack.archive.sampling import JobSamples, TokenRange
from pltpack.archive.settings import Settings
from pltpack.codec.base import Codec, State
from pltpack.errors import UnsupportedError
from pltpack.format import state as state_format
from pltpack.snapshot import Identity


@dataclasses.dataclass(frozen=True)
class CodecPlace:
    """A started codec and where its state is.

    Attributes
    ----------
    codec : Codec
    library : Library or None
        None: the segment that will be written.
    state : int
        Index of the state in that segment.
    entry : dict
        What the metadata of a segment say of the state.
    packed : ndarray
        What a segment holds of the state's arrays, uint8; of a profile, which is large, nothing if another segment has
        the arrays.
    """

    codec: Codec
    library: Library | None
    state: int
    entry: dict[str, object]
    packed: np.ndarray


class Places:
    """Finds codecs in the segments of an archive, or starts them.

    Parameters
    ----------
    libraries : sequence of Library
    settings : Settings
    """

    def __init__(self, libraries: Sequence[Library], settings: Settings) -> None:
        self._libraries, self._settings = libraries, settings

    def find(self, tier: Codec) -> CodecPlace | None:
        """The place of an equal codec with the wanted profile, newest segment first."""
        given = None if self._settings.profile is None or not tier.calibrated else digest(self._settings.profile)
        for library in reversed(self._libraries):
            for state in range(len(library.states)):
                if given is not None and library.profile_digest(state) != given:
                    continue
                if library.state_entry(state) == (tier.codec_id, tier.get_config()):
                    return _held(library, state)
        return None

    def start(
        self, tier: Codec, ranges: Sequence[TokenRange], identity: Identity, learning: Callable[[], None]
    ) -> CodecPlace:
        """Start a codec for the segment to be written: with a profile, or with what it learns from token ranges.

        Raises
        ------
        UnsupportedError
            If the tier needs a profile and there is none, or it does not serve the sessions.
        """
        entry: dict[str, object] = {"codec": tier.codec_id, "config": tier.get_config()}
        if not tier.calibrated:
            learning()
            packed = state_format.pack(tier.learn(JobSamples(ranges), identity))
            tier.start(state_format.unpack(packed), identity)
            return CodecPlace(placed(tier, self._settings.backend), None, 0, entry, packed)
        arrays, embedded = self.profile(tier)
        entry["profile"] = digest(arrays)
        packed = np.empty(0, np.uint8) if embedded else state_format.pack(arrays)
        try:
            tier.start(arrays, identity)
        except ValueError as error:
            raise UnsupportedError(f"the profile does not serve these sessions: {error}") from None
        return CodecPlace(placed(tier, self._settings.backend), None, 0, entry, packed)

    def profile(self, tier: Codec) -> tuple[State, bool]:
        """A profile for a new codec state, and whether the archive can do without another copy of it."""
        held = [
            (library, state)
            for library in self._libraries
            for state in range(len(library.states))
            if library.profile_digest(state) is not None
        ]
        given = self._settings.profile
        if given is not None:
            wanted = digest(given)
            return given, self._settings.external or any(lib.profile_digest(state) == wanted for lib, state in held)
        if held:
            library, state = held[-1]
            return library.state(state), True
        where = ", and the archive holds none" if self._libraries else ""
        raise UnsupportedError(f"tier {self._settings.quality!r} needs a profile{where}: give one with --profile "
                               "(pltpack calibrate makes one)")  # fmt: skip


def _held(library: Library, state: int) -> CodecPlace:
    codec = library.codec(state)
    entry: dict[str, object] = {"codec": codec.codec_id, "config": codec.get_config()}
    packed = library.container.array(f"codec.state.{state}", "U8")
    profile = library.profile_digest(state)
    if profile is not None:
        entry["profile"], packed = profile, np.empty(0, np.uint8)
    return CodecPlace(codec, library, state, entry, packed)


def codec_state(codec: Codec) -> State:
    """The profile of a started codec."""
    profile = getattr(codec.on_host, "profile", None)
    if profile is None:
        raise UnsupportedError(f"codec {codec.codec_id!r} has no profile")
    found: State = profile.arrays
    return found


def keeps(library: Library, node: int, tier: Codec) -> bool:
    """Whether sessions of a tier may map to a node: its codec is exact or the tier's own."""
    for state in np.unique(library.units_of(node)["state"]):
        entry = library.state_entry(int(state))
        if entry != (tier.codec_id, tier.get_config()) and not library.codec(int(state)).exact:
            return False
    return True
