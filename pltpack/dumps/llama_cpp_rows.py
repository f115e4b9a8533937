"""One sequence of a llama.cpp state file, read from its rows on demand."""

from __future__ import annotations

import dataclasses

import numpy as np

from pltpack.dumps import base, ggml
from pltpack.dumps.llama_cpp_file import Rows, Stream
from pltpack.dumps.quantized import CARRIER
from pltpack.dumps.safetensors_header import read_into
from pltpack.snapshot import DTYPES, LayerGeometry


@dataclasses.dataclass(frozen=True)
class SequenceSource:
    """A `LayerSource` over the cells of one sequence.

    Attributes
    ----------
    path, stamp
        The file, opened anew by every call.
    stream : Stream
        Where its rows are.
    cells : ndarray
        The sequence's cells int64 ``[T]`` in the order of positions.
    layers : tuple of LayerGeometry
        Of the values.
    scheme : str or None
        Block quantization: layers are then integers, and from the middle on their scales
        (`pltpack.dumps.quantized`).
    """

    path: str
    stamp: base.FileStamp
    stream: Stream
    cells: np.ndarray
    layers: tuple[LayerGeometry, ...]
    scheme: str | None

    def layer(self, index: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LayerSource.layer`."""
        base.check_range(start, stop, len(self.cells))
        part, index = divmod(index, len(self.layers))
        geometry = self.layers[index]
        with base.reading(self.path, self.stamp) as fd:
            keys = self._rows(fd, self.stream.keys[index], start, stop)
            read = self._columns if self.stream.transposed else self._rows
            values = read(fd, self.stream.values[index], start, stop)
        return (self._split(keys, geometry.heads, geometry.k_dim, geometry.dtype, part),
                self._split(values, geometry.heads, geometry.v_dim, geometry.dtype, part))  # fmt: skip

    def _split(self, rows: np.ndarray, heads: int, dim: int, dtype: str, part: int) -> np.ndarray:
        """Rows ``[T, bytes]`` as ``[H, T, D]``."""
        if self.scheme is None:
            found = rows.view(DTYPES[dtype])
        else:
            scales, integers = ggml.split_rows(rows, self.scheme)
            found = scales if part else np.ascontiguousarray(integers).view(DTYPES[CARRIER])
        return np.ascontiguousarray(found.reshape(len(rows), heads, -1).swapaxes(0, 1))

    def _rows(self, fd: int, rows: Rows, start: int, stop: int) -> np.ndarray:
        cells = self.cells[start:stop]
        if not len(cells):
            return np.empty((0, rows.width), np.uint8)
        low, high = int(cells.min()), int(cells.max()) + 1
        out = np.empty((high - low, rows.width), np.uint8)
        read_into(fd, rows.offset + low * rows.width, out.reshape(-1).data, self.path)
        if high - low == len(cells) and bool((np.diff(cells) == 1).all()):
            return out
        return np.ascontiguousarray(out[cells - low])

    def _columns(self, fd: int, rows: Rows, start: int, stop: int) -> np.ndarray:
        """Rows ``[T, bytes]`` of values that are stored channel by channel."""
        cells, count = self.cells[start:stop], len(self.stream.positions)
        if not len(cells):
            return np.empty((0, rows.width * rows.columns), np.uint8)
        low, high = int(cells.min()), int(cells.max()) + 1
        out = np.empty((rows.columns, high - low, rows.width), np.uint8)
        if high - low == count:
            read_into(fd, rows.offset, out.reshape(-1).data, self.path)
        else:
            for column in range(rows.columns):
                at = rows.offset + (column * count + low) * rows.width
                read_into(fd, at, out[column].reshape(-1).data, self.path)
        return np.ascontiguousarray(out[:, cells - low].swapaxes(0, 1)).reshape(len(cells), -1)
