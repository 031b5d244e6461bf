"""Counters, gauges and latencies of a scheduler, compared with what was done."""

from __future__ import annotations

import bisect
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from schedule_rig import EngineRig, make_manager, make_rig, open_rig

from kvservice.bench.bookkeeping import make_trace, replay
from kvservice.errors import KVServiceError
from kvservice.scheduler import (
    LATENCY_BUCKETS_S,
    BatchPolicy,
    EngineScheduler,
    Histogram,
    PreemptionMode,
    Report,
    Request,
    ScheduledBatch,
    Scheduler,
    SchedulerConfig,
    SchedulerFigures,
)


def counts_of(durations_s: list[float]) -> list[int]:
    """Count durations by bucket, one after the other."""
    counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
    for seconds in durations_s:
        counts[bisect.bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
    return counts


def assert_histogram(histogram: Histogram, durations_s: list[float]) -> None:
    assert histogram.counts.tolist() == counts_of(durations_s)
    assert histogram.seconds == pytest.approx(sum(durations_s))


def test_equal_and_different_durations_fall_into_the_same_buckets() -> None:
    durations = [0.0, 0.001, 0.0011, 0.02, 0.5, 200.0, 201.0, -1.0]
    one_by_one, together = Histogram(), Histogram()
    for seconds in durations:
        one_by_one.observe(seconds, 2)
    together.observe(np.array(durations * 2), 16)
    expected = [max(seconds, 0.0) for seconds in durations] * 2
    assert_histogram(one_by_one, expected)
    assert_histogram(together, expected)


MAX_WIDTH = 3


class Workload:
    """Random requests under a clock with uneven steps. It notes what it does, and how long tokens took."""

    def __init__(self, rig: EngineRig, seed: int, max_width: int, ahead: bool) -> None:
        self.rig, self.random, self.now_s = rig, random.Random(seed), 100.0
        self.max_width, self.ahead = max_width, ahead
        self.added_at: dict[int, float] = {}
        self.token_at: dict[int, float] = {}
        self.first_s: list[float] = []
        self.between_s: list[float] = []
        self.added = self.aborted = self.refused = 0

    def arrive(self) -> None:
        for _ in range(self.random.randrange(3)):
            name, size = MAX_WIDTH * self.added, self.random.randrange(1, 30)
            width = self.random.randint(1, self.max_width)
            self.added += 1
            self.added_at |= {name + sample: self.now_s for sample in range(width)}
            prompt = range(100 * name, 100 * name + size)
            stop = self.random.randrange(1, 20)
            self.rig.add(name, prompt, stop + self.random.randrange(3), stop, width=width, now_s=self.now_s)
        if self.random.random() < 0.1:
            self.refused += 1
            with pytest.raises(KVServiceError):
                self.rig.engine.add(Request(0, [], 1))

    def abort(self) -> None:
        known = set(self.rig.engine.queues.requests) - self.rig.aborted
        if self.random.random() < 0.1 and known:
            self.rig.abort(self.random.choice(sorted(known)))
            self.aborted += 1

    def step(self) -> None:
        batch = self.rig.begin(now_s=self.now_s)
        self.abort()
        self.now_s += self.random.choice([0.0, 0.002, 0.01, 0.3, 4.0])
        if self.rig.flight and (batch.step is None or len(self.rig.flight) > self.ahead):
            self.report()

    def report(self) -> None:
        """Report the oldest batch, and note the time of each of its tokens."""
        before = {name: len(output) for name, output in self.rig.outputs.items()}
        self.rig.end(self.rig.flight[0], self.now_s)
        for name, count in before.items():
            if len(self.rig.outputs[name]) == count:
                continue
            if name in self.token_at:
                self.between_s.append(self.now_s - self.token_at[name])
            else:
                self.first_s.append(self.now_s - self.added_at[name])
            self.token_at[name] = self.now_s

    def run(self, steps: int) -> None:
        for number in range(steps):
            if number < steps // 2:
                self.arrive()
            self.step()
        while len(self.rig.engine) or self.rig.flight:
            self.step()


CONFIGS: list[dict[str, Any]] = [
    {},
    {"max_stalled_fraction": 0.0, "reserve_steps": 0},
    {"preemption": PreemptionMode.SWAP, "reserve_steps": 0},
    {"batches": BatchPolicy.PREFILL_FIRST},
    {"max_step_tokens": 16, "max_stalled_fraction": 0.5, "reserve_steps": 0},
]


def test_figures_say_what_was_done() -> None:
    """check_figures fails if one differs."""
    with each_row() as row:
        for config in CONFIGS:
            for max_width in (1, MAX_WIDTH):
                for ahead in (False, True):
                    with row((config, max_width, ahead)):
                        check_figures(config, max_width, ahead)


def check_figures(config: dict[str, Any], max_width: int, ahead: bool) -> None:
    rig = make_rig(24, {"num_swap_blocks": 20}, **config)
    work = Workload(rig, len(config), max_width, ahead)
    work.run(150)
    assert_histogram(rig.scheduler.latencies.first_token, work.first_s)
    assert_histogram(rig.scheduler.latencies.between_tokens, work.between_s)
    figures, batches = rig.engine.figures(), rig.batches
    assert (figures.waiting, figures.running, figures.swapped, figures.stalled) == (0, 0, 0, 0)
    assert (figures.added, figures.aborted, figures.refused) == (work.added, work.aborted, work.refused)
    assert figures.finished == work.added - work.aborted
    assert figures.generated_tokens == len(work.first_s) + len(work.between_s)
    assert figures.steps == sum(batch.step is not None for batch in batches)
    assert figures.stalls == sum(batch.num_stalled for batch in batches)
    preempted = [one.swapped for batch in batches for one in batch.preempted]
    assert figures.swap_preemptions == sum(preempted)
    assert figures.recompute_preemptions == len(preempted) - sum(preempted)
    assert len(preempted) > 0
    assert work.between_s
    assert work.aborted


def test_recomputed_tokens_are_those_that_are_computed_more_than_once() -> None:
    """check_recomputed_tokens fails if the scheduler and the replay count differently."""
    for swap_blocks in (0, 500):
        check_recomputed_tokens(swap_blocks)


def check_recomputed_tokens(swap_blocks: int) -> None:
    engines: list[EngineScheduler] = []

    def keep(engine: EngineScheduler, _: ScheduledBatch) -> None:
        engines[:] = [engine]

    trace = make_trace(2, 150, 1.5, prompt_mean=60, output_mean=40)
    mode = PreemptionMode.SWAP if swap_blocks else PreemptionMode.RECOMPUTE
    config = SchedulerConfig(reserve_steps=0, max_stalled_fraction=0.0, preemption=mode)
    result = replay(trace, config, 200, swap_blocks, after_step=keep)
    figures = engines[0].figures()
    assert figures.recomputed_tokens == result.recomputed_tokens
    assert (figures.recomputed_tokens > 0) == (swap_blocks == 0)
    assert figures.recompute_preemptions + figures.swap_preemptions == result.preemptions > 0
    assert figures.prompt_tokens == sum(trace.prompt_len)
    assert figures.generated_tokens == sum(trace.output_len)


def test_prompt_tokens_count_at_admission_with_those_in_the_cache() -> None:
    rig = make_rig()
    rig.add(1, 8, max_tokens=1)
    assert rig.engine.figures().prompt_tokens == 0
    rig.run()
    rig.add(2, 11)
    rig.step()
    figures = rig.engine.figures()
    assert (figures.prompt_tokens, figures.cached_tokens) == (19, 8)


def gauges(rig: EngineRig) -> tuple[int, int, int, int]:
    figures = rig.engine.figures()
    return figures.waiting, figures.running, figures.swapped, figures.stalled


def test_gauges_are_of_the_moment() -> None:
    rig = make_rig(6, reserve_steps=0, max_stalled_fraction=0.5)
    rig.add(1, range(8), max_tokens=4)
    rig.add(2, range(100, 112), max_tokens=4)
    rig.add(3, range(200, 212), max_tokens=4)
    assert gauges(rig) == (3, 0, 0, 0)
    rig.step()
    batch = rig.begin()
    assert gauges(rig) == (1, 2, 0, 1)
    rig.end(batch)
    for name in (1, 2, 3):
        rig.engine.abort(name)
    assert gauges(rig) == (0, 0, 0, 0)


def test_a_refused_report_counts_nothing() -> None:
    rig = make_rig()
    rig.add(1, 4)
    batch = rig.begin()
    before = rig.engine.figures()
    with pytest.raises(KVServiceError):
        rig.engine.update(Report(batch.number, [1, 2]), 5.0)
    assert rig.engine.figures() == before
    assert not rig.scheduler.latencies.first_token.counts.any()


@pytest.fixture
def engines() -> tuple[Scheduler, EngineRig, EngineRig]:
    manager = make_manager()
    scheduler = Scheduler(manager)
    return scheduler, open_rig(scheduler, manager), open_rig(scheduler, manager)


def test_totals_keep_what_closed_engines_counted(engines: tuple[Scheduler, EngineRig, EngineRig]) -> None:
    scheduler, first, second = engines
    for rig, size in ((first, 4), (second, 9)):
        rig.add(1, range(size), max_tokens=2)
        rig.run()
    assert {number: one.prompt_tokens for number, one in scheduler.figures().items()} == {
        first.namespace.number: 4, second.namespace.number: 9,
    }  # fmt: skip
    scheduler.close_engine(first.namespace)
    assert list(scheduler.figures()) == [second.namespace.number]
    totals = scheduler.totals()
    assert (totals.prompt_tokens, totals.generated_tokens, totals.finished, totals.steps) == (13, 4, 2, 4)
    second.add(2, 5)
    assert (scheduler.totals().waiting, scheduler.totals().aborted) == (1, 0)
    scheduler.close_engine(second.namespace)
    assert (scheduler.totals().waiting, scheduler.totals().aborted) == (0, 1), "requests end with their engine"
    assert int(scheduler.latencies.first_token.counts.sum()) == 2, "latencies are of all engines"
    assert int(scheduler.latencies.between_tokens.counts.sum()) == 2


def test_figures_have_every_counter() -> None:
    rig = make_rig()
    counters = rig.engine.queues.counters
    names = [field.name for field in dataclasses.fields(counters)][4:]
    for number, name in enumerate(names):
        setattr(counters, name, 100 + number)
    assert rig.engine.figures() == SchedulerFigures(0, 0, 0, 0, *range(100, 100 + len(names)))


def test_proposals_count_when_they_are_verified() -> None:
    """A report is one time between tokens, however many of its proposals were right."""
    rig = make_rig(lookahead=3)
    rig.random = random.Random(1)
    for number in range(3):
        rig.add(number, range(100 * number, 100 * number + 6), max_tokens=30)
    verified = rows = 0
    while len(rig.engine):
        batch = rig.step()
        assert batch.step is not None
        verified += int(batch.step.query_lens[: batch.num_decodes].sum()) - batch.num_decodes
        rows += batch.num_decodes
    figures = rig.engine.figures()
    assert figures.proposed_tokens == verified > figures.accepted_tokens == rig.accepted > 0
    assert figures.generated_tokens == sum(map(len, rig.outputs.values())) == rows + 3 + rig.accepted
    assert int(rig.scheduler.latencies.between_tokens.counts.sum()) == rows
