"""``hdf5`` dumps: many sessions per file.

``/sessions/<id>/tokens`` int32 ``[T]``; ``/sessions/<id>/layers/<i>/keys`` ``[H_kv, T, D_k]`` and ``values``
``[H_kv, T, D_v]``, float32 or float16 as they are, BF16 as uint16 and fp8 as uint8 with the attribute ``dtype``
(``BF16``, ``F8_E4M3``, ``F8_E5M2``); optionally ``logprobs``, ``logprob_ids`` and ``importance`` beside ``tokens``.
The session group's attribute ``identity`` holds JSON; its attribute ``session`` the name, where ``<id>`` is the
percent-quoted form (`pltpack.names.session_to_file`). Datasets are chunked along tokens.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.dumps import base
from pltpack.dumps.atomic import make_folder, replacing
from pltpack.dumps.hdf5_data import StoredArray, locate
from pltpack.dumps.hdf5_guard import (
    SIGNATURE,
    check_sizes,
    check_strings,
    child,
    member_names,
    opened,
    translated,
)
from pltpack.dumps.hdf5_sink import Sink
from pltpack.dumps.tensor_layout import identity_json
from pltpack.dumps.tokens import TokenLookup, token_ids
from pltpack.errors import DumpError, UnsupportedError
from pltpack.names import check_session, session_to_file
from pltpack.snapshot import DTYPES, LayerGeometry, Snapshot

#: Most sessions of one file.
MAX_SESSIONS = 1 << 17
_CHUNK_TOKENS = 256
_CHUNK_BYTES = 1 << 20
_MAX_MEMBERS = 64
_MAX_EXTRA_BYTES = 512 << 20
_STORED: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"),
           "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}  # fmt: skip
_EXTRAS = {"logprobs": np.dtype("<f4"), "logprob_ids": np.dtype("<i4"), "importance": np.dtype("<f4")}


class Hdf5Format(base.DumpFormat):
    """One HDF5 file of many sessions."""

    engine = False
    format_id = "hdf5"

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`; the signature may stand behind a user block of 512, 1024 or 2048 bytes."""
        return any(head[at : at + 8] == SIGNATURE for at in (0, 512, 1024, 2048))

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`."""
        name = os.fspath(path.absolute())
        stamp = base.FileStamp.of(path)
        check_strings(path)
        with translated(path), opened(name, stamp) as file:
            check_sizes(file)
            ids = member_names(child(file, "sessions", "group"), MAX_SESSIONS)
        for group in ids:
            with translated(path), opened(name, stamp) as file:
                snapshot = _read_session(child(child(file, "sessions", "group"), group, "group"), path, stamp, tokens)
            yield snapshot

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is the file."""
        import h5py

        make_folder(path.parent)
        with replacing(path) as temp, open(temp, "xb+", buffering=0) as raw:
            sink = Sink(raw)
            # Older versions spend 3 KB on the index of every dataset.
            with h5py.File(sink, "w", libver=("v110", "latest")) as file:
                root = file.create_group("sessions")
                for snapshot in snapshots:
                    base.check_snapshot(snapshot)
                    group = session_to_file(snapshot.session)
                    if group in root:
                        raise DumpError(f"two snapshots are named {snapshot.session!r}", path)
                    _write_session(root.create_group(group), snapshot, sink)
            sink.check()
        return [path]


@dataclasses.dataclass(frozen=True, slots=True)
class Hdf5Source:
    """A `LayerSource` over one session of an HDF5 file, in any number of threads; the file is opened for each call."""

    path: str
    stamp: base.FileStamp
    count: int
    layers: tuple[LayerGeometry, ...]
    arrays: tuple[tuple[StoredArray, StoredArray], ...]

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        base.check_range(start, stop, self.count)
        dtype = DTYPES[self.layers[index].dtype]
        keys, values = self.arrays[index]
        with base.reading(self.path, self.stamp) as fd:
            read = (array.read(fd, self.path, start, stop, axis=1).view(dtype) for array in (keys, values))
            return next(read), next(read)


def _read_session(group: Any, path: Path, stamp: base.FileStamp, tokens: TokenLookup) -> Snapshot:
    group_name = group.name.rsplit("/", 1)[-1]
    session = _text(group, "session") or group_name
    check_session(session)
    layers = child(group, "layers", "group")
    names = member_names(layers, base.MAX_LAYERS)
    if not names or {str(index) for index in range(len(names))} != set(names):
        raise DumpError(f"session {session!r}: layers are not named 0 to {len(names) - 1}")
    count = None
    geometry, arrays = [], []
    for index in range(len(names)):
        layer = child(layers, str(index), "group")
        keys, values = (child(layer, name, "dataset") for name in ("keys", "values"))
        arrays.append((locate(keys, 3), locate(values, 3)))
        geometry.append(_geometry(index, keys, values))
        count = base.check_count(keys.shape[1]) if count is None else count
        if keys.shape[1] != count or values.shape[1] != count:
            raise DumpError(f"session {session!r}: layer {index} does not hold {count} tokens as layer 0 does")
    assert count is not None
    names = member_names(group, _MAX_MEMBERS)
    stored = token_ids(_array(group, "tokens", count), "tokens") if "tokens" in names else None
    extras = {name: _extra(group, name, count, dtype) for name, dtype in _EXTRAS.items() if name in names}
    base.check_extras(count, extras.get("logprobs"), extras.get("logprob_ids"), extras.get("importance"))
    return Snapshot(
        session=session,
        tokens=tokens.require(path, session, count, stored),
        identity=base.parse_identity(_text(group, "identity"), tuple(geometry)),
        source=Hdf5Source(os.fspath(path.absolute()), stamp, count, tuple(geometry), tuple(arrays)),
        origin=os.fspath(path),
        **extras,
    )


def _geometry(index: int, keys: Any, values: Any) -> LayerGeometry:
    dtypes = []
    for name, dataset in (("keys", keys), ("values", values)):
        said = _text(dataset, "dtype")
        stored = dataset.dtype
        if said is None:
            said = {"f4": "F32", "f2": "F16"}.get(f"{stored.kind}{stored.itemsize}")
        if said is None:
            raise DumpError(f"layer {index}: {name} are {stored} without the attribute 'dtype'")
        if said not in DTYPES:
            raise UnsupportedError(f"layer {index}: {name} have dtype {said!r} (known: {', '.join(DTYPES)})")
        if (stored.kind, stored.itemsize) != (_STORED[said].kind, _STORED[said].itemsize):
            raise DumpError(f"layer {index}: {name} are {said} but stored as {stored}")
        dtypes.append(said)
    return base.geometry_of(index, dtypes, keys.shape, values.shape)


def _array(group: Any, name: str, count: int) -> np.ndarray:
    dataset = child(group, name, "dataset")
    array = locate(dataset, None)
    if dataset.shape[0] != count:
        raise DumpError(f"{dataset.name} is {list(dataset.shape)} but the caches hold {count} tokens")
    if dataset.size * dataset.dtype.itemsize > _MAX_EXTRA_BYTES:
        raise UnsupportedError(f"{dataset.name} holds more than {_MAX_EXTRA_BYTES} bytes")
    path = dataset.file.filename
    with base.reading(path) as fd:
        return array.read(fd, path, 0, count, axis=0)


def _extra(group: Any, name: str, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    array = _array(group, name, count)
    if (array.dtype.kind, array.dtype.itemsize) != (dtype.kind, dtype.itemsize):
        raise DumpError(f"{name} are {array.dtype} instead of {dtype}")
    return array.astype(dtype, copy=False)


def _text(node: Any, name: str) -> str | None:
    """A string attribute; its type and size are checked before the library converts it."""
    import h5py

    if name not in node.attrs:
        return None
    attribute = node.attrs.get_id(name)
    kind = attribute.get_type()
    if not isinstance(kind, h5py.h5t.TypeStringID) or kind.committed():
        raise DumpError(f"attribute {name!r} is not a string")
    if attribute.shape != () or attribute.get_storage_size() > base.MAX_JSON:
        raise DumpError(f"attribute {name!r} is not one string")
    value = node.attrs[name]
    return value.decode() if isinstance(value, bytes) else str(value)


def _write_session(group: Any, snapshot: Snapshot, sink: Sink) -> None:
    group.attrs["session"] = snapshot.session
    group.attrs["identity"] = identity_json(snapshot.identity)
    group["tokens"] = np.ascontiguousarray(snapshot.tokens, "<i4")
    for name, dtype in _EXTRAS.items():
        array = getattr(snapshot, name)
        if array is not None:
            group[name] = np.ascontiguousarray(array, dtype)
    layers = group.create_group("layers")
    for index, geometry in enumerate(snapshot.identity.layers):
        layer = layers.create_group(str(index))
        keys, values = (
            _dataset(layer, name, geometry, len(snapshot), dim)
            for name, dim in (("keys", geometry.k_dim), ("values", geometry.v_dim))
        )
        stored = _STORED[geometry.dtype]
        for start, stop, k, v in base.layer_slices(snapshot, index):
            keys[:, start:stop] = np.ascontiguousarray(k).view(stored)
            values[:, start:stop] = np.ascontiguousarray(v).view(stored)
            sink.check()


def _dataset(layer: Any, name: str, geometry: LayerGeometry, count: int, dim: int) -> Any:
    stored = _STORED[geometry.dtype]
    row = geometry.heads * dim * stored.itemsize
    chunks = (geometry.heads, _chunk_tokens(count, row), dim) if count else None
    dataset = layer.create_dataset(name, (geometry.heads, count, dim), stored, chunks=chunks)
    dataset.attrs["dtype"] = geometry.dtype
    return dataset


def _chunk_tokens(count: int, token_bytes: int) -> int:
    """Tokens of one chunk: the last one is stored whole however few it holds, so all are nearly of one length."""
    most = max(1, min(_CHUNK_TOKENS, _CHUNK_BYTES // token_bytes))
    return -(-count // -(-count // most))
