"""Prometheus metrics, computed from each reading of the daemon's shared memory.

daemon      build and configuration, connections and refused callers, latency of calls, restarts, transfers
pool        blocks, tokens, swap, prefix cache; sessions, tenants, regions, lanes; the schedulers
store       the block store, the tiers below it, and blocks of the pool and sessions that are saved there
"""

from kvservice.metrics.daemon import (
    about_metrics,
    access_metrics,
    call_metrics,
    event_loop_metric,
    restart_metrics,
    transfer_metrics,
)
from kvservice.metrics.pool import holder_metrics, pool_metrics, scheduler_metrics
from kvservice.metrics.store import spill_metrics, store_metrics, tier_metrics

__all__ = [
    "about_metrics",
    "access_metrics",
    "call_metrics",
    "event_loop_metric",
    "holder_metrics",
    "pool_metrics",
    "restart_metrics",
    "scheduler_metrics",
    "spill_metrics",
    "store_metrics",
    "tier_metrics",
    "transfer_metrics",
]
