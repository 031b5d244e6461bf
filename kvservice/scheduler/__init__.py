"""The scheduler: which requests an engine computes in each step. Plain Python and NumPy over the block manager.

`Scheduler` is the API. Imports point down this list:

scheduler    Scheduler: the engines of one pool       integrity    checks of all invariants
engine       EngineScheduler: add, abort, schedule, update
admission    Admission: swapped and waiting requests  preemption   Preemptor: stalls and preemptions
state        EngineQueues: all requests of an engine  shares       PoolShares: engines by weight
drafts       Draft and InFlight: a batch in the making, and until its report
opening      Opener: a draft becomes a batch          reporting    Reporter: applies reports
speculation  proposals of tokens, computed and then verified
samples      Samples: forked, and ended one by one    snapshots    descriptions of requests, with their tokens
stats        counters, figures, latencies             waiting      WaitingQueue: by rank
decoding     DecodeSet: running sequences as arrays   token_times  TokenTimes of the latest tokens
requests     Request and its state                    batches      ScheduledBatch: the frozen result
reports      Report: the sampled tokens of a batch, and its checks
config       SchedulerConfig: budgets and policies
"""

from kvservice.scheduler.batches import Preemption, QueueCounts, ScheduledBatch
from kvservice.scheduler.config import BatchPolicy, PreemptionMode, QueueOrder, SchedulerConfig, Speeds
from kvservice.scheduler.engine import EngineScheduler
from kvservice.scheduler.integrity import check_integrity
from kvservice.scheduler.reports import Report
from kvservice.scheduler.requests import Phase, Request
from kvservice.scheduler.scheduler import Scheduler
from kvservice.scheduler.snapshots import RequestSnapshot, SampleSnapshot
from kvservice.scheduler.stats import BUCKETS_S as LATENCY_BUCKETS_S
from kvservice.scheduler.stats import Histogram, Latencies, SchedulerCounters, SchedulerFigures

__all__ = [
    "LATENCY_BUCKETS_S",
    "BatchPolicy",
    "EngineScheduler",
    "Histogram",
    "Latencies",
    "Phase",
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
    "SchedulerCounters",
    "SchedulerFigures",
    "Speeds",
    "check_integrity",
]
