"""`PltpackConnector`: vLLM's connector interface (``KVConnectorBase_V1``) over the scheduler's and the worker's side.

In vLLM both sides live in one process or in two; in one they share the open archive. vLLM imports this module before
its workers start, and then looks into all modules in a way that fails on llvmlite's; so what needs numba is imported
later.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pltpack.errors import NotFoundError
from pltpack.serve.vllm.settings import ConnectorSettings
from pltpack.serve.vllm.steps import Load, Planner, Save
from pltpack.snapshot import Identity

if TYPE_CHECKING:
    from pltpack.serve.follow import FollowedArchive
    from pltpack.serve.vllm.worker import Worker

log = logging.getLogger("pltpack.serve")

_LOCK = threading.Lock()
_SHARED: weakref.WeakValueDictionary[str, FollowedArchive] = weakref.WeakValueDictionary()


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):
    """What a step loads and keeps."""

    loads: list[Load]
    saves: list[Save]


class PltpackConnector(KVConnectorBase_V1, SupportsHMA):
    """Starts prompts warm from an archive, and captures new ones.

    ``kv_connector_extra_config`` is described in `pltpack.serve.vllm.settings.ConnectorSettings`.

    Raises
    ------
    IdentityError
        If the archive is of another model, dtype or rotary embedding, naming the field.
    UnsupportedError
        If a setting is wrong, or the model's caches are of a kind that the connector does not serve.
    NotFoundError
        If there is no archive and prompts are not captured.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        from pltpack.serve.vllm.capture import Keeper
        from pltpack.serve.vllm.model import cache_shape, engine_identity
        from pltpack.serve.vllm.worker import Worker

        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config or {})
        shape = cache_shape(vllm_config, kv_cache_config)
        own = engine_identity(vllm_config, shape, settings.salt, settings.model)
        self._archive = _shared(settings, own)
        self._planner: Planner | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._planner = Planner(
                self._archive, shape.block_size, settings.salt, settings.capture, settings.recompute_last
            )
        else:
            keeper = Keeper(settings, own, self._archive.refresh) if settings.capture else None
            self._worker = Worker(self._archive, shape, vllm_config.cache_config.cache_dtype, keeper)
        warming = self._archive.warm_up()
        if role == KVConnectorRole.SCHEDULER:
            # Made last, when the engine has its weights and caches: requests come next.
            warming.join()

    @property
    def _scheduling(self) -> Planner:
        assert self._planner is not None
        return self._planner

    @property
    def _working(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """See the base class: what is not kept is a later miss, and nothing else."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See the base class: layers are waited for one by one."""
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        return self._scheduling.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        self._scheduling.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See the base class."""
        return StepMetadata(*self._scheduling.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        if connector_output.invalid_block_ids:
            self._scheduling.failed(set(connector_output.invalid_block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class: prompts are copied when they are complete, so blocks may go."""
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        self._working.register(kv_caches)

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        self._working.start(self._step().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See the base class."""
        self._working.fill(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See the base class: a prompt is copied when all its layers are there."""

    def wait_for_save(self) -> None:
        """See the base class."""
        self._working.finish(self._step().saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self._working.failed()

    def shutdown(self) -> None:
        """See the base class."""
        if self._worker is not None:
            self._worker.close()

    def take_events(self) -> Iterable[Any]:
        """See the base class."""
        return ()


def _shared(settings: ConnectorSettings, own: Identity) -> FollowedArchive:
    """The archive, opened once in a process."""
    from pltpack.serve.follow import FollowedArchive
    from pltpack.serve.vllm.model import expected_of

    def expected(identity: Identity) -> Identity:
        return expected_of(own, identity, settings.accept_unknown)

    key = repr((settings, own))
    with _LOCK:
        found = _SHARED.get(key)
        if found is None:
            found = FollowedArchive(
                settings.archive, expected, settings.accept_unknown, settings.profile,
                depth=settings.depth, workers=settings.workers, memory=settings.memory, timeout=settings.timeout,
                recompute_at_cut=settings.recompute_at_cut,
            )  # fmt: skip
            if found.loader() is None and not settings.capture:
                raise NotFoundError("no archive here, and prompts are not captured", settings.archive)
            _SHARED[key] = found
        return found
