"""HTTP connections that send no request, or read no response, do not block others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from page_pool import PagePool
from serving_http import serving_http

from kvservice.observer.http_server import Connections, HttpLimits
from kvservice.observer.web_api import HttpOptions, Refusals, make_app

LIMITS = HttpLimits(max_connections=4, max_per_address=3, request_s=10.0, stalled_s=30.0)
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Peer:
    """A fake connection from an address, which records whether it was closed."""

    def __init__(self, address: str = "a") -> None:
        self.address = address
        self.closed = False

    def abort(self) -> None:
        self.closed = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connections(clock: Clock) -> Connections:
    return Connections(LIMITS, clock)


def admitted(connections: Connections, *addresses: str) -> list[Peer]:
    peers = [Peer(address) for address in addresses]
    for peer in peers:
        assert connections.admit(peer)
    return peers


def closed(peers: list[Peer]) -> list[bool]:
    return [peer.closed for peer in peers]


def test_an_address_that_is_full_loses_its_own_oldest(connections: Connections) -> None:
    (other,) = admitted(connections, "b")
    peers = admitted(connections, "a", "a", "a", "a", "a")
    assert closed(peers) == [True, True, False, False, False]
    assert not other.closed
    assert len(connections) == 4


def test_when_all_places_are_taken_the_oldest_of_all_gives_way(connections: Connections) -> None:
    peers = admitted(connections, "a", "b", "b", "b", "c", "d")
    assert closed(peers) == [True, True, False, False, False, False]


def test_who_is_answered_does_not_give_way(connections: Connections) -> None:
    peers = admitted(connections, "a", "a", "a")
    connections.answer(peers[0])
    admitted(connections, "a")
    assert closed(peers) == [False, True, False]


def test_where_all_are_answered_the_new_one_is_refused(connections: Connections) -> None:
    peers = admitted(connections, "a", "a", "a")
    for peer in peers:
        connections.answer(peer)
    assert not connections.admit(Peer("a"))
    admitted(connections, "b")
    connections.await_request(peers[1])
    admitted(connections, "a")
    assert closed(peers) == [False, True, False]


def test_a_request_has_so_much_time(connections: Connections, clock: Clock) -> None:
    late, answered, again = admitted(connections, "a", "a", "a")
    clock.now += 9.9
    connections.answer(answered)
    connections.answer(again)
    connections.await_request(again)
    connections.await_request(late)  # a partial request does not extend the deadline
    connections.close_late()
    assert closed([late, answered, again]) == [False, False, False]
    clock.now += 0.1
    connections.close_late()
    assert closed([late, answered, again]) == [True, False, False]
    clock.now += 1000
    connections.close_late()
    assert closed([late, answered, again]) == [True, False, True]
    assert len(connections) == 1


def test_who_does_not_read_has_so_much_time_and_gives_way(connections: Connections, clock: Clock) -> None:
    stalled, other = admitted(connections, "a", "a")
    connections.answer(stalled)
    connections.answer(other)
    connections.await_reading(stalled)
    clock.now += 29.9
    connections.close_late()
    assert not stalled.closed
    clock.now += 0.1
    connections.close_late()
    assert closed([stalled, other]) == [True, False]


def test_what_has_ended_takes_no_place(connections: Connections) -> None:
    peers = admitted(connections, "a", "a", "a")
    for peer in peers:
        connections.remove(peer)
        connections.remove(peer)
    connections.await_request(peers[0])
    assert len(connections) == 0
    admitted(connections, "a", "a", "a")
    assert closed(peers) == [False, False, False]


# ---- a server


Exchange = Callable[[int], Awaitable[None]]


async def no_metrics() -> tuple[bytes, str]:
    return b"some 1\n", "text/plain"


def scenario(connections: Connections, body: Exchange, app: Any = None) -> None:
    """Run `body(port)` with a server in one event loop. By default the server serves the observer's app."""

    async def run() -> None:
        served = app or make_app(PagePool(64, 16, 4).views, HttpOptions(loopback=True), no_metrics, Refusals(), 0.02)
        async with serving_http(served, connections) as port:
            await body(port)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def connected(port: int, sent: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(sent)
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


async def status_of(port: int, path: bytes = b"/metrics") -> int:
    async with connected(port, GET % path) as (reader, _):
        return int((await reader.readline()).split()[1])


def test_half_open_connections_keep_nobody_out() -> None:
    """All connections are from one address, as on the loopback interface."""

    async def body(port: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(300):
                await stack.enter_async_context(connected(port, GET[:20] if number % 2 else b""))
            for path in (b"/metrics", b"/"):
                assert await status_of(port, path) == 200

    scenario(Connections(HttpLimits()), body)


def test_a_server_without_requests_wakes_once_a_second(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        delays: list[float] = []

        def noted(delay: float, *arguments: Any, **context: Any) -> asyncio.TimerHandle:
            delays.append(delay)
            return loop.call_at(loop.time() + delay, *arguments, **context)

        monkeypatch.setattr(loop, "call_later", noted)
        app = make_app(PagePool(64, 16, 4).views, HttpOptions(loopback=True), no_metrics, Refusals())
        async with serving_http(app, connections, sweep_every_s=1.0) as port:
            assert await status_of(port) == 200
            assert delays
            assert min(delays) >= 1.0

    asyncio.run(run())


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection. Bytes that the server has not read make it a reset."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


def test_a_request_that_does_not_end_is_closed(connections: Connections, clock: Clock) -> None:
    """The time of a connection begins when the server waits for its next request."""

    async def body(port: int) -> None:
        async with connected(port, GET[:20]) as (begun, _), connected(port, GET % b"/metrics") as (kept, writer):
            await kept.readuntil(b"some 1\n")
            writer.write(GET[:20])
            closing = asyncio.gather(is_closed(begun), is_closed(kept))
            while not closing.done():
                clock.now += LIMITS.request_s
                await asyncio.sleep(0.01)
            assert all(await closing)

    scenario(connections, body)


def test_who_does_not_read_is_closed(connections: Connections, clock: Clock) -> None:
    """The test would hang if the connection stayed open."""
    ended = asyncio.Event()

    async def endless(_scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            for _ in range(64):
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        ended.set()

    async def body(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(GET % b"/")
            while not ended.is_set():
                await asyncio.sleep(0.01)
                clock.now += LIMITS.request_s / 2

    scenario(connections, body, endless)


def test_pages_that_are_open_stay(clock: Clock) -> None:
    async def body(port: int) -> None:
        async with connected(port, GET % b"/api/stream") as (page, _):
            assert b"200" in await page.readline()
            for _ in range(20):
                assert await status_of(port) == 200
            for _ in range(3):
                await page.readuntil(b"event: frame")
                clock.now += LIMITS.stalled_s

    scenario(Connections(HttpLimits(max_connections=2, max_per_address=2), clock), body)


def test_where_every_place_has_an_open_page_one_more_is_refused() -> None:
    async def body(port: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                page, _ = await stack.enter_async_context(connected(port, GET % b"/api/stream"))
                assert b"200" in await page.readline()
            assert await status_of(port) == 503
        while await status_of(port) == 503:
            await asyncio.sleep(0.01)

    scenario(Connections(HttpLimits(max_connections=2, max_per_address=2)), body)


def test_a_body_without_an_end_is_not_read() -> None:
    """The test would hang if the server went on reading. Others are answered meanwhile, and short bodies are read."""
    chunk = b"1000\r\n" + bytes(4096) + b"\r\n"
    begun = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def body(port: int) -> None:
        async with connected(port, begun + b"2\r\nab\r\n0\r\n\r\n" + GET % b"/metrics") as (twice, _):
            for _ in range(2):
                await twice.readuntil(b"some 1\n")
        for opening in (begun, begun.replace(b"Transfer-Encoding: chunked", b"Content-Length: 9000000000000")):
            async with connected(port, opening) as (reader, writer):
                await reader.readuntil(b"some 1\n")
                assert await status_of(port) == 200
                with contextlib.suppress(ConnectionError):
                    while True:
                        writer.write(chunk)
                        await writer.drain()
            assert await status_of(port) == 200

    scenario(Connections(HttpLimits()), body)


def test_headers_without_an_end_are_not_read() -> None:
    """The test would hang if the server went on reading. Others are answered meanwhile."""

    async def body(port: int) -> None:
        for line in (b"X-Some: " + b"x" * 4096 + b"\r\n", b"x" * 4096):
            async with connected(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Long: ") as (_, writer):
                with contextlib.suppress(ConnectionError):
                    while True:
                        assert await status_of(port) == 200
                        writer.write(line)
                        await writer.drain()
            assert await status_of(port) == 200

    scenario(Connections(HttpLimits()), body)
