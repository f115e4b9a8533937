"""What a load is given, and what it hands over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pltpack.archive.shard import Shard
from pltpack.serve.destinations import Destination

if TYPE_CHECKING:
    from pltpack.serve.on_device import DeviceStages


class LoadedLayer(NamedTuple):
    """A layer that is ready: keys and values ``[H, T, D]`` where the destination has them so, else None."""

    layer: int
    keys: Any
    values: Any


class Job(NamedTuple):
    """What is to be loaded, where to, what decodes it if that is not the CPU, and who is told each stage's seconds."""

    shard: Shard
    tokens: int
    destination: Destination
    device: DeviceStages | None = None
    observe: Callable[[str, float], object] | None = None
