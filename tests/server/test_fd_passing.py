"""The fd-passing socket: which users receive file descriptors, how often, and how a session's user is identified."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fd_socket
import manual_loop
import pytest
from each_row import each_row
from manual_clock import ManualClock
from open_files import num_open_files
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.errors import ConnectionLostError, QuotaExceededError
from kvservice.launch import Daemon
from kvservice.server.memory.fd_passing import (
    BACKLOG,
    MAX_OFFERS_OF_SESSION,
    MAX_SILENT_OF_USER,
    PRESENT_S,
    TOKEN_S,
    FdServer,
)

SESSION_TOKEN = b"a session's one."
INTRODUCED = b"an introduction."
ANOTHER_UID, STRANGER_UID = 4242, 4343
Body = Callable[[FdServer, str], Awaitable[None]]
Scenario = Callable[[Body], None]
introductions: list[tuple[bytes, Any]] = []


def introduce(token: bytes, peer: Any) -> bytes | None:
    introductions.append((token, peer))
    return INTRODUCED if token == SESSION_TOKEN else None


class Owner:
    pass


class Users:
    """The users of connections as the test says: `uid` is that of the next ones."""

    def __init__(self) -> None:
        self.uid = os.geteuid()

    def peer_of(self, _: socket.socket) -> Any:
        return SimpleNamespace(uid=self.uid, gids=frozenset())

    @contextlib.contextmanager
    def connecting_as(self, uid: int) -> Iterator[None]:
        self.uid = uid
        yield
        self.uid = os.geteuid()


@asynccontextmanager
async def serving(path: Path, clock: ManualClock, **options: Any) -> AsyncIterator[FdServer]:
    introductions.clear()
    fd_server = FdServer(frozenset({os.geteuid(), ANOTHER_UID}), introduce, clock, **options)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    fd_server.listen(listener)
    task = asyncio.create_task(fd_server.serve())
    try:
        yield fd_server
    finally:
        task.cancel()
        fd_server.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.sock.fds"


@pytest.fixture
def scenario(path: Path, clock: ManualClock) -> Callable[..., None]:
    """Run a test's coroutine beside a served socket."""

    def run(body: Body, **options: Any) -> None:
        async def whole() -> None:
            async with serving(path, clock, **options) as fd_server:
                await body(fd_server, str(path))

        manual_loop.run(whole())

    return run


def memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def fetch(where: str, token: bytes, count: int = 1) -> Coroutine[Any, Any, list[int]]:
    return asyncio.to_thread(fd_socket.fetch, where, token, count)


async def connect(where: str) -> socket.socket:
    """Return a connection that has not sent anything yet."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, where)
    return connection


async def is_closed(connection: socket.socket) -> bool:
    """Wait until the daemon has closed the connection."""
    with connection:
        return await asyncio.get_running_loop().sock_recv(connection, 1) == b""


def test_a_token_is_good_for_its_descriptors_and_once(scenario: Scenario) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        before = num_open_files()
        files = [memory_file(b"one"), memory_file(b"two")]
        inodes = [os.fstat(descriptor).st_ino for descriptor in files]
        token = fd_server.offer(files, Owner())
        got = await fetch(where, token, 2)
        assert [os.pread(descriptor, 10, 0) for descriptor in got] == [b"one", b"two"]
        assert [os.fstat(descriptor).st_ino for descriptor in got] == inodes
        assert await fetch(where, token, 2) == []
        for descriptor in got:
            os.close(descriptor)
        assert num_open_files() <= before  # descriptors of an earlier test may be closed in the meantime

    scenario(body)


def test_a_token_is_good_for_so_long(scenario: Scenario, clock: ManualClock) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        first = fd_server.offer([memory_file(b"")], Owner())
        descriptor = memory_file(b"")
        token = fd_server.offer([descriptor], Owner())
        clock.advance(TOKEN_S * 0.99)
        (fetched,) = await fetch(where, first)
        os.close(fetched)
        os.fstat(descriptor)
        clock.advance(TOKEN_S * 0.02)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        assert await fetch(where, token) == []

    scenario(body)


def test_what_is_withdrawn_is_not_handed_over(scenario: Scenario) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        one, other = Owner(), Owner()
        before = num_open_files()
        gone = [fd_server.offer([memory_file(b""), memory_file(b"")], one) for _ in range(3)]
        gone_alone = fd_server.offer([memory_file(b"")], other)
        kept = fd_server.offer([memory_file(b"kept")], other)
        fd_server.withdraw_all(one)
        fd_server.withdraw(gone_alone)
        fd_server.withdraw(gone_alone)
        assert num_open_files() == before + 1
        for token in (*gone, gone_alone):
            assert await fetch(where, token, 2) == []
        (got,) = await fetch(where, kept)
        assert os.pread(got, 10, 0) == b"kept"
        os.close(got)

    scenario(body)


def test_a_wrong_token_gets_nothing_and_costs_no_one(scenario: Scenario) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        with each_row() as row:
            for sent in (b"", b"\0" * 15, b"\0" * 16, b"\xff" * 1000):
                with row((sent[:20], len(sent))):
                    token = fd_server.offer([memory_file(b"mine")], Owner())
                    assert await asyncio.to_thread(fd_socket.ask, where, sent, 1, 8) == (b"", [])
                    (got,) = await fetch(where, token)
                    assert os.pread(got, 10, 0) == b"mine"
                    os.close(got)

    scenario(body)


def test_a_stranger_gets_nothing_and_is_named_once(
    scenario: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    users = Users()

    async def body(fd_server: FdServer, where: str) -> None:
        token = fd_server.offer([memory_file(b"")], Owner())
        with users.connecting_as(STRANGER_UID):
            for _ in range(3):
                assert await is_closed(await connect(where))  # without waiting for a token
            assert await fetch(where, token) == []
        (got,) = await fetch(where, token)
        os.close(got)

    scenario(body, peer_of=users.peer_of)
    assert [record.message for record in caplog.records].count(
        f"user {STRANGER_UID} is not handed anything: see allow_client_shm, trusted_uids"
    ) == 1


def test_a_user_of_too_many_groups_cannot_fill_the_log(
    scenario: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def peer_of(_: socket.socket) -> Any:
        raise OSError("Numerical result out of range")

    async def body(_: FdServer, where: str) -> None:
        for _attempt in range(50):
            assert await is_closed(await connect(where))

    scenario(body, peer_of=peer_of)
    assert 0 < len([record for record in caplog.records if "out of range" in record.getMessage()]) <= 20


def test_a_sessions_token_says_whose_it_is(scenario: Scenario) -> None:
    async def body(_: FdServer, where: str) -> None:
        assert await asyncio.to_thread(fd_socket.introduce, where, SESSION_TOKEN) == INTRODUCED
        token, peer = introductions[-1]
        assert (token, peer.uid) == (SESSION_TOKEN, os.geteuid())
        assert os.getegid() in peer.gids
        assert await asyncio.to_thread(fd_socket.introduce, where, bytes(16)) == b""

    scenario(body)


def test_those_who_connect_and_say_nothing_are_shown_out(scenario: Scenario) -> None:
    async def body(_: FdServer, where: str) -> None:
        before = num_open_files()
        silent = [await connect(where) for _ in range(8)]
        # A connection that is accepted after them is answered, so they are accepted by now.
        await asyncio.to_thread(fd_socket.introduce, where, SESSION_TOKEN)
        await manual_loop.advance(PRESENT_S)
        for connection in silent:
            assert await is_closed(connection)
        assert num_open_files() <= before

    scenario(body)


def test_a_users_oldest_gives_way_to_its_newest_and_nobody_elses(scenario: Callable[..., None]) -> None:
    users = Users()

    async def body(fd_server: FdServer, where: str) -> None:
        patient = await connect(where)
        await asyncio.to_thread(fd_socket.introduce, where, SESSION_TOKEN)  # the connection is accepted by now
        token = fd_server.offer([memory_file(b"mine")], Owner())
        with users.connecting_as(ANOTHER_UID):
            silent = [await connect(where) for _ in range(MAX_SILENT_OF_USER + 3)]
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

    scenario(body, peer_of=users.peer_of)


def test_many_of_a_user_who_speak_are_all_answered(scenario: Scenario) -> None:
    async def body(_: FdServer, where: str) -> None:
        def ask() -> list[bytes]:
            with contextlib.ExitStack() as stack:
                connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
                for connection in connections:
                    connection.connect(where)
                    connection.send(SESSION_TOKEN)
                return [connection.recv(16) for connection in connections]

        assert await asyncio.to_thread(ask) == [INTRODUCED] * 100

    scenario(body)


def test_so_many_offers_of_an_owner_may_wait(scenario: Scenario) -> None:
    async def body(fd_server: FdServer, where: str) -> None:
        owner = Owner()
        tokens = [fd_server.offer([memory_file(b"")], owner) for _ in range(MAX_OFFERS_OF_SESSION)]
        with pytest.raises(QuotaExceededError):
            fd_server.offer([memory_file(b"")], owner)
        fd_server.offer([memory_file(b"")], Owner())
        (got,) = await fetch(where, tokens[0])
        fd_server.offer([memory_file(b"")], owner)
        os.close(got)

    before = num_open_files()
    scenario(body)
    assert num_open_files() == before


def test_a_client_finds_the_socket_by_the_address_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane's memory comes over the socket. Over TCP there is none."""
    with Daemon(**SMALL_POOL | {"tcp_address": "127.0.0.1:0", "log_level": "info"}) as daemon:
        folder, name = os.path.split(daemon.address.removeprefix("unix://"))
        monkeypatch.chdir(folder)
        (port,) = re.findall(r"serving .*, 127\.0\.0\.1:(\d+)$", daemon.log.read_text(), re.MULTILINE)
        transports = {}
        for address in (f"unix://{folder}/{name}", f"unix:{folder}/{name}", f"unix:{name}", f"127.0.0.1:{port}"):
            with KVClient(address) as client, client.session() as kv:
                transports[address] = kv.transport
        assert [*transports.values()] == ["lane", "lane", "lane", "inline"], transports
        os.unlink(f"{name}.fds")
        with (
            KVClient(daemon.address, transport="lane") as client,
            pytest.raises(ConnectionLostError, match="fds: No such"),
        ):
            client.session()
        with KVClient(daemon.address) as client, client.session() as kv:
            assert kv.transport == "inline"
