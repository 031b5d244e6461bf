"""The class that vLLM loads. It passes vLLM's calls on to the scheduler's or the worker's side, and what they report on
to vLLM's log, metrics and events."""

from __future__ import annotations

import dataclasses
import logging
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from prometheus_client import Counter
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvservice.client import KVClient, Store, StoreNamespace
from kvservice.client.store.memory import StoreChanges
from kvservice.integrations.common import ComputeTime, digest, session_name
from kvservice.integrations.vllm import versions
from kvservice.integrations.vllm.copies import BlockLayout, block_layout
from kvservice.integrations.vllm.finder import StoreFinder
from kvservice.integrations.vllm.gpu_copies import block_copier
from kvservice.integrations.vllm.groups import CacheGroups
from kvservice.integrations.vllm.lookup import StoreLookup
from kvservice.integrations.vllm.scheduling import ConnectorScheduler, SchedulingOptions
from kvservice.integrations.vllm.settings import VLLMOptions, check_supported, worker_namespace
from kvservice.integrations.vllm.steps import ConnectorStep, MemoryId, Rank, TransferCounters, WorkerReport
from kvservice.integrations.vllm.working import ConnectorWorker

logger = logging.getLogger("vllm.kvservice")

# How long the end of vLLM waits for blocks that are being saved, in seconds. vLLM kills its workers after 5.
CLOSE_S = 3.0
MIB = 1 << 20


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries a step to the workers."""

    step: ConnectorStep


@dataclass
class WorkerNamespace(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Tells the scheduler where the worker with a rank keeps its blocks, and which memory of the store it maps."""

    rank: Rank
    namespace: StoreNamespace
    memory: MemoryId | None


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Carries a worker's report to the scheduler. vLLM adds up those of all workers after a step."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        assert isinstance(other, ReportMetadata)
        self.report.add(other.report)
        return self


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """The sums of TransferCounters over workers and steps, by name."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        names = self.data.keys() | other.data.keys()
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter of each of TransferCounters for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {}
        for field in dataclasses.fields(TransferCounters):
            family = counter(
                name=f"vllm:kvservice_{field.name}",
                documentation=f"{field.name.replace('_', ' ')} by the connector of kvservice.",
                labelnames=labelnames,
            )
            self._counters[field.name] = {
                engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)


class KVServiceConnector(KVConnectorBase_V1, *versions.groups_of_caches()):  # type: ignore[misc]
    """See the package. vLLM makes one object for its scheduler and one for each worker."""

    if (_source := versions.cache_hit_source()) is not None:
        _cache_hit_source = _source

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises InvalidArgumentError for a configuration whose blocks would be wrong or never found."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        transfer = vllm_config.kv_transfer_config
        self._options = options = VLLMOptions.of(transfer.kv_connector_extra_config)
        check_supported(vllm_config, fixed_seed=versions.has_fixed_seed())
        self._groups = CacheGroups.of(kv_cache_config, vllm_config.cache_config.block_size)
        self._client: KVClient | None = None
        self._lookup: StoreLookup | None = None
        self._worker: ConnectorWorker | None = None
        self._namespace: StoreNamespace | None = None
        self._changes: StoreChanges | None = None
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        # Verified loads fail one by one, which vLLM must be able to mend. vLLM copies recurrent states to the block of
        # the next tokens before a step loads.
        max_step_mib = 0 if options.verify or self._groups.recurrent else options.max_step_load_mib
        self._recomputes = self._groups.num == 1 and not versions.schedules_ahead(vllm_config)
        self._scheduler = ConnectorScheduler(
            SchedulingOptions(
                groups=self._groups,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                max_step_bytes=max_step_mib * MIB,
                max_beside_bytes=options.max_beside_load_mib * MIB,
                max_held=options.max_held_percent / 100,
                save_decode=options.save_decode,
                adapters_by_name=not versions.hashes_have_paths(),
                checks_loads=not self._recomputes,
            )
        )
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_is_made = versions.frees_at_once(transfer)
            versions.warn_of_version(vllm.__version__)
            if transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    'kv_load_failure_policy is "%s": requests fail if the daemon ends while they load blocks. Set it '
                    'to "recompute" in --kv-transfer-config.',
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
            self._open(self._namespace, "vllm worker", self._options.transfer_timeout_s),
            copier,
            layout.block_bytes,
            rank=(get_pp_group().rank_in_group, get_tp_group().rank_in_group),
            blocks_of=_rank(self._namespace),
            recomputes=self._recomputes,
        )

    def get_handshake_metadata(self) -> WorkerNamespace | None:
        if self._namespace is None or self._worker is None:
            return None
        return WorkerNamespace(self._worker.rank, self._namespace, self._worker.memory)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all computations of a step wait for its loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are saved after the last layer."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        if self._worker is None:
            return None, None
        ended = self._worker.end_step(computes=self._step().computes)
        if self._groups.num == 1:
            self._failed_blocks |= ended.wrong
        else:
            self._failed_requests |= ended.failed
        return None, ended.loaded

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM calls this since 0.31."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving, self._failed_requests = self._failed_requests, set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._worker is None:
            return None
        counters = self._worker.take_counters()
        return None if counters.empty else ConnectorStats(data=counters.as_dict())

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        report = None if self._worker is None else self._worker.take_report()
        return None if report is None else ReportMetadata(report)

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler_is_made()
        self._scheduler.bind(gpu_block_pool, versions.name_of_block)
        versions.before_reset(gpu_block_pool, self._scheduler.free_held)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        finders: dict[Rank, StoreFinder] = {}
        blocks_of: dict[Rank, Rank] = {}
        block_bytes, report = 0, WorkerReport()
        for _, worker in sorted(metadata.items()):
            assert isinstance(worker, WorkerNamespace)
            namespace = worker.namespace
            rank = blocks_of[worker.rank] = _rank(namespace)
            report.memories[worker.rank] = worker.memory
            block_bytes = max(block_bytes, namespace.block_bytes)
            if rank not in finders:
                finders[rank] = self._finder(namespace, len(metadata))
        self._lookup = StoreLookup(
            list(finders.values()), self._options.lookup_timeout_s, self._options.transfer_timeout_s
        )
        if versions.tells_events(self._vllm_config) and self._groups.leading and finders:
            first = next(iter(finders.values()))
            self._changes = StoreChanges(lambda: None if self._scheduler.has_own_keys else first.memory)
        self._scheduler.use(self._lookup, blocks_of, block_bytes)
        self._scheduler.received(report, (), frozenset())

    def on_new_request(self, request: Any) -> None:
        self._scheduler.expect(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, ReportMetadata) else WorkerReport()
        if (stats := connector_output.kv_connector_stats) is not None:
            self._scheduler.count(stats.data)
        self._scheduler.received(
            report,
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or frozenset(),
            getattr(connector_output, "failed_recving", None) or frozenset(),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """vLLM may give the blocks back at once: those that are being saved are held."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self._scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """An idle vLLM goes on until workers have reported the saves, so that their blocks are free again."""
        return self._scheduler.holds

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.delays_others

    def take_events(self) -> Iterable[Any]:
        """Tell routers which blocks the store has, if vLLM publishes events and this process maps the store."""
        if self._changes is None:
            return ()
        return versions.cache_events(*self._changes.take(), self._groups.block_size)

    def reset_cache(self) -> bool:
        """Find nothing that was saved until now."""
        self._scheduler.reset()
        return True

    # ---- both

    def shutdown(self) -> None:
        until = time.monotonic() + CLOSE_S
        if self._worker is not None:
            self._worker.close(CLOSE_S)
            self._worker = None
        if self._lookup is not None:
            self._lookup.close(max(until - time.monotonic(), 0.0))
            self._lookup = None
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

    def _finder(self, namespace: StoreNamespace, num_workers: int) -> StoreFinder:
        compute = ComputeTime.of(
            self._options.prefill_tokens_per_s,
            self._vllm_config.cache_config.block_size,
            namespace.block_bytes,
            num_workers,
        )
        store, background = (
            self._open(namespace, part, self._options.transfer_timeout_s)
            for part in ("vllm scheduler", "vllm background")
        )
        return StoreFinder(_rank(namespace), store, background, compute)

    def _make_namespace(self, layout: BlockLayout, kv_caches: Mapping[str, torch.Tensor]) -> StoreNamespace:
        device = next(iter(kv_caches.values())).device
        invariant = ", batch-invariant" if versions.is_batch_invariant() else ""
        return worker_namespace(
            self._vllm_config,
            layout,
            engine=f"vLLM {vllm.__version__}, {self._backends()} on {_processor(device)}{invariant}",
            layers=list(kv_caches),
            groups=self._groups_of_layers(),
            weights=self._options.weights,
            replicas=versions.num_replicas(self._kv_cache_config),
            tensor_parallel=get_tp_group(),
            pipeline_parallel=get_pp_group(),
        )

    def _groups_of_layers(self) -> str:
        """Return which layers are in which group; "" if all need all blocks."""
        if self._groups.leading:
            return ""
        layers = (digest(*group.layer_names)[:16] for group in self._kv_cache_config.kv_cache_groups)
        return f"{self._groups}; {', '.join(layers)}"

    def _backends(self) -> str:
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase).values()
        return "+".join(sorted({layer.get_attn_backend().get_name() for layer in layers}))


def _rank(namespace: StoreNamespace) -> Rank:
    return namespace.pp_rank, namespace.tp_rank


def _log_with_vllm(vllm_name: str = "vllm", own_name: str = "kvservice") -> None:
    """Write what this package logs where vLLM writes its own lines. vLLM's logger does not use the root logger, so
    lines of the client below a warning would not appear. Does nothing if the application has set handlers up."""
    own, engine = logging.getLogger(own_name), logging.getLogger(vllm_name)
    if own.handlers or not engine.handlers or logging.getLogger().handlers:
        return
    for handler in engine.handlers:
        own.addHandler(handler)
    own.setLevel(engine.getEffectiveLevel())
    own.propagate = False


def _processor(device: torch.device) -> str:
    """Return what may decide how a backend orders the bytes of a block."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    amx = " AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{amx}"
