"""PCA over all layers with variance normalization: the recipe of KVTC, as a baseline.

Keys are un-rotated; every layer and head is divided by its standard deviation; one PCA of all layers together, for keys
and for values, is learned on calibration text; one step size quantizes all components, so that each gets the bits its
variance deserves; static rANS tables per component, learned on the same text, code them. The first tokens of a session
are stored as they are. Every byte of a session is counted: streams, escapes and first tokens; basis, means, scales and
tables are the profile and are reported beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pltpack.codec import rans
from pltpack.codec.base import SINK_TOKENS
from pltpack.codec.rope import Rotation
from pltpack.errors import DumpError, NotFoundError, UnsupportedError
from pltpack.quality.rebuilt import Rate
from pltpack.snapshot import Identity, Snapshot

if TYPE_CHECKING:
    from pltpack.quality.model import Model

#: Step sizes in units of a normalized value's standard deviation.
STEPS = (0.35, 0.5, 0.7, 1.0, 1.4)
#: Tokens of calibration text, and how many of them the model reads at once.
CALIBRATION_TOKENS, WINDOW = 40 * 1024, 1024
#: Components of a smaller standard deviation than this part of the step practically never leave zero.
_QUIET = 0.1
#: Wider caches would need a covariance matrix beyond a gigabyte.
MAX_WIDTH = 16384
#: Calibration tokens from which the entropy coder's tables are learned.
_SAMPLE = 16384
_MIDDLE, _ESCAPE = 127, 255
_LARGEST = 126


@dataclasses.dataclass(frozen=True)
class _Side:
    """What is learned for keys or for values of all layers: `width` is layers × heads × dim."""

    mean: np.ndarray  # float32 [width]
    scale: np.ndarray  # float32 [width], equal within a layer and head
    basis: np.ndarray  # float32 [width, components], by falling variance
    deviation: np.ndarray  # float32 [components]
    sample: np.ndarray  # float32 [tokens, components], calibration text in this basis

    def project(self, rows: np.ndarray) -> np.ndarray:
        return ((rows - self.mean) / self.scale) @ self.basis

    def back(self, coefficients: np.ndarray) -> np.ndarray:
        return (coefficients @ self.basis[:, : coefficients.shape[1]].T) * self.scale + self.mean


class Basis:
    """Bases for keys and values, learned on calibration caches.

    Parameters
    ----------
    calibration : iterable of Snapshot
        At least two tokens after the first `SINK_TOKENS` of each.
    finest : float
        The smallest step that will be asked for: components that never leave zero at it are forgotten.

    Raises
    ------
    UnsupportedError
        If there is nothing to learn from, or the cache is wider than `MAX_WIDTH`.
    """

    def __init__(self, calibration: Iterable[Snapshot], finest: float = min(STEPS)) -> None:
        rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        dims: tuple[list[int], list[int]] = ([], [])
        for snapshot in calibration:
            dims = _dims(snapshot.identity)
            for side, found in zip(rows, _matrices(snapshot), strict=True):
                side.append(found[SINK_TOKENS:])
        if sum(len(part) for part in rows[0]) < 2:
            raise UnsupportedError("too few calibration tokens for a PCA")
        self.finest = finest
        self.sides = tuple(_learn(part, widths, finest) for part, widths in zip(rows, dims, strict=True))
        self._last: tuple[Snapshot, list[np.ndarray]] | None = None

    def coefficients(self, snapshot: Snapshot) -> list[np.ndarray]:
        """Keys and values of all tokens in the basis, float32 ``[T, components]``; the last snapshot's are kept."""
        if self._last is None or self._last[0] is not snapshot:
            projected = [side.project(rows) for side, rows in zip(self.sides, _matrices(snapshot), strict=True)]
            self._last = snapshot, projected
        return self._last[1]


class Pca:
    """One step size over a `Basis`; a `pltpack.quality.rebuilt.Rebuilt`.

    Parameters
    ----------
    basis : Basis
    step : float
        In standard deviations of a normalized value.

    Raises
    ------
    ValueError
        If the basis was made for coarser steps only.
    """

    family = "PCA"

    def __init__(self, basis: Basis, step: float) -> None:
        if step < basis.finest:
            raise ValueError(f"a basis for steps from {basis.finest:g} has no components for steps of {step:g}")
        self.name = f"PCA step {step:g}"
        self._basis, self._step = basis, step
        self._kept = [max(1, int((side.deviation >= _QUIET * step).sum())) for side in basis.sides]
        samples = [side.sample[:, :kept] for side, kept in zip(basis.sides, self._kept, strict=True)]
        self._tables = [frequencies(_levels(sample, step)) for sample in samples]
        self._bytes, self._raw, self._elements = 0, 0, 0

    @property
    def profile_bytes(self) -> int:
        """Bases, means, scales and tables, in two bytes for each number."""
        sizes = ((s.basis[:, :k].size + 2 * s.mean.size) for s, k in zip(self._basis.sides, self._kept, strict=True))
        return 2 * (sum(sizes) + sum(int((tables > 0).sum()) for tables in self._tables))

    def rate(self) -> Rate:
        """Over all snapshots that were rebuilt."""
        return Rate(self._bytes + self.profile_bytes, self._raw, self._elements, self.profile_bytes)

    def rebuild(self, original: Snapshot) -> Snapshot:
        """See `Rebuilt.rebuild`; counts the bytes towards `rate`."""
        out = []
        parts = zip(self._basis.coefficients(original), self._kept, self._tables, self._basis.sides, strict=True)
        for coefficients, kept, tables, side in parts:
            levels = _levels(coefficients[:, :kept], self._step)
            stream, escaped = coded(levels[SINK_TOKENS:], tables)
            self._bytes += len(stream) + escaped.nbytes
            out.append(side.back(levels * np.float32(self._step)))
        sinks = min(SINK_TOKENS, len(original))
        self._bytes += sinks * sum(layer.bytes_per_token for layer in original.identity.layers)
        self._raw += original.raw_bytes
        self._elements += original.elements
        layers = _layers(original, *out)
        for index, pair in enumerate(layers):
            for mine, exact in zip(pair, original.layer(index, 0, sinks), strict=True):
                mine[:, :sinks] = exact
        return Snapshot.from_arrays(original.session, original.tokens, layers, original.identity)


def captured(model: Model, texts: Sequence[Path], count: int = CALIBRATION_TOKENS) -> Iterator[Snapshot]:
    """Caches of calibration text, in windows that the model reads one by one.

    Parameters
    ----------
    model : Model
    texts : sequence of Path
        Text files, UTF-8.
    count : int
        Most tokens.

    Raises
    ------
    NotFoundError, DumpError
        If a file is missing or no text.
    UnsupportedError
        If the model has no tokenizer.
    """
    from pltpack.dumps import from_dynamic_cache
    from pltpack.quality.model import load_tokenizer, prefill

    tokenizer = load_tokenizer(model.folder)
    if tokenizer is None:
        raise UnsupportedError("has no tokenizer to read calibration text with", model.folder)
    ids = np.array([token for path in texts for token in tokenizer(_text(path)).input_ids][:count], np.int32)
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        yield from_dynamic_cache(prefill(model, window), window, f"calibration-{start}", model.identity("F32"))


def _text(path: Path) -> str:
    if not path.is_file():
        raise NotFoundError("no such text file", path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DumpError(f"cannot be read as text ({error})", path) from None


def coded(levels: np.ndarray, tables: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Code integer levels ``[T, components]``.

    Parameters
    ----------
    levels : ndarray
    tables : ndarray
        uint16 ``[components, 256]``: symbol 127 is level 0, 255 the escape.

    Returns
    -------
    bytes
        A stream of `pltpack.codec.rans`, one row for each component.
    ndarray
        The levels behind the escapes, int32, component by component.
    """
    whole = levels.T.astype(np.int32)
    offset = whole + _MIDDLE
    known = (offset >= 0) & (offset < _ESCAPE)
    known &= np.take_along_axis(tables, np.clip(offset, 0, _ESCAPE), axis=1) > 0
    symbols = np.where(known, offset, _ESCAPE).astype(np.uint8)
    return rans.encode(symbols, np.arange(len(symbols)), tables), whole[~known]


def frequencies(levels: np.ndarray) -> np.ndarray:
    """Frequencies for rANS, uint16 ``[components, 256]``.

    Each component's table has the levels of its calibration text, the next ones beyond them, and an escape.

    Parameters
    ----------
    levels : ndarray
        Integers ``[T, components]``.
    """
    counts = np.zeros((levels.shape[1], 256))
    for row, column in zip(counts, levels.T.astype(np.int64), strict=True):
        most = min(int(np.abs(column).max()), _LARGEST - 1) + 1
        row[_MIDDLE - most : _MIDDLE + most + 1] = 0.05
        inside = column[np.abs(column) <= most] + _MIDDLE
        row += np.bincount(inside, minlength=256)
        row[_ESCAPE] += len(column) - len(inside) + 0.05
    return rans.normalize(counts)


def _levels(coefficients: np.ndarray, step: float) -> np.ndarray:
    return np.rint(coefficients / np.float32(step))


def _learn(parts: list[np.ndarray], widths: Sequence[int], finest: float) -> _Side:
    """Mean, scale and basis of rows ``[tokens, width]``; `widths` are the runs of columns that share a scale."""
    import torch

    rows = np.concatenate(parts)
    # Gigabytes, at the usual amount of text.
    parts.clear()
    mean = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
    rows -= mean
    variance = np.square(rows).mean(axis=0, dtype=np.float64)
    starts = np.cumsum([0, *widths[:-1]])
    per_head = np.sqrt(np.add.reduceat(variance, starts) / np.array(widths))
    scale = np.repeat(np.where(per_head > 0, per_head, 1), widths).astype(np.float32)
    rows /= scale
    x = torch.from_numpy(rows)
    count, width = rows.shape
    if count < width:
        # The same basis from the smaller of the two products.
        power, vectors = torch.linalg.eigh(x @ x.T)
        keep = power > power[-1] * 1e-6
        power, basis = power[keep], x.T @ vectors[:, keep] / power[keep].sqrt()
    else:
        power, basis = torch.linalg.eigh(x.T @ x)
    basis = basis.flip(1).contiguous()
    deviation = (power.flip(0).clamp_min(0) / count).sqrt().numpy()
    useful = max(1, int((deviation >= _QUIET * finest).sum()))
    basis = basis[:, :useful].contiguous()
    return _Side(mean, scale, basis.numpy(), deviation[:useful], (x[:: 1 + count // _SAMPLE] @ basis).numpy())


def _dims(identity: Identity) -> tuple[list[int], list[int]]:
    """Key and value dimension of every layer and head."""
    keys = [layer.k_dim for layer in identity.layers for _ in range(layer.heads)]
    values = [layer.v_dim for layer in identity.layers for _ in range(layer.heads)]
    if max(sum(keys), sum(values)) > MAX_WIDTH:
        raise UnsupportedError(f"a PCA over {sum(keys)} key channels is too wide (at most {MAX_WIDTH})")
    return keys, values


def _matrices(snapshot: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """Un-rotated keys, and values, of all layers side by side: float32 ``[T, width]``."""
    keys, values = [], []
    for index, geometry in enumerate(snapshot.identity.layers):
        k, v = snapshot.layer(index)
        rotation = Rotation.of(snapshot.identity.rope, snapshot.identity.keys, geometry.k_dim)
        k = k.astype(np.float32) if rotation is None else rotation.unrotate(k, 0)
        keys.append(k.transpose(1, 0, 2).reshape(len(snapshot), -1))
        values.append(v.astype(np.float32).transpose(1, 0, 2).reshape(len(snapshot), -1))
    return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)


def _layers(like: Snapshot, keys: np.ndarray, values: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inverse of `_matrices`, in the dtypes of `like`."""
    out, at, v_at = [], 0, 0
    for index, geometry in enumerate(like.identity.layers):
        width, v_width = geometry.heads * geometry.k_dim, geometry.heads * geometry.v_dim
        k = keys[:, at : at + width].reshape(-1, geometry.heads, geometry.k_dim).transpose(1, 0, 2)
        v = values[:, v_at : v_at + v_width].reshape(-1, geometry.heads, geometry.v_dim).transpose(1, 0, 2)
        rotation = Rotation.of(like.identity.rope, like.identity.keys, geometry.k_dim)
        if rotation is not None:
            k = rotation.rotate(k, 0)
        dtype = like.layer(index, 0, 1)[0].dtype
        out.append((k.astype(dtype), v.astype(dtype)))
        at, v_at = at + width, v_at + v_width
    return out
