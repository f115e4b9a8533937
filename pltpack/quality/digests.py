"""Digests by which identities name a model's weights and its tokenizer, however their content is split into files.

Weights: SHA-256 over all tensors in the order of their names (as UTF-8 bytes); each contributes the JSON text of
``[name, dtype, shape]`` without spaces, a line feed, and its bytes. Tokenizer: SHA-256 over ``tokenizer.json`` as
JSON with sorted keys and without spaces, less ``truncation`` and ``padding`` (which say how a program used it last);
without that file, over the vocabulary files in the order of their names, each as the JSON text of ``[name, size]``, a
line feed, and its bytes. Both are written ``sha256:`` and hexadecimal digits. Chat templates are no part of either:
they decide which tokens a prompt becomes, and the tokens are in the snapshot.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pltpack.dumps.base import MAX_JSON, parse_json, reading
from pltpack.dumps.safetensors_header import TensorEntry, read_header, read_into
from pltpack.errors import DumpError, PltpackError, UnsupportedError

_INDEX, _WEIGHTS, _TOKENIZER = "model.safetensors.index.json", "model.safetensors", "tokenizer.json"
_VOCABULARIES = (
    "added_tokens.json", "bpe.codes", "merges.txt", "sentencepiece.bpe.model", "source.spm", "spiece.model",
    "spm.model", "target.spm", "tekken.json", "tokenizer.model", "vocab.bpe", "vocab.json", "vocab.txt",
)  # fmt: skip
_CHUNK = 16 << 20


def weights_digest(folder: Path) -> str:
    """Digest of the safetensors weights in a model's folder; reads them once, in pieces of 16 MiB.

    Raises
    ------
    UnsupportedError
        If the folder holds no safetensors weights.
    DumpError
        If a file is damaged, or two files hold one tensor.
    """
    found: dict[str, tuple[Path, TensorEntry]] = {}
    for file in weight_files(folder):
        for name, tensor in read_header(file).tensors.items():
            if name in found:
                raise DumpError(f"tensor {name!r} is in {found[name][0].name} already", file)
            found[name] = (file, tensor)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    for name in sorted(found, key=lambda name: name.encode()):
        file, tensor = found[name]
        digest.update(_line(name, tensor.dtype, list(tensor.shape)))
        with reading(os.fspath(file)) as fd:
            for start in range(0, tensor.length, _CHUNK):
                part = buffer[: min(_CHUNK, tensor.length - start)]
                read_into(fd, tensor.offset + start, part, file)
                digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load: ``model.safetensors``, else those that the index names.

    Raises
    ------
    UnsupportedError
        If there are none.
    DumpError
        If the index is malformed, or names a file outside the folder.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.is_file():
        raise UnsupportedError(f"holds no safetensors weights ({_WEIGHTS} or {_INDEX})", folder)
    data = _json_file(index)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise DumpError("weight_map is not an object of file names", index)
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DumpError(f"names {name!r}, which is not a file of this folder", index)
    return [folder / name for name in names]


def tokenizer_digest(folder: Path) -> str | None:
    """Digest of the tokenizer in a model's folder, or None if it holds none.

    Raises
    ------
    DumpError
        If ``tokenizer.json`` is not a JSON object.
    """
    digest = hashlib.sha256()
    if (folder / _TOKENIZER).is_file():
        data = _json_file(folder / _TOKENIZER)
        if not isinstance(data, dict):
            raise DumpError("is not a JSON object", folder / _TOKENIZER)
        lasting = {key: value for key, value in data.items() if key not in ("truncation", "padding")}
        digest.update(json.dumps(lasting, sort_keys=True, separators=(",", ":")).encode())
        return f"sha256:{digest.hexdigest()}"
    files = [folder / name for name in _VOCABULARIES if (folder / name).is_file()]
    for file in files:
        content = _bounded(file)
        digest.update(_line(file.name, len(content)) + content)
    return f"sha256:{digest.hexdigest()}" if files else None


def _json_file(file: Path) -> Any:
    try:
        return parse_json(_bounded(file), file.name)
    except PltpackError as error:
        raise error.at(file) from None


def _bounded(file: Path) -> bytes:
    if file.stat().st_size > MAX_JSON:
        raise DumpError(f"is larger than {MAX_JSON} bytes", file)
    return file.read_bytes()


def _line(*values: Any) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"
