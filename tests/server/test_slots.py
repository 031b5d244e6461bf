"""Limits on open RPCs: one kind does not use the slots of another, and stalled RPCs are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from each_row import each_row
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http2_pings import PingingClient
from http2_requests import HEADERS, RST_STREAM, opening_without_a_window, request, until_frame
from kept_daemon import next_process
from raw_wire import SERVICES
from small_pool import SMALL_POOL
from top_screen import top
from waiting import PATIENCE_S, until

from kvservice.auth.client import NO_CREDENTIALS
from kvservice.config import ServeConfig
from kvservice.errors import ResourceExhaustedError, UnknownSessionError
from kvservice.health import ask, check, door_of
from kvservice.keeper import MAX_SOCKET_PATH_BYTES
from kvservice.launch import Daemon
from kvservice.server.rpc.slots import (
    HURRIED_STALL_S,
    RPC,
    SESSION_UNREAD_BYTES,
    STALL_S,
    UNREAD_BYTES,
    Rpc,
    Slots,
    kind_limits,
    max_rpcs,
    max_rpcs_of_connection,
    max_unattached,
    task_factory,
)
from kvservice.server.rpc.stream import Stream
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc

CONFIG = ServeConfig(max_sessions=3, max_event_streams=2)
LIMITS = kind_limits(CONFIG)
MAX_UNATTACHED = max_unattached(ServeConfig())
HANDLER = Mock()
WATCH, PING, FREE = "/grpc.health.v1.Health/Watch", "/kvservice.v1.PoolService/Ping", "/kvservice.v1.BlockService/Free"


METHODS = [
    *(f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods),
    "/grpc.health.v1.Health/Check",
    WATCH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


class Calls:
    """RPCs on a port, each in its own task as in gRPC."""

    def __init__(self, port: Slots) -> None:
        self._port = port
        self.rpcs: list[Rpc] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def come(self, method: str) -> bool:
        """Start an RPC, and return whether it gets a slot, which it keeps until its task ends."""
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def rpc() -> None:
            handler = self._port.service(cast(Any, SimpleNamespace(method=method)))
            answered.set_result(handler is HANDLER)
            if handler is HANDLER:
                self.rpcs.append(RPC.get())
                await asyncio.Event().wait()

        self.tasks.append(asyncio.create_task(rpc()))
        return await answered

    async def end(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def calls(port: Slots) -> AsyncIterator[Calls]:
    port.add(dict.fromkeys(METHODS, HANDLER))
    made = Calls(port)
    yield made
    for task in made.tasks:
        await made.end(task)


def test_a_kind_takes_no_slot_of_another() -> None:
    async def scenario() -> None:
        async with calls(Slots(CONFIG)) as made:
            assert [await made.come(WATCH) for _ in range(70)] == [True] * 64 + [False] * 6
            assert await made.come(PING)
            assert await made.come(FREE)
            await made.end(made.tasks[0])
            assert [await made.come(WATCH) for _ in range(2)] == [True, False]

    asyncio.run(scenario())


KINDS: dict[str, Any] = {
    "/kvservice.v1.SessionService/Connect": "session stream",
    "/kvservice.v1.SessionService/Open": "other call",
    "/kvservice.v1.EventService/Subscribe": "event stream",
    "/kvservice.v1.AttentionService/Decode": "session call",
    "/kvservice.v1.InspectService/GetSnapshot": "other call",
    "/grpc.health.v1.Health/Check": "other call",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "reflection",
}


def test_each_kind_has_its_slots_and_a_method_of_nobody_takes_none() -> None:
    async def scenario(method: str, limit: int) -> None:
        async with calls(Slots(CONFIG)) as made:
            assert [await made.come("/of/nobody") for _ in range(300)] == [False] * 300
            accepted = [await made.come(method) for _ in range(limit + 1)]
            assert accepted == [True] * limit + [False]

    with each_row() as row:
        for method, kind in KINDS.items():
            with row(method):
                asyncio.run(scenario(method, LIMITS[kind]))


def test_who_does_not_read_large_answers_has_less_time_if_others_wait_for_their_room() -> None:
    """The session that takes its part is hurried for its own calls; nobody for those of another, until all is taken."""

    async def scenario() -> None:
        async with calls(port := Slots(CONFIG)) as made:
            for _ in range(6):
                assert await made.come(FREE)
            *of_flood, slow, quick = made.rpcs
            for i, rpc in enumerate(of_flood):
                rpc.session = b"flood %d" % i
            slow.session, quick.session = b"slow", b"quick"
            for rpc in made.rpcs:
                rpc.stalled_since = 0.0
            port.room.sends(slow, 1 << 20)
            port.room.sends(of_flood[0], SESSION_UNREAD_BYTES)
            port.sweep(STALL_S - 1)
            assert not any(task.cancelling() for task in made.tasks)

            async def ended(now: float) -> list[int]:
                port.sweep(now)
                await asyncio.sleep(0)
                return [i for i, task in enumerate(made.tasks) if task.done()]

            own = asyncio.create_task(port.room.begin(Rpc(Mock(), None, port, "other call", session=b"flood 0")))
            await asyncio.sleep(0)
            assert await ended(HURRIED_STALL_S - 1) == []
            assert await ended(HURRIED_STALL_S + 1) == [0]
            await own
            assert list(port.room._careless) == [b"flood 0"]
            for rpc in of_flood[1:]:
                port.room.sends(rpc, UNREAD_BYTES)
            waits = asyncio.create_task(port.room.begin(quick))
            await asyncio.sleep(0)
            assert await ended(HURRIED_STALL_S + 1) == [0, 1, 2, 3]
            await waits

    asyncio.run(scenario())


def test_a_connection_is_no_more_than_a_part() -> None:
    """One connection can still have all sessions and some calls besides."""
    for config in (CONFIG, ServeConfig(), ServeConfig(max_sessions=4096)):
        assert config.max_sessions < max_rpcs_of_connection(config) < max_rpcs(config) / 2
        assert sum(kind_limits(config).values()) < max_rpcs(config)


def test_an_address_has_a_fourth_of_a_kind_and_half_of_the_streams_of_events_and_of_unattached_ones() -> None:
    config = ServeConfig(max_sessions=3, max_event_streams=5)
    with each_row() as row:
        for kind, share in (("health watch", LIMITS["health watch"] // 4), ("event stream", 2), ("unattached", 32)):
            with row(kind):
                assert_share(Slots(config), kind, share)
        with row("a host with many sessions"):
            assert_share(Slots(ServeConfig(max_sessions=256)), "unattached", 128, 256)


def assert_share(port: Slots, kind: Any, share: int, most: int = 64) -> None:
    """An address takes its share, from several of its connections. Others, and the unix socket, have theirs."""

    @contextlib.contextmanager
    def taken(peer: str) -> Iterator[None]:
        if kind != "unattached":
            with port.of_peer(kind, peer):
                yield
            return
        port.check_unattached(peer)
        port.add_unattached(peer)
        yield
        port.remove_unattached(peer)

    with contextlib.ExitStack() as open_:
        for number in range(share):
            open_.enter_context(taken(f"ipv4:10.0.0.1:{number}"))
        with pytest.raises(ResourceExhaustedError, match=f"{share} .* of 10.0.0.1 "):
            open_.enter_context(taken("ipv4:10.0.0.1:999"))
        open_.enter_context(taken("ipv4:10.0.0.2:5"))
        for _ in range(most - share - 1):  # peers on the unix socket cannot be distinguished
            open_.enter_context(taken("unix:"))
        if kind == "unattached":
            with pytest.raises(ResourceExhaustedError, match=f"^{most} session streams are not"):
                open_.enter_context(taken("unix:"))
        open_.pop_all().close()
    with taken("ipv4:10.0.0.1:999"):
        pass


def test_a_stream_that_waits_for_its_session_to_be_restored_leaves_its_place() -> None:
    async def scenario() -> None:
        port, sessions, context, peer = Slots(CONFIG), Mock(), Mock(), "ipv4:10.0.0.1:5"
        restored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answered, ends = asyncio.Event(), asyncio.Event()
        sessions.restoring.return_value = restored
        attach = session_pb2.Call(call_id=1, attach=session_pb2.AttachRequest(session_token=b"saved"))

        async def messages() -> AsyncIterator[Any]:
            yield attach
            answered.set()
            await ends.wait()
            yield grpc.aio.EOF

        context.peer.return_value, context.read, context.write = peer, aiter(messages()).__anext__, AsyncMock()
        for _ in range(31):
            port.add_unattached(peer)
        rpc = Rpc(Mock(), None, port, "session stream")
        stream = asyncio.create_task(Stream(Mock(), sessions, context, Mock(called_again=None), port, rpc).serve())
        while not sessions.restoring.called:
            await asyncio.sleep(0)
        port.check_unattached(peer)
        restored.set_exception(UnknownSessionError("it was closed"))
        await answered.wait()
        with pytest.raises(ResourceExhaustedError, match=r"^32 session streams of 10"):
            port.check_unattached(peer)
        ends.set()
        await stream
        port.check_unattached(peer)

    asyncio.run(scenario())


def test_who_stalls_an_rpc_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    async def scenario() -> None:
        port = Slots(CONFIG)
        async with calls(port) as made:
            for _ in range(3):
                await made.come(PING)
            half_sent, worked_on, unread = made.tasks
            with made.rpcs[1].working():
                with made.rpcs[2].working():
                    now[0] += STALL_S
                port.sweep(now[0])
                await asyncio.sleep(0)
                assert not any(task.cancelling() for task in made.tasks)
                now[0] += 1
                port.sweep(now[0])
                assert [task.cancelling() for task in made.tasks] == [1, 0, 0]
                now[0] += STALL_S
                port.sweep(now[0])
                assert [bool(task.cancelling()) for task in made.tasks] == [True, False, True]
            assert {half_sent, worked_on, unread} == set(made.tasks)

    asyncio.run(scenario())


def test_a_stream_waits_for_its_client_only_while_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    rpc = Rpc(Mock(), 1.0, Mock(), "session stream")
    with rpc.working():
        assert rpc.stalled_since is None
        with rpc.waiting():
            assert rpc.stalled_since == 7.0
        assert rpc.stalled_since is None
    assert rpc.stalled_since == 7.0, "its status is to be read"


async def is_answered(call: Any) -> bool:
    """Return whether a call gets a slot."""
    made = call(b"")
    code = await made.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return bool(code is grpc.StatusCode.OK)


def test_an_rpc_whose_message_never_comes_loses_its_slot(tmp_path: Path) -> None:
    async def answer(request: bytes, _: Any) -> bytes:
        with RPC.get().working():
            return request

    async def scenario() -> None:
        port = Slots(CONFIG)
        port.add({PING: grpc.unary_unary_rpc_method_handler(answer)})
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((port,))
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
            half_sent: Any = [channel.stream_stream(PING)() for _ in range(LIMITS["other call"])]
            full: Any = channel.unary_unary(PING)
            while await is_answered(full):
                await asyncio.sleep(0.01)
            port.sweep(time.monotonic() + STALL_S + 1)
            while not await is_answered(full):
                await asyncio.sleep(0.01)
            ping: Any = channel.unary_unary(PING)
            assert await ping(b"later") == b"later"
            for one in half_sent:
                one.cancel()
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_grpc_forgets_answers_that_are_not_read(tmp_path: Path) -> None:
    """gRPC resets their streams, except for the latest RPCs, which it keeps until new ones arrive."""

    async def answer(_: bytes, __: Any) -> bytes:
        return bytes(3 << 20)

    async def scenario() -> None:
        asyncio.get_running_loop().set_task_factory(task_factory)
        port = Slots(CONFIG)
        port.add({PING: grpc.unary_unary_rpc_method_handler(answer)})
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((port,))
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/socket")
        writer.write(opening_without_a_window() + b"".join(request(PING, stream) for stream in (1, 3, 5, 7)))
        for _ in range(4):
            await until_frame(reader, HEADERS)
        port.sweep(time.monotonic() + STALL_S + 1)
        assert await until_frame(reader, RST_STREAM) in (1, 3, 5, 7)
        writer.close()
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Daemon(**SMALL_POOL) as daemon:
        yield daemon.address


async def first(stream: Any) -> Any:
    """Return the first message of a stream, or its error."""
    try:
        return await stream.read()
    except grpc.aio.AioRpcError as error:
        return error


def is_error(answer: Any) -> bool:
    return isinstance(answer, grpc.aio.AioRpcError)


def test_many_health_watches_leave_the_others_alone(address: str) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(300)]
            answers = await asyncio.gather(*map(first, watches))
            refused = list(filter(is_error, answers))
            assert len(refused) == 300 - 64
            assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert "64 RPCs of the kind 'health watch' are open" in str(refused[0].details())
            await health.Check(health_pb2.HealthCheckRequest())
            await pool_pb2_grpc.PoolServiceStub(channel).Ping(pool_pb2.PingRequest())
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
            told = reflection.ServerReflectionInfo()
            await told.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await told.read()).HasField("list_services_response")

    asyncio.run(scenario())


def test_streams_that_attach_to_nothing_leave_room_for_those_that_do(address: str) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = session_pb2_grpc.SessionServiceStub(channel)
            idle = [stub.Connect() for _ in range(MAX_UNATTACHED + 20)]
            for stream in idle:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await stream.write(session_pb2.Call(call_id=1, ping=pool_pb2.PingRequest()))
            answers = await asyncio.gather(*map(first, idle))
            assert len(idle) - sum(map(is_error, answers)) == MAX_UNATTACHED
            taken = next(stream for stream, answer in zip(idle, answers, strict=True) if not is_error(answer))
            token = (await stub.Open(session_pb2.OpenRequest())).session_token
            attach = session_pb2.Call(call_id=2, attach=session_pb2.AttachRequest(session_token=token))
            await taken.write(attach)
            assert (await taken.read()).WhichOneof("reply") == "attach"
            another = stub.Connect()  # uses the place of the stream that is attached now
            await another.write(session_pb2.Call(call_id=1, ping=pool_pb2.PingRequest()))
            assert (await another.read()).call_id == 1

    asyncio.run(scenario())


def test_connections_are_bounded() -> None:
    async def scenario(address: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            channels = []
            for number in range(3):
                options = [("grpc.use_local_subchannel_pool", 1), ("kvservice.number", number)]
                channels.append(await stack.enter_async_context(grpc.aio.insecure_channel(address, options)))
            one, two, three = (pool_pb2_grpc.PoolServiceStub(channel) for channel in channels)
            await one.Ping(pool_pb2.PingRequest())
            await two.Ping(pool_pb2.PingRequest())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await three.Ping(pool_pb2.PingRequest())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await channels[0].close()
            await three.Ping(pool_pb2.PingRequest(), wait_for_ready=True, timeout=60)

    with Daemon(**SMALL_POOL, max_connections=2) as daemon:
        asyncio.run(scenario(daemon.address))


def test_clients_that_hold_everything_do_not_keep_the_operator_out(tmp_path: Path) -> None:
    """The operator's door has limits of its own. It is there again in the next process."""
    path, door = tmp_path / "k.sock", tmp_path / "k.sock.own"
    door.write_text("of somebody else")
    options = SMALL_POOL | {"max_connections": 3, "max_event_streams": 2, "unix_socket_mode": "0666"}

    async def hold_streams(stack: contextlib.AsyncExitStack) -> None:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{path}"))
        stub: Any = session_pb2_grpc.SessionServiceStub(channel)
        idle = [stub.Connect() for _ in range(MAX_UNATTACHED + 1)]
        for stream in idle:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(session_pb2.Call(call_id=1, ping=pool_pb2.PingRequest()))
        assert sum(map(is_error, await asyncio.gather(*map(first, idle)))) == 1
        events: Any = events_pb2_grpc.EventServiceStub(channel)
        told = [events.Subscribe(events_pb2.SubscribeRequest(start_number=1)) for _ in range(3)]
        done, _ = await asyncio.wait([asyncio.create_task(stream.code()) for stream in told], timeout=PATIENCE_S,
                                     return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        assert {task.result() for task in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}

    async def served_at_the_door() -> None:
        async with grpc.aio.insecure_channel(f"unix:{door}") as channel:
            stream: Any = session_pb2_grpc.SessionServiceStub(channel).Connect()
            await stream.write(session_pb2.Call(call_id=1, ping=pool_pb2.PingRequest()))
            assert (await stream.read()).call_id == 1

    async def attack(daemon: Daemon) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await hold_streams(stack)
            for _ in range(2):
                assert stack.enter_context(PingingClient(path)).ping() == b""
            assert is_refused(path)
            assert ask(daemon.address, PATIENCE_S, NO_CREDENTIALS) == ("", "")
            snapshot = await asyncio.to_thread(top, "--once", "--json", "--address", daemon.address)
            assert json.loads(snapshot.stdout)["pool"]["num_blocks"] == SMALL_POOL["num_blocks"]
            await served_at_the_door()

    with Daemon(**options, keeper=True, unix_socket=path) as daemon, contextlib.ExitStack() as stack:
        reason = f"cannot listen on {door}: it exists and is not a socket"
        assert reason in ask(daemon.address, PATIENCE_S, NO_CREDENTIALS).note
        assert reason in daemon.log.read_text()
        door.unlink()
        until(lambda: door.is_socket() and door_of(daemon.address) == f"unix:{door}")
        assert stat.S_IMODE(door.stat().st_mode) == 0o600
        asyncio.run(attack(daemon))
        next_process(daemon, signal.SIGKILL)
        until(lambda: door_of(daemon.address) == f"unix:{door}")
        assert stat.S_IMODE(door.stat().st_mode) == 0o600
        held: list[PingingClient] = []
        until(lambda: add_served(held, stack, door) == 16)
        assert is_refused(door)
        assert door_of(daemon.address) == daemon.address, "the usual address is asked instead"
        assert check(daemon.address, timeout_s=PATIENCE_S)
        daemon.stop()
        assert not door.exists()


def is_refused(path: Path) -> bool:
    """Return whether the daemon closes a connection to the unix socket at once."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(path))
        return client.recv(1) == b""


def add_served(held: list[PingingClient], stack: contextlib.ExitStack, path: Path) -> int:
    """Connect once more, and return how many connections the daemon serves. It may still have older ones that it has
    not found closed."""
    client = stack.enter_context(PingingClient(path))
    with contextlib.suppress(AssertionError, ConnectionError):
        assert client.ping() == b""
        held.append(client)
    return len(held)


def test_a_path_too_long_for_the_door_costs_the_door_alone(tmp_path: Path) -> None:
    path = tmp_path / ("k" * (MAX_SOCKET_PATH_BYTES - 3 - len(os.fsencode(tmp_path)) - 1))
    options = SMALL_POOL | {"allow_client_shm": "off", "share_pool": "off", "store_gib": 0}  # no fd-passing socket
    with Daemon(**options, unix_socket=path) as daemon:
        assert check(daemon.address, timeout_s=PATIENCE_S)
        assert [*tmp_path.iterdir()] == [path]
        assert f"{path}.own has over {MAX_SOCKET_PATH_BYTES} bytes" in daemon.log.read_text()


def resident_mib(daemon: Daemon) -> int:
    with open(f"/proc/{daemon.process.pid}/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("RssAnon:"))


@pytest.mark.slow
def test_clients_that_never_read_take_little_memory() -> None:
    """Each of 6 connections sends pings of 60 kB on 60 streams until flow control stops them. Without limits they would
    take a GiB."""
    call = session_pb2.Call(call_id=1, ping=pool_pb2.PingRequest(payload=bytes(60_000)))

    async def send(stream: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(100):
                await stream.write(call)

    async def scenario(daemon: Daemon) -> None:
        async with contextlib.AsyncExitStack() as stack:
            sending = []
            for number in range(6):
                options = [("grpc.use_local_subchannel_pool", 1), ("kvservice.number", number)]
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(daemon.address, options))
                stub: Any = session_pb2_grpc.SessionServiceStub(channel)
                sending += [asyncio.create_task(send(stub.Connect())) for _ in range(60)]
            await asyncio.wait(sending, timeout=4)
            assert resident_mib(daemon) < before + 200
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    with Daemon(**SMALL_POOL) as daemon:
        before = resident_mib(daemon)
        asyncio.run(scenario(daemon))
