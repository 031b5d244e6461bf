"""The scheduler: which requests an engine computes in each step. Plain Python and NumPy over the block manager.

`Scheduler` is the API. Imports point down this list:

scheduler    Scheduler: the engines of one pool, and the checks of all invariants
engine       EngineScheduler: add, abort, schedule, update; the opener of steps; shares of engines by weight
reporting    reports: checked and applied; proposals, samples, retries
admission    Admission: swapped and waiting requests join the batch; Preemptor: stalls and preemptions
queues       EngineQueues: all requests of an engine; their descriptions
stats        counters, figures, latencies
batches      DecodeSet, Draft, ScheduledBatch, InFlight: a batch from its choice to its report
requests     Request, its checks and its state
config       SchedulerConfig: budgets and policies
"""

from kvservice.scheduler.batches import Preemption, QueueCounts, ScheduledBatch
from kvservice.scheduler.config import BatchPolicy, PreemptionMode, QueueOrder, SchedulerConfig, Speeds
from kvservice.scheduler.engine import MAX_WEIGHT, MIN_WEIGHT, EngineScheduler, PoolShares
from kvservice.scheduler.queues import Needs, RequestSnapshot, SampleSnapshot
from kvservice.scheduler.reporting import Report
from kvservice.scheduler.requests import Phase, Request
from kvservice.scheduler.scheduler import Scheduler, check_integrity
from kvservice.scheduler.stats import BUCKETS_S as LATENCY_BUCKETS_S
from kvservice.scheduler.stats import Histogram, Latencies, SchedulerFigures

__all__ = [
    "LATENCY_BUCKETS_S",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "BatchPolicy",
    "EngineScheduler",
    "Histogram",
    "Latencies",
    "Needs",
    "Phase",
    "PoolShares",
    "Preemption",
    "PreemptionMode",
    "QueueCounts",
    "QueueOrder",
    "Report",
    "Request",
    "RequestSnapshot",
    "SampleSnapshot",
    "ScheduledBatch",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerFigures",
    "Speeds",
    "check_integrity",
]
