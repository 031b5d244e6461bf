"""The event stream: order of events, one computation for all readers, and readers that stop reading."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
from http_app import serving
from page_pool import FIRST_SEQUENCE, PagePool

from kvservice.observer.web_api import MAX_STREAMS, EventStream, HttpOptions, Refusals, make_app

INTERVAL_S = 0.02
Event = tuple[str, Any]


class Reader:
    """An ASGI client of an EventStream, in this process. It accepts no data while `reading` is not set."""

    def __init__(self, app: EventStream) -> None:
        self.status = 0
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(app({"type": "http", "method": "GET"}, self._receive, self._send))

    async def _receive(self) -> dict[str, str]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.chunks.put_nowait(message["body"])

    async def next(self) -> list[Event]:
        return events(await asyncio.wait_for(self.chunks.get(), 10))

    async def leave(self) -> None:
        self._gone.set()
        await self.task


def events(chunk: bytes) -> list[Event]:
    """Parse events into (name, data). Comments and the retry time have neither."""
    found = []
    for block in chunk.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


@contextlib.asynccontextmanager
async def reader(app: EventStream) -> AsyncIterator[Reader]:
    opened = Reader(app)
    try:
        yield opened
    finally:
        opened.reading.set()
        await opened.leave()


def small_pool() -> PagePool:
    return PagePool(64, 16, 4)


def test_hello_then_the_map_then_frames() -> None:
    async def run() -> None:
        pool = small_pool()
        async with reader(EventStream(pool.views, INTERVAL_S)) as page:
            [(name, hello)] = await page.next()
            assert (name, hello["info"]) == ("hello", pool.views.info)
            assert len(hello["history"]["time_s"]) == 30
            (map_name, cells), (frame_name, frame) = await page.next()
            assert (map_name, frame_name) == ("map", "frame")
            assert (cells["group"], cells["group_swap"]) == (1, 1)
            assert base64.b64decode(cells["device"]) == pool.views.map().device
            assert base64.b64decode(cells["swap"]) == pool.views.map().swap
            ids = {row["sequence_id"] for row in frame["snapshot"]["sequences"]}
            assert ids == {str(FIRST_SEQUENCE + index) for index in range(5)}

    asyncio.run(run())


def test_the_map_comes_again_only_if_it_changed() -> None:
    async def run() -> None:
        pool = small_pool()
        async with reader(EventStream(pool.views, INTERVAL_S)) as page:
            names = [[name for name, _ in await page.next()] for _ in range(4)]
            assert names == [["hello"], ["map", "frame"], ["frame"], ["frame"]]
            pool.grow()
            (_, cells), _ = await until(page, "map")
            assert base64.b64decode(cells["device"]) == pool.views.map().device
            assert [name for name, _ in await page.next()] == ["frame"]

    asyncio.run(run())


async def until(page: Reader, name: str) -> list[Event]:
    while (found := await page.next())[0][0] != name:
        pass
    return found


def test_a_second_is_computed_once_for_all() -> None:
    """Twenty readers get three frames each, of far fewer than twenty readings of the pool."""

    async def run() -> None:
        pool = small_pool()
        app = EventStream(pool.views, INTERVAL_S)
        async with contextlib.AsyncExitStack() as stack:
            pages = [await stack.enter_async_context(reader(app)) for _ in range(20)]
            for _ in range(4):
                await asyncio.gather(*(page.next() for page in pages))
            assert 3 <= pool.num_readings < len(pages)

    asyncio.run(run())


def test_nothing_is_computed_while_nobody_listens() -> None:
    async def run() -> None:
        pool = small_pool()
        app = EventStream(pool.views, INTERVAL_S)
        async with reader(app) as page:
            await page.next()
            await page.next()
        computed = pool.num_readings
        await asyncio.sleep(10 * INTERVAL_S)
        assert pool.num_readings == computed

    asyncio.run(run())


def test_who_reads_slowly_misses_frames_and_sees_the_latest() -> None:
    async def run() -> None:
        pool = small_pool()
        app = EventStream(pool.views, INTERVAL_S)
        async with reader(app) as quick, reader(app) as slow:
            await slow.next()
            slow.reading.clear()
            await quick.next()
            for _ in range(8):
                pool.grow()
                latest = await quick.next()
            while not slow.chunks.empty():
                slow.chunks.get_nowait()
            slow.reading.set()
            waiting = await slow.next()  # the data in flight when it stopped reading
            seen = await slow.next()
            assert waiting[-1][1]["snapshot"]["time_s"] < latest[-1][1]["snapshot"]["time_s"]
            assert seen[-1][1]["snapshot"]["time_s"] >= latest[-1][1]["snapshot"]["time_s"]
            assert [name for name, _ in seen] == ["map", "frame"]

    asyncio.run(run())


def test_who_reads_nothing_at_all_is_given_up() -> None:
    """Waiting for the task fails if it never ends."""

    async def run() -> None:
        app = EventStream(small_pool().views, INTERVAL_S, stalled_s=10 * INTERVAL_S)
        async with reader(app) as page:
            await page.next()
            page.reading.clear()
            await asyncio.wait_for(page.task, 10)

    asyncio.run(run())


def test_there_is_an_end_to_streams() -> None:
    async def run() -> None:
        app = EventStream(small_pool().views, INTERVAL_S)
        async with contextlib.AsyncExitStack() as stack:
            pages = [await stack.enter_async_context(reader(app)) for _ in range(MAX_STREAMS)]
            for page in pages:
                await page.next()
            refused = Reader(app)
            body = await asyncio.wait_for(refused.chunks.get(), 10)
            assert (refused.status, set(json.loads(body))) == (503, {"error"})
            await refused.leave()
            await pages[0].leave()
            async with reader(app) as again:
                assert (await again.next())[0][0] == "hello"

    asyncio.run(run())


def test_a_failure_ends_the_stream_and_the_next_can_begin() -> None:
    async def run() -> None:
        pool = small_pool()
        app = EventStream(pool.views, INTERVAL_S)
        pool.failure = OSError("the memory is gone")
        with pytest.raises(OSError, match="gone"):
            await asyncio.wait_for(Reader(app).task, 10)
        pool.failure = None
        async with reader(app) as page:
            assert [(await page.next())[0][0] for _ in range(2)] == ["hello", "map"]

    asyncio.run(run())


def test_a_comment_is_sent_where_frames_are_rare() -> None:
    async def run() -> None:
        app = EventStream(small_pool().views, interval_s=1000, keep_alive_s=INTERVAL_S)
        async with reader(app) as page:
            await page.next()
            await page.next()
            for _ in range(3):
                assert (await asyncio.wait_for(page.chunks.get(), 10)).startswith(b": ")

    asyncio.run(run())


def test_what_json_does_not_have_is_null() -> None:
    """The ids of a frame are text, see the first test. NaN is no JSON."""

    async def run() -> None:
        pool = small_pool()
        pool.views.info["share"] = float("nan")
        async with reader(EventStream(pool.views, INTERVAL_S)) as page:
            [(_, hello)] = await page.next()
            assert hello["info"] == pool.views.info | {"share": None}

    asyncio.run(run())


async def no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain"


def test_over_a_socket() -> None:
    app = make_app(small_pool().views, HttpOptions(loopback=True), no_metrics, Refusals(), INTERVAL_S)
    with serving(app) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as page:
        page.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while received.count(b"event: frame") < 3:
            received += page.recv(65536)
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"content-type: text/event-stream" in head.lower()
        assert b"cache-control: no-store" in head.lower()
        assert body.index(b"retry: ") < body.index(b"event: hello") < body.index(b"event: map")
