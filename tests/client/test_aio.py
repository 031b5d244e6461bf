"""The async API: it matches the sync API, and handles concurrent calls, cancellation and broken connections."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from both_faces import Awaitable
from cutting_proxy import CuttingProxy
from each_row import each_row
from scripted_daemon import ScriptedDaemon, serving

from kvservice.client import (
    AsyncKVClient,
    AsyncKVScheduler,
    AsyncSession,
    AsyncStep,
    KVClient,
    KVScheduler,
    Session,
    Step,
)
from kvservice.client.aio import TaskWaiting
from kvservice.client.channel import MAX_IN_FLIGHT
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    InvalidArgumentError,
    KVServiceError,
    LayerWrittenError,
    MessageTooLargeError,
    SessionTakenError,
    UnknownSessionError,
)
from kvservice.launch import Daemon
from kvservice.v1 import blocks_pb2, session_pb2
from kvservice.wire.status import to_status

GRACE_S = 0.5
LAYERS, HEADS, HEAD_SIZE = 2, 2, 32


@pytest.fixture(autouse=True)
def alone(client: KVClient) -> Any:
    """Wait until no session of another test is left. Afterwards wait for this test's sessions to end within the grace
    period, and clear the prefix cache."""
    await_no_sessions(client)
    yield
    await_no_sessions(client)
    with client.session() as session:
        session.reset_prefix_cache()
    stats = client.stats()
    assert (stats.sequences, stats.free_blocks) == (0, stats.num_blocks)


def await_no_sessions(client: KVClient) -> None:
    deadline = time.monotonic() + 10
    while client.stats().sessions:
        assert time.monotonic() < deadline, "sessions are left over"
        time.sleep(0.02)


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a scenario with asyncio.run. What the loop would only log, such as unretrieved exceptions, fails the test."""
    logged: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        result = await asyncio.wait_for(scenario, 30)
        await asyncio.sleep(0)
        gc.collect()
        left = [task for task in asyncio.all_tasks() if "kvservice" in str(task.get_coro())]
        assert left == []
        return result

    result = asyncio.run(watched())
    gc.collect()
    assert logged == []
    return result


def far_client(proxy: CuttingProxy) -> AsyncKVClient:
    """A client whose connection can be cut. Its calls wait until it has reconnected."""
    return AsyncKVClient(proxy.address, reconnect_wait_s=60)


def tensors(seed: int, *leading: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((*leading, HEADS, HEAD_SIZE)).astype(np.float32) for _ in range(3)]


async def everything(kv: Any) -> list[Any]:
    """Call each method of a session at least once. Returns their results and errors."""
    seen: list[Any] = [await kv.can_allocate([[1, 2, 3]]), await kv.can_allocate([range(500)])]
    one, two = await kv.allocate_batch([[1, 2, 3, 4, 5], [7, 8]])
    prefill = await kv.open_step([one, two])
    seen += [prefill.query_lens.tolist(), prefill.context_lens.tolist(), prefill.num_tokens, prefill.cow_copies]
    for layer in range(LAYERS):
        seen.append(await prefill.extend(layer, *tensors(layer, 7), return_lse=True))
    child = await kv.fork(one)
    children = await kv.fork_batch([two, two])
    step = await kv.append([child, two], [9, 10])
    seen += [step.cow_copies, await step.decode(0, *tensors(5, 2)), await step.attend(1, *tensors(6, 2))]
    verify = await kv.append([one, child], [1, 2, 3], num_tokens=[2, 1], lookahead=2)
    await verify.write(*tensors(7, 3)[:2], layer=1)
    await kv.open_step([one], 1)
    await kv.truncate(one, 4)
    seen += [await kv.can_append([one, child], [2, 1], lookahead=3), await kv.can_swap_out([one, child])]
    await kv.swap_out([one, child])
    seen.append(await kv.can_swap_in([one, child]))
    await kv.swap_in([one, child])
    seen += [await kv.read(one, 0, 4), await kv.read(two, 1, 3, layer=1), await kv.common_prefix([one, child])]
    await kv.free(children)
    pin = await kv.pin([1, 2, 3, 4], 60.0)
    seen += [pin.num_pinned_tokens, await kv.match_prefix([1, 2, 3, 4, 5]), await kv.describe([one], token_ids=True)]
    await kv.unpin(pin)
    for wrong in (
        lambda: kv.free([children[0]]),
        lambda: step.decode(0, *tensors(5, 2)),
        lambda: kv.truncate(one, 100),
        lambda: kv.allocate([-1]),
        lambda: kv.allocate([1], sequence_id=one.sequence_id),
        lambda: kv.read(one, 3, 9),
        lambda: kv.swap_in([one]),
        lambda: kv.allocate(range(500)),
        lambda: verify.write(*tensors(7, 4)[:2], layer=0),
        lambda: kv.pin([1, 2, 3, 4], -1.0),
        lambda: kv.truncate(one, float("nan")),
    ):
        with pytest.raises(KVServiceError) as error:
            await wrong()
        seen += [type(error.value), str(error.value), error.value.metadata]
    await kv.reset_prefix_cache()
    return [*seen, await kv.describe(token_ids=True)]


def test_both_faces_do_the_same(daemon: Daemon, client: KVClient) -> None:
    async def asynchronous() -> list[Any]:
        async with AsyncKVClient(daemon.address) as remote:
            assert (await remote.ping(b"x"), remote.info, await remote.stats()) == (b"x", client.info, client.stats())
            async with remote.session("one") as kv:
                return await everything(kv)

    with client.session("one") as session:
        blocking = asyncio.run(everything(Awaitable(session)))
        session.reset_prefix_cache()
    np.testing.assert_equal(run(asynchronous()), blocking)


def test_both_faces_have_the_same_methods() -> None:
    def methods(of: type) -> dict[str, Callable[..., Any]]:
        return {name: found for name, found in inspect.getmembers(of, inspect.isfunction) if name[0] != "_"}

    pairs: tuple[tuple[type, type], ...] = (Session, AsyncSession), (Step, AsyncStep), (KVScheduler, AsyncKVScheduler)
    with each_row() as row:
        for blocking, asynchronous in pairs:
            awaited = methods(asynchronous)
            awaited.pop("call", None)  # it is not part of the API
            with row(blocking.__name__):
                assert methods(blocking).keys() == awaited.keys()
                assert any(inspect.iscoroutinefunction(found) for found in awaited.values())
                for name, found in awaited.items():
                    assert inspect.signature(methods(blocking)[name]) == inspect.signature(found), name


def test_what_is_freed_later_is_freed_before_the_next_allocation(daemon: Daemon, client: KVClient) -> None:
    async def asynchronous() -> None:
        async with AsyncKVClient(daemon.address) as remote, remote.session() as kv:
            kv.free_later(await kv.allocate_batch([[1], [2, 3]]))
            assert [one.length for one in await kv.describe()] == [1, 2]
            assert await kv.can_allocate([[1]]) == "ok"
            assert await kv.describe() == []

    run(asynchronous())
    with client.session() as kv:
        one, two, three = kv.allocate_batch([[1], [2, 3], [4, 5, 6]])
        kv.free([one])
        kv.free_later(iter([two, one]))
        with pytest.raises(CallTimeoutError):  # the call that frees the first one has no answer in time
            kv.append([three], [7], timeout_s=1e-6)
        kv.append([three], [7])
        assert [sequence.length for sequence in kv.describe()] == [4]


async def generate(kv: AsyncSession, number: int) -> list[Any]:
    """Generate with a new sequence: prefill, three decode steps, then read all K/V."""
    sequence = await kv.allocate([number, number + 1, number + 2])
    prefill = await kv.open_step([sequence])
    seen = [await prefill.extend(layer, *tensors(100 * number + layer, 3)) for layer in range(LAYERS)]
    for token in range(3):
        step = await kv.append([sequence], [token])
        layers = range(LAYERS)
        seen += [await step.decode(layer, *tensors(100 * number + 10 * token + layer, 1)) for layer in layers]
    seen += await kv.read(sequence, 0, 6)
    await kv.free([sequence])
    return seen


def test_calls_overlap(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as client:
            async with client.session() as kv:
                together = await asyncio.gather(*(generate(kv, number) for number in range(16)))
            async with client.session() as kv:
                alone = [await generate(kv, number) for number in range(16)]
            np.testing.assert_equal(together, alone)

    run(scenario())


def test_overlapping_calls_are_done_in_their_order(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as client, client.session() as kv:
            calls: list[Any] = []
            for _ in range(100):
                sequence_id = 5
                calls.append(kv.allocate([1, 2], sequence_id=sequence_id))
                calls.append(kv.describe())
                calls.append(kv.context.connection.send("free", free_request(sequence_id)))
            answers = await asyncio.gather(*calls)
            assert all(len(described) == 1 for described in answers[1::3])
            assert await kv.describe() == []

    run(scenario())


def free_request(sequence_id: int) -> Any:
    return blocks_pb2.FreeRequest(sequence_ids=[sequence_id])


def test_one_of_several_appends_at_once_counts(daemon: Daemon) -> None:
    """Also if all have the same token, so that they look like one append that is repeated."""

    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as client, client.session() as session:
            for tokens in ([7, 7, 7], [7, 8, 9]):
                sequence = await session.allocate(range(20))
                await session.open_step([sequence])
                appends = [session.append([sequence], [token]) for token in tokens]
                done = await asyncio.gather(*appends, return_exceptions=True)
                assert sorted(type(one).__name__ for one in done) == ["AsyncStep", *["LengthMismatchError"] * 2]
                assert sequence.length == (await session.describe([sequence]))[0].length == 21
                await session.append([sequence], [7])
                await session.free([sequence])

    run(scenario())


def test_a_closed_client_says_so(daemon: Daemon) -> None:
    client = KVClient(daemon.address)
    client.close()
    for call in (client.session, client.ping):
        with pytest.raises(ConnectionLostError, match="the client is closed"):
            call()


def test_a_cancelled_call_harms_no_other(daemon: Daemon) -> None:
    big = tensors(1, LAYERS, 200)[:2]

    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as client, client.session() as kv:
            sequence = await kv.allocate(range(200))
            step = await kv.append([await kv.allocate([1])], [2])
            prefill = await kv.open_step([sequence])
            for n in range(20):
                doomed = [asyncio.create_task(prefill.write(*big)), asyncio.create_task(kv.describe())]
                for _ in range(n % 5):
                    await asyncio.sleep(0)
                for task in doomed:
                    task.cancel()
                # Calls for layers are never sent again, so a stream that broke during one would raise an error here.
                assert len(await kv.describe()) == 2
                await asyncio.gather(*doomed, return_exceptions=True)
            await step.extend(0, *tensors(3, 2))

    run(scenario())


def test_overlapping_calls_over_a_line_that_breaks(tmp_path: Path, daemon: Daemon) -> None:
    """Every call runs once and in order: step ids are consecutive and each of them was returned to a caller."""
    count = 300

    async def scenario(proxy: CuttingProxy) -> None:
        async with far_client(proxy) as client, client.session(detachable=True) as kv:
            sequence = await kv.allocate([1, 2, 3, 4])
            first = (await kv.open_step([sequence])).step_id
            steps = [asyncio.create_task(kv.open_step([sequence])) for _ in range(count)]
            for _ in range(3):
                proxy.lose_replies()
                await asyncio.sleep(0.05)
                proxy.cut()
                await asyncio.sleep(0.02)
            ids = [step.step_id for step in await asyncio.gather(*steps)]
            assert ids == list(range(first + 1, first + 1 + count))

    with CuttingProxy(tmp_path, daemon.address) as proxy:
        run(scenario(proxy))


def test_large_calls_that_wait_to_be_written_when_the_line_breaks(tmp_path: Path, daemon: Daemon) -> None:
    """Calls that are not repeatable raise an error; the next stream starts with its attach; the session continues."""

    async def scenario(proxy: CuttingProxy) -> None:
        async with far_client(proxy) as client, client.session(detachable=True) as kv:
            for number in range(6):
                sequence = await kv.allocate(range(1000 * number, 1000 * number + 200))
                step = await kv.open_step([sequence])
                calls = [step.write(*tensors(1, LAYERS, 200)[:2]) for _ in range(20)]
                tasks = [asyncio.create_task(call) for call in [*calls, kv.describe()]]
                await asyncio.sleep(0.002 * number)
                proxy.cut()
                *writes, described = await asyncio.gather(*tasks, return_exceptions=True)
                assert isinstance(described, list)
                [info] = described
                assert {type(answer) for answer in writes} <= {type(None), ConnectionLostError, LayerWrittenError}
                assert info.sequence_id == sequence.sequence_id
                await kv.free([sequence])

    with CuttingProxy(tmp_path, daemon.address) as proxy:
        run(scenario(proxy))


def test_a_daemon_out_of_reach_is_an_error_for_all_at_once(tmp_path: Path, daemon: Daemon) -> None:
    async def scenario(proxy: CuttingProxy) -> None:
        async with AsyncKVClient(proxy.address, reconnect_wait_s=0.3) as client, client.session() as kv:
            proxy.cut(stay_down=True)
            for _ in range(2):
                answers = await asyncio.gather(*(kv.describe() for _ in range(50)), return_exceptions=True)
                assert {type(answer) for answer in answers} == {DaemonAwayError}

    with CuttingProxy(tmp_path, daemon.address) as proxy:
        run(scenario(proxy))


def test_closing_ends_calls_that_wait(tmp_path: Path, daemon: Daemon) -> None:
    async def scenario(proxy: CuttingProxy, *, reconnecting: bool) -> None:
        async with far_client(proxy) as client, client.session() as kv:
            if reconnecting:
                proxy.cut(stay_down=True)
            else:
                proxy.lose_replies()
            waiting = [asyncio.create_task(kv.describe()) for _ in range(3)]
            await asyncio.sleep(0.1)
            await kv.detach()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {(type(answer), str(answer)) for answer in answers} == {
                (ConnectionLostError, "the session is closed")
            }

    with CuttingProxy(tmp_path, daemon.address) as proxy:
        run(scenario(proxy, reconnecting=False))
        proxy.cut()
        run(scenario(proxy, reconnecting=True))


def test_who_lost_a_session_neither_takes_it_back_nor_closes_it(daemon: Daemon) -> None:
    async def lose(first: AsyncKVClient, second: AsyncKVClient, *, noticed: bool) -> None:
        async with first.session(detachable=True) as old:
            await old.allocate([1, 2, 3])
            taken = second.resume(old.token)
            new = await taken.__aenter__()
            if noticed:
                for _ in range(2):
                    with pytest.raises(SessionTakenError):
                        await old.describe()
        await asyncio.sleep(2 * GRACE_S)
        assert [info.length for info in await new.describe()] == [3]
        await taken.__aexit__(None, None, None)

    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as first, AsyncKVClient(daemon.address) as second:
            await asyncio.gather(*(lose(first, second, noticed=noticed) for noticed in (True, False)))
            assert (await first.stats()).sessions == 0

    run(scenario())


def test_who_lost_a_session_unawares_is_refused_and_asks_no_more(tmp_path: Path, daemon: Daemon) -> None:
    """The first client's connection is cut before the session is taken over, so the client notices neither."""

    async def scenario(proxy: CuttingProxy, far: AsyncKVClient, near: AsyncKVClient) -> None:
        async with far.session(detachable=True) as old:
            proxy.cut(stay_down=True)
            async with near.resume(old.token) as new:
                proxy.up()
                answers = await asyncio.gather(*(old.describe() for _ in range(20)), return_exceptions=True)
                assert {type(answer) for answer in answers} == {SessionTakenError}
                proxy.cut(stay_down=True)
                with pytest.raises(SessionTakenError):
                    await old.describe()
                proxy.up()
                assert await new.describe() == []

    async def connected(proxy: CuttingProxy) -> None:
        async with far_client(proxy) as far, AsyncKVClient(daemon.address) as near:
            await scenario(proxy, far, near)

    with CuttingProxy(tmp_path, daemon.address) as proxy:
        run(connected(proxy))


def test_who_lost_a_session_unawares_does_not_close_it(tmp_path: Path, daemon: Daemon) -> None:
    async def reach(far: AsyncKVClient) -> None:
        while True:
            try:
                await far.ping()
                return
            except ConnectionLostError:
                await asyncio.sleep(0.01)

    async def scenario(proxy: CuttingProxy) -> None:
        async with far_client(proxy) as far, AsyncKVClient(daemon.address) as near:
            async with far.session(detachable=True) as old:
                proxy.cut(stay_down=True)
                taken = near.resume(old.token)
                new = await taken.__aenter__()
                proxy.up()
                await reach(far)
            assert await new.describe() == []
            await taken.__aexit__(None, None, None)

    with CuttingProxy(tmp_path, daemon.address) as proxy:
        run(scenario(proxy))


def test_calls_under_way_when_the_session_is_taken(daemon: Daemon) -> None:
    """If gRPC is sending a call when the status arrives, the status may be lost; the client then only sees that the
    stream broke."""

    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as first, AsyncKVClient(daemon.address) as second:
            for _ in range(20):
                async with first.session(detachable=True) as old:
                    calls = [asyncio.create_task(keep_calling(old)) for _ in range(4)]
                    async with second.resume(old.token) as new:
                        assert {type(error) for error in await asyncio.gather(*calls)} == {SessionTakenError}
                        assert await new.describe() == []

    run(scenario())


async def keep_calling(kv: AsyncSession) -> KVServiceError:
    while True:
        try:
            await kv.describe()
        except KVServiceError as error:
            return error


def test_detach_and_resume(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as client:
            async with client.session(detachable=True) as kv:
                sequence = await kv.allocate([1, 2, 3])
                key, value = tensors(1, LAYERS, 3)[:2]
                await (await kv.open_step([sequence])).write(key, value)
                token = await kv.detach()
            await asyncio.sleep(2 * GRACE_S)
            async with client.resume(token) as kv:
                [info] = await kv.describe()
                np.testing.assert_equal(await kv.read(sequence, 0, info.length), (key, value))
            with pytest.raises(UnknownSessionError):
                async with client.resume(token):
                    pass

    run(scenario())


def test_a_session_whose_opening_is_cancelled_is_given_up(tmp_path: Path, daemon: Daemon, client: KVClient) -> None:
    async def scenario(proxy: CuttingProxy) -> None:
        async with far_client(proxy) as remote, remote.session(detachable=True) as kv:
            token = await kv.detach()
            proxy.lose_replies()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), remote.resume(token):
                    pass
            proxy.cut()
            assert client.stats().sessions == 1
            async with remote.resume(token) as again:
                assert await again.describe() == []

    with CuttingProxy(tmp_path, daemon.address) as proxy:
        run(scenario(proxy))


def test_a_message_over_the_limit_is_refused_and_the_session_lives(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(daemon.address) as client, client.session(detachable=True) as kv:
            request = blocks_pb2.MatchPrefixRequest(token_ids=range(1_100_000))
            with pytest.raises(MessageTooLargeError):  # bypasses the client's check, so the daemon ends the stream
                await kv.context.connection.send("match_prefix", request)
            assert await kv.describe() == []

    run(scenario())


def test_a_daemon_that_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConnectionLostError):
            async with AsyncKVClient(f"unix://{tmp_path}/none.sock", connect_timeout_s=0.3):
                pass

    run(scenario())


class JoiningDaemon(ScriptedDaemon):
    """A daemon that takes up to `max_calls` calls in one message; 0: it is of an earlier version. It fails every fifth
    `match_prefix`, and ends its stream after `num_replies` replies. `messages` has the number of calls of each message,
    and `executed` the request ids of `allocate`."""

    def __init__(self, max_calls: int, num_replies: int = 10**6) -> None:
        super().__init__()
        self.max_calls, self.num_replies = max_calls, num_replies
        self.messages: list[int] = []
        self.executed: list[int] = []

    def Connect(self, calls: Iterator[session_pb2.Call], context: Any) -> Iterator[session_pb2.Reply]:  # noqa: N802
        attach = next(calls)
        attached = session_pb2.AttachResponse(session_id=7, daemon_start=1, max_calls=self.max_calls)
        yield session_pb2.Reply(call_id=attach.call_id, attach=attached)
        for message in calls:
            together = list(message.calls) or [message]
            self.messages.append(len(together))
            replies = [self.reply_to(call) for call in together[: self.num_replies]]
            self.num_replies -= len(replies)
            yield session_pb2.Reply(replies=replies) if message.calls else replies[0]
            if self.num_replies == 0:
                self.num_replies = 10**6
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")

    def reply_to(self, call: session_pb2.Call) -> session_pb2.Reply:
        if call.WhichOneof("call") == "allocate":
            self.executed.append(call.allocate.request_id)
            return session_pb2.Reply(call_id=call.call_id, allocate=blocks_pb2.AllocateResponse(num_cached_tokens=[0]))
        length = len(call.match_prefix.token_ids)
        if length % 5 == 0:
            error = to_status(InvalidArgumentError(f"{length}", field="token_ids"))
            return session_pb2.Reply(call_id=call.call_id, error=error)
        response = blocks_pb2.MatchPrefixResponse(num_cached_tokens=length)
        return session_pb2.Reply(call_id=call.call_id, match_prefix=response)


@pytest.mark.parametrize(("max_calls", "longest"), [(0, 1), (8, 8), (10**6, 32)])
def test_calls_that_wait_go_as_one_message(tmp_path: Path, max_calls: int, longest: int) -> None:
    """As many as the daemon allows, and none with a daemon of an earlier version. Large ones go alone."""
    daemon = JoiningDaemon(max_calls)

    async def scenario(address: str) -> None:
        async with AsyncKVClient(address, transport="inline") as client, client.session() as kv:
            for length in (1, 2):
                assert await kv.match_prefix(range(length)) == length
            assert daemon.messages == [1, 1], "a lone call is sent as ever"
            daemon.messages.clear()
            lengths = range(1, 33)
            calls = [kv.match_prefix(range(length)) for length in lengths]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for length, answer in zip(lengths, answers, strict=True):
                assert (str(answer) if length % 5 == 0 else answer) == (
                    f"token_ids: {length}" if length % 5 == 0 else length
                )
            assert (sum(daemon.messages), max(daemon.messages)) == (32, longest)
            daemon.messages.clear()
            await asyncio.gather(*(kv.match_prefix(range(9999)) for _ in range(8)))
            assert max(daemon.messages) == 1

    with serving(daemon, f"unix:{tmp_path}/socket") as address:
        run(scenario(address))


def test_a_line_that_breaks_within_a_message(tmp_path: Path) -> None:
    """The calls that were answered are done; the others are sent again, as the same requests."""
    daemon = JoiningDaemon(8, num_replies=3)

    async def scenario(address: str) -> None:
        async with AsyncKVClient(address, transport="inline") as client, client.session() as kv:
            made = await asyncio.gather(*(kv.allocate([1]) for _ in range(8)))
            assert len({sequence.sequence_id for sequence in made}) == 8
            assert daemon.messages == [8, 5]
            assert len(daemon.executed) == len(set(daemon.executed)) == 8

    with serving(daemon, f"unix:{tmp_path}/socket") as address:
        run(scenario(address))


def test_turns_go_to_those_who_wait_in_their_order() -> None:
    """None is lost when somebody who waits is cancelled, or does not wait longer, also in the moment it comes."""

    async def scenario() -> None:
        turns = TaskWaiting().turns()
        assert all(turns.take_now() for _ in range(MAX_IN_FLIGHT))
        assert not turns.take_now()
        assert not await turns.take(0.0)
        waiting = [asyncio.create_task(turns.take(None)) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        turns.give_back()
        waiting[1].cancel()  # it has its turn, and does not know it yet
        done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            more, others = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert [task.cancelled() for task in waiting[:2]] == [True, True]
        assert waiting[2].result()
        assert others == {waiting[3]}, "there was one turn"
        turns.give_back()
        assert await waiting[3]
        for _ in range(MAX_IN_FLIGHT):
            turns.give_back()
        assert all(turns.take_now() for _ in range(MAX_IN_FLIGHT))
        assert not turns.take_now()

    asyncio.run(scenario())
