"""``llama.cpp`` dumps: sequence files (``llama_state_seq_save_file``, slots of llama-server) and whole sessions.

Read: `pltpack.dumps.llama_cpp_file`; one snapshot per sequence, named after the file, with ``.seqN`` if there are
several. A session file holds the tokens of one sequence only. No file says how many heads a row has, and only session
files name the architecture, which decides how keys are paired by RoPE: options, or the model's identity, tell.
Written: one ``<session>.bin`` per session.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pltpack.dumps import base, ggml, quantized
from pltpack.dumps.base import DumpFormat, Option
from pltpack.dumps.llama_cpp_file import SEQUENCE, SESSION, Rows, StateFile, Stream, read_state
from pltpack.dumps.llama_cpp_rows import SequenceSource
from pltpack.dumps.llama_cpp_write import Target, write_state
from pltpack.dumps.rope_style import STYLES, UNRECORDED, arch_rope, in_half_style, restyled, style_of
from pltpack.dumps.tokens import TokenLookup, token_ids
from pltpack.errors import DumpError, UnsupportedError
from pltpack.names import check_session
from pltpack.snapshot import Identity, LayerGeometry, Snapshot

_SAMPLED = 256
_YES_NO = ("yes", "no")
# As llama.cpp's own options spell them.
_TYPES = {name.lower(): name for name in ggml.TYPES}


class LlamaCppFormat(DumpFormat):
    """State files of llama.cpp."""

    format_id = "llama.cpp"
    options: ClassVar[dict[str, Option]] = {
        "arch": Option("architecture as GGUF names it (llama, qwen2, ...): tells how RoPE pairs channels"),
        "rope_style": Option("the same, told directly", STYLES),
        "head_dim": Option("channels of one head", writes=False),
        "keys": Option("order of channels in which keys enter; half makes them those of other engines",
                       ("stored", "half"), writes=False),
        "hadamard": Option("whether llama.cpp rotated a quantized cache", (*_YES_NO, "auto")),
        "quantized": Option("what a quantized cache enters as", ("values", "integers"), writes=False),
        "type": Option("type of the cache [default: the stored one]", tuple(_TYPES), reads=False),
        "v_trans": Option("whether values are transposed, as without flash attention", _YES_NO, reads=False),
        "kind": Option("a sequence file or a session file", ("sequence", "session"), reads=False),
        "version": Option("2 or 3 for a sequence, 9 or 10 for a session", ("2", "3", "9", "10"), reads=False),
        "token_list": Option("plain, or packed as llama-server saves it", ("plain", "packed"), reads=False),
        "seq_id": Option("number of the sequence", reads=False),
    }

    def sniff(self, path: Path, head: bytes) -> bool:
        """See `DumpFormat.sniff`."""
        return int.from_bytes(head[:4], "little") in (SEQUENCE, SESSION) and len(head) >= 4

    def read(self, path: Path, tokens: TokenLookup) -> Iterator[Snapshot]:
        """See `DumpFormat.read`."""
        state = read_state(path)
        several = sum(len(stream.sequences) for stream in state.streams) > 1
        rope = self._rope(state)
        for stream in state.streams:
            for number, cells in stream.sequences.items():
                session = check_session(f"{path.stem}.seq{number}" if several else path.stem)
                yield self._snapshot(path, state, stream, cells, session, rope, tokens)

    def write(self, snapshots: Iterable[Snapshot], path: Path) -> list[Path]:
        """See `DumpFormat.write`; `path` is a folder that gets ``<session>.bin`` files."""
        return write_state(snapshots, path, self._target())

    def prepare(self, snapshot: Snapshot) -> Snapshot:
        """See `DumpFormat.prepare`: integers of ggml stay as they are, keys get the architecture's style."""
        scheme = dict(snapshot.identity.quantized or {})
        style = self._style(snapshot, scheme.get("rope") if scheme else snapshot.identity.rope)
        if scheme.get("scheme") in ggml.TYPES and self.chosen.get("type") in (None, scheme["scheme"]):
            found = style_of(scheme.get("rope"))
            if found != style:
                raise UnsupportedError(f"session {snapshot.session!r}: identity field 'rope.style' is {found!r}, and "
                                       f"quantized keys cannot become {style!r}")  # fmt: skip
            return snapshot
        values = quantized.as_values(snapshot)
        if values.identity.keys == "unrotated":
            raise UnsupportedError(f"session {snapshot.session!r}: identity field 'keys' is 'unrotated', and llama.cpp "
                                   "holds rotated keys")  # fmt: skip
        return restyled(values, style)

    def _target(self) -> Target:
        chosen = self.chosen
        session = chosen.get("kind") == "session"
        version = int(chosen.get("version", "10" if session else "3"))
        if (version > 3) != session:
            raise UnsupportedError(f"version {version} is not of a {'session' if session else 'sequence'} file")
        arch = chosen.get("arch")
        if session and arch is None:
            raise UnsupportedError("a session file names the architecture: say arch=NAME")
        number = chosen.get("seq_id", "0")
        if not number.isascii() or not number.isdigit() or int(number) >= 1 << 31:
            raise UnsupportedError(f"seq_id {number!r} is no number of a sequence")
        return Target(
            SESSION if session else SEQUENCE, version, arch if session else None, _TYPES.get(chosen.get("type", "")),
            chosen.get("v_trans") == "yes", chosen.get("token_list") == "packed", int(number),
            chosen.get("hadamard") != "no",
        )  # fmt: skip

    def _style(self, snapshot: Snapshot, rope: Any) -> str:
        """The style in which to write keys."""
        found = style_of(rope)
        if "arch" in self.chosen:
            wanted = arch_rope(self.chosen["arch"]).get("style", "half")
            if wanted == UNRECORDED and "rope_style" not in self.chosen:
                raise UnsupportedError(f"how llama.cpp pairs channels of {self.chosen['arch']!r} is not known here: "
                                       "say rope_style=half or rope_style=interleaved")  # fmt: skip
            if wanted != UNRECORDED:
                return self._possible(snapshot, found, str(wanted))
        if "rope_style" in self.chosen:
            return self._possible(snapshot, found, self.chosen["rope_style"])
        if found == "half":
            raise UnsupportedError(f"session {snapshot.session!r}: identity field 'rope.style' is half as far as is "
                                   "known, and llama.cpp may rotate this model interleaved: say arch=NAME as the GGUF "
                                   "file does, or rope_style=half or rope_style=interleaved")  # fmt: skip
        return found

    @staticmethod
    def _possible(snapshot: Snapshot, found: str, wanted: str) -> str:
        if found == UNRECORDED and wanted != found:
            # A cache of llama.cpp that goes back to llama.cpp: what is asked for is what it is.
            return found
        return wanted

    def _rope(self, state: StateFile) -> dict[str, Any] | None:
        arch = self.chosen.get("arch")
        if state.arch is not None and arch not in (None, state.arch):
            raise DumpError(f"is of architecture {state.arch!r}, not {arch!r}")
        arch = state.arch if arch is None else arch
        rope = {"style": UNRECORDED} if arch is None else arch_rope(arch)
        if rope.get("style") == UNRECORDED:
            if "rope_style" in self.chosen:
                rope = {"style": self.chosen["rope_style"]}
            elif self.known is not None and "permuted" in (self.known.rope or {}):
                known = dict(self.known.rope or {})
                rope = {name: known[name] for name in ("style", "permuted") if known.get(name)}
        return rope or None

    def _snapshot(
        self, path: Path, state: StateFile, stream: Stream, cells: np.ndarray, session: str,
        rope: dict[str, Any] | None, tokens: TokenLookup,
    ) -> Snapshot:  # fmt: skip
        scheme = _scheme(stream)
        layers = tuple(self._geometry(index, *pair, scheme) for index, pair in
                       enumerate(zip(stream.keys, stream.values, strict=True)))  # fmt: skip
        source = SequenceSource(os.fspath(path.absolute()), state.stamp, stream, cells, layers, scheme)
        ids = tokens.require(path, session, len(cells), self._stored(state, session, len(cells)))
        identity = Identity(rope=rope, keys="rotated", layers=layers)
        snapshot = Snapshot(session, ids, identity, source, os.fspath(path))
        if scheme is None:
            return self._ordered(snapshot)
        described: dict[str, Any] = {"scheme": scheme}
        turned = self._hadamard(source)
        if turned is not None:
            described["hadamard"] = turned
        snapshot = dataclasses.replace(snapshot, identity=quantized.integer_identity(identity, described, "F16"))
        if self.chosen.get("quantized") == "integers":
            return snapshot
        return self._ordered(quantized.as_values(snapshot))

    def _ordered(self, snapshot: Snapshot) -> Snapshot:
        return in_half_style(snapshot) if self.chosen.get("keys") == "half" else snapshot

    def _stored(self, state: StateFile, session: str, count: int) -> np.ndarray | None:
        lengths = [len(cells) for stream in state.streams for cells in stream.sequences.values()]
        if len(lengths) == 1 and len(state.tokens) > count:
            # The last tokens may not have been through the model yet.
            return token_ids(state.tokens[:count], "its token list")
        if len(state.tokens) == count and lengths.count(count) == 1:
            return token_ids(state.tokens, "its token list")
        return None

    def _geometry(self, index: int, keys: Rows, values: Rows, scheme: str | None) -> LayerGeometry:
        columns = [_columns(index, rows) for rows in (keys, values)]
        told = self.chosen.get("head_dim")
        if told is not None:
            if not told.isascii() or not told.isdigit() or not 0 < int(told) <= base.MAX_DIM or columns[0] % int(told):
                raise UnsupportedError(f"head_dim {told!r} does not divide rows of {columns[0]} channels")
            heads = columns[0] // int(told)
        elif self.known is not None and index < len(self.known.layers):
            heads = self.known.layers[index].heads
        else:
            raise DumpError(f"rows have {columns[0]} channels, and the file does not say how many heads these are: say "
                            "--from-option head_dim=N, or name the model (--model)")  # fmt: skip
        if columns[0] % heads or columns[1] % heads:
            raise DumpError(f"layer {index}: rows of {columns[0]} and {columns[1]} channels are not of {heads} heads")
        base.check_dims(index, heads, columns[0] // heads, columns[1] // heads)
        dtype = "F16" if scheme else ggml.PLAIN[keys.kind]
        return LayerGeometry(heads, columns[0] // heads, columns[1] // heads, dtype)

    def _hadamard(self, source: SequenceSource) -> list[int] | bool | None:
        """Sizes of the Hadamard matrices, False without; None where nothing tells."""
        layer = source.layers[0]
        sizes = ggml.hadamard_sizes(layer.k_dim, layer.v_dim)
        told = self.chosen.get("hadamard", "auto")
        if sizes is None or told == "no":
            return False
        if told == "yes":
            return list(sizes)
        samples = []
        for index in sorted({0, len(source.layers) // 2, len(source.layers) - 1}):
            integers, scales = source.layer(index, 0, min(_SAMPLED, len(source.cells)))[0], None
            scales = source.layer(len(source.layers) + index, 0, integers.shape[1])[0]
            blocks = integers.view(np.uint8).reshape(*scales.shape, -1)
            samples += list(ggml.dequantize(scales, blocks, str(source.scheme)))
        found = ggml.looks_rotated(samples, sizes[0])
        return found if not found else list(sizes)


def _scheme(stream: Stream) -> str | None:
    """The block quantization of all keys and values, or None.

    Raises
    ------
    UnsupportedError
        If types differ or are not known.
    """
    kinds = {rows.kind for rows in (*stream.keys, *stream.values)}
    for kind in kinds - set(ggml.PLAIN) - set(ggml.QUANTIZED):
        name = ggml.OTHERS.get(kind, kind)
        raise UnsupportedError(f"holds a cache of ggml type {name} (known: {', '.join(ggml.TYPES)})")
    if len(kinds) > 1:
        names = sorted({**ggml.PLAIN, **ggml.QUANTIZED}[kind] for kind in kinds)
        raise UnsupportedError(f"holds keys and values of different types ({', '.join(names)})")
    return ggml.QUANTIZED.get(kinds.pop())


def _columns(index: int, rows: Rows) -> int:
    """Channels of a row, after checking its bytes."""
    if rows.kind in ggml.PLAIN:
        size = 4 if rows.kind == 0 else 2
        if rows.columns:
            if rows.width != size:
                raise DumpError(f"layer {index}: elements of {rows.width} bytes are no {ggml.PLAIN[rows.kind]}")
            return rows.columns
        found, rest = divmod(rows.width, size)
    else:
        blocks, rest = divmod(rows.width, 2 + ggml.INTEGERS[ggml.QUANTIZED[rows.kind]])
        found = blocks * ggml.BLOCK
    if rest:
        raise DumpError(f"layer {index}: rows of {rows.width} bytes are no whole values")
    return found
