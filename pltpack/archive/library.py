"""Open library segments: the radix trie's nodes, their units, and the codec states."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pltpack.archive import profiles
from pltpack.archive.backends import placed
from pltpack.archive.embeddings import as_known
from pltpack.archive.segments import Segment, strings
from pltpack.archive.started import start
from pltpack.codec import registry
from pltpack.codec.base import Codec, State
from pltpack.errors import FormatError, PltpackError
from pltpack.format import state as state_format
from pltpack.format import tables
from pltpack.format.container import MINOR_GROUPS, Container
from pltpack.format.manifest import FileEntry
from pltpack.format.sealing import FileSeal, Seal
from pltpack.snapshot import Identity
from pltpack.store import Store

if TYPE_CHECKING:
    from pltpack.gpu.backend import Backend

FindProfile = Callable[[str], State]


class Library(Segment):
    """One segment of the centroid library.

    Parameters
    ----------
    store : Store
        Where the archive is.
    entry : FileEntry
        What the manifest says of it.
    identity : Identity
        The archive's.
    find_profile : callable, optional
        Gives the arrays of a profile that the segment names by digest only.
    backend : Backend, optional
        Where units are decoded and encoded instead of on the CPU.
    seal : Seal or FileSeal, optional
        See `Container`.

    Raises
    ------
    FormatError
        If the file breaks the specification.
    """

    def __init__(
        self, store: Store, entry: FileEntry, identity: Identity, find_profile: FindProfile | None = None,
        backend: Backend | None = None, seal: Seal | FileSeal | None = None,
    ) -> None:  # fmt: skip
        self.entry, self.identity = entry, identity
        self._find_profile, self._backend = find_profile, backend
        self.container = Container(store.open(entry.file), entry.bytes, entry.head_sha256, seal)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        path, metadata = self.container.path, self.container.metadata
        self._check_kind("library")
        self.others = strings(tables.metadata_list(metadata, "libraries", path), path)
        self.salts = tables.metadata_list(metadata, "salts", path)
        strings([salt for salt in self.salts if salt is not None], path)
        self.states = tables.metadata_list(metadata, "states", path)
        states = {f"codec.state.{index}" for index in range(len(self.states))}
        self._check_names({"unit.index", "trie.nodes", "trie.tokens", *states}, {"libraries", "salts", "states"})
        if self.minor < MINOR_GROUPS and any(isinstance(entry, dict) and "profile" in entry for entry in self.states):
            raise FormatError("a codec state names a profile, which its format version does not know", path)
        self.units = tables.read_units(self.container, self._token_bytes(), len(self.states), self.minor)
        layers = len(self.identity.layers)
        self.nodes = tables.read_nodes(self.container, self.units, layers, len(self.others), len(self.salts))
        self.tokens = self._token_ids("trie.tokens")
        self._codecs: dict[int, Codec] = {}
        self._lock = threading.Lock()

    def position_of(self, record: np.void) -> int:
        """See `Segment.position_of`."""
        return int(self.nodes[record["node"]]["position"]) + int(record["token_start"])

    def bytes_with(self, record: np.void) -> int:
        """See `Segment.bytes_with`: of the whole node."""
        return int(self.nodes[record["node"]]["length"]) * sum(layer.bytes_per_token for layer in self.identity.layers)

    def codec_of(self, record: np.void) -> Codec:
        """See `Segment.codec_of`."""
        return self.codec(int(record["state"]))

    def state_entry(self, index: int) -> tuple[str, dict[str, Any]]:
        """Codec name and configuration of one state.

        Raises
        ------
        FormatError
            If there is no such state, or its entry is malformed.
        """
        entry = self.states[index] if index < len(self.states) else None
        if not (isinstance(entry, dict) and isinstance(entry.get("codec"), str)
                and isinstance(entry.get("config"), dict)):  # fmt: skip
            raise FormatError(f"codec state {index} is missing or malformed", self.container.path)
        return entry["codec"], entry["config"]

    def profile_digest(self, index: int) -> str | None:
        """Digest of the profile that one state is, if it is one."""
        self.state_entry(index)
        entry = self.states[index]
        assert isinstance(entry, dict)
        if "profile" not in entry:
            return None
        digest = entry["profile"]
        if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise FormatError(f"codec state {index} names a profile by something else than a digest",
                              self.container.path)  # fmt: skip
        return digest

    def embeds(self, index: int) -> bool:
        """Whether one state's arrays are in this segment."""
        return len(self.container.array(f"codec.state.{index}", "U8")) > 0

    def state(self, index: int) -> State:
        """The arrays of one state: the segment's own, or a profile that it names.

        Raises
        ------
        FormatError
            If they are damaged.
        NotFoundError
            If the profile is not found.
        """
        digest = self.profile_digest(index)
        if digest is not None and not self.embeds(index):
            if self._find_profile is None:
                raise FormatError(f"codec state {index} names a profile elsewhere", self.container.path)
            return self._find_profile(digest)
        try:
            arrays = state_format.unpack(self.container.array(f"codec.state.{index}", "U8"))
        except ValueError as error:
            raise FormatError(f"codec state {index}: {error}", self.container.path) from None
        if digest is not None and profiles.digest(arrays) != digest:
            raise FormatError(f"codec state {index} is another profile than its entry says", self.container.path)
        return arrays

    def codec(self, index: int) -> Codec:
        """The started codec of one state; made once."""
        with self._lock:
            if index not in self._codecs:
                codec_id, config = self.state_entry(index)
                try:
                    codec = registry.codec(codec_id, config)
                    profile = self.profile_digest(index)
                    if codec.calibrated != (profile is not None):
                        raise ValueError("a profile that its codec does not take, or none where it needs one")
                    known = as_known(self.identity, self.minor)
                    state = functools.cache(functools.partial(self.state, index))
                    if not self.embeds(index):
                        # Its profile must be there, whether or not another archive has it open.
                        state()
                    start(codec, profile, known, state)
                    self._codecs[index] = placed(codec, self._backend)
                except ValueError as error:
                    raise FormatError(f"codec state {index}: {error}", self.container.path) from None
                except PltpackError as error:
                    raise error.at(self.container.path) from None
            return self._codecs[index]

    def units_of(self, node: int) -> np.ndarray:
        """Unit records of one node."""
        record = self.nodes[node]
        return self.units[record["first_unit"] : record["first_unit"] + record["unit_count"]]
