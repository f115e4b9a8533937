"""Identities that the command line names by a file: of a dump, of a model, or written down as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pltpack.snapshot import Identity


def identity_file(file: Path | None) -> Identity | None:
    """The identity in a JSON file (also what ``inspect --json`` prints), or of the first session of a dump."""
    from pltpack.dumps import open_dumps
    from pltpack.dumps.base import MAX_JSON, parse_json
    from pltpack.errors import DumpError, PltpackError
    from pltpack.snapshot import Identity

    if file is None:
        return None
    if file.suffix.lower() != ".json":
        first = next(open_dumps(file), None)
        if first is None:
            raise DumpError("holds no session whose identity could be taken", file)
        return first.identity
    try:
        if file.exists() and not file.is_file():
            raise DumpError("is not a regular file")
        if file.stat().st_size > MAX_JSON:
            raise DumpError(f"identity file is larger than {MAX_JSON} bytes")
        data = parse_json(file.read_bytes(), "identity file")
        # What `inspect --json` prints serves as well.
        inner = data.get("identity") if isinstance(data, Mapping) else None
        return Identity.from_json(data if inner is None else inner)
    except PltpackError as error:
        raise error.at(file) from None


def engine_options(options: dict[str, str], engine: str, target: Path | None) -> dict[str, str]:
    """Settings of the format to write, with the architecture of a GGUF file named by ``--for``."""
    from pltpack.dumps.model_config import gguf_arch

    if engine != "llama.cpp" or target is None or "arch" in options or "rope_style" in options:
        return options
    arch = gguf_arch(target)
    return options if arch is None else {**options, "arch": arch}


def known_identity(model: Path | None, identity: Path | None) -> Identity | None:
    """What ``--model`` and ``--identity`` say together; they must agree."""
    from pltpack.dumps.model_config import model_identity

    said = identity_file(identity)
    if model is None:
        return said
    found = model_identity(model)
    return found if said is None else said.completed(found, str(model))
