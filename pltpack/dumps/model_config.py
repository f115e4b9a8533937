"""What a model's own files say of its identity, without running it: ``config.json`` of a folder, or a GGUF file."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pltpack.dumps.base import MAX_LAYERS, parse_json
from pltpack.dumps.rope_style import arch_rope
from pltpack.errors import DumpError, NotFoundError, PltpackError, UnsupportedError
from pltpack.snapshot import Identity, LayerGeometry

_MAX_CONFIG = 16 << 20
#: What mlx-lm takes where the top level of a configuration gives no base, by type of model.
_MLX_THETA = {"llama": 10000.0, "mistral": 10000.0}
_HALF_STYLE = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2",
               "smollm3"}  # fmt: skip
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ENTRIES = 1 << 16
_MAX_STRING = 1 << 26


def model_identity(path: Path) -> Identity:
    """The identity of caches of a model, as far as its files tell without being run.

    Geometry has the dtype F16, which stands for any: `Identity.completed` does not compare it.

    Parameters
    ----------
    path : Path
        A transformers folder, or a GGUF file.

    Raises
    ------
    NotFoundError, DumpError, UnsupportedError
    """
    if not path.exists():
        raise NotFoundError("no such model", path)
    try:
        if path.is_dir():
            return _of_config(path, read_config(path))
        return _of_gguf(path)
    except PltpackError as error:
        raise error.at(path) from None
    except OSError as error:
        raise DumpError(f"cannot be read ({error.strerror})", path) from None


def read_config(folder: Path) -> Mapping[str, Any]:
    """``config.json`` of a folder, the part of the text model if there are several.

    Raises
    ------
    DumpError
        If it is missing or no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file() or file.stat().st_size > _MAX_CONFIG:
        raise DumpError("holds no config.json of a model")
    config = parse_json(file.read_bytes(), "config.json")
    if isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    if not isinstance(config, Mapping):
        raise DumpError("config.json is not a JSON object")
    return config


def mlx_rope(model: str | None, dim: int) -> dict[str, Any] | None:
    """The RoPE parameters that mlx-lm used, by the model's folder; None where that is not there or does not tell.

    mlx-lm up to 0.32.2 reads ``rope_theta`` at the top level only: with configurations of transformers 5, which keep it
    under ``rope_parameters``, it takes 10000 without a word.
    """
    if not model or "\0" in model or not os.path.isdir(model):
        return None
    try:
        config = read_config(Path(model))
    except (PltpackError, OSError):
        return None
    theta = config.get("rope_theta", _MLX_THETA.get(str(config.get("model_type"))))
    if not _number(theta) or config.get("rope_scaling") or config.get("partial_rotary_factor", 1) != 1:
        return None
    return {"type": "default", "theta": float(theta), "dim": dim, "style": "half"}


def label(path: Path) -> str:
    """A model's name, by that of its folder; a link's own name counts."""
    return path.name if path.name not in ("", "..") else path.resolve().name


def _of_config(path: Path, config: Mapping[str, Any]) -> Identity:
    heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
    count, hidden, queries = (config.get(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    dim = config.get("head_dim")
    if dim is None and isinstance(hidden, int) and isinstance(queries, int) and queries > 0:
        dim = hidden // queries
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    plain = _number(theta) and kind == "default" and share == 1 and isinstance(dim, int)
    # Whether a model of another type pairs neighbours, only running it would tell.
    style = {"style": "half"} if config.get("model_type") in _HALF_STYLE else {}
    known = {"type": "default", "theta": float(theta), "dim": dim, **style} if plain else None
    return Identity(label(path), rope=known, keys="rotated", layers=_layers(count, heads, dim, dim))


def _layers(count: Any, heads: Any, k_dim: Any, v_dim: Any) -> tuple[LayerGeometry, ...]:
    for value, most in ((count, MAX_LAYERS), (heads, 1 << 16), (k_dim, 1 << 16), (v_dim, 1 << 16)):
        if type(value) is not int or not 0 < value <= most:
            raise UnsupportedError("says nothing of its layers, heads or their size")
    return (LayerGeometry(heads, k_dim, v_dim, "F16"),) * count


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < 1e300


def _of_gguf(path: Path) -> Identity:
    found = read_gguf(path)
    arch = found.get("general.architecture")
    if not isinstance(arch, str):
        raise DumpError("does not name its architecture")

    def get(name: str, otherwise: Any = None) -> Any:
        return found.get(f"{arch}.{name}", otherwise)

    queries, heads = get("attention.head_count"), get("attention.head_count_kv", get("attention.head_count"))
    width = get("embedding_length")
    dim = width // queries if isinstance(width, int) and isinstance(queries, int) and queries > 0 else None
    k_dim, v_dim = get("attention.key_length", dim), get("attention.value_length", dim)
    layers = _layers(get("block_count"), heads, k_dim, v_dim)
    theta = get("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {**arch_rope(arch), "dim": get("rope.dimension_count", k_dim)}
    # Said even where it is false: a GGUF file settles how llama.cpp pairs channels, a transformers folder does not.
    rope.setdefault("permuted", False)
    if _number(theta) and get("rope.scaling.type", "none") == "none":
        rope |= {"type": "default", "theta": round(float(theta), 3)}
    name = found.get("general.name")
    return Identity(name if isinstance(name, str) and name else path.stem, rope=rope, keys="rotated", layers=layers)


def gguf_arch(path: Path) -> str | None:
    """The architecture that a GGUF file names; None for anything else."""
    if not path.is_file():
        return None
    try:
        found = read_gguf(path).get("general.architecture")
    except (PltpackError, OSError):
        return None
    return found if isinstance(found, str) else None


def read_gguf(path: Path) -> dict[str, Any]:
    """Scalars and strings of a GGUF file's metadata, by name; arrays are passed over.

    Raises
    ------
    DumpError
        If it is no sound GGUF file.
    UnsupportedError
        If it is of an unknown version.
    """
    with open(path, "rb") as file:
        reader = _Gguf(file.read, file.seek, os.fstat(file.fileno()).st_size)
        if reader.take(4) != b"GGUF":
            raise DumpError("is neither a folder with a config.json nor a GGUF file")
        version, _, count = reader.unpack("<IQQ")
        if version not in (2, 3):
            raise UnsupportedError(f"is a GGUF file of version {version} (known: 2 and 3)")
        if count > _MAX_ENTRIES:
            raise DumpError(f"holds {count} metadata entries (allowed: {_MAX_ENTRIES})")
        found = {}
        for _ in range(count):
            name = reader.string()
            (kind,) = reader.unpack("<I")
            value = reader.value(kind)
            if value is not None:
                found[name] = value
        return found


@dataclasses.dataclass
class _Gguf:
    read: Any
    seek: Any
    size: int
    at: int = 0

    def take(self, size: int) -> bytes:
        if size > self.size - self.at:
            raise DumpError("ends within its metadata")
        self.at += size
        data: bytes = self.read(size)
        if len(data) != size:
            raise DumpError("ends within its metadata")
        return data

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (size,) = self.unpack("<Q")
        if size > _MAX_STRING:
            raise DumpError(f"holds a string of {size} bytes")
        return self.take(size).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _GGUF_SCALARS:
            return self.unpack("<" + _GGUF_SCALARS[kind])[0]
        if kind == 8:
            return self.string()
        if kind != 9:
            raise DumpError(f"holds metadata of unknown type {kind}")
        inner, count = self.unpack("<IQ")
        if inner in _GGUF_SCALARS:
            self._pass(count * struct.calcsize("<" + _GGUF_SCALARS[inner]))
        elif inner == 8:
            if count > self.size // 8:
                raise DumpError("ends within its metadata")
            for _ in range(count):
                self._pass(self.unpack("<Q")[0])
        else:
            raise DumpError(f"holds metadata lists of type {inner}")
        return None

    def _pass(self, size: int) -> None:
        if size > self.size - self.at:
            raise DumpError("ends within its metadata")
        self.at += size
        self.seek(self.at)
