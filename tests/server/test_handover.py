"""The handover socket: who gets descriptors, what for, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvservice.client import handover as client_side
from kvservice.errors import ConnectionLostError, QuotaExceededError, RegionsNotAllowedError
from kvservice.server import handover as server_side
from kvservice.server.handover import Handover


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Handover]:
    handover = Handover(frozenset())
    handover.listen(path, 0o600)
    task = asyncio.create_task(handover.serve())
    try:
        yield handover
    finally:
        task.cancel()
        handover.close()


def scenario(path: Path, body: Callable[[Handover, str], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(path) as handover:
            await body(handover, str(path))

    asyncio.run(run())


class Owner:
    pass


def memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.sock.fds"


def test_a_token_is_good_for_its_descriptors_and_once(path: Path) -> None:
    async def body(handover: Handover, where: str) -> None:
        files = [memory_file(b"one"), memory_file(b"two")]
        before = num_descriptors()
        token = handover.offer(files)
        got = await asyncio.to_thread(client_side.fetch, where, token, 2)
        assert [os.pread(descriptor, 10, 0) for descriptor in got] == [b"one", b"two"]
        assert [os.fstat(a).st_ino for a in got] == [os.fstat(b).st_ino for b in files]
        assert not any(os.get_inheritable(descriptor) for descriptor in got)
        with pytest.raises(RegionsNotAllowedError):
            await asyncio.to_thread(client_side.fetch, where, token, 2)
        for descriptor in got:
            os.close(descriptor)
        assert num_descriptors() <= before  # what an earlier test has left may be gone by now
        for descriptor in files:
            os.close(descriptor)

    scenario(path, body)


def test_a_token_is_good_for_so_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "TOKEN_S", 0.01)

    async def body(handover: Handover, where: str) -> None:
        before = num_descriptors()
        descriptor = memory_file(b"")
        token = handover.offer([descriptor])
        os.close(descriptor)
        await asyncio.sleep(0.1)
        assert num_descriptors() <= before  # what an earlier test has left may be gone by now
        with pytest.raises(RegionsNotAllowedError):
            await asyncio.to_thread(client_side.fetch, where, token, 1)

    scenario(path, body)


def test_what_an_owner_has_offered_is_withdrawn_with_it(path: Path) -> None:
    async def body(handover: Handover, where: str) -> None:
        descriptor, one, other = memory_file(b"kept"), Owner(), Owner()
        before = num_descriptors()
        gone = [handover.offer([descriptor, descriptor], one) for _ in range(3)]
        kept = handover.offer([descriptor], other)
        handover.withdraw(one)
        assert num_descriptors() == before + 1
        for token in gone:
            with pytest.raises(RegionsNotAllowedError):
                await asyncio.to_thread(client_side.fetch, where, token, 2)
        (got,) = await asyncio.to_thread(client_side.fetch, where, kept, 1)
        assert os.pread(got, 10, 0) == b"kept"
        assert handover.has_served(other)
        assert not handover.has_served(one)
        os.close(got)
        os.close(descriptor)

    scenario(path, body)


@pytest.mark.parametrize("sent", [b"", b"\0" * 15, b"\0" * 16, b"\xff" * 1000])
def test_a_wrong_token_gets_nothing_and_costs_no_one(path: Path, sent: bytes) -> None:
    async def body(handover: Handover, where: str) -> None:
        descriptor = memory_file(b"mine")
        token = handover.offer([descriptor])

        def ask() -> tuple[bytes, list[int]]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(where)
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                try:
                    data, descriptors, _, _ = socket.recv_fds(connection, 1, 8)
                except ConnectionResetError:  # closed with bytes that nobody read
                    return b"", []
                return data, descriptors

        assert await asyncio.to_thread(ask) == (b"", [])
        (got,) = await asyncio.to_thread(client_side.fetch, where, token, 1)
        assert os.pread(got, 10, 0) == b"mine"
        os.close(got)
        os.close(descriptor)

    scenario(path, body)


def test_another_user_gets_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(handover: Handover, where: str) -> None:
        descriptor = memory_file(b"")
        token = handover.offer([descriptor])
        monkeypatch.setattr(server_side, "_peer_uid", lambda _: 4242)
        with pytest.raises(RegionsNotAllowedError, match="trusted_uids"):
            await asyncio.to_thread(client_side.fetch, where, token, 1)
        monkeypatch.undo()
        (got,) = await asyncio.to_thread(client_side.fetch, where, token, 1)
        os.close(got)
        os.close(descriptor)

    scenario(path, body)


def test_the_kernel_says_who_the_peer_is() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert server_side._peer_uid(one) == os.geteuid()


def test_those_who_connect_and_say_nothing_are_shown_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "TOKEN_S", 0.2)
    monkeypatch.setattr(server_side, "MAX_CONNECTIONS", 4)

    async def body(handover: Handover, where: str) -> None:
        before = num_descriptors()

        def ask() -> None:
            with contextlib.ExitStack() as stack:
                silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(12)]
                for connection in silent:
                    connection.connect(where)
                    connection.settimeout(10)
                for connection in silent:
                    assert connection.recv(1) == b""

        await asyncio.to_thread(ask)
        await asyncio.sleep(0.05)
        assert num_descriptors() <= before  # what an earlier test has left may be gone by now
        descriptor = memory_file(b"")
        (got,) = await asyncio.to_thread(client_side.fetch, where, handover.offer([descriptor]), 1)
        os.close(got)
        os.close(descriptor)

    scenario(path, body)


def test_so_many_offers_may_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "MAX_OFFERS", 2)

    async def body(handover: Handover, where: str) -> None:
        descriptor = memory_file(b"")
        tokens = [handover.offer([descriptor]) for _ in range(2)]
        with pytest.raises(QuotaExceededError):
            handover.offer([descriptor])
        (got,) = await asyncio.to_thread(client_side.fetch, where, tokens[0], 1)
        handover.offer([descriptor])
        os.close(got)
        os.close(descriptor)

    before = num_descriptors()
    scenario(path, body)
    assert num_descriptors() == before
    assert not path.exists()


def test_no_daemon(path: Path) -> None:
    with pytest.raises(ConnectionLostError):
        client_side.fetch(str(path), bytes(16), 1)


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
