"""Prometheus metrics, computed from each reading of the daemon's shared memory.

pool        blocks, tokens, swap, prefix cache      calls     latency of RPCs and of lanes, the event loop
holders     sessions, tenants, regions, lanes       about     build, configuration, events
access      connections over TCP, refused callers   store     the block store
scheduling  queues, preemptions and tokens of schedulers
tiers       the tiers below the block store              spill     blocks of the pool below it, saved sessions
transfers   transfers between hosts
"""

from kvservice.metrics.about import about_metrics
from kvservice.metrics.access import access_metrics
from kvservice.metrics.calls import call_metrics, event_loop_metric
from kvservice.metrics.holders import holder_metrics
from kvservice.metrics.pool import pool_metrics
from kvservice.metrics.restarts import restart_metrics
from kvservice.metrics.scheduling import scheduler_metrics
from kvservice.metrics.spill import spill_metrics
from kvservice.metrics.store import store_metrics
from kvservice.metrics.tiers import tier_metrics
from kvservice.metrics.transfers import transfer_metrics

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
