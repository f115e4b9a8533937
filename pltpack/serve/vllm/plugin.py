"""The entry point of the group ``vllm.general_plugins``: the connector by name, and an environment variable for all.

With ``PLTPACK_ARCHIVE=FOLDER`` an engine that names no connector of its own gets this one, with failed loads
recomputed; ``PLTPACK_VLLM`` may hold more of ``kv_connector_extra_config`` as a JSON object.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

from pltpack.errors import UnsupportedError

NAME = "PltpackConnector"
MODULE = "pltpack.serve.vllm"
ARCHIVE, OPTIONS = "PLTPACK_ARCHIVE", "PLTPACK_VLLM"


def register() -> None:
    """Register the connector with vLLM; harmless when repeated, as vLLM does in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    if os.environ.get(ARCHIVE):
        _turn_on()


def transfer_config() -> dict[str, Any]:
    """The ``--kv-transfer-config`` that the environment asks for.

    Raises
    ------
    UnsupportedError
        If the options are no JSON object.
    """
    try:
        extra = json.loads(os.environ.get(OPTIONS) or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise UnsupportedError(f"environment variable {OPTIONS} is not a JSON object")
    return {
        "kv_connector": NAME,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"archive": os.environ[ARCHIVE]} | extra,
    }


def _turn_on() -> None:
    """Let engine arguments that name no connector name this one."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs.create_engine_config
    if getattr(made, "_pltpack", False):
        return

    @functools.wraps(made)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.kv_transfer_config is None:
            self.kv_transfer_config = KVTransferConfig(**transfer_config())
        return made(self, *args, **kwargs)

    create_engine_config._pltpack = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
