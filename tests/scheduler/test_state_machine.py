"""The scheduler as a Hypothesis machine: any order of calls keeps all invariants, and tokens never depend on it."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedule_rig import make_manager, open_rig

from kvservice.errors import OutOfBlocksError
from kvservice.scheduler import BatchPolicy, PreemptionMode, QueueOrder, Scheduler, check_integrity


def running(machine: SchedulerMachine) -> bool:
    return bool(machine.rig.flight)


def idle(machine: SchedulerMachine) -> bool:
    return not machine.rig.flight


def may_go_ahead(machine: SchedulerMachine) -> bool:
    return len(machine.rig.flight) == 1


def abortable(machine: SchedulerMachine) -> bool:
    return bool(machine.open_ids())


class SchedulerMachine(RuleBasedStateMachine):
    """One engine in a small pool."""

    @initialize(
        num_blocks=st.integers(8, 24),
        num_swap_blocks=st.integers(0, 8),
        watermark=st.sampled_from([0.0, 0.1]),
        caching=st.sampled_from([True, True, False]),
        batches=st.sampled_from(BatchPolicy),
        order=st.sampled_from(QueueOrder),
        preemption=st.sampled_from(PreemptionMode),
        max_step_tokens=st.integers(1, 30),
        max_running=st.integers(1, 6),
        lookahead=st.sampled_from([0, 0, 2, 5]),
        reserve_steps=st.integers(0, 4),
        stalled=st.sampled_from([0.0, 0.25, 1.0]),
    )
    def start(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        watermark: float,
        caching: bool,
        stalled: float,
        **config: Any,
    ) -> None:
        self.manager = make_manager(
            num_blocks, num_swap_blocks=num_swap_blocks, watermark=watermark, enable_prefix_caching=caching,
            max_sequences=8,
        )  # fmt: skip
        self.rig = open_rig(Scheduler(self.manager), self.manager, max_stalled_fraction=stalled, **config)
        if config["lookahead"]:
            self.rig.random = random.Random(num_blocks)
        self.next_id = 0

    def open_ids(self) -> list[int]:
        engine = self.rig.engine
        return [name for name in engine.queues.requests if name not in engine.queues.aborted]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 8),
        stop=st.integers(1, 8),
        priority=st.integers(0, 1),
        width=st.sampled_from([1, 1, 2, 3]),
        lengths=st.lists(st.integers(1, 9), min_size=3, max_size=3) | st.none(),
        beams=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: int,
        width: int,
        lengths: list[int] | None,
        **options: Any,
    ) -> None:
        config = self.rig.engine.config
        width = min(width, config.max_running, config.max_step_tokens)
        stop_lengths = [len(prompt) + length for length in lengths[:width]] if lengths else ()
        self.next_id += 10
        with contextlib.suppress(OutOfBlocksError):  # all beams together may be too many for the pool
            self.rig.add(self.next_id, prompt, max_tokens, stop, width=width, stop_lengths=stop_lengths, **options)

    @precondition(idle)
    @rule(write=st.booleans())
    def schedule(self, write: bool) -> None:
        self.rig.begin(write)

    @precondition(may_go_ahead)
    @rule(write=st.booleans())
    def schedule_ahead(self, write: bool) -> None:
        self.rig.begin(write)

    @precondition(running)
    @rule()
    def retry(self) -> None:
        self.rig.retry()

    @precondition(running)
    @rule()
    def report(self) -> None:
        self.rig.end(self.rig.flight[0])
        check_integrity(self.rig.engine)

    @precondition(idle)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(count=st.integers(1, 6))
    def go_ahead(self, count: int) -> None:
        for _ in range(count):
            if len(self.rig.flight) == 2:
                self.rig.end(self.rig.flight[0])
            self.rig.step_ahead()

    @precondition(abortable)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(self.open_ids())))

    @invariant()
    def blocks_are_whole(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()
            self.rig.check_descriptions()
            check_integrity(self.rig.engine)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.settle()
        self.rig.run()
        self.rig.check_outputs()
        assert self.manager.stats().sequences == 0


SETTINGS: dict[str, Any] = {
    "stateful_step_count": 40,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.brief
class TestShortly(SchedulerMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=10, **SETTINGS)


@pytest.mark.slow
class TestScheduler(SchedulerMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=40, **SETTINGS)
