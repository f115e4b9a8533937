"""The windows of a calibration: rows and gradients of each, kept in a folder so that an interrupted run goes on.

The folder holds ``settings.json`` and, per finished window, ``N.rows.npy``, ``N.first.npy`` and, with a model,
``N.gradients.npy``: bfloat16 bits ``[T, rows]`` in the row order of profiles, keys un-rotated but for ``first``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pltpack.codec.base import SINK_TOKENS
from pltpack.dumps.atomic import make_folder, replacing
from pltpack.errors import ConflictError, DumpError
from pltpack.quality.rows import Blocks, from_bits, to_bits

_SETTINGS = "settings.json"


class Windows:
    """Windows in a folder.

    Parameters
    ----------
    folder : Path
        Made if it does not exist.
    settings : mapping
        JSON values that make the windows what they are; a folder of other settings is started anew.
    count : int
        How many windows there will be.
    blocks : Blocks

    Raises
    ------
    ConflictError
        If the folder exists and is no work folder of a calibration.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], count: int, blocks: Blocks) -> None:
        self.folder, self.count, self.blocks = folder, count, blocks
        if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
            known = _settings(folder / _SETTINGS)
            if known is None:
                raise ConflictError("exists and is no work folder of an interrupted calibration", folder)
            if known != json.loads(json.dumps(settings)):
                shutil.rmtree(folder)
        make_folder(folder)
        if not (folder / _SETTINGS).exists():
            with replacing(folder / _SETTINGS) as temp:
                temp.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    def missing(self) -> list[int]:
        """Windows that are not finished."""
        return [index for index in range(self.count) if not self._file(index, "rows").exists()]

    def put(self, index: int, rows: np.ndarray, first: np.ndarray, gradients: np.ndarray | None = None) -> None:
        """Store a window: float32 ``[T, rows]``; `first` are its first tokens with keys as they are stored."""
        for kind, array in (("first", first), ("gradients", gradients), ("rows", rows)):
            # Rows come last: where they are, all is there.
            if array is not None:
                with replacing(self._file(index, kind)) as temp, temp.open("wb") as file:
                    np.save(file, to_bits(array))

    def rows(self, index: int, first: int = SINK_TOKENS, step: int = 1, part: slice = slice(None)) -> np.ndarray:
        """Rows of every `step`-th token from token `first` on, float32; `part` of the rows."""
        return from_bits(self._load(index, "rows")[first::step, part])

    def tokens(self, index: int) -> int:
        """How many tokens a window has."""
        return len(self._load(index, "rows"))

    def some_rows(self, index: int, count: int, part: slice) -> np.ndarray:
        """The same of about so many tokens, evenly."""
        found = self._load(index, "rows")[SINK_TOKENS:, part]
        return from_bits(found[np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int)])

    def gradients(self, index: int) -> np.ndarray:
        """Gradients of a window's tokens after its sinks, float32."""
        return from_bits(self._load(index, "gradients")[SINK_TOKENS:])

    def first(self, index: int) -> np.ndarray:
        """The first tokens' rows, keys as they are stored."""
        return from_bits(self._load(index, "first"))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, index: int, kind: str) -> Path:
        return self.folder / f"{index}.{kind}.npy"

    def _load(self, index: int, kind: str) -> np.ndarray:
        file = self._file(index, kind)
        try:
            found: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DumpError(f"cannot be read ({error}); remove the folder to start anew", file) from None
        if found.dtype != np.uint16 or found.ndim != 2 or found.shape[1] != self.blocks.rows:
            raise DumpError("does not fit the model; remove the folder to start anew", file)
        return found


def _settings(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
