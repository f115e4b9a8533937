"""Profile files: what calibration learned, as one safetensors file (spec/profile.md), found by digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.codec.base import State
from pltpack.codec.profile import NAMES, Profile
from pltpack.dumps.atomic import make_folder, replacing
from pltpack.dumps.base import reading
from pltpack.dumps.safetensors_header import Header, make_header, read_header, read_into
from pltpack.errors import FormatError, IdentityError, NotFoundError, PltpackError, UnsupportedError
from pltpack.format.state import MAX_STATE_BYTES
from pltpack.snapshot import Identity

VERSION = "1"
#: Environment variable: folders, separated as in PATH, that hold profiles.
PATH_VARIABLE = "PLTPACK_PROFILE_PATH"
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"), "I8": np.dtype("i1"), "U16": np.dtype("<u2"), "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"), "I32": np.dtype("<i4"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

PathLike = str | os.PathLike[str]


def digest(arrays: State) -> str:
    """SHA-256 (hex) of a profile: by name, each array's ``[name, dtype, shape]`` as JSON, a newline, and its bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = _little(arrays[name])
        line = json.dumps([name, _NAMES[array.dtype], list(array.shape)], separators=(",", ":"))
        found.update(line.encode() + b"\n")
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def save(path: PathLike, arrays: State, identity: Identity, metadata: Mapping[str, str] | None = None) -> str:
    """Write a profile, whole or not at all.

    Parameters
    ----------
    path : path
    arrays : mapping of str to ndarray
        As spec/profile.md lays them out.
    identity : Identity
        Of the caches that it serves.
    metadata : mapping of str to str, optional
        More to keep in the file's header.

    Returns
    -------
    str
        Its `digest`.

    Raises
    ------
    UnsupportedError
        If the arrays are no profile of a model with these layers.
    """
    path = Path(path)
    try:
        kept = {name: _little(array) for name, array in Profile(arrays, identity.layers).arrays.items()}
    except ValueError as error:
        raise UnsupportedError(str(error), path) from None
    made = digest(kept)
    about = {**(metadata or {}), "pltpack.profile": VERSION, "digest": made, "identity": json.dumps(identity.to_json())}
    header, entries = make_header([(n, _NAMES[a.dtype], a.shape) for n, a in sorted(kept.items())], about)
    make_folder(path.absolute().parent)
    with replacing(path) as temp, temp.open("wb") as file:
        file.write(header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
            assert file.tell() == entry.offset
            file.write(kept[name].reshape(-1).view(np.uint8).data)
    return made


def load(path: PathLike) -> tuple[dict[str, np.ndarray], Identity]:
    """Read a profile and check it.

    Returns
    -------
    (dict of str to ndarray, Identity)

    Raises
    ------
    NotFoundError
        If there is no such file.
    FormatError
        If it is damaged, or larger than a codec state may be.
    UnsupportedError
        If it is no profile, or one of another version.
    """
    path = Path(path)
    header = _header(path)
    try:
        identity = Identity.from_json(json.loads(header.metadata.get("identity", "{}")))
    except (ValueError, RecursionError):
        raise FormatError("its identity is not JSON", path) from None
    except UnsupportedError as error:
        raise error.at(path) from None
    if set(header.tensors) != set(NAMES):
        odd = sorted(set(header.tensors) ^ set(NAMES))[0]
        raise FormatError(f"profile array {odd!r} is missing or unknown", path)
    if sum(tensor.length for tensor in header.tensors.values()) > MAX_STATE_BYTES:
        raise FormatError(f"is larger than a profile may be ({MAX_STATE_BYTES} bytes)", path)
    arrays = {}
    with reading(os.fspath(path), header.stamp) as fd:
        for name, tensor in header.tensors.items():
            if tensor.dtype not in _DTYPES:
                raise FormatError(f"profile array {name!r} has dtype {tensor.dtype}", path)
            array = np.empty(tensor.shape, _DTYPES[tensor.dtype])
            read_into(fd, tensor.offset, array.reshape(-1).view(np.uint8).data, path)
            arrays[name] = array
    try:
        Profile(arrays, identity.layers)
    except ValueError as error:
        raise FormatError(str(error), path) from None
    return arrays, identity


def find(
    wanted: str, given: PathLike | None = None, folder: PathLike | None = None
) -> tuple[Path, dict[str, np.ndarray], Identity]:
    """Find the profile of a digest: the file `given`, else in the folders of PLTPACK_PROFILE_PATH, else in `folder`.

    Parameters
    ----------
    wanted : str
        As `digest` gives it.
    given : path, optional
        A file.
    folder : path, optional
        The archive's own.

    Returns
    -------
    (Path, dict of str to ndarray, Identity)
        The file and what `load` gives.

    Raises
    ------
    NotFoundError
        If there is none.
    IdentityError
        If the file given is another profile.
    """
    if given is not None:
        arrays, identity = load(given)
        if (found := digest(arrays)) != wanted:
            raise IdentityError(f"is profile {found[:16]}…, but the archive was made with {wanted[:16]}…", given)
        return Path(given), arrays, identity
    folders = [Path(name) for name in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if name]
    folders += [Path(folder)] if folder is not None else []
    for file in _candidates(folders, wanted):
        arrays, identity = load(file)
        if digest(arrays) == wanted:
            return file, arrays, identity
    places = ", ".join(map(str, folders)) or "no folder"
    raise NotFoundError(f"profile {wanted[:16]}… is not found (looked in {places}; name it with --profile)")


def _candidates(folders: list[Path], wanted: str) -> Iterator[Path]:
    """Files that say they are the profile wanted."""
    for folder in folders:
        for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
            try:
                if _header(file).metadata.get("digest", wanted) == wanted:
                    yield file
            except (OSError, PltpackError):
                continue


def _header(path: Path) -> Header:
    if not path.is_file():
        raise NotFoundError("no such profile", path)
    try:
        header = read_header(path)
    except OSError as error:
        raise FormatError(f"cannot be read ({error.strerror})", path) from None
    except PltpackError as error:
        raise FormatError(error.fact, path) from None
    version = header.metadata.get("pltpack.profile")
    if version != VERSION:
        raise UnsupportedError("is no profile" if version is None else f"is a profile of version {version!r}; this "
                               f"program reads version {VERSION}", path)  # fmt: skip
    return header


def _little(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype)
