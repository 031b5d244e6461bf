"""The measured speeds: which steps count, and what a client has fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from daemon_lives import Life
from manual_clock import ManualClock

from kvservice.v1 import scheduler_pb2

POOL: dict[str, Any] = {"num_blocks": 1024, "max_sequence_tokens": 2048, "store_gib": 0.0, "share_store": "off"}


class Engine:
    """An engine over the scheduler of a session."""

    def __init__(self, life: Life, clock: ManualClock) -> None:
        self.life, self.clock, self.session = life, clock, life.open()

    @property
    def speeds(self) -> Any:
        return self.session.scheduler.scheduler.queues.speeds

    async def open(self, **settings: Any) -> None:
        await self.life.call(self.session, "open_scheduler", scheduler_pb2.OpenSchedulerRequest(**settings))

    async def add(self, request_id: int, num_tokens: int) -> None:
        first = 10_000 * request_id
        one = scheduler_pb2.ScheduledRequest(
            request_id=request_id, token_ids=range(first, first + num_tokens), max_tokens=9, width=1
        )
        await self.life.call(self.session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[one]))

    async def schedule(self, *reports: scheduler_pb2.StepReport, **fields: Any) -> Any:
        request = scheduler_pb2.ScheduleRequest(reports=reports, **fields)
        batch = await self.life.call(self.session, "schedule", request)
        if batch.batch:
            self.life.manager.mark_all_layers(self.session.namespace, batch.step.step_id)
        return batch


def report(batch: Any) -> scheduler_pb2.StepReport:
    return scheduler_pb2.StepReport(batch=batch.batch, token_ids=[5] * len(batch.sampled_ids))


@pytest.fixture
def engine(clock: ManualClock) -> Iterator[Engine]:
    life = Life(clock=clock, **POOL)
    yield Engine(life, clock)
    life.kill()


def test_the_time_of_a_step_over_its_tokens(engine: Engine) -> None:
    async def scenario() -> None:
        await engine.open()
        before = engine.speeds.compute_token_s
        await engine.add(1, 1000)
        batch = await engine.schedule()
        engine.clock.advance(0.1)
        batch = await engine.schedule(report(batch))
        measured = before + (1e-4 - before) / 8
        assert engine.speeds.compute_token_s == pytest.approx(measured)
        # A step with less than 64 tokens does not count.
        engine.clock.advance(9.0)
        await engine.add(2, 62)
        batch = await engine.schedule(report(batch))
        engine.clock.advance(9.0)
        batch = await engine.schedule(report(batch))
        assert engine.speeds.compute_token_s == pytest.approx(measured)
        # Nor does a call that has made no batch.
        finished = scheduler_pb2.StepReport(
            batch=batch.batch, token_ids=[5] * len(batch.sampled_ids), finished_ids=batch.sampled_ids
        )
        assert not (await engine.schedule(finished)).batch
        engine.clock.advance(9.0)
        assert not (await engine.schedule()).batch
        assert engine.speeds.compute_token_s == pytest.approx(measured)

    asyncio.run(scenario())


def test_steps_with_decodes_alone_do_not_count(engine: Engine) -> None:
    async def scenario() -> None:
        await engine.open()
        for number in range(64):
            await engine.add(number, 2)
        batch = await engine.schedule()
        assert len(batch.sampled_ids) == 64
        engine.clock.advance(0.128)
        batch = await engine.schedule(report(batch))
        assert batch.num_decodes == 64
        measured = engine.speeds.compute_token_s
        engine.clock.advance(9.0)
        await engine.schedule(report(batch))
        assert engine.speeds.compute_token_s == measured

    asyncio.run(scenario())


def test_two_batches_of_one_call(engine: Engine) -> None:
    async def scenario() -> None:
        await engine.open(max_step_tokens=300)
        before = engine.speeds.compute_token_s
        await engine.add(1, 400)
        first = await engine.schedule()
        second = await engine.schedule(ahead=True)
        assert (list(first.step.query_lens), list(second.step.query_lens)) == ([300], [100])
        engine.clock.advance(4.0)
        await engine.schedule(report(first), report(second))
        assert engine.speeds.compute_token_s == pytest.approx(before + (4.0 / 400 - before) / 8)

    asyncio.run(scenario())


def test_what_the_client_has_fixed_stays(engine: Engine) -> None:
    async def scenario() -> None:
        await engine.open(compute_token_s=2e-5, swap_block_s=1.0)
        await engine.add(1, 1000)
        batch = await engine.schedule()
        engine.clock.advance(10.0)
        await engine.schedule(report(batch))
        assert (engine.speeds.swap_block_s, engine.speeds.compute_token_s) == (1.0, 2e-5)

    asyncio.run(scenario())


def test_the_speed_of_swaps_is_estimated_then_measured(engine: Engine) -> None:
    async def scenario() -> None:
        await engine.open()
        await engine.schedule()
        core = engine.life.core
        assert engine.speeds.swap_block_s == core.engine.swap_block_s
        assert core.engine.swap_block_s == pytest.approx(core.engine.layout.block_bytes / 10e9)
        counters = core.engine.manager.counters
        counters.swapped_out_blocks, counters.swapped_in_blocks = 30, 10
        core.device.swap_busy_s.update({"out": 0.03, "in": 0.01})
        await engine.schedule()
        assert engine.speeds.swap_block_s == core.engine.swap_block_s == pytest.approx(1e-3)

    asyncio.run(scenario())
