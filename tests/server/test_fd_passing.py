"""The fd-passing socket: which users receive file descriptors, how often, and how a session's user is identified."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from manual_clock import ManualClock

from kvservice.client import fd_passing as client_side
from kvservice.errors import ConnectionLostError, QuotaExceededError, RegionsNotAllowedError
from kvservice.server import fd_passing as server_side
from kvservice.server.clock import Clock, SystemClock
from kvservice.server.fd_passing import BACKLOG, TOKEN_S, FdServer
from kvservice.server.peers import Peer

SESSION_TOKEN = b"a session's one."
INTRODUCED = b"an introduction."
introductions: list[tuple[bytes, Peer]] = []


def introduce(token: bytes, peer: Peer) -> bytes | None:
    introductions.append((token, peer))
    return INTRODUCED if token == SESSION_TOKEN else None


@asynccontextmanager
async def serving(path: Path, clock: Clock) -> AsyncIterator[FdServer]:
    introductions.clear()
    fd_server = FdServer(frozenset({os.geteuid(), ANOTHER_UID}), introduce, clock)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    fd_server.listen(listener, path)
    task = asyncio.create_task(fd_server.serve())
    try:
        yield fd_server
    finally:
        task.cancel()
        fd_server.close()


def scenario(path: Path, body: Callable[[FdServer, str], Awaitable[None]], clock: Clock | None = None) -> None:
    async def run() -> None:
        async with serving(path, clock or SystemClock()) as fd_server:
            await body(fd_server, str(path))

    asyncio.run(run())


class Owner:
    pass


ANOTHER_UID, STRANGER_UID = 4242, 4343


@contextlib.contextmanager
def connecting_as(monkeypatch: pytest.MonkeyPatch, uid: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(server_side, "peer_of", lambda _: Peer(uid, frozenset()))
        yield


def memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def fetch(where: str, token: bytes, count: int = 1) -> list[int]:
    return await asyncio.to_thread(client_side.fetch, where, token, count)


async def connect(where: str) -> socket.socket:
    """Return a connection that has not sent anything yet."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, where)
    return connection


async def is_closed(connection: socket.socket) -> bool:
    """Wait until the daemon has closed the connection."""
    with connection:
        async with asyncio.timeout(20):
            return await asyncio.get_running_loop().sock_recv(connection, 1) == b""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.sock.fds"


def test_a_token_is_good_for_its_descriptors_and_once(path: Path) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        before = num_descriptors()
        inodes = []
        files = [memory_file(b"one"), memory_file(b"two")]
        inodes = [os.fstat(descriptor).st_ino for descriptor in files]
        token = fd_server.offer(files, Owner())
        got = await fetch(where, token, 2)
        assert [os.pread(descriptor, 10, 0) for descriptor in got] == [b"one", b"two"]
        assert [os.fstat(descriptor).st_ino for descriptor in got] == inodes
        assert not any(os.get_inheritable(descriptor) for descriptor in got)
        with pytest.raises(RegionsNotAllowedError):
            await fetch(where, token, 2)
        for descriptor in got:
            os.close(descriptor)
        assert num_descriptors() <= before  # descriptors of an earlier test may be closed in the meantime

    scenario(path, body)


def test_a_token_is_good_for_so_long(path: Path) -> None:
    clock = ManualClock()

    async def body(fd_server: FdServer, where: str) -> None:
        first = fd_server.offer([memory_file(b"")], Owner())
        descriptor = memory_file(b"")
        token = fd_server.offer([descriptor], Owner())
        clock.advance(TOKEN_S * 0.99)
        for fetched in await fetch(where, first):
            os.close(fetched)
        os.fstat(descriptor)
        clock.advance(TOKEN_S * 0.02)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        with pytest.raises(RegionsNotAllowedError):
            await fetch(where, token)

    with contextlib.closing(clock):
        scenario(path, body, clock)


def test_what_is_withdrawn_is_not_handed_over(path: Path) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        one, other = Owner(), Owner()
        before = num_descriptors()
        gone = [fd_server.offer([memory_file(b""), memory_file(b"")], one) for _ in range(3)]
        gone_alone = fd_server.offer([memory_file(b"")], other)
        kept = fd_server.offer([memory_file(b"kept")], other)
        fd_server.withdraw_all(one)
        fd_server.withdraw(gone_alone)
        fd_server.withdraw(gone_alone)
        assert num_descriptors() == before + 1
        for token in (*gone, gone_alone):
            with pytest.raises(RegionsNotAllowedError):
                await fetch(where, token, 2)
        (got,) = await fetch(where, kept)
        assert os.pread(got, 10, 0) == b"kept"
        os.close(got)

    scenario(path, body)


@pytest.mark.parametrize("sent", [b"", b"\0" * 15, b"\0" * 16, b"\xff" * 1000])
def test_a_wrong_token_gets_nothing_and_costs_no_one(path: Path, sent: bytes) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        token = fd_server.offer([memory_file(b"mine")], Owner())

        def ask() -> tuple[bytes, list[int]]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(where)
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                try:
                    data, descriptors, _, _ = socket.recv_fds(connection, 1, 8)
                except ConnectionResetError:  # closed with unread bytes
                    return b"", []
                return data, descriptors

        assert await asyncio.to_thread(ask) == (b"", [])
        (got,) = await fetch(where, token)
        assert os.pread(got, 10, 0) == b"mine"
        os.close(got)

    scenario(path, body)


def test_a_stranger_gets_nothing_and_is_named_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        token = fd_server.offer([memory_file(b"")], Owner())
        with connecting_as(monkeypatch, STRANGER_UID):
            for _ in range(3):
                assert await is_closed(await connect(where))  # without waiting for a token
            with pytest.raises((RegionsNotAllowedError, ConnectionLostError)):
                await fetch(where, token)
        (got,) = await fetch(where, token)
        os.close(got)

    scenario(path, body)
    assert [record.message for record in caplog.records].count(
        f"user {STRANGER_UID} is not handed anything: see allow_client_shm, trusted_uids"
    ) == 1


def test_a_sessions_token_says_whose_it_is(path: Path) -> None:
    async def body(_: FdServer, where: str) -> None:
        assert await asyncio.to_thread(client_side.introduce, where, SESSION_TOKEN) == INTRODUCED
        token, peer = introductions[-1]
        assert (token, peer.uid) == (SESSION_TOKEN, os.geteuid())
        assert os.getegid() in peer.gids
        with pytest.raises(RegionsNotAllowedError):
            await asyncio.to_thread(client_side.introduce, where, bytes(16))

    scenario(path, body)


def test_those_who_connect_and_say_nothing_are_shown_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "PRESENT_S", 0.05)

    async def body(_: FdServer, where: str) -> None:
        before = num_descriptors()
        for connection in [await connect(where) for _ in range(8)]:
            assert await is_closed(connection)
        assert num_descriptors() <= before

    scenario(path, body)


def test_a_users_oldest_gives_way_to_its_newest_and_nobody_elses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "PRESENT_S", 1000.0)

    async def body(fd_server: FdServer, where: str) -> None:
        patient = await connect(where)
        await asyncio.to_thread(client_side.introduce, where, SESSION_TOKEN)  # the connection is accepted by now
        token = fd_server.offer([memory_file(b"mine")], Owner())
        with connecting_as(monkeypatch, ANOTHER_UID):
            silent = [await connect(where) for _ in range(server_side.MAX_SILENT_OF_USER + 3)]
            for connection in silent[:3]:
                assert await is_closed(connection)
        (got,) = await fetch(where, token)
        assert os.pread(got, 10, 0) == b"mine"
        # The remaining connections are answered when they send a token.
        for connection in (patient, silent[3], silent[-1]):
            connection.send(SESSION_TOKEN)
            assert await asyncio.get_running_loop().sock_recv(connection, 16) == INTRODUCED
        for connection in (patient, *silent[3:]):
            connection.close()
        os.close(got)

    scenario(path, body)


def test_many_of_a_user_who_speak_are_all_answered(path: Path) -> None:
    async def body(_: FdServer, where: str) -> None:
        def ask() -> list[bytes]:
            with contextlib.ExitStack() as stack:
                connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
                for connection in connections:
                    connection.connect(where)
                    connection.send(SESSION_TOKEN)
                return [connection.recv(16) for connection in connections]

        assert await asyncio.to_thread(ask) == [INTRODUCED] * 100

    scenario(path, body)


def test_so_many_offers_of_an_owner_may_wait(path: Path) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        owner = Owner()
        tokens = [fd_server.offer([memory_file(b"")], owner) for _ in range(server_side.MAX_OFFERS_OF_SESSION)]
        with pytest.raises(QuotaExceededError):
            fd_server.offer([memory_file(b"")], owner)
        fd_server.offer([memory_file(b"")], Owner())
        (got,) = await fetch(where, tokens[0])
        fd_server.offer([memory_file(b"")], owner)
        os.close(got)

    before = num_descriptors()
    scenario(path, body)
    assert num_descriptors() == before
    assert not path.exists()


def test_no_daemon(path: Path) -> None:
    with pytest.raises(ConnectionLostError):
        client_side.fetch(str(path), bytes(16), 1)
    with pytest.raises(ConnectionLostError):
        client_side.introduce(str(path), bytes(16))


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("unix:///run/kv.sock", "/run/kv.sock.fds"),
        ("unix:/run/kv.sock", "/run/kv.sock.fds"),
        ("unix:kv.sock", "kv.sock.fds"),
        ("127.0.0.1:50051", None),
        ("dns:///host:1", None),
    ],
)
def test_where_it_is(address: str, wanted: str | None) -> None:
    assert client_side.socket_path(address) == wanted
