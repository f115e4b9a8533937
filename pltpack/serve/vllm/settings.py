"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pltpack.errors import UnsupportedError
from pltpack.snapshot import Identity

#: Where captured prompts go.
DUMPS, ARCHIVE = "dumps", "archive"


@dataclasses.dataclass(frozen=True)
class ConnectorSettings:
    """Settings of the connector.

    Attributes
    ----------
    archive : Path
        Archive folder; may be absent only where prompts are captured.
    capture : bool
        Keep the caches of new prompts.
    capture_to : str
        ``dumps``: a file per prompt in `dumps`; ``archive``: append to `archive`, which is made if it is not there.
    dumps : Path
        Folder of captured dumps; ``<archive>.dumps`` by default.
    quality : str or None
        Tier of what is appended; the archive's own by default, ``lossless`` for a new one.
    profile : Path or None
        Profile of an archive that refers to one outside.
    salt : str or None
        The tenant. Requests of another ``cache_salt`` are neither matched nor captured.
    model : str or None
        Model name for captured identities; the name that vLLM serves by default. Names are not compared.
    accept_unknown : tuple of str
        Identity fields that the archive, or vLLM, need not know.
    depth : int
        Units in flight, see `pltpack.serve.loader.Loader`; `workers` and `memory` too.
    timeout : float or None
        Seconds that one load may take.
    recompute_last : int
        Last tokens of a prompt that the engine computes though they are stored; at least 1.
    recompute_at_cut : int or None
        Further tokens that the engine computes where a prompt leaves a stored session before its end; what the
        archive's tier asks for by default: see `pltpack.serve.prefixes.PrefixIndex`.
    queue_bytes : int
        Captured caches that may wait to be written; further ones are not kept.
    """

    archive: Path
    capture: bool = False
    capture_to: str = DUMPS
    dumps: Path = Path()
    quality: str | None = None
    profile: Path | None = None
    salt: str | None = None
    model: str | None = None
    accept_unknown: tuple[str, ...] = ()
    depth: int = 3
    workers: int | None = None
    memory: int = 1 << 30
    timeout: float | None = None
    recompute_last: int = 2
    recompute_at_cut: int | None = None
    queue_bytes: int = 1 << 30

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Settings from what a user wrote.

        Raises
        ------
        UnsupportedError
            Naming the setting that is missing, unknown or of the wrong type.
        """
        kinds: dict[str, type | tuple[type, ...]] = {
            "archive": str, "capture": bool, "capture_to": str, "dumps": str, "quality": str, "profile": str,
            "salt": str, "model": str, "accept_unknown": (list, tuple), "depth": int, "workers": int, "memory": int,
            "timeout": (int, float), "recompute_last": int, "recompute_at_cut": int,
            "queue_bytes": int,
        }  # fmt: skip
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in kinds:
                raise UnsupportedError(f"kv_connector_extra_config has an unknown setting {name!r}")
            wrong = not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is not bool)
            if value is not None and wrong:
                raise UnsupportedError(f"kv_connector_extra_config: {name!r} has the wrong type")
            if value is not None:
                values[name] = value
        if not values.get("archive"):
            raise UnsupportedError("kv_connector_extra_config needs 'archive', the folder of an archive")
        if values.get("capture_to", DUMPS) not in (DUMPS, ARCHIVE):
            raise UnsupportedError(f"kv_connector_extra_config: 'capture_to' is neither {DUMPS!r} nor {ARCHIVE!r}")
        if values.get("recompute_last", 2) < 1:
            raise UnsupportedError("kv_connector_extra_config: 'recompute_last' is less than 1")
        unknown = set(values.get("accept_unknown", ())) - set(Identity.ARCHIVE_FIELDS)
        if unknown:
            raise UnsupportedError(f"kv_connector_extra_config: no identity field {sorted(map(str, unknown))[0]!r}")
        archive = Path(values.pop("archive"))
        dumps = Path(values.pop("dumps", None) or archive.with_name(archive.name + ".dumps"))
        if "profile" in values:
            values["profile"] = Path(values["profile"])
        accepted = tuple(values.pop("accept_unknown", ()))
        return cls(archive, dumps=dumps, accept_unknown=accepted, **values)
