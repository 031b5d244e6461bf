"""Engines over the scheduler of a real daemon, by each transport and with both APIs. All K/V are read and compared."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from both_faces import Face, session_of
from each_row import each_row
from small_daemons import TRANSPORTS, OpenDaemon
from toy_engine import ToyEngine

from kvservice.client import BatchReport, KVClient, ScheduledRequest, SchedulerInfo
from kvservice.errors import (
    DuplicateSequenceError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    OutOfBlocksError,
    QuotaExceededError,
    SequenceScheduledError,
    StaleStepError,
    UnknownSequenceError,
)
from kvservice.launch import Daemon

VARIANTS = {"inline": ("inline", "write"), **TRANSPORTS}


@asynccontextmanager
async def engine_of(face: Face, address: str, transport: str = "inline", **settings: Any) -> AsyncIterator[ToyEngine]:
    async with session_of(face, address, transport) as kv:
        yield ToyEngine(kv, await kv.open_scheduler(**settings))
        await kv.reset_prefix_cache()


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_engine_under_pressure(open_daemon: OpenDaemon, variant: str) -> None:
    """Six requests for 41 blocks each in a pool of 64: they are preempted, and end with the right tokens."""
    transport, share_pool = VARIANTS[variant]

    async def scenario(face: Face) -> None:
        async with engine_of(face, open_daemon("float32", share_pool).address, transport) as engine:
            for number in range(6):
                await engine.add(number, range(100 * number, 100 * number + 60), max_tokens=8 if number % 2 else 24)
            await engine.run()
            assert sorted(engine.finished) == list(range(6))
            engine.check_outputs()
            preempted = [one for batch in engine.batches for one in batch.preempted]
            assert preempted
            last = engine.batches[-1]
            assert (last.waiting, last.running, last.swapped, last.step) == (0, 0, 0, None)

    with each_row() as row:
        faces: tuple[Face, ...] = ("blocking", "asyncio")
        for face in faces:
            with row(face):
                asyncio.run(scenario(face))


def test_preemption_by_swap(open_daemon: OpenDaemon) -> None:
    """K/V that are swapped out and in again are read back unchanged."""

    async def scenario() -> None:
        address = open_daemon("float32", "write").address
        async with engine_of("blocking", address, preemption="swap", max_step_tokens=64) as engine:
            for number in range(4):
                await engine.add(number, range(100 * number, 100 * number + 60), max_tokens=20)
            await engine.run()
            assert sorted(engine.finished) == list(range(4))
            engine.check_outputs()
            swapped = [one.swapped for batch in engine.batches for one in batch.preempted]
            assert any(swapped)
            assert max(batch.swapped for batch in engine.batches) > 0

    asyncio.run(scenario())


def test_settings_reach_the_scheduler(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with engine_of("asyncio", daemon.address, order="priority", max_step_tokens=8, max_running=2) as engine:
            assert engine.scheduler.settings == SchedulerInfo(8, 2, 0, 65536)
            for number, priority in ((1, 3), (2, 2), (3, 1)):
                await engine.add(number, range(number, number + 6), max_tokens=2, priority=priority)
            batch = await engine.schedule()
            assert batch.sequence_ids.tolist() == [3, 2]
            assert batch.step.query_lens.tolist() == [6, 2]
            assert (batch.num_decodes, batch.sampled.tolist(), batch.sampled_rows.tolist()) == (0, [3], [0])
            assert (batch.waiting, batch.running, batch.swapped) == (1, 2, 0)
            await engine.run(batch)
            assert engine.finished == [3, 2, 1]
            engine.check_outputs()

    asyncio.run(scenario())


def test_the_budgets_of_one_batch(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with engine_of("asyncio", daemon.address) as engine:
            await engine.add(1, range(9))
            await engine.add(2, range(20, 29))
            batch = await engine.schedule(max_step_tokens=5, max_running=1)
            assert (batch.step.num_tokens, batch.waiting) == (5, 1)
            await engine.run(batch)
            engine.check_outputs()

    asyncio.run(scenario())


def test_sequences_have_the_extra_keys_of_their_requests(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with engine_of("asyncio", daemon.address) as engine:
            await engine.add(1, range(8), extra_keys=[(0, b"adapter")])
            await engine.add(2, range(8))
            batch = await engine.schedule()
            keys = {one.sequence_id: one.extra_keys for one in batch.step.sequences}
            assert keys == {1: ((0, b"adapter"),), 2: ()}
            await engine.run(batch)
            engine.check_outputs()

    asyncio.run(scenario())


def test_aborted_requests_end_at_once_or_with_their_batch(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with engine_of("asyncio", daemon.address, max_running=1) as engine:
            await engine.add(1, range(9), max_tokens=5)
            await engine.add(2, range(9), max_tokens=5)
            batch = await engine.schedule()
            assert await engine.scheduler.abort([1, 2]) == [2]
            with pytest.raises(UnknownSequenceError):
                await engine.scheduler.abort([1])
            await engine.compute(batch)
            batch = await engine.schedule(engine.sample(batch))
            assert (batch.finished, batch.number) == ([1], 0)
            sequences = [weakref.ref(sequence) for one in engine.batches if one.step for sequence in one.step.sequences]
            assert sequences
            engine.batches.clear()
            await engine.add(3, range(20, 24))
            batch = await engine.schedule()
            gc.collect()
            assert not [sequence() for sequence in sequences if sequence() is not None], "the client keeps none"

    asyncio.run(scenario())


BAD_REQUESTS: tuple[tuple[dict[str, Any], type[KVServiceError], str], ...] = (
    ({"request_id": 1}, DuplicateSequenceError, "requests[1].request_id"),
    ({"request_id": 50}, DuplicateSequenceError, "requests[1].request_id"),
    ({"request_id": 2}, DuplicateSequenceError, "requests[1].request_id"),
    ({"request_id": -1}, InvalidArgumentError, "requests[1].request_id"),
    ({"request_id": 1 << 63}, InvalidArgumentError, "request_id"),
    ({"token_ids": []}, InvalidArgumentError, "requests[1].token_ids"),
    ({"token_ids": [-1]}, InvalidArgumentError, "requests[1].token_ids[0]"),
    ({"token_ids": [1.5]}, InvalidArgumentError, "token_ids"),
    ({"width": 0}, InvalidArgumentError, "requests[1].width"),
    ({"max_tokens": 0}, InvalidArgumentError, "requests[1].max_tokens"),
    ({"max_tokens": (1 << 63) - 1}, InvalidArgumentError, "requests[1].max_tokens"),
    ({"max_tokens": 300}, OutOfBlocksError, "requests[1].max_tokens"),
    ({"priority": 1 << 31}, InvalidArgumentError, "requests[1].priority"),
    ({"extra_keys": [(0, b"")]}, InvalidArgumentError, "requests[1].extra_keys[0]"),
    ({"extra_keys": [(600, b"k")]}, InvalidArgumentError, "requests[1].extra_keys[0]"),
)


def test_of_requests_with_a_bad_one_none_is_added(client: KVClient) -> None:
    """The error names the field, and the next batch has the requests from before alone."""
    with each_row() as row:
        for change, error, field in BAD_REQUESTS:
            with row(change):
                check_bad_request(client, change, error, field)


def check_bad_request(client: KVClient, change: dict[str, Any], error: type[KVServiceError], field: str) -> None:
    with client.session() as kv:
        kv.allocate([1, 2, 3], sequence_id=50)
        scheduler = kv.open_scheduler(max_requests=3)
        scheduler.add([ScheduledRequest(1, [1, 2, 3], 4)])
        good = ScheduledRequest(2, [4, 5], 4)
        fields: dict[str, Any] = {"request_id": 3, "token_ids": [6], "max_tokens": 4}
        bad = ScheduledRequest(**(fields | change))
        with pytest.raises(error) as caught:
            scheduler.add([good, bad])
        assert caught.value.field == field
        batch = scheduler.schedule()
        assert batch.sequence_ids.tolist() == [1]
        assert (batch.waiting, batch.running) == (0, 1)


def test_the_length_of_the_queue_is_limited(client: KVClient) -> None:
    with client.session() as kv:
        scheduler = kv.open_scheduler(max_requests=2)
        with pytest.raises(QuotaExceededError) as caught:
            scheduler.add([ScheduledRequest(number, [1], 4) for number in range(3)])
        assert caught.value.metadata["limit"] == "max_requests"
        scheduler.add([ScheduledRequest(number, [1], 4) for number in range(2)])


BAD_SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_step_tokens": 0}, "max_step_tokens"),
    ({"max_step_tokens": 131073}, "max_step_tokens"),
    ({"max_running": 65}, "max_running"),
    ({"max_running": -1}, "max_running"),
    ({"max_requests": 65537}, "max_requests"),
    ({"policy": "random"}, "policy"),
    ({"order": "lifo"}, "order"),
    ({"preemption": ""}, "preemption"),
    ({"lookahead": -1}, "lookahead"),
    ({"lookahead": 1 << 40}, "lookahead"),
    ({"weight": 0.0}, "weight"),
    ({"weight": float("nan")}, "weight"),
    ({"max_stalled_fraction": 1.5}, "max_stalled_fraction"),
    ({"swap_block_s": -1.0}, "swap_block_s"),
    ({"compute_token_s": float("inf")}, "compute_token_s"),
)


def test_bad_settings_open_nothing(client: KVClient) -> None:
    with each_row() as row:
        for settings, field in BAD_SETTINGS:
            with row(settings), client.session() as kv:
                with pytest.raises((InvalidArgumentError, QuotaExceededError)) as caught:
                    kv.open_scheduler(**settings)
                assert caught.value.field == field
                kv.open_scheduler()


def test_an_unknown_setting_and_an_unknown_choice_name_the_known_ones(client: KVClient) -> None:
    with client.session() as kv:
        with pytest.raises(InvalidArgumentError, match=r"no setting of a scheduler, .*max_running, policy") as caught:
            kv.open_scheduler(max_num_seqs=3)  # type: ignore[call-arg]
        assert caught.value.field == "max_num_seqs"
        with pytest.raises(InvalidArgumentError, match=r"order: is 'lifo', not one of fcfs, priority$"):
            kv.open_scheduler(order="lifo")


def test_a_session_has_one_scheduler(client: KVClient) -> None:
    with client.session() as kv:
        kv.open_scheduler(max_running=4).add([ScheduledRequest(1, [1], 4)])
        with pytest.raises(FailedPreconditionError):
            kv.open_scheduler(max_running=5)
        with client.session() as other:
            other.open_scheduler(max_running=5)


def test_sequences_of_requests_are_changed_by_the_scheduler_only(client: KVClient) -> None:
    with client.session() as kv:
        own = kv.allocate([1, 2, 3], sequence_id=50)
        scheduler = kv.open_scheduler(max_running=1)
        scheduler.add([ScheduledRequest(1, [1, 2, 3], 4), ScheduledRequest(2, [1, 2, 3], 4)])
        batch = scheduler.schedule()
        assert batch.step is not None
        (scheduled,) = batch.step.sequences
        calls = {
            "append": lambda: kv.append([own, scheduled], [1, 2]),
            "open_step": lambda: kv.open_step([own, scheduled]),
            "truncate": lambda: kv.truncate(scheduled, 1),
            "fork": lambda: kv.fork(scheduled),
            "fork to it": lambda: kv.fork(own, 2),
            "swap_out": lambda: kv.swap_out([own, scheduled]),
            "swap_in": lambda: kv.swap_in([scheduled]),
            "free": lambda: kv.free([own, scheduled]),
            "allocate": lambda: kv.allocate([1], sequence_id=2),
        }
        before = kv.describe(token_ids=True, block_ids=True)
        for name, call in calls.items():
            with pytest.raises(SequenceScheduledError) as caught:
                call()
            assert caught.value.field, name
        assert kv.describe(token_ids=True, block_ids=True) == before
        kv.append([own], [9])
        with pytest.raises(InvalidArgumentError):
            scheduler.schedule([BatchReport(batch.number, [1, 2])])


def test_a_resumed_session_has_its_requests(client: KVClient) -> None:
    with client.session(detachable=True) as kv:
        scheduler = kv.open_scheduler(max_running=2)
        scheduler.add(
            [ScheduledRequest(1, [1, 2, 3], 4, extra_keys=[(0, b"k")]), ScheduledRequest(5, [4, 5], 4, width=2)]
        )
        before = scheduler.describe(token_ids=True)
        assert before == scheduler.describe([1, 5], token_ids=True)
        assert [(one.request_id, one.phase) for one in before] == [(1, "waiting"), (5, "waiting")]
        with client.resume(kv.token) as again:
            resumed = again.open_scheduler(max_running=2)
            assert resumed.describe(token_ids=True) == before
            with pytest.raises(UnknownSequenceError) as caught:
                resumed.describe([1, 6])
            assert caught.value.field == "request_ids[1]"
            batch = resumed.schedule()
            assert batch.step is not None
            assert [one.extra_keys for one in batch.step.sequences] == [((0, b"k"),)]
            again.reset_prefix_cache()


def test_an_engine_that_lost_its_step_opens_it_again(daemon: Daemon) -> None:
    """A prompt in chunks and a decode: one layer of two is written when the engine loses what it computed."""

    async def scenario() -> None:
        async with engine_of("asyncio", daemon.address, max_step_tokens=8) as engine:
            await engine.add(1, range(5), max_tokens=6)
            batch = await engine.schedule()
            await engine.compute(batch)
            await engine.add(2, range(50, 70), max_tokens=3)
            lost = await engine.schedule(engine.sample(batch))
            await engine.compute(lost, num_layers=1)
            again = await engine.schedule(retry=True)
            assert again.number > lost.number
            assert again.sequence_ids.tolist() == lost.sequence_ids.tolist() == [1, 2]
            with pytest.raises(StaleStepError):
                await engine.compute(lost)
            with pytest.raises(FailedPreconditionError):
                await engine.schedule(BatchReport(lost.number, [7]))
            await engine.run(again)
            assert sorted(engine.finished) == [1, 2]
            engine.check_outputs()
            assert (await engine.schedule(retry=True)).number == 0

    asyncio.run(scenario())


def test_samples_of_one_prompt(daemon: Daemon) -> None:
    """Three samples end at lengths of their own; the tokens of each differ from the first one on."""

    async def scenario() -> None:
        async with engine_of("asyncio", daemon.address) as engine:
            await engine.add(10, range(9), max_tokens=8, width=3, stop_lengths=[12, 17, 10])
            await engine.add(20, range(30, 35), max_tokens=2)
            await engine.run()
            assert sorted(engine.finished) == [10, 20]
            assert [len(engine.outputs[sequence_id]) for sequence_id in (10, 11, 12)] == [3, 8, 1]
            assert len({tuple(engine.outputs[sequence_id][:1]) for sequence_id in (10, 11, 12)}) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("variant", VARIANTS)
def test_batches_are_made_one_step_ahead(open_daemon: OpenDaemon, variant: str) -> None:
    """A batch is made before the tokens of the one before are reported. Two requests are finished by the engine, when
    the batch ahead has them already."""
    transport, share_pool = VARIANTS[variant]

    async def scenario() -> None:
        async with engine_of("asyncio", open_daemon("float32", share_pool).address, transport) as engine:
            for number in range(5):
                await engine.add(number, range(100 * number, 100 * number + 30), max_tokens=9 + number)
            stops = {1: 4, 3: 7}
            batch, gone = await engine.schedule(), set[int]()
            ahead = None
            while batch.number or ahead is not None:
                if not batch.number:  # a request has to be preempted first, or all are finished
                    assert ahead is not None
                    batch, ahead = ahead, None
                following = await engine.schedule(ahead=True) if ahead is None else ahead
                await engine.compute(batch)
                report = engine.sample(batch, gone)
                sampled = set(batch.sampled.tolist()) - gone
                finished = [one for one in sampled if len(engine.outputs[one]) == stops.get(one)]
                gone = set(finished)
                report = dataclasses.replace(report, finished=finished)
                await engine.check(batch)
                if following.number:
                    batch, ahead = following, await engine.schedule(report, ahead=True)
                else:
                    batch, ahead = await engine.schedule(report), None
            assert sorted(engine.finished) == list(range(5))
            engine.check_outputs()
            assert [len(engine.outputs[number]) for number in range(5)] == [9, 4, 11, 7, 13]

    asyncio.run(scenario())


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_beams_continue_one_another(daemon: Daemon, preemption: str) -> None:
    """Each step, the first beam is continued twice and the last one is dropped, while others need the blocks."""

    async def scenario() -> None:
        async with engine_of("asyncio", daemon.address, preemption=preemption) as engine:
            await engine.add(10, range(9), max_tokens=20, width=3, beams=True)
            for number in range(20, 24):
                await engine.add(number, range(100 * number, 100 * number + 60), max_tokens=16)
            batch = await engine.schedule()
            while batch.number:
                await engine.compute(batch)
                await engine.check(batch)
                report = engine.sample(batch)
                parents = batch.sampled.tolist()
                if 10 in parents and 10 in batch.sequence_ids[: batch.num_decodes]:
                    at = parents.index(10)
                    parents[at : at + 3] = [10, 10, 11]
                    ends = [engine.outputs[sequence_id][-1] for sequence_id in (10, 11, 12)]
                    kept = [engine.outputs[parent][:-1] for parent in (10, 10, 11)]
                    for sequence_id, output, end in zip((10, 11, 12), kept, ends, strict=True):
                        engine.outputs[sequence_id] = [*output, end + sequence_id - 10]
                    tokens = [engine.outputs[sequence_id][-1] for sequence_id in batch.sampled.tolist()]
                    report = dataclasses.replace(report, token_ids=tokens, parents=parents)
                batch = await engine.schedule(report)
            assert sorted(engine.finished) == [10, 20, 21, 22, 23]
            assert len({tuple(engine.outputs[sequence_id]) for sequence_id in (10, 11, 12)}) == 3
            preempted = [one for one_batch in engine.batches for one in one_batch.preempted]
            assert preempted

    asyncio.run(scenario())
