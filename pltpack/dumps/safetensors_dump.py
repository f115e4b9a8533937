"""``safetensors`` dumps: one session per file, the project's own plain layout.

Tensors: ``tokens`` I32 ``[T]``; ``layers.{i}.keys`` ``[H_kv, T, D_k]`` and ``layers.{i}.values`` ``[H_kv, T, D_v]`` of
dtype F32, F16, BF16, F8_E4M3 or F8_E5M2, one dtype per layer; optionally ``logprobs`` F32 ``[T, k]`` with
``logprob_ids`` I32 ``[T, k]``, and ``importance`` F32 ``[T]``. Metadata: ``pltpack.dump`` = ``1``, ``session``,
``identity`` (JSON of `Identity.to_json`; missing fields are unknown, the geometry comes from the tensors).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pltpack.dumps.base import DumpFormat
from pltpack.dumps.safetensors_header import looks_like_safetensors, read_header
from pltpack.dumps.tensor_layout import Layout, has_layers, identity_json, read_session, write_sessions
from pltpack.dumps.tokens import TokenLookup
from pltpack.errors import UnsupportedError
from pltpack.snapshot import Snapshot

LAYOUT = Layout("keys", "values", batch=False)
VERSION = "1"


class SafetensorsFormat(DumpFormat):
    """One safetensors file per session."""

    engine = False
    format_id = "safetensors"

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`; a safetensors file with a damaged header is taken, to be refused by name."""
        return looks_like_safetensors(path, head) and has_layers(path, LAYOUT) is not False

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`. A file that names no session is named by its stem."""
        header = read_header(path)
        version = header.metadata.get("pltpack.dump", VERSION)
        if version != VERSION:
            raise UnsupportedError(f"is a dump of version {version!r}; this program reads version {VERSION}")
        yield read_session(path, header, LAYOUT, tokens)

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is a folder that gets ``<session>.safetensors`` files."""
        return write_sessions(snapshots, path, LAYOUT, _metadata)


def _metadata(snapshot: Snapshot) -> dict[str, str]:
    return {
        "pltpack.dump": VERSION,
        "session": snapshot.session,
        "identity": identity_json(snapshot.identity),
    }
