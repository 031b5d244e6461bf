"""Statistics of an engine's scheduler: gauges, counters, and histograms of latency.

The callers of `schedule` and `update` pass the time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.blocks.plans import Int64Array
from kvservice.blocks.pool import Float64Array
from kvservice.scheduler.batches import ScheduledBatch
from kvservice.scheduler.requests import RequestState

# Upper bounds of the histograms' buckets.
BUCKETS_S = (
    1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0,
)  # fmt: skip
WIDTH = len(BUCKETS_S) + 1
_BOUNDS_S = np.array(BUCKETS_S)


class Histogram:
    """A histogram of seconds: `counts` int64[buckets + 1], the last above all bounds, and their sum `seconds`."""

    def __init__(self) -> None:
        self.counts: Int64Array = np.zeros(WIDTH, np.int64)
        self.seconds = 0.0
        # Updating an element of a memoryview takes a quarter of NumPy's time.
        self._counts: Any = self.counts.data

    def observe(self, seconds: float | Float64Array, count: int) -> None:
        """Add `count` durations: float64[count], or one number if they are equal. A negative one, of a clock that was
        set back, counts as 0."""
        if isinstance(seconds, float):
            seconds = max(seconds, 0.0)
            self._counts[bisect_left(BUCKETS_S, seconds)] += count
            self.seconds += seconds * count
        else:
            seconds = np.maximum(seconds, 0.0)
            self.counts += np.bincount(_BOUNDS_S.searchsorted(seconds), minlength=WIDTH)
            self.seconds += float(seconds.sum())


class Latencies:
    """Latencies of all engines of a pool: from adding a request to the report with the first token of each of its
    samples, and from report to report of the same sequence."""

    def __init__(self) -> None:
        self.first_token = Histogram()
        self.between_tokens = Histogram()

    def observe_token(self, state: RequestState, now_s: float) -> None:
        """Note that a token of a request in its prefill is reported: its first one, or the next after a preemption."""
        if state.generated:
            self.between_tokens.observe(now_s - state.token_at_s, 1)
        else:
            self.first_token.observe(now_s - state.arrived_at_s, state.num_places)
        state.token_at_s = now_s


@dataclass(slots=True)
class SchedulerFigures:
    """Figures of a scheduler: gauges, then counters since it was opened.

    The gauges are requests that wait, sequences that run or are swapped out, and running sequences that the last batch
    left without a block. An engine counts in an object of its own, whose gauges stay 0.

    Requests: `added`, `finished`, `aborted`, and `refused` by `add`. `stalls` counts a running sequence once for each
    step in which it waits for a block. `prompt_tokens` counts prompts of admitted requests, `cached_tokens` the part of
    them that was in the prefix cache, and `recomputed_tokens` tokens computed again after preemptions.
    `proposed_tokens` were verified, and `accepted_tokens` of them were right.
    """

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    stalled: int = 0

    steps: int = 0
    added: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    recompute_preemptions: int = 0
    swap_preemptions: int = 0
    stalls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, other: SchedulerFigures) -> None:
        """Add the figures of another engine."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count_batch(self, batch: ScheduledBatch) -> None:
        """Count a batch that was made."""
        if batch.step is not None:
            self.steps += 1
        self.stalls += batch.num_stalled
        if batch.preempted:
            swapped = sum(one.swapped for one in batch.preempted)
            self.swap_preemptions += swapped
            self.recompute_preemptions += len(batch.preempted) - swapped

    def count_admission(self, state: RequestState, num_cached: int) -> None:
        """Count the tokens of an admitted request, of which `num_cached` need not be computed."""
        if state.preempted:
            self.recomputed_tokens += max(state.lost - num_cached, 0)
            state.lost = 0
        else:
            self.prompt_tokens += len(state.tokens)
            self.cached_tokens += num_cached
