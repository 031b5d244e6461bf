"""A seeded simulation with fake time and faults: aborts, lost steps, killed engines, and a pool that others fill."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from schedule_rig import EngineRig, make_manager, open_rig
from todays_part import ENTRIES

from kvservice.blocks import AllocationRequest, BlockManager, SessionNamespace
from kvservice.errors import OutOfBlocksError
from kvservice.scheduler import BatchPolicy, PreemptionMode, QueueOrder, Scheduler, check_integrity

NUM_BLOCKS = 60


class Squatter:
    """Another client of the pool, which takes blocks and gives them back at any time."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager, self.namespace = manager, manager.open_namespace()
        self.next_id = 0

    def take(self, num_blocks: int) -> None:
        request = AllocationRequest(self.next_id, np.full(num_blocks * 4, self.next_id))
        try:
            self.manager.allocate(self.namespace, [request])
        except OutOfBlocksError:
            return
        self.next_id += 1

    def give_back(self) -> None:
        if len(self.namespace):
            self.manager.free(self.namespace, self.namespace.sequence_ids())


class Simulation:
    """Up to three engines of different weights and policies over one pool."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager = make_manager(NUM_BLOCKS, num_swap_blocks=self.random.choice([0, 20]), max_sequences=40)
        self.scheduler = Scheduler(self.manager)
        self.squatter = Squatter(self.manager)
        self.depths: dict[SessionNamespace, int] = {}
        self.rigs = [self.open() for _ in range(self.random.choice([1, 2, 3]))]
        self.now_s, self.next_id, self.killed, self.retried = 0.0, 0, 0, 0

    def open(self) -> EngineRig:
        choose = self.random.choice
        rig = open_rig(
            self.scheduler,
            self.manager,
            choose([0.5, 1.0, 3.0]),
            max_step_tokens=choose([8, 20, 100]),
            max_running=choose([2, 5, 8]),
            batches=choose(list(BatchPolicy)),
            order=choose(list(QueueOrder)),
            preemption=choose(list(PreemptionMode)),
            lookahead=choose([0, 0, 3]),
            long_prefill_tokens=choose([0, 6]),
            max_long_prefills=choose([0, 1]),
            reserve_steps=choose([0, 3]),
            max_stalled_fraction=choose([0.0, 0.3, 1.0]),
            delay_factor=choose([0.0, 1.0]),
        )
        self.depths[rig.namespace], rig.late = choose([0, 1]), choose([False, True])
        if rig.engine.config.lookahead and choose([False, True]):
            rig.random = random.Random(self.random.random())
        return rig

    def add(self, rig: EngineRig) -> None:
        shared = [7] * self.random.choice([0, 0, 9, 21])
        prompt = shared + [self.random.randrange(3) for _ in range(self.random.randint(1, 40))]
        width = min(self.random.choice([1, 1, 1, 2, 3, 5]), rig.engine.config.max_running)
        max_tokens = self.random.randint(1, 30 if width == 1 else 12)
        stop_lengths = [len(prompt) + self.random.randint(1, 30) for _ in range(width)]
        self.next_id += 10
        with contextlib.suppress(OutOfBlocksError):  # all beams together may be too many for the pool
            rig.add(
                self.next_id,
                prompt,
                max_tokens=max_tokens,
                stop=self.random.randint(1, 30),
                width=width,
                stop_lengths=self.random.choice([(), stop_lengths]),
                beams=self.random.random() < 0.4,
                priority=self.random.randint(0, 2),
                now_s=self.now_s,
            )

    def step(self, rig: EngineRig) -> None:
        """Make a batch and report one. Some engines are one step ahead at times, and some lose a step."""
        batch = rig.begin(self.random.random() < 0.9, now_s=self.now_s)
        while batch.step is not None and self.random.random() < 0.1:
            self.squat(rig)
            batch = rig.retry()
            self.retried += 1
        if self.random.random() < 0.1 and len(rig.engine):
            self.abort(rig)
        if batch.step is None or len(rig.flight) > self.depths[rig.namespace]:
            self.report(rig)
        if self.random.random() < 0.1:
            rig.settle(self.now_s)

    def report(self, rig: EngineRig) -> None:
        if rig.flight:
            rig.end(rig.flight[0], self.now_s)

    def abort(self, rig: EngineRig) -> None:
        open_ids = [name for name in rig.engine.queues.requests if name not in rig.engine.queues.aborted]
        if open_ids:
            rig.abort(self.random.choice(open_ids))

    def kill(self, rig: EngineRig) -> None:
        """The engine dies, at times between a batch and its report; a new one takes its place."""
        if self.random.random() < 0.5 and len(rig.flight) < 2:
            rig.begin(now_s=self.now_s)
        self.manager.close_namespace(rig.namespace)
        self.scheduler.close_engine(rig.namespace)
        rig.check_outputs()
        self.rigs[self.rigs.index(rig)] = self.open()
        self.killed += 1

    def fault_or_step(self) -> None:
        rig = self.random.choice(self.rigs)
        self.now_s += self.random.random()
        actions = [self.step, self.add, self.abort, self.kill, self.squat]
        self.random.choices(actions, weights=[60, 25, 4, 0.5, 5])[0](rig)

    def squat(self, _rig: EngineRig) -> None:
        if self.random.random() < 0.6:
            self.squatter.give_back()
        else:
            self.squatter.take(self.random.randint(1, NUM_BLOCKS))

    def check(self) -> None:
        for rig in self.rigs:
            check_integrity(rig.engine)
            rig.check_descriptions()
        self.manager.check_integrity()

    def drain(self) -> None:
        """Without faults every request ends."""
        self.squatter.give_back()
        for _ in range(20_000):
            if not any(len(rig.engine) for rig in self.rigs):
                return
            self.now_s += 1.0
            for rig in self.rigs:
                rig.settle(self.now_s)
                rig.step(now_s=self.now_s)
        raise AssertionError(f"requests starve: {[len(rig.engine) for rig in self.rigs]}")


def simulate(seed: int, num_actions: int) -> Simulation:
    """Under faults no invariant breaks. Without more of them no request starves, and no token has changed."""
    simulation = Simulation(seed)
    for _ in range(num_actions):
        simulation.fault_or_step()
        simulation.check()
    simulation.drain()
    simulation.check()
    for rig in simulation.rigs:
        rig.check_outputs()
    assert simulation.manager.stats().sequences == 0
    return simulation


@pytest.mark.brief
def test_under_faults_no_request_starves_and_no_token_changes() -> None:
    """A simulation fails if they do."""
    made = [simulate(seed, 150) for seed in range(100, 104)]
    assert sum(simulation.next_id for simulation in made) > 500
    assert sum(simulation.retried for simulation in made) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12)[ENTRIES])
def test_under_many_faults_no_request_starves_and_no_token_changes(seed: int) -> None:
    """A simulation fails if they do."""
    simulation = simulate(seed, 400)
    assert simulation.next_id > 500
    assert simulation.retried > 5


def test_a_killed_engine_gives_its_blocks_to_the_others() -> None:
    manager = make_manager(20)
    scheduler = Scheduler(manager)
    first, second = open_rig(scheduler, manager), open_rig(scheduler, manager)
    first.add(1, 60, max_tokens=9)
    first.begin()
    second.add(1, range(100, 160), max_tokens=9)
    assert second.step().step is None
    manager.close_namespace(first.namespace)
    scheduler.close_engine(first.namespace)
    second.run()
    assert second.finished == [1]


def test_engines_share_a_pool_by_weight() -> None:
    manager = make_manager(40)
    scheduler = Scheduler(manager)
    heavy, light = open_rig(scheduler, manager, 3.0), open_rig(scheduler, manager, 1.0)
    for i in range(40):
        heavy.add(i, range(100 * i, 100 * i + 12), max_tokens=12)
        light.add(i, range(100 * i + 50, 100 * i + 62), max_tokens=12)
    held: list[tuple[int, int]] = []
    for _ in range(60):
        light.step()
        heavy.step()
        held.append((heavy.engine.queues.held_blocks(), light.engine.queues.held_blocks()))
    mean = np.mean(held[20:], axis=0)
    assert mean[0] > 2 * mean[1]
    assert mean.sum() > 30
    for rig in (heavy, light):
        rig.run()
        rig.check_outputs()


def test_a_request_above_the_share_of_its_engine_runs_alone_there() -> None:
    manager = make_manager(20)
    scheduler = Scheduler(manager)
    rigs = [open_rig(scheduler, manager), open_rig(scheduler, manager)]
    squatter = Squatter(manager)
    squatter.take(15)
    for rig in rigs:
        rig.add(1, 48, max_tokens=4)
        assert rig.step().step is None
    squatter.give_back()
    assert rigs[0].step().sampled.tolist() == [1]
    for rig in rigs:
        rig.run()
        rig.check_outputs()


def test_an_engine_alone_uses_the_whole_pool() -> None:
    manager = make_manager(40)
    scheduler = Scheduler(manager)
    busy, idle = open_rig(scheduler, manager, 1.0), open_rig(scheduler, manager, 9.0)
    for i in range(20):
        busy.add(i, range(100 * i, 100 * i + 12), max_tokens=4)
    idle.step()
    busy.step()
    assert busy.engine.queues.held_blocks() > 30
