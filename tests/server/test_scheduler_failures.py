"""Errors of schedulers over the wire: failed requests, errors of batches, and loads for requests that were aborted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life
from spill_rig import TOKENS, computed, forget, run, save_all, start_spilling, tier_of

from kvservice.errors import DuplicateSequenceError, InternalError, OutOfBlocksError
from kvservice.v1 import blocks_pb2, scheduler_pb2
from kvservice.wire import from_status

__all__ = ["start_spilling"]


async def open_scheduler(life: Life, session: Any) -> None:
    await life.call(
        session,
        "open_scheduler",
        scheduler_pb2.OpenSchedulerRequest(
            order=scheduler_pb2.QUEUE_ORDER_PRIORITY, preemption=scheduler_pb2.PREEMPTION_MODE_SWAP
        ),
    )


async def add(life: Life, session: Any, number: int, tokens: list[int], priority: int = 0) -> None:
    request = scheduler_pb2.ScheduledRequest(
        request_id=number, token_ids=tokens, max_tokens=6, width=1, priority=priority
    )
    await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[request]))


async def schedule(life: Life, session: Any, *reports: scheduler_pb2.StepReport) -> Any:
    return await life.call(session, "schedule", scheduler_pb2.ScheduleRequest(reports=reports))


def report(batch: Any) -> scheduler_pb2.StepReport:
    return scheduler_pb2.StepReport(batch=batch.batch, token_ids=[7] * len(batch.sampled_ids))


async def preempting(life: Life, session: Any) -> tuple[Any, Any]:
    """Compute request 10 and queue request 5, for which it must be swapped out. Returns the batch and the K/V."""
    await open_scheduler(life, session)
    await add(life, session, 10, list(range(20)), priority=5)
    batch = await schedule(life, session)
    kv = await life.write(session, batch.step.step_id, 20, seed=1)
    await add(life, session, 5, list(range(100, 120)))
    return batch, kv


async def overwrite(life: Life) -> None:
    """Let another session use all blocks that are free."""
    other = life.open("other")
    free = life.manager.device.num_available * life.config.block_size
    await computed(life, other, list(range(500, 500 + free)))


async def resumed(life: Life, session: Any) -> None:
    while True:
        batch = await schedule(life, session)
        if batch.batch:
            assert list(batch.sequence_ids) == [10]
            return


FULL = OutOfBlocksError("full", tier="device", required=5, free=0, total=8)
SMALL: dict[str, Any] = {"num_blocks": 8, "enable_prefix_caching": False}


def test_a_request_with_the_id_of_a_sequence_on_the_disk_is_refused(tmp_path: Path) -> None:
    life = Life(disk=str(tmp_path / "disk"))

    async def scenario() -> None:
        session = life.open()
        await life.allocate(session, 5, [1, 2, 3])
        swap = blocks_pb2.SwapOutRequest(sequence_ids=[5], tier=blocks_pb2.SWAP_TIER_DISK)
        await life.call(session, "swap_out", swap)
        await open_scheduler(life, session)
        with pytest.raises(DuplicateSequenceError) as refused:
            await add(life, session, 5, list(range(20)))
        assert refused.value.field == "requests[0].request_id"

    try:
        run(scenario())
    finally:
        life.kill()


@pytest.mark.parametrize("error", [FULL, MemoryError("none")])
def test_blocks_that_were_preempted_for_a_request_that_fails_are_copied(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    life = Life(**SMALL)

    async def scenario() -> None:
        session = life.open()
        batch, kv = await preempting(life, session)

        def fails(*_: Any) -> None:
            raise error

        with monkeypatch.context() as fault:
            fault.setattr(life.manager, "allocate_found", fails)
            made = await schedule(life, session, report(batch))
        assert list(made.preempted_ids) == [10]
        assert (made.num_swapped, list(made.finished_ids)) == (1, [5])
        (failed,) = made.failed
        expected = OutOfBlocksError if isinstance(error, OutOfBlocksError) else InternalError
        assert failed.request_id == 5
        assert type(from_status(failed.error)) is expected
        await overwrite(life)
        await resumed(life, session)
        np.testing.assert_array_equal(await life.read(session, 10, 20), kv)
        await add(life, session, 5, list(range(100, 120)))
        life.manager.check_integrity()

    try:
        run(scenario())
    finally:
        life.kill()


def test_an_error_after_blocks_have_moved_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(**SMALL)

    async def scenario() -> None:
        session = life.open()
        batch, kv = await preempting(life, session)

        def fails(*_: Any, **__: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as fault:
            fault.setattr(life.manager, "open_step", fails)
            made = await schedule(life, session, report(batch))
        assert (made.batch, list(made.preempted_ids)) == (0, [10])
        with pytest.raises(InternalError):
            await schedule(life, session)
        made = await schedule(life, session)
        assert list(made.sequence_ids) == [5]
        await life.write(session, made.step.step_id, 20, seed=2)
        abort = scheduler_pb2.AbortRequestsRequest(request_ids=[5])
        await life.call(session, "abort_requests", abort)
        assert list((await schedule(life, session, report(made))).finished_ids) == [5]
        np.testing.assert_array_equal(await life.read(session, 10, 20), kv)

    try:
        run(scenario())
    finally:
        life.kill()


@pytest.mark.parametrize("again", [10, 13])
def test_a_load_for_an_aborted_request_holds_nobody_back(start_spilling: Any, again: int) -> None:
    """Also when a request with its id waits for another load."""
    life = start_spilling()
    prompts = TOKENS, [1000 + token for token in TOKENS]

    async def scenario() -> None:
        session = life.open()
        for i, tokens in enumerate(prompts):
            await computed(life, session, tokens, i)
        await save_all(life)
        await forget(life)
        await open_scheduler(life, session)
        gate, load_blocks = asyncio.Event(), life.core.device.load_blocks

        async def held(*arguments: Any, **options: Any) -> Any:
            await gate.wait()
            return await load_blocks(*arguments, **options)

        life.core.device.load_blocks = held
        queues = session.scheduler.scheduler.queues
        await add(life, session, 10, prompts[0])
        first = session.scheduler.load_ahead(tier_of(life))
        await life.call(session, "abort_requests", scheduler_pb2.AbortRequestsRequest(request_ids=[10]))
        await add(life, session, again, prompts[1])
        loading = session.scheduler.load_ahead(tier_of(life))
        assert loading is not None
        assert len(queues.loading) == 2
        gate.set()
        await asyncio.gather(first, loading)
        while queues.loading:  # until the callbacks have run
            await asyncio.sleep(0)
        assert again in (await schedule(life, session)).sequence_ids

    run(asyncio.wait_for(scenario(), 60))
