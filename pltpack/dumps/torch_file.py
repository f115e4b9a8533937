"""``torch.save`` files of key and value tensors, read without running any pickled code.

Known contents: a list (or tuple) with a ``(keys, values)`` pair per layer; a dict with ``past_key_values`` as such a
list; a dict with lists ``keys`` and ``values`` (or ``key_cache`` and ``value_cache``). Tensors are ``[1, H_kv, T, D]``
or ``[H_kv, T, D]``. A dict may hold token ids as ``tokens``, ``input_ids`` or ``token_ids``, and ``session`` and
``identity``. Only ``torch.load(weights_only=True, mmap=True)`` is used, after a check of the zip directory
and of the names in the pickle.
"""

from __future__ import annotations

import dataclasses
import os
import pickletools
import re
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.dumps import base
from pltpack.dumps.tokens import TokenLookup, token_ids
from pltpack.dumps.torch_arrays import cache_dtype, to_numpy
from pltpack.errors import DumpError, PltpackError, UnsupportedError
from pltpack.names import check_session
from pltpack.snapshot import Identity, LayerGeometry, Snapshot

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_PICKLE = 64 << 20
_PLAIN = re.compile(
    r"torch._utils _rebuild_tensor(_v2|_v3)?|collections OrderedDict|torch Size|torch(\.storage)? \w+Storage"
    r"|torch (b?float|u?int)\w+",
    re.ASCII,
)
_MAX_MEMBERS = 1 << 16
# Mapped pages that were read count as memory in use; the mapping is dropped and made anew after so many bytes.
_REMAP_BYTES = 256 << 20
_SAFE_WAY = (
    "save plain tensors instead: torch.save({'input_ids': ids, 'past_key_values': "
    "[(layer.keys, layer.values) for layer in cache.layers]}, path)"
)
_TOKEN_NAMES = ("tokens", "input_ids", "token_ids")
_PAIRED_LISTS = (("keys", "values"), ("key_cache", "value_cache"))


def is_torch_file(path: Path, head: bytes) -> bool:
    """Whether a file is a ``torch.save`` archive or any pickle."""
    if head.startswith(b"PK\x03\x04"):
        try:
            with zipfile.ZipFile(path) as archive:
                return any(name.split("/")[-1] == "data.pkl" for name in archive.namelist())
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            return path.suffix.lower() in (".pt", ".pth")
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_torch_file(path: Path, tokens: TokenLookup) -> Snapshot:
    """The one session of a file.

    Raises
    ------
    DumpError
        If the file is damaged, holds pickled objects, or its tensors do not fit together.
    UnsupportedError
        If it holds a batch, or was saved in PyTorch's format before 1.6.
    """
    stamp = base.FileStamp.of(path)
    _check(path)
    content = _load(path)
    pairs = _pairs(content)
    named = content if isinstance(content, Mapping) else {}
    session = named.get("session", path.stem)
    if not isinstance(session, str):
        raise DumpError("'session' is not a string")
    check_session(session)
    geometry = tuple(_geometry(index, keys, values) for index, (keys, values) in enumerate(pairs))
    count = base.check_count(int(pairs[0][0].shape[-2]))
    for index, pair in enumerate(pairs):
        for tensor in pair:
            if tensor.shape[-2] != count:
                raise DumpError(f"layer {index} holds {tensor.shape[-2]} tokens but layer 0 holds {count}")
    identity = Identity() if named.get("identity") is None else base.identity_of(named["identity"])
    return Snapshot(
        session=session,
        tokens=tokens.require(path, session, count, _stored_tokens(named)),
        identity=base.with_layers(identity, geometry),
        source=TorchFileSource(os.fspath(path.absolute()), stamp, count),
        origin=os.fspath(path),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TorchFileSource:
    """A `LayerSource` over a ``torch.save`` file; sources of all files share one mapping at a time."""

    path: str
    stamp: base.FileStamp
    count: int

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        base.check_range(start, stop, self.count)
        with _mapping.lock:
            try:
                self.stamp.check(self.path, self.path)
            except OSError as error:
                raise DumpError(f"cannot be read ({error.strerror})", self.path) from error
            keys, values = _mapping.pairs(self)[index]
            arrays = to_numpy(_heads_first(keys)[:, start:stop]), to_numpy(_heads_first(values)[:, start:stop])
            _mapping.count(arrays[0].nbytes + arrays[1].nbytes)
        return arrays


class _Mapping:
    """The file that is mapped at present, and how much of it was touched."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._source: TorchFileSource | None = None
        self._pairs: list[tuple[Any, Any]] = []
        self._touched = 0

    def pairs(self, source: TorchFileSource) -> list[tuple[Any, Any]]:
        """The tensors of a file, mapped."""
        if self._source != source:
            self._source, self._pairs, self._touched = None, [], 0
            self._pairs = _pairs(_load(Path(source.path)))
            self._source = source
        return self._pairs

    def count(self, size: int) -> None:
        """Note that `size` bytes were read."""
        self._touched += size
        if self._touched > _REMAP_BYTES:
            self._source, self._pairs, self._touched = None, [], 0


_mapping = _Mapping()


def _check(path: Path) -> None:
    """Refuse what is not a torch file of plain tensors, from its bytes alone."""
    with open(path, "rb") as file:
        head = file.read(len(_LEGACY))
    if head == _LEGACY:
        raise UnsupportedError("was saved in PyTorch's format before 1.6; load it and save it again", path)
    if not head.startswith(b"PK"):
        raise DumpError(f"is a plain pickle, and reading it would run its code; {_SAFE_WAY}", path)
    try:
        with zipfile.ZipFile(path) as archive:
            program = _check_members(archive, path)
        names = [str(arg) for opcode, arg, _ in pickletools.genops(program) if _names_object(opcode.name, arg)]
    except PltpackError:
        raise
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from None
    except Exception as error:  # zipfile and pickletools raise many kinds on damaged input
        raise DumpError(f"is not a sound torch.save file ({type(error).__name__})", path) from None
    if names:
        raise DumpError(f"holds pickled objects ({names[0].replace(' ', '.')}), and reading them would run code; "
                        f"{_SAFE_WAY}", path)  # fmt: skip


def _check_members(archive: zipfile.ZipFile, path: Path) -> bytes:
    """Check a zip directory against the file's size; returns the pickle."""
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise DumpError(f"holds {len(members)} zip members (allowed: {_MAX_MEMBERS})", path)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise DumpError("holds compressed members, which torch.save never writes", path)
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise DumpError("has zip members larger than the file", path)
    pickles = [member for member in members if member.filename.split("/")[-1] == "data.pkl"]
    if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE:
        raise DumpError(f"must hold one data.pkl of at most {_MAX_PICKLE} bytes", path)
    return archive.read(pickles[0])


def _names_object(opcode: str, argument: Any) -> bool:
    """Whether a pickle opcode fetches anything but the parts of a plain tensor; torch.save writes only GLOBAL."""
    if opcode in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
        return True
    return opcode == "GLOBAL" and not _PLAIN.fullmatch(argument)


def _load(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise UnsupportedError("reading torch.save files needs PyTorch (pip install 'pltpack[torch]')", path) from None
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # the unpickler lets any exception of damaged input through
        raise DumpError(f"is not a sound torch.save file ({type(error).__name__})", path) from None


def _pairs(content: Any) -> list[tuple[Any, Any]]:
    found = content
    if isinstance(content, Mapping):
        found = content.get("past_key_values")
        for keys, values in _PAIRED_LISTS:
            if found is None and isinstance(content.get(keys), list | tuple):
                if not isinstance(content.get(values), list | tuple) or len(content[keys]) != len(content[values]):
                    raise DumpError(f"lists {keys!r} and {values!r} are not of one length")
                found = list(zip(content[keys], content[values], strict=True))
    if not isinstance(found, list | tuple) or not 0 < len(found) <= base.MAX_LAYERS:
        raise DumpError(f"holds no list of (keys, values) per layer; {_SAFE_WAY}")
    for index, pair in enumerate(found):
        # Iterating over a DynamicCache gives triples whose last part is the window of a sliding layer, or None.
        if not isinstance(pair, list | tuple) or len(pair) not in (2, 3) or not all(map(_is_sound, pair[:2])):
            raise DumpError(f"layer {index} is not a pair of plain tensors")
        if len(pair) == 3 and pair[2] is not None:
            raise UnsupportedError(f"layer {index} is a sliding layer, which may have dropped tokens")
    return [(pair[0], pair[1]) for pair in found]


def _is_sound(tensor: Any) -> bool:
    import torch

    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    # Strides of 0 would let a small file claim arrays of any size.
    return bool(tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes())


def _geometry(index: int, keys: Any, values: Any) -> LayerGeometry:
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.ndim == 4 and tensor.shape[0] != 1:
            raise UnsupportedError(f"layer {index}: {name} hold a batch of {tensor.shape[0]}; dump each session alone")
        if tensor.ndim not in (3, 4):
            raise DumpError(f"layer {index}: {name} have {tensor.ndim} axes instead of [1, heads, tokens, dim]")
    return base.geometry_of(index, (cache_dtype(keys.dtype), cache_dtype(values.dtype)), keys.shape, values.shape)


def _heads_first(tensor: Any) -> Any:
    return tensor[0] if tensor.ndim == 4 else tensor


def _stored_tokens(named: Mapping[Any, Any]) -> np.ndarray | None:
    name = next((name for name in _TOKEN_NAMES if named.get(name) is not None), None)
    if name is None:
        return None
    found = named[name]
    if isinstance(found, list | tuple):
        found = list(found)
        return token_ids(found[0] if len(found) == 1 and isinstance(found[0], list) else found, repr(name))
    if not _is_sound(found) or found.is_floating_point() or found.is_complex():
        raise DumpError(f"{name!r} is not a tensor of integers")
    if found.ndim == 2 and found.shape[0] == 1:
        found = found[0]
    return token_ids(found.numpy().copy(), repr(name))
