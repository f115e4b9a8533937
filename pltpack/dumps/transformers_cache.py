"""``transformers`` dumps: caches that people save by hand, since the library has no format of its own.

Read: safetensors files with ``layers.{i}.key`` and ``layers.{i}.value`` ``[1, H_kv, T, D]`` (token ids in the metadata
``token_ids``, as JSON), and ``torch.save`` files of lists and dicts of tensors (`pltpack.dumps.torch_file`). Written:
the safetensors layout, one file per session.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pltpack.dumps.base import ROPE_STYLE, DumpFormat
from pltpack.dumps.safetensors_header import looks_like_safetensors, read_header
from pltpack.dumps.tensor_layout import Layout, has_layers, identity_json, read_session, write_sessions
from pltpack.dumps.tokens import TokenLookup
from pltpack.dumps.torch_file import is_torch_file, read_torch_file
from pltpack.snapshot import Snapshot

LAYOUT = Layout("key", "value", batch=True)


class TransformersFormat(DumpFormat):
    """Hand-saved `DynamicCache` contents."""

    format_id = "transformers"
    options = {"rope_style": ROPE_STYLE}  # noqa: RUF012

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`; pickles are taken too, to be refused with the way out."""
        if looks_like_safetensors(path, head):
            return has_layers(path, LAYOUT) is True
        return is_torch_file(path, head)

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`."""
        with open(path, "rb") as file:
            head = file.read(16)
        # A safetensors length may by chance begin like a pickle, so the order matters.
        if not looks_like_safetensors(path, head) and is_torch_file(path, head):
            yield read_torch_file(path, tokens)
        else:
            yield read_session(path, read_header(path), LAYOUT, tokens)

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is a folder that gets ``<session>.safetensors`` files."""
        return write_sessions(snapshots, path, LAYOUT, _metadata)


def _metadata(snapshot: Snapshot) -> dict[str, str]:
    return {
        "format": "pt",
        "session": snapshot.session,
        "identity": identity_json(snapshot.identity),
        "token_ids": json.dumps(snapshot.tokens.tolist(), separators=(",", ":")),
    }
