"""One peer takes no more of the gRPC addresses than its share, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from each_row import each_row
from http2_requests import PREFACE, request
from manual_clock import ManualClock
from other_user import as_user
from ports import free_port
from scraping import scrape, value
from secure_daemon import secured, with_token
from small_pool import SMALL_POOL
from waiting import PATIENCE_S, until

from kvservice.client import KVClient
from kvservice.config import ServeConfig
from kvservice.health import check
from kvservice.launch import Daemon
from kvservice.server.rpc import peers
from kvservice.server.rpc.callers import Audit, RemoteCallers
from kvservice.server.rpc.peers import (
    BETWEEN_CALLS_S,
    FIRST_BYTES,
    LOOK_AGAIN_S,
    LOOK_QUIET_S,
    LOOK_S,
    LOOK_UNIX_S,
    MAX_MESSAGES,
    SUSPECT_BYTES,
    SUSPECT_S,
    Peers,
    SockDiag,
    TcpConnection,
    name_of,
)
from kvservice.server.rpc.slots import Slots
from kvservice.server.rpc.stream import Services
from kvservice.v1 import pool_pb2, session_pb2_grpc, store_pb2, store_pb2_grpc

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
WINDOW_UPDATE = b"\0\0\4\x08\0\0\0\0\0" + b"\0\0\0\1"
ANOTHER_UID = 65534


def peer_of(host: int, port: int) -> bytes:
    return bytes((10, 0, 0, host)) + port.to_bytes(2, "big")


class Kernel:
    """The connections of a test, with the bytes that each has received."""

    def __init__(self, clock: ManualClock, **options: Any) -> None:
        self.config = ServeConfig(**options)
        self.peers = Peers(self.config, lambda: clock.now)
        self.peers.watch_tcp("127.0.0.1:1")  # for the calls; no connection of the host is looked at
        self.received: dict[bytes, int] = {}

    def look(self) -> dict[bytes, str]:
        return dict(self.peers.over(TcpConnection(*row) for row in self.received.items()))


def test_names_are_those_of_grpc() -> None:
    v4, port = bytes((127, 0, 0, 1)), (4711).to_bytes(2, "big")
    assert name_of(v4 + port) == ("ipv4:127.0.0.1:4711", "127.0.0.1")
    assert name_of(bytes(10) + b"\xff\xff" + v4 + port) == ("ipv4:127.0.0.1:4711", "127.0.0.1")
    assert name_of(bytes(15) + b"\1" + port) == ("ipv6:%5B::1%5D:4711", "::1")
    link = b"\xfe\x80" + bytes(13) + b"\1" + (4).to_bytes(4, sys.byteorder)
    assert name_of(link + port) == ("ipv6:%5Bfe80::1%254%5D:4711", "fe80::1%4")


def test_bytes_before_the_first_call(clock: ManualClock) -> None:
    kernel = Kernel(clock)
    one, other, elsewhere = peer_of(1, 5), peer_of(4, 6), peer_of(2, 5)
    kernel.received = {one: FIRST_BYTES, other: FIRST_BYTES, elsewhere: FIRST_BYTES}
    kernel.peers.called("ipv4:10.0.0.4:6")
    assert kernel.look() == {}
    kernel.received = {peer: num_bytes + 1 for peer, num_bytes in kernel.received.items()}
    assert kernel.look() == {one: "bytes", elsewhere: "bytes"}
    # Their addresses have a lower limit now, also for connections that use a port again, and for some time.
    kernel.received = {one: SUSPECT_BYTES + 1, other: FIRST_BYTES + 1, peer_of(3, 1): SUSPECT_BYTES + 1}
    assert kernel.look() == {one: "bytes"}
    clock.advance(SUSPECT_S + 0.1)
    kernel.received = {peer_of(1, 7): SUSPECT_BYTES + 1, peer_of(1, 8): SUSPECT_BYTES}
    assert kernel.look() == {}, "its first call may be on its way"
    clock.advance(0.2)
    assert kernel.look() == {peer_of(1, 7): "bytes"}


def test_the_first_call_again_of_an_address_that_makes_calls_may_be_large(clock: ManualClock) -> None:
    kernel = Kernel(clock)
    kernel.peers.called("ipv4:10.0.0.1:5")
    kernel.received = {peer_of(1, 5): 9}
    assert kernel.look() == {}
    allowed = MAX_MESSAGES * kernel.config.max_message_bytes + FIRST_BYTES
    kernel.received = {peer_of(1, 6): 0, peer_of(2, 6): 0}
    assert kernel.look() == {}
    clock.advance(BETWEEN_CALLS_S + 0.1)
    kernel.received = {peer_of(1, 6): allowed, peer_of(2, 6): allowed}
    assert kernel.look() == {peer_of(2, 6): "bytes"}
    kernel.received = {peer_of(1, 6): allowed + 1}
    assert kernel.look() == {peer_of(1, 6): "bytes"}


def test_a_call_that_comes_before_its_connection_is_listed_counts(clock: ManualClock) -> None:
    kernel = Kernel(clock, first_call_s=5)
    kernel.peers.called("ipv4:10.0.0.1:5")
    assert kernel.look() == {}
    kernel.received = {peer_of(1, 5): 9}
    assert kernel.look() == {}
    clock.advance(6.0)
    assert kernel.look() == {}
    kernel.received = {}
    kernel.look(), kernel.look(), kernel.look()
    kernel.received = {peer_of(1, 5): 9}
    assert kernel.look() == {}
    clock.advance(6.0)
    assert kernel.look() == {peer_of(1, 5): "no_call"}, "another connection has the port"


def test_bytes_between_two_calls(clock: ManualClock) -> None:
    kernel = Kernel(clock)
    one = peer_of(1, 5)
    allowed = MAX_MESSAGES * kernel.config.max_message_bytes + FIRST_BYTES
    kernel.peers.called("ipv4:10.0.0.1:5")
    kernel.received = {one: 1000}
    assert kernel.look() == {}
    kernel.received = {one: 1000 + allowed + 1}
    clock.advance(1.0)
    assert kernel.look() == {}, "calls may be on their way"
    kernel.peers.called("ipv4:10.0.0.1:5")
    clock.advance(0.1)
    assert kernel.look() == {}, "they were"
    kernel.received = {one: 1000 + 2 * (allowed + 1)}
    clock.advance(1.1)
    assert kernel.look() == {one: "bytes"}


def test_a_connection_may_receive_a_message_of_each_open_rpc_besides(clock: ManualClock) -> None:
    kernel = Kernel(clock)
    one, name = peer_of(1, 5), "ipv4:10.0.0.1:5"
    allowed = (MAX_MESSAGES + 2) * kernel.config.max_message_bytes + FIRST_BYTES
    with kernel.peers.opened(name):
        with kernel.peers.opened(name), kernel.peers.opened("ipv4:10.0.0.1:6"):
            assert kernel.look() == {}
            kernel.received = {one: 0}
            assert kernel.look() == {}
            clock.advance(BETWEEN_CALLS_S + 0.1)
            kernel.received = {one: FIRST_BYTES + 1}
            assert kernel.look() == {one: "bytes"}, "no call was accepted"
            kernel.received = {one: 0}
            kernel.peers.called(name)
            assert kernel.look() == {}
            clock.advance(BETWEEN_CALLS_S + 0.1)
            kernel.received = {one: allowed}
            assert kernel.look() == {}
            kernel.received = {one: allowed + 1}
            assert kernel.look() == {one: "bytes"}
        kernel.received = {one: allowed}
        assert kernel.look() == {one: "bytes"}
    assert not kernel.peers._open


def test_time_before_the_first_call(clock: ManualClock) -> None:
    kernel = Kernel(clock, first_call_s=5)
    one, other = peer_of(1, 5), peer_of(1, 6)
    kernel.received = {one: 0, other: 0}
    assert kernel.look() == {}
    kernel.peers.called("ipv4:10.0.0.1:6")
    clock.advance(5.0)
    assert kernel.look() == {}
    clock.advance(0.1)
    assert kernel.look() == {one: "no_call"}


def test_connections_of_an_address(clock: ManualClock) -> None:
    """Those with calls stay, then the oldest."""
    with each_row() as row:
        for options, most in (({"max_connections": 7}, 3), ({"max_connections_per_peer": 3}, 3)):
            with row(options):
                kernel = Kernel(clock, **options)
                for port in range(most):
                    kernel.received[peer_of(1, port)] = 0
                    assert kernel.look() == {}
                    clock.advance(0.1)
                kernel.received |= {peer_of(1, 90): 0, peer_of(1, 91): 0, peer_of(2, 1): 0}
                kernel.peers.called("ipv4:10.0.0.1:91")
                assert kernel.look() == {peer_of(1, 90): "connections", peer_of(1, most - 1): "connections"}


def test_it_rests_while_nobody_does_anything(clock: ManualClock) -> None:
    kernel = Kernel(clock)
    one = peer_of(1, 5)
    kernel.look()
    assert [kernel.peers.pause_s(each) for each in (0, 1, 1)] == [LOOK_QUIET_S, LOOK_S, LOOK_QUIET_S], "calls"
    for received, pause_s in (
        ({one: 0}, LOOK_S),
        ({one: 0}, LOOK_QUIET_S),
        ({one: 9}, LOOK_S),
        ({one: SUSPECT_BYTES + 9}, LOOK_AGAIN_S),
        ({}, LOOK_S),
        ({}, LOOK_QUIET_S),
    ):
        kernel.received = received
        kernel.look()
        assert kernel.peers.pause_s(1) == pause_s


def test_a_call_ends_a_pause_for_quiet(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(clock)
    kernel.look()
    waited: list[float] = []
    looked: list[int] = []
    monkeypatch.setattr(kernel.peers, "look", lambda: looked.append(len(waited)))

    class Stopped(threading.Event):
        def is_set(self) -> bool:
            return bool(looked)

        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    kernel.peers._look_until(Stopped(), lambda: int(len(waited) >= 3))
    assert looked == [3]


def strangers(port: int, count: int, stack: contextlib.ExitStack, address: str = "127.0.0.2") -> list[socket.socket]:
    """Return connections from another address of this host, which have sent HTTP/2's first frames."""
    made = []
    for _ in range(count):
        one = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S, (address, 0)))
        one.sendall(PREFACE + SETTINGS)
        made.append(one)
    return made


def is_closed(client: socket.socket) -> bool:
    """Wait until the daemon has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while client.recv(4096):
            pass
    return True


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


def test_a_peer_that_takes_too_much_over_tcp_loses_it_and_a_client_beside_it_does_not() -> None:
    port, http_port = free_port(), free_port()
    options = {"tcp_address": f"127.0.0.1:{port}", "http_address": f"127.0.0.1:{http_port}", "max_connections": 16}
    with (
        Daemon(**SMALL_POOL | options, first_call_s=1) as daemon,
        contextlib.ExitStack() as stack,
        KVClient(f"127.0.0.1:{port}") as client,
        client.session() as kv,
    ):
        sequence = kv.allocate([1, 2, 3])
        closed = "kvservice_closed_connections_total"
        # Connections that are held without a call: half of all, and not for long.
        held = strangers(port, 16, stack)
        until(lambda: sum(map(is_open, held)) <= 8)
        assert check(f"127.0.0.1:{port}", timeout_s=PATIENCE_S), "a probe gets in beside them"
        assert kv.describe([sequence])[0].length == 3
        until(lambda: not any(map(is_open, held)))
        assert kv.describe([sequence])[0].length == 3, "the client's connection is older, and stays"
        # Frames that are no calls.
        (flooding,) = strangers(port, 1, stack)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                flooding.sendall(WINDOW_UPDATE * (FIRST_BYTES // len(WINDOW_UPDATE)))
        assert is_closed(flooding)
        assert kv.describe([sequence])[0].length == 3
        samples = scrape(http_port)
        until(lambda: value(scrape(http_port), closed, cause="bytes") >= 1)
        samples = scrape(http_port)
        assert value(samples, closed, cause="connections") >= 7
        assert value(samples, closed, cause="no_call") >= 1
        said = daemon.log.read_text()
        assert "over 8 connections (max_connections_per_peer)" in said
        assert "no call was accepted for 1 s (first_call_s)" in said
        assert "ipv4:127.0.0.2:" in said
        assert "ipv4:127.0.0.1:" not in said


class Slow:
    """A way to the daemon from another address of this host, for one connection: it carries `num_bytes` of what the
    client sends, and the rest after `go_on`."""

    def __init__(self, port: int, num_bytes: int) -> None:
        self._port, self._num_bytes = port, num_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.waits, self.go_on = threading.Event(), threading.Event()

    def __enter__(self) -> Slow:
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self._listener.close()

    def _carry(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            with near, socket.create_connection(("127.0.0.1", self._port), PATIENCE_S, ("127.0.0.2", 0)) as far:
                back = threading.Thread(target=self._carry_back, args=(far, near))
                back.start()
                try:
                    carried = 0
                    while data := near.recv(1 << 16):
                        far.sendall(data)
                        carried += len(data)
                        if carried > self._num_bytes and not self.waits.is_set():
                            self.waits.set()
                            self.go_on.wait(PATIENCE_S)
                finally:
                    far.shutdown(socket.SHUT_RDWR)
                    back.join(PATIENCE_S)

    def _carry_back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                near.sendall(data)
            near.shutdown(socket.SHUT_RDWR)


def test_a_large_first_call_with_a_token_that_arrives_slowly_is_no_flood_and_one_without_is(tmp_path: Path) -> None:
    put = store_pb2.BatchPutRequest(session_token=b"unknown", data=bytes(3 << 20))
    with (
        secured(tmp_path, tls=False) as daemon,
        Slow(daemon.port, 5 << 19) as slow,
        contextlib.ExitStack() as stack,
        KVClient(daemon.address, token=daemon.tokens["bob"]) as client,
        client.session() as kv,
    ):
        sequence = kv.allocate([1, 2, 3])
        channel = stack.enter_context(grpc.insecure_channel(slow.address))
        stub = store_pb2_grpc.StoreServiceStub(with_token(channel, daemon.tokens["alice"]))
        answer = stub.BatchPut.future(put, timeout=PATIENCE_S)
        assert slow.waits.wait(PATIENCE_S)
        # Another one sends as much without a call, and is closed by a look that finds both.
        (flooding,) = strangers(daemon.port, 1, stack, "127.0.0.3")
        with contextlib.suppress(ConnectionError):
            flooding.sendall(WINDOW_UPDATE * (2 * FIRST_BYTES // len(WINDOW_UPDATE)))
        assert is_closed(flooding)
        slow.go_on.set()
        assert answer.code() is grpc.StatusCode.NOT_FOUND, answer
        # A call that has begun without a token covers no flood.
        (flooding,) = strangers(daemon.port, 1, stack, "127.0.0.4")
        begun = request("/kvservice.v1.StoreService/BatchPut", 1)[:-14]  # its message does not come
        with contextlib.suppress(ConnectionError):
            flooding.sendall(begun)
            flooding.sendall(WINDOW_UPDATE * (2 * FIRST_BYTES // len(WINDOW_UPDATE)))
        assert is_closed(flooding)
        assert kv.describe([sequence])[0].length == 3
        until(lambda: "a connection of ipv4:127.0.0.4:" in daemon.daemon.log.read_text())
        assert "a connection of ipv4:127.0.0.2:" not in daemon.daemon.log.read_text()


def test_an_rpc_is_open_while_its_message_is_on_its_way_and_without_a_token_no_call_yet() -> None:
    async def scenario() -> None:
        watching = Peers(ServeConfig())
        watching.watch_tcp("127.0.0.1:1")
        callers, slots = RemoteCallers(None, False, Audit(), watching, None), Slots(ServeConfig())
        dispatcher = Mock(call=AsyncMock(return_value=pool_pb2.PingResponse()), tracer=None)
        services = Services(dispatcher, Mock(), Mock(), ServeConfig().request_limits, callers, slots)
        slots.add(services.handlers())
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((slots,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            # The messages of streams are sent when the client likes.
            ping: Any = channel.stream_unary("/kvservice.v1.PoolService/Ping", pool_pb2.PingRequest.SerializeToString)()
            stream: Any = session_pb2_grpc.SessionServiceStub(channel).Connect()
            while [*watching._open.values()] != [2]:
                await asyncio.sleep(0.01)
            assert [*watching._calls.values()] == [1], "the session's stream"
            await ping.write(pool_pb2.PingRequest())
            await ping.done_writing()
            await ping
            assert [*watching._calls.values()] == [2]
            assert [*watching._open.values()] == [1]
            stream.cancel()
            while watching._open:
                await asyncio.sleep(0.01)
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


HOLD = """
held = []
for _ in range(4):
    one = socket.socket(socket.AF_UNIX)
    one.connect(sys.argv[1].removeprefix("unix://"))
    one.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    held.append(one)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_connections_of_another_user_to_the_unix_socket_leave_room_for_those_of_the_daemons() -> None:
    with Daemon(**SMALL_POOL, unix_socket_mode="0666", max_connections=4) as daemon:
        path = Path(daemon.address.removeprefix("unix://"))
        os.chmod(path.parent, 0o755)
        with as_user(ANOTHER_UID, HOLD, daemon.address) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            until(lambda: f"a connection of user {ANOTHER_UID} is closed: over 2 connections" in daemon.log.read_text())
            with KVClient(daemon.address) as client, client.session() as kv:
                assert kv.describe() == []
            process.communicate()


def test_without_the_kernels_list_there_is_a_warning(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(peers, "SockDiag", refuse)
    kernel = Kernel(clock)
    assert "the kernel does not list connections (Operation not permitted)" in caplog.text
    kernel.peers.called("ipv4:10.0.0.1:5")
    assert not kernel.peers._calls, "nobody looks, and forgets it"


def test_an_address_that_is_opened_later_is_looked_at() -> None:
    async def scenario() -> None:
        watching = Peers(ServeConfig(first_call_s=1))
        looking = asyncio.create_task(watching.run(lambda: 0))
        await asyncio.sleep(0)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            watching.watch_tcp(f"127.0.0.1:{listener.getsockname()[1]}")
            with socket.create_connection(listener.getsockname()), listener.accept()[0]:
                await asyncio.to_thread(until, lambda: watching.num_closed["no_call"])
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert watching.num_closed == {"connections": 0, "no_call": 1, "bytes": 0}

    asyncio.run(scenario())


def test_a_list_that_is_not_read_to_its_end_does_not_keep_the_next_one_from_being_read() -> None:
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        diag = SockDiag(f"127.0.0.1:{listener.getsockname()[1]}")
        for _ in range(300):  # more than one message
            stack.enter_context(socket.create_connection(listener.getsockname()))
            stack.enter_context(listener.accept()[0])
        unread = diag.connections()
        next(unread)
        assert len([*diag.connections()]) == 300
        del unread
        assert len([*diag.connections()]) == 300


def test_looks_go_on_after_one_that_failed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = [OSError(errno.ENOBUFS, "No buffer space"), TimeoutError("timed out"), OSError(16, "Busy")]

    def connections(_: SockDiag) -> list[TcpConnection]:
        if answers:
            raise answers.pop(0)
        return [TcpConnection(peer_of(1, 5), 0)]

    async def scenario() -> None:
        watching = Peers(ServeConfig())
        watching.watch_tcp("127.0.0.1:1")
        monkeypatch.setattr(SockDiag, "connections", connections)
        looking = asyncio.create_task(watching.run(lambda: 0))
        await asyncio.to_thread(until, lambda: watching._known)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    asyncio.run(scenario())
    assert caplog.text.count("a look at the connections failed") == 3


@dataclass
class UnixConnection:
    """A connection of another user to the unix socket."""

    is_closed: bool = False
    family: int = socket.AF_UNIX

    def __enter__(self) -> UnixConnection:
        return self

    def __exit__(self, *_: object) -> None: ...

    def getsockname(self) -> str:
        return "k.sock"

    def getsockopt(self, *_: object) -> bytes:
        return struct.pack("=iII", 1, ANOTHER_UID, ANOTHER_UID)

    def shutdown(self, _: int) -> None:
        self.is_closed = True


def test_the_oldest_connections_to_the_unix_socket_stay_whatever_their_inodes(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked at once a second, because that reads all descriptors."""
    old, new = UnixConnection(), UnixConnection()
    opened = {30: old}
    monkeypatch.setattr(peers, "own_sockets", lambda: opened.items())
    watching = Kernel(clock, unix_socket_mode="0666", max_connections_per_peer=1).peers
    watching.watch_unix("k.sock")
    watching.look()
    opened[20] = new
    clock.advance(LOOK_UNIX_S - 0.1)
    watching.look()
    assert not new.is_closed
    clock.advance(0.2)
    watching.look()
    assert new.is_closed
    assert not old.is_closed
