"""The class that vLLM loads. It passes vLLM's calls on to the scheduler's or the worker's side."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core import kv_cache_utils
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvservice.client import KVClient, Store, StoreNamespace
from kvservice.integrations.common.identity import session_name
from kvservice.integrations.common.options import ConnectorOptions
from kvservice.integrations.common.waiting import ComputeTime
from kvservice.integrations.vllm.asking import StoreAsker
from kvservice.integrations.vllm.checks import check_supported
from kvservice.integrations.vllm.copiers import block_copier
from kvservice.integrations.vllm.finders import StoreFinder
from kvservice.integrations.vllm.identity import worker_namespace
from kvservice.integrations.vllm.layout import BlockLayout, block_layout
from kvservice.integrations.vllm.logs import log_with_vllm
from kvservice.integrations.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from kvservice.integrations.vllm.scheduling import ConnectorScheduler
from kvservice.integrations.vllm.steps import ConnectorStep
from kvservice.integrations.vllm.working import ConnectorWorker

logger = logging.getLogger("vllm.kvservice")

# How long the end of vLLM waits for blocks that are being saved, in seconds.
CLOSE_S = 10.0


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries a step to the workers."""

    step: ConnectorStep


@dataclass
class WorkerNamespace(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Tells the scheduler where a worker keeps its blocks."""

    namespace: StoreNamespace


class KVServiceConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the package. vLLM makes one object for its scheduler and one for each worker."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises InvalidArgumentError for a configuration whose blocks would be wrong or never found."""
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        transfer = vllm_config.kv_transfer_config
        self._options = ConnectorOptions.of(transfer.kv_connector_extra_config)
        fixed_seed = "PYTHONHASHSEED" in os.environ or hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
        check_supported(vllm_config, kv_cache_config, fixed_seed=fixed_seed)
        self._client: KVClient | None = None
        self._asker: StoreAsker | None = None
        self._worker: ConnectorWorker | None = None
        self._namespace: StoreNamespace | None = None
        self._failed_blocks: set[int] = set()
        self._scheduler = ConnectorScheduler(
            vllm_config.cache_config.block_size, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer
        )
        if role is KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                'kv_load_failure_policy is "%s": requests fail if the daemon ends while they load blocks. Set it to '
                '"recompute" in --kv-transfer-config.',
                transfer.kv_load_failure_policy,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is a miss later."""
        return False

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout = block_layout(kv_caches, self._kv_cache_config.num_blocks)
        copier = block_copier(layout, verify=self._options.verify)
        self._namespace = self._make_namespace(layout, kv_caches)
        logger.info("blocks of %d bytes are kept in %s", layout.block_bytes, self._namespace)
        self._worker = ConnectorWorker(
            self._open(self._namespace, "vllm worker", self._options.transfer_timeout_s), copier, layout.block_bytes
        )

    def get_handshake_metadata(self) -> WorkerNamespace | None:
        return None if self._namespace is None else WorkerNamespace(self._namespace)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request continues when all its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are saved after the last layer."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        if self._worker is None:
            return None, None
        finished, failed = self._worker.take_finished_loads()
        self._failed_blocks |= failed
        return None, finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._worker is None:
            return None
        counters = self._worker.take_counters()
        return None if counters.empty else ConnectorStats(data=counters.as_dict())

    # ---- scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        finders, timeout_s = [], self._options.lookup_timeout_s
        for _, worker in sorted(metadata.items()):
            assert isinstance(worker, WorkerNamespace)
            store = self._open(worker.namespace, "vllm scheduler", timeout_s)
            compute = ComputeTime.of(
                self._options.prefill_tokens_per_s,
                self._vllm_config.cache_config.block_size,
                worker.namespace.block_bytes,
                len(metadata),
            )
            finders.append(StoreFinder(store, compute, timeout_s))
        self._asker = StoreAsker(finders)
        self._scheduler.use(self._asker)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.num_matched_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002
        """vLLM may use the blocks again at once: workers look for pending saves before they overwrite a block."""
        self._scheduler.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """Find nothing that was saved until now."""
        self._scheduler.reset()
        return True

    # ---- both

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close(CLOSE_S)
            self._worker = None
        if self._asker is not None:
            self._asker.close(CLOSE_S)
            self._asker = None
        if self._client is not None:
            self._client.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(*arguments)

    def _step(self) -> ConnectorStep:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.step

    def _open(self, namespace: StoreNamespace, part: str, timeout_s: float) -> Store:
        """Open a store. The daemon may start later than vLLM."""
        if self._client is None:
            self._client = KVClient(self._options.address, token=self._options.token, connect_timeout_s=None)
        return self._client.store(
            namespace, tenant=self._options.tenant, name=session_name(part, namespace), timeout_s=timeout_s
        )

    def _make_namespace(self, layout: BlockLayout, kv_caches: Mapping[str, torch.Tensor]) -> StoreNamespace:
        device = next(iter(kv_caches.values())).device
        return worker_namespace(
            self._vllm_config,
            layout,
            engine=f"vLLM {vllm.__version__}, {self._backends()} on {_processor(device)}",
            layers=list(kv_caches),
            weights=self._options.weights,
            tensor_parallel=get_tp_group(),
            pipeline_parallel=get_pp_group(),
        )

    def _backends(self) -> str:
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase).values()
        return "+".join(sorted({layer.get_attn_backend().get_name() for layer in layers}))


def _processor(device: torch.device) -> str:
    """Return what may decide how a backend orders the bytes of a block."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    amx = " AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{amx}"
