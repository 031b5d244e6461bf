"""Prometheus metrics, computed from each reading of the daemon's shared memory.

pool        blocks, tokens, swap, prefix cache      calls     latency of RPCs and of lanes, the event loop
holders     sessions, tenants, regions, lanes       about     build, configuration, events
access      connections over TCP, refused callers   store     the block store
scheduling  queues, preemptions and tokens of schedulers
tiers       the tiers below the block store              spill     blocks of the pool below it, saved sessions
transfers   transfers between hosts
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
