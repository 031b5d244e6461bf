"""Latency of calls, by method, status and transport."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

BUCKETS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class RpcMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._histogram = Histogram(
            "kvservice_rpc_duration_seconds",
            "Time from a call's arrival to its answer, without the transport.",
            ("method", "status", "transport"),
            registry=registry,
            buckets=BUCKETS_S,
        )
        # Looking a labelled child up costs more than observing it; all labels come from fixed sets.
        self._children: dict[tuple[str, str, str], Histogram] = {}

    def observe(self, method: str, status: str, transport: str, seconds: float) -> None:
        key = (method, status, transport)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._histogram.labels(*key)
        child.observe(seconds)
