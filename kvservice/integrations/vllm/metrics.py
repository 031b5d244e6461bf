"""The statistics hooks of vLLM: its log and its Prometheus metrics show what the workers count."""

from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvservice.integrations.vllm.steps import TransferCounters


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
