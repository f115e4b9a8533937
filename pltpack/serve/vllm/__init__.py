"""vLLM: a connector that starts prompts warm from an archive and captures new ones (docs/engines/vllm.md).

``pltpack.serve.vllm`` is the module path that ``--kv-transfer-config`` names; vLLM itself is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["PltpackConnector"]

if TYPE_CHECKING:
    from pltpack.serve.vllm.connector import PltpackConnector


def __getattr__(name: str) -> Any:
    if name != "PltpackConnector":
        raise AttributeError(f"module 'pltpack.serve.vllm' has no attribute {name!r}")
    return importlib.import_module("pltpack.serve.vllm.connector").PltpackConnector
