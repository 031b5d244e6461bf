"""Calls that are cut short leave nothing behind: they are cancelled, or reach their time limit, before their answer is
there. Handles and daemon agree afterwards, and what nobody can name is gone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from both_faces import Face, session_of
from each_row import each_row
from small_pool import SMALL_POOL
from waiting import PATIENCE_S, until

from kvservice.client import (
    AsyncKVClient,
    BatchReport,
    KVClient,
    RegionInfo,
    ScheduledRequest,
    Sequence,
    StoreNamespace,
)
from kvservice.client.aio import TaskStream
from kvservice.client.cut_calls import SETTLED_BY_THEIR_OWNER, UNDO
from kvservice.client.threads import BlockingStream
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    OutOfBlocksError,
    PoolNotSharedError,
)
from kvservice.launch import Daemon
from kvservice.server.rpc.contract import SERVICES, call_name
from kvservice.v1 import (
    blocks_pb2,
    blocks_pb2_grpc,
    regions_pb2,
    regions_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    session_pb2,
)

NUM_TOKENS = 9
FACES: list[Face] = ["blocking", "asyncio"]
CUT = (CallTimeoutError, asyncio.CancelledError)


@contextlib.contextmanager
def cut(name: str, *, executed: bool) -> Iterator[None]:
    """Let the next call of this name be cut short: after the daemon has executed it, or before the daemon gets it."""
    left = [name]
    with pytest.MonkeyPatch.context() as patch:
        for client, error in ((KVClient, CallTimeoutError("no answer")), (AsyncKVClient, asyncio.CancelledError())):

            async def sent(
                self: Any, method: Any, request: Any, limit: Any, send: Any = client._send, error: Any = error
            ) -> Any:
                if not isinstance(request, session_pb2.OpenRequest) or left != ["open"]:
                    return await send(self, method, request, limit)
                left.clear()
                if executed:
                    await send(self, method, request, limit)
                raise error

            patch.setattr(client, "_send", sent)
        for kind, error in ((BlockingStream, CallTimeoutError("no answer")), (TaskStream, asyncio.CancelledError())):

            async def held(
                stream: Any, called: str, request: Any, deadline: Any, exchange: Any = kind.exchange, error: Any = error
            ) -> Any:
                if [called] != left:
                    return await exchange(stream, called, request, deadline)
                left.clear()
                if executed:
                    await exchange(stream, called, request, None)
                raise error

            patch.setattr(kind, "exchange", held)
        yield
    assert not left, f"{name} was called"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    # The grace time is long: what a cut call has made goes because the client sees to it.
    with Daemon(**SMALL_POOL | {"num_blocks": 512, "max_sequences": 512, "session_grace_s": 600.0}) as running:
        yield running.address


def test_each_call_that_changes_something_is_settled() -> None:
    """The contract marks them by their request id, or by the secret that they return. A new one needs an entry."""
    changing = {
        call_name(method)
        for service in SERVICES
        for method in service.methods
        if "request_id" in method.input_type.fields_by_name or "session_token" in method.output_type.fields_by_name
    }
    assert set(UNDO) | SETTLED_BY_THEIR_OWNER == changing
    assert set(UNDO) & SETTLED_BY_THEIR_OWNER == set()
    assert set(CALLS) == set(UNDO), "each is tried below"
    assert set(MAKES) >= {name for name, undo in UNDO.items() if undo is not None} | {"open", "create_region"}


def layers(num_tokens: int) -> list[np.ndarray]:
    """Return K and V of a step, for all layers."""
    return [np.ones((2, num_tokens, 2, 32), np.float32)] * 2


# ---- each call


class Rig(SimpleNamespace):
    """A session with a computed sequence `one` and a new one `other`, that has mapped the pool."""

    async def state(self) -> Any:
        """Return what the daemon has of the session, and of pins."""
        found = await self.kv.describe()
        infos = sorted((one.sequence_id, one.length, one.num_blocks, one.swapped) for one in found)
        requests = await self.scheduler.describe()
        return infos, [one.request_id for one in requests], self.client.stats().pinned_blocks


@contextlib.asynccontextmanager
async def rig_of(face: Face, address: str) -> AsyncIterator[Rig]:
    with KVClient(address) as client:
        async with session_of(face, address, "inline") as kv:
            await kv.map_pool(writable=True)
            one, other = await kv.allocate(range(NUM_TOKENS)), await kv.allocate(range(100, 110))
            await kv.commit(await kv.open_step([one]))
            scheduler = await kv.open_scheduler(max_step_tokens=64)
            yield Rig(kv=kv, one=one, other=other, client=client, scheduler=scheduler)
            await kv.reset_prefix_cache()
        until(lambda: client.stats().sessions == 0)


@contextlib.asynccontextmanager
async def opener_of(face: Face, address: str) -> AsyncIterator[Any]:
    """Yield a client that opens sessions."""
    if face == "blocking":
        with KVClient(address) as client:
            yield client
    else:
        async with AsyncKVClient(address) as waiting:
            yield waiting


# For each call: what comes before it, the call, and what it changes that cannot be undone.
Step = Callable[[Rig], Awaitable[Any]]
Call = tuple[Step | None, Step, Callable[[Rig], Awaitable[bool]] | None]


async def add(rig: Rig, request_id: int = 500) -> None:
    await rig.scheduler.add([ScheduledRequest(request_id, range(200, 205), max_tokens=2)])


async def kept(rig: Rig, name: str, work: Awaitable[Any]) -> None:
    setattr(rig, name, await work)


async def is_swapped(rig: Rig) -> bool:
    (info,) = await rig.kv.describe([rig.one])
    return bool(info.swapped)


async def batch_comes_again(rig: Rig) -> bool:
    batch = await rig.scheduler.schedule()
    return batch.number == 1 and batch.sequence_ids.tolist() == [500]


async def ids_of(rig: Rig) -> list[int]:
    return [one.sequence_id for one in await rig.kv.describe()]


async def is_free(rig: Rig) -> bool:
    return rig.one.sequence_id not in await ids_of(rig)


async def no_pins(rig: Rig) -> bool:
    return (await rig.state())[2] == 0


async def nothing_cached(rig: Rig) -> bool:
    return bool(await rig.kv.match_prefix(range(NUM_TOKENS)) == 0)


async def is_computed(rig: Rig) -> bool:
    (info,) = await rig.kv.describe([rig.other])
    return bool(info.num_computed_tokens == info.length)


async def same_scheduler(rig: Rig) -> bool:
    return (await rig.kv.open_scheduler(max_step_tokens=64)).settings.max_step_tokens == 64


async def one_has(rig: Rig, length: int) -> bool:
    (info,) = await rig.kv.describe([rig.one])
    return info.length == rig.one.length == length


async def no_requests(rig: Rig) -> bool:
    return (await rig.state())[1] == []


CALLS: dict[str, Call] = {
    "allocate": (None, lambda rig: rig.kv.allocate(range(50, 70)), None),
    "append": (None, lambda rig: rig.kv.append([rig.one, rig.other], [1, 2]), None),
    "fork": (None, lambda rig: rig.kv.fork_batch([rig.one, rig.one]), None),
    "open_step": (None, lambda rig: rig.kv.open_step([rig.other]), None),
    "open_ahead": (None, lambda rig: rig.kv.open_ahead([rig.one], 8), None),
    "pin": (None, lambda rig: rig.kv.pin(range(NUM_TOKENS), 600), None),
    "add_requests": (None, add, None),
    "commit_ahead": (
        lambda rig: kept(rig, "step", rig.kv.open_ahead([rig.one], 4)),
        lambda rig: rig.kv.commit_ahead(rig.step, [1, 2], num_steps=4),
        lambda rig: one_has(rig, NUM_TOKENS + 2),
    ),
    "commit": (
        lambda rig: kept(rig, "step", rig.kv.open_step([rig.other])),
        lambda rig: rig.kv.commit(rig.step),
        is_computed,
    ),
    "truncate": (None, lambda rig: rig.kv.truncate(rig.one, 3), lambda rig: one_has(rig, 3)),
    "swap_out": (None, lambda rig: rig.kv.swap_out([rig.one]), is_swapped),
    "swap_in": (
        lambda rig: rig.kv.swap_out([rig.one]),
        lambda rig: rig.kv.swap_in([rig.one]),
        lambda rig: one_has(rig, NUM_TOKENS),
    ),
    "free": (None, lambda rig: rig.kv.free([rig.one]), is_free),
    "unpin": (
        lambda rig: kept(rig, "pin", rig.kv.pin(range(NUM_TOKENS), 600)),
        lambda rig: rig.kv.unpin(rig.pin),
        no_pins,
    ),
    "reset_prefix_cache": (lambda rig: rig.kv.free([rig.one]), lambda rig: rig.kv.reset_prefix_cache(), nothing_cached),
    "open_scheduler": (None, lambda rig: rig.kv.open_scheduler(max_step_tokens=64), same_scheduler),
    "abort_requests": (add, lambda rig: rig.scheduler.abort([500]), no_requests),
    "schedule": (add, lambda rig: rig.scheduler.schedule(), batch_comes_again),
}


@pytest.mark.parametrize("face", FACES)
def test_handles_and_daemon_agree_after_each_call(address: str, face: Face) -> None:
    async def check(name: str, executed: bool) -> None:
        before, call, done = CALLS[name]
        async with rig_of(face, address) as rig:
            if before is not None:
                await before(rig)
            state = await rig.state()
            with cut(name, executed=executed), pytest.raises(CUT):
                await call(rig)
            if done is None:
                assert await rig.state() == state
            else:
                assert await done(rig)
            assert not await is_free(rig) or name in ("free", "reset_prefix_cache")
            lengths = {one.sequence_id: one.length for one in await rig.kv.describe()}
            for sequence in (rig.one, rig.other):
                assert lengths.get(sequence.sequence_id, sequence.length) == sequence.length
            # The sequences can be used.
            assert (await rig.kv.append([rig.other], [3])).num_tokens >= 1

    with each_row() as row:
        for name in CALLS:
            for executed in (True, False):
                with row((name, executed)):
                    asyncio.run(check(name, executed))


async def open_another(rig: Rig) -> None:
    if isinstance(rig.opener, KVClient):
        rig.opener.session()
    else:
        async with rig.opener.session():
            pass


# The calls that make something, also those that are not tried above.
MAKES: dict[str, tuple[Step | None, Step]] = {
    "open": (None, open_another),
    "create_region": (None, lambda rig: rig.kv.create_region(4096)),
    **{
        name: CALLS[name][:2]
        for name in ("allocate", "append", "fork", "open_ahead", "commit_ahead", "pin", "add_requests")
    },
}


def found_by(address: str, token: bytes, client: KVClient) -> Any:
    """Return what the daemon has, asked by somebody else, for whom no call of the session waits."""
    with grpc.insecure_channel(address) as channel:
        blocks = blocks_pb2_grpc.BlockServiceStub(channel)
        schedulers = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        memory = regions_pb2_grpc.RegionServiceStub(channel)
        sequences = blocks.Describe(blocks_pb2.DescribeRequest(session_token=token)).sequences
        requests = schedulers.DescribeRequests(scheduler_pb2.DescribeRequestsRequest(session_token=token)).requests
        regions = memory.ListRegions(regions_pb2.ListRegionsRequest(session_token=token)).regions
    stats = client.stats()
    return (
        sorted((one.sequence_id, one.length) for one in sequences),
        [one.request_id for one in requests],
        sorted(region.name for region in regions),
        (stats.sessions, stats.pinned_blocks, stats.tokens),
    )


@pytest.mark.parametrize("face", FACES)
def test_what_nobody_can_name_is_gone_without_another_call(address: str, face: Face) -> None:
    async def check(name: str, executed: bool) -> None:
        before, call = MAKES[name]
        async with rig_of(face, address) as rig, opener_of(face, address) as rig.opener:
            if before is not None:
                await before(rig)

            def found() -> Any:
                return found_by(address, rig.kv.token, rig.client)

            state = found()
            if name == "commit_ahead":  # its tokens are committed, and nobody has the step that it has opened
                lengths = dict(state[0]) | {rig.one.sequence_id: NUM_TOKENS + 2}
                num_tokens = state[3][2] + sum(lengths.values()) - sum(dict(state[0]).values())
                state = (sorted(lengths.items()), *state[1:3], (*state[3][:2], num_tokens))
            with cut(name, executed=executed), pytest.raises(CUT):
                await call(rig)
            await asyncio.to_thread(until, lambda: found() == state)

    with each_row() as row:
        for name in MAKES:
            for executed in (True, False):
                with row((name, executed)):
                    asyncio.run(check(name, executed))


@pytest.mark.parametrize("face", FACES)
def test_a_client_that_is_closed_leaves_no_session_behind(address: str, face: Face) -> None:
    """Its session is closed before its connection is."""

    async def scenario() -> None:
        with KVClient(address) as client:
            with cut("open", executed=True), pytest.raises(CUT):
                async with opener_of(face, address) as opener:
                    await open_another(Rig(opener=opener))
            assert client.stats().sessions == 0

    asyncio.run(scenario())


def test_a_scheduler_tells_later_what_a_call_without_an_answer_has_said(address: str) -> None:
    """Requests that it ended are named by the next batch, and its batch is opened again."""

    async def scenario(face: Face) -> None:
        async with rig_of(face, address) as rig:
            for request_id in (500, 600):
                await add(rig, request_id)
            first = await rig.scheduler.schedule()
            assert first.step is not None
            await first.step.write(*layers(first.step.num_tokens))
            report = [BatchReport(first.number, [7] * len(first.sampled), finished=[500])]
            with cut("schedule", executed=True), pytest.raises(CUT):
                await rig.scheduler.schedule(report)
            found = await rig.scheduler.schedule(retry=True)
            assert found.finished == [500]
            assert found.sequence_ids.tolist() == [600]
            assert (await rig.scheduler.schedule(retry=True)).finished == [], "it is said once"

    for face in FACES:
        asyncio.run(scenario(face))


@pytest.mark.parametrize("executed", [True, False])
def test_a_mapping_that_nobody_has_ends(address: str, executed: bool) -> None:
    with KVClient(address, transport="inline") as client, client.session() as kv:
        with cut("map_pool", executed=executed), pytest.raises(CallTimeoutError):
            kv.map_pool(writable=True)
        with pytest.raises(PoolNotSharedError):
            kv.open_ahead([kv.allocate([1])], 1)


def test_a_region_is_dropped_when_the_connection_is_back(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks before the answer is there, and does not come back in time."""
    exchange, broken, back = BlockingStream.exchange, threading.Event(), threading.Event()

    async def breaking(stream: Any, called: str, request: Any, deadline: Any) -> Any:
        lost = ConnectionLostError("broken")
        if called == "attach" and broken.is_set() and not back.is_set():
            raise lost
        answer = await exchange(stream, called, request, deadline)
        if called == "create_region" and not broken.is_set():
            broken.set()
            stream.error = lost
            await stream.end()
            raise lost
        return answer

    def regions() -> list[RegionInfo] | None:
        try:
            return kv.regions()
        except DaemonAwayError:
            return None

    monkeypatch.setattr(BlockingStream, "exchange", breaking)
    with KVClient(address, transport="inline", reconnect_wait_s=0) as client, client.session() as kv:
        with pytest.raises(DaemonAwayError):
            kv.create_region(4096)
        assert regions() is None
        back.set()
        until(lambda: regions() == [])


def test_a_session_whose_opening_is_cancelled_is_closed(address: str) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(address, transport="inline") as client:
            with cut("attach", executed=True), pytest.raises(asyncio.CancelledError):
                async with client.session():
                    pass
            assert (await client.stats()).sessions == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("face", FACES)
def test_a_session_ends_if_its_client_then_cannot_ask_for_the_pool(address: str, face: Face) -> None:
    """A client that has not waited for the daemon asks when the session is open."""
    kind: Any = KVClient if face == "blocking" else AsyncKVClient

    async def failing(*_: object) -> None:
        raise CallTimeoutError("late")

    async def scenario() -> None:
        client = kind(address, connect_timeout_s=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "_get_info", failing)
            if face == "blocking":
                with client, pytest.raises(CallTimeoutError):
                    client.session()
            else:
                async with client:
                    with pytest.raises(CallTimeoutError):
                        await client.session().__aenter__()

    asyncio.run(scenario())
    with KVClient(address) as watcher:
        assert watcher.stats().sessions == 0


def test_opening_and_closing_are_cancelled_at_any_moment(address: str) -> None:
    """Of sessions, and of stores. Twice: what tidies up is not cut short by the second time."""

    async def used(opening: contextlib.AbstractAsyncContextManager[object]) -> None:
        async with opening:
            pass

    async def scenario() -> None:
        namespace = StoreNamespace(model="m", block_bytes=4096)
        async with AsyncKVClient(address, transport="inline") as client, AsyncKVClient(address) as watcher:
            for number in range(100):
                for opening in (client.session(), client.store(namespace)):
                    task = asyncio.create_task(used(opening))
                    await asyncio.sleep(number * 5e-5)
                    task.cancel()
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                    assert task.cancelled() or task.exception() is None
            async with asyncio.timeout(PATIENCE_S):
                while (await watcher.stats()).sessions:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


# ---- random moments


async def random_call(kv: Any, rng: random.Random, named: list[Any], freed: list[Any], limit: dict[str, float]) -> None:
    """Make one call, and keep the handles. Those of `freed` are free if the call was sent."""
    kind = rng.choice(["allocate", "fork", "append", "free", "truncate", "pin"]) if named else "allocate"
    sequence: Any = rng.choice(named) if named else None
    if kind == "allocate":
        named.append(await kv.allocate([rng.randrange(100) for _ in range(rng.randrange(1, 8))], **limit))
    elif kind == "fork":
        named.append(await kv.fork(sequence, **limit))
    elif kind == "append":
        await kv.append([sequence], [1, 2], num_tokens=[2], **limit)
    elif kind == "truncate":
        await kv.truncate(sequence, min(2, sequence.length), **limit)
    elif kind == "pin":
        await kv.unpin(await kv.pin(range(NUM_TOKENS), 600, **limit))
    elif len(named) > 6:
        named.remove(sequence)
        freed.append(sequence)
        await kv.free([sequence], **limit)


@pytest.mark.parametrize("face", FACES)
def test_calls_that_are_cut_at_random_moments(address: str, face: Face) -> None:
    async def scenario(seed: int) -> None:
        rng, named, freed = random.Random(seed), list[Any](), list[Any]()
        async with rig_of(face, address) as rig:
            for _ in range(60):
                with contextlib.suppress(OutOfBlocksError, *CUT):
                    if face == "blocking":
                        limit_s = rng.choice([1e-5, 3e-4, 6e-4, 60.0])
                        await random_call(rig.kv, rng, named, freed, {"timeout_s": limit_s})
                        continue
                    calling = asyncio.ensure_future(random_call(rig.kv, rng, named, freed, {}))
                    for _ in range(rng.choice([1, 2, 5, 50, 1000])):
                        await asyncio.sleep(0)
                    calling.cancel()
                    await calling
            found = {one.sequence_id: one.length for one in await rig.kv.describe()}
            still = [one for one in freed if one.sequence_id in found]
            assert found == {one.sequence_id: one.length for one in (*named, *still, rig.one, rig.other)}
            stats = rig.client.stats()
            assert (stats.sequences, stats.pinned_blocks) == (len(found), 0)

    for seed in range(4):
        asyncio.run(scenario(seed))


def test_more_calls_are_cancelled_at_once_than_the_daemon_remembers(address: str) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(address, transport="inline") as client, client.session() as kv:
            tasks = [asyncio.ensure_future(kv.allocate([number])) for number in range(400)]
            for number in range(2000):
                await asyncio.sleep(0)
                if number % 5 == 0:
                    tasks[number // 5].cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, (Sequence, asyncio.CancelledError, OutOfBlocksError)) for one in done)
            named = {one.sequence_id for one in done if isinstance(one, Sequence)}
            assert {one.sequence_id for one in await kv.describe()} == named
            assert (await client.stats()).sequences == len(named)

    asyncio.run(scenario())
