"""The contract between a dump format and its users, and what all formats check alike.

A format reads tokens and metadata at once and the caches on demand, so that a dump larger than memory can be streamed;
it writes layer by layer for the same reason.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pltpack.dumps.quantized import as_values
from pltpack.dumps.rope_style import STYLES, in_half_style
from pltpack.dumps.tokens import TokenLookup
from pltpack.errors import DumpError, PltpackError, UnsupportedError
from pltpack.snapshot import Identity, LayerGeometry, Snapshot

#: Most layers of one session.
MAX_LAYERS = 4096
#: Most heads of a layer, and longest head dimension.
MAX_DIM = 1 << 20
#: Most key and value elements that one token adds to a layer.
MAX_ELEMENTS = 1 << 22
#: Most tokens of one session.
MAX_TOKENS = 1 << 24
#: Longest JSON text of an identity or token list in bytes.
MAX_JSON = 256 << 20
# A Python int in a list takes up to 36 bytes, so this bounds what parsing a JSON text may allocate.
_MAX_JSON_ITEMS = MAX_TOKENS
_SLICE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A setting of one dump format, given as ``NAME=VALUE`` text.

    Attributes
    ----------
    help : str
        What it is, in one phrase.
    choices : tuple of str
        The values allowed; any text if empty.
    reads, writes : bool
        Whether it matters to reading and to writing.
    """

    help: str
    choices: tuple[str, ...] = ()
    reads: bool = True
    writes: bool = True


#: An option of every engine's format.
ROPE_STYLE = Option("how this model's keys are paired by RoPE, where the identity does not tell", STYLES, reads=False)


class DumpFormat(abc.ABC):
    """Abstract base of all dump formats; instances hold their options and no other state.

    A third party's format is a subclass, named by an entry point of the group ``pltpack.dumps``.

    Parameters
    ----------
    options : mapping of str to str, optional
        Values of some of the format's `options`.

    Raises
    ------
    UnsupportedError
        If an option is not one of the format's, or its value is not allowed.
    """

    #: Name in the registry and on the command line.
    format_id: ClassVar[str]
    #: What `read` and `write` can be told, by name.
    options: ClassVar[Mapping[str, Option]] = {}
    #: Whether it is an engine's, which takes values with keys rotated its way, or holds whatever an identity describes.
    engine: ClassVar[bool] = True

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self.chosen: dict[str, str] = dict(options or {})
        #: What is known from elsewhere of the model whose dumps are read.
        self.known: Identity | None = None
        for name, value in self.chosen.items():
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise UnsupportedError(f"dump format {self.format_id!r} has no option {name!r} (known: {known})")
            allowed = self.options[name].choices
            if allowed and value not in allowed:
                raise UnsupportedError(f"option {name!r} of dump format {self.format_id!r} is {value!r} "
                                       f"(allowed: {', '.join(allowed)})")  # fmt: skip

    def prepare(self, snapshot: Snapshot) -> Snapshot:
        """What of a snapshot `write` is given: for an engine, values, with keys in half style.

        A format whose engine rotates otherwise, or which holds integers, overrides this.

        Raises
        ------
        UnsupportedError
            If the identity does not tell how to get there.
        """
        if not self.engine:
            return snapshot
        return in_half_style(as_values(snapshot), self.chosen.get("rope_style"))

    def sniff_folder(self, path: Path) -> bool:
        """Whether a folder is one dump of this format as a whole, to be read as such; never by default."""
        return False

    @abc.abstractmethod
    def sniff(self, path: Path, head: bytes) -> bool:
        """Whether the file is of this format, damaged or not, told by its content.

        Parameters
        ----------
        path : Path
            A regular file.
        head : bytes
            Its first bytes, up to 4096.
        """

    @abc.abstractmethod
    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """Give the snapshots in a file; their arrays are read only when a layer is asked for.

        Parameters
        ----------
        path : Path
            A regular file, or a folder that `sniff_folder` takes.
        tokens : TokenLookup
            Finds token ids for dumps that hold none.

        Raises
        ------
        DumpError
            If the file is damaged, or a session's tokens are missing or do not fit its caches.
        UnsupportedError
            If it is valid but uses what this version does not handle.
        """

    @abc.abstractmethod
    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """Write snapshots layer by layer, each file whole or not at all; returns the files written.

        Raises
        ------
        DumpError
            If two snapshots have one name, or a source gives arrays that its geometry does not announce.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class FileStamp:
    """A file's size in bytes and time of change: enough to notice that it was replaced between two reads."""

    size: int
    changed: int

    @classmethod
    def of(cls, fd_or_path: int | str | os.PathLike[str]) -> FileStamp:
        """The present stamp of an open or named file."""
        stat = os.stat(fd_or_path)
        return cls(stat.st_size, stat.st_mtime_ns)

    def check(self, fd_or_path: int | str | os.PathLike[str], path: str) -> None:
        """Raise DumpError unless the file is still the one that was opened."""
        if FileStamp.of(fd_or_path) != self:
            raise DumpError("the file changed while it was read", path)


@contextlib.contextmanager
def reading(path: str, stamp: FileStamp | None = None) -> Iterator[int]:
    """A file descriptor for one read; DumpError if the file cannot be read or is not the one of `stamp` any more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from error
    try:
        if stamp is not None:
            stamp.check(fd, path)
        yield fd
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from error
    except PltpackError as error:
        raise error.at(path) from None
    finally:
        os.close(fd)


def parse_json(text: str | bytes, what: str) -> Any:
    """Parse untrusted JSON within bounds of size and depth.

    Raises
    ------
    DumpError
        Naming `what`.
    """
    comma = "," if isinstance(text, str) else b","
    if len(text) > MAX_JSON or text.count(comma) > _MAX_JSON_ITEMS:  # type: ignore[arg-type]
        raise DumpError(f"{what} is too large ({len(text)} bytes)")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{what} is not valid JSON ({type(error).__name__})") from None


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all."""
    from pltpack.dumps.atomic import replacing

    with replacing(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        json.dump(data, file, separators=(",", ":"))


def parse_identity(text: str | None, layers: tuple[LayerGeometry, ...]) -> Identity:
    """The identity that a dump records, with the geometry of its arrays.

    Recorded geometry must agree with the arrays; only the window, which arrays cannot show, is taken from it.

    Parameters
    ----------
    text : str or None
        JSON of `Identity.to_json`; fields may be missing.
    layers : tuple of LayerGeometry
        What the arrays are.
    """
    recorded = Identity() if text is None else identity_of(parse_json(text, "identity"))
    return with_layers(recorded, layers)


def identity_of(data: Any) -> Identity:
    """`Identity.from_json` for untrusted values, which may also be text that is no Unicode."""
    if not isinstance(data, Mapping):
        raise DumpError("identity is not a JSON object")
    try:
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise DumpError("identity holds values that JSON does not have") from None
    return Identity.from_json(data)


def with_layers(recorded: Identity, layers: tuple[LayerGeometry, ...]) -> Identity:
    """`recorded` with the geometry of the arrays, after checking that the two agree."""
    if recorded.layers:
        if len(recorded.layers) != len(layers):
            raise DumpError(f"identity records {len(recorded.layers)} layers but the dump holds {len(layers)}")
        for index, (said, found) in enumerate(zip(recorded.layers, layers, strict=True)):
            if dataclasses.replace(said, window=None) != found:
                raise DumpError(f"identity's geometry of layer {index} differs from the dump's arrays")
        layers = recorded.layers
    return dataclasses.replace(recorded, layers=layers)


def geometry_of(index: int, dtypes: Sequence[str], keys: Sequence[int], values: Sequence[int]) -> LayerGeometry:
    """The geometry of one layer, after checking that its arrays fit each other.

    Parameters
    ----------
    index : int
    dtypes : sequence of str
        Those of the keys and of the values.
    keys, values : sequence of int
        Shapes ``[..., heads, tokens, dim]``.
    """
    if dtypes[0] != dtypes[1]:
        raise UnsupportedError(f"layer {index}: keys are {dtypes[0]} but values are {dtypes[1]}")
    if keys[-3] != values[-3]:
        raise DumpError(f"layer {index}: {keys[-3]} key heads but {values[-3]} value heads")
    check_dims(index, keys[-3], keys[-1], values[-1])
    return LayerGeometry(keys[-3], keys[-1], values[-1], dtypes[0])


def check_dims(index: int, heads: int, k_dim: int, v_dim: int) -> None:
    """Raise DumpError if a layer is empty in an axis other than tokens, or absurdly large."""
    for name, size in (("heads", heads), ("key dimension", k_dim), ("value dimension", v_dim)):
        if not 0 < size <= MAX_DIM:
            raise DumpError(f"layer {index}: {name} of {size} (allowed: 1 to {MAX_DIM})")
    if heads * (k_dim + v_dim) > MAX_ELEMENTS:
        raise DumpError(f"layer {index}: {heads * (k_dim + v_dim)} elements per token (allowed: {MAX_ELEMENTS})")


def check_count(count: int) -> int:
    """The token count itself, or DumpError if it is more than `MAX_TOKENS`."""
    if count > MAX_TOKENS:
        raise DumpError(f"holds {count} tokens (allowed: {MAX_TOKENS})")
    return count


def check_extras(
    count: int, logprobs: np.ndarray | None, ids: np.ndarray | None, importance: np.ndarray | None
) -> None:
    """Raise DumpError unless the optional per-token arrays fit `count` tokens and each other."""
    if (logprobs is None) != (ids is None):
        raise DumpError("logprobs and logprob_ids must both be there or both be missing")
    if logprobs is not None and ids is not None and (
        logprobs.ndim != 2 or logprobs.shape != ids.shape or len(logprobs) != count
    ):  # fmt: skip
        raise DumpError(f"logprobs {logprobs.shape} and logprob_ids {ids.shape} do not fit {count} tokens")
    if importance is not None and importance.shape != (count,):
        raise DumpError(f"importance {importance.shape} does not fit {count} tokens")


def check_range(start: int, stop: int, count: int) -> None:
    """Raise ValueError unless ``0 <= start <= stop <= count``."""
    if not 0 <= start <= stop <= count:
        raise ValueError(f"token range {start}:{stop} is outside 0:{count}")


def layer_slices(snapshot: Snapshot, index: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """One layer as ``(start, stop, keys, values)``, in token runs of about 32 MiB, checked against the geometry.

    Raises
    ------
    DumpError
        If the source gives arrays of another shape or dtype than the snapshot's identity says.
    """
    geometry = snapshot.identity.layers[index]
    fitting = max(1, _SLICE_BYTES // geometry.bytes_per_token)
    # Whole multiples of any common block length, so that sources made of blocks decode none of them twice.
    step = fitting // 256 * 256 or fitting
    for start in range(0, len(snapshot), step):
        stop = min(start + step, len(snapshot))
        keys, values = snapshot.layer(index, start, stop)
        for name, array, dim in (("keys", keys, geometry.k_dim), ("values", values, geometry.v_dim)):
            if array.shape != (geometry.heads, stop - start, dim) or array.dtype != snapshot_dtype(geometry):
                raise DumpError(
                    f"session {snapshot.session!r} layer {index}: {name} are {array.dtype}{list(array.shape)}, "
                    f"not as the identity says"
                )
        yield start, stop, keys, values


def snapshot_dtype(geometry: LayerGeometry) -> np.dtype[Any]:
    """The numpy dtype of a layer."""
    from pltpack.snapshot import DTYPES

    return DTYPES[geometry.dtype]


def check_snapshot(snapshot: Snapshot) -> Snapshot:
    """The snapshot itself, if it can be written: tokens, geometry and extras in order.

    Raises
    ------
    DumpError
        Naming the session and what is wrong.
    """
    from pltpack.dumps.tokens import token_ids
    from pltpack.names import check_session

    try:
        check_session(snapshot.session)
        token_ids(snapshot.tokens, "tokens")
        if not 0 < len(snapshot.identity.layers) <= MAX_LAYERS:
            raise DumpError(f"{len(snapshot.identity.layers)} layers (allowed: 1 to {MAX_LAYERS})")
        check_extras(len(snapshot), snapshot.logprobs, snapshot.logprob_ids, snapshot.importance)
    except PltpackError as error:
        raise type(error)(f"session {snapshot.session!r}: {error.fact}", error.path) from None
    return snapshot
