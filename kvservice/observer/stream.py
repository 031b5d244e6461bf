"""Server-sent events: one frame per second, computed once for all listeners, and only while there are any.

hello   {"info", "history"}            once
map     {"group", "group_swap", "device", "swap"}   the cells in base64; first, and after each change
frame   {"snapshot", "sample"}         each second; the sample is the latest of the history, or null
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvservice import plain_json
from kvservice.observer.access import refusal
from kvservice.observer.blocks import PoolMap
from kvservice.observer.views import Views

MAX_STREAMS: Final = 64
FRAME_INTERVAL_S: Final = 1.0
# Proxies close idle connections.
KEEP_ALIVE_S: Final = 15.0
# A listener that reads nothing for this long is considered gone.
STALLED_S: Final = 60.0
_RETRY: Final = b"retry: 2000\n\n"
_KEEP_ALIVE: Final = b": still here\n\n"
# Ids have 64 bits, but JavaScript's numbers are exact only up to 53 bits.
_IDS: Final = frozenset({"session_id", "sequence_id"})


@dataclass(frozen=True)
class Tick:
    """The encoded events of one second."""

    number: int
    frame: bytes
    map: bytes


class Ticker:
    """Computes the latest tick. One of the waiting listeners computes it for all."""

    def __init__(self, views: Views, interval_s: float) -> None:
        self._views = views
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._due = 0.0
        self._latest = Tick(0, b"", b"")
        self._map: PoolMap | None = None

    async def newer_than(self, number: int) -> Tick:
        """Return the latest tick, and wait until its number is above `number`. A slow listener skips ticks."""
        if not self._has_newer_than(number):
            async with self._lock:
                if not self._has_newer_than(number):
                    await self._compute_when_due()
        return self._latest

    def _has_newer_than(self, number: int) -> bool:
        return self._latest.number > number and asyncio.get_running_loop().time() < self._due

    async def _compute_when_due(self) -> None:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(self._due - now)
        self._due = max(now, self._due) + self._interval_s
        snapshot = await self._views.snapshot()
        frame = event("frame", {"snapshot": snapshot, "sample": self._views.sample()})
        self._latest = Tick(self._latest.number + 1, frame, self._map_event())

    def hello(self) -> bytes:
        return event("hello", {"info": self._views.info, "history": self._views.history()})

    def _map_event(self) -> bytes:
        """Return the map event, as the identical bytes object if nothing changed, so that it is not sent again."""
        seen = self._views.map()
        if seen == self._map:
            return self._latest.map
        self._map = seen
        cells = {"device": base64.b64encode(seen.device).decode(), "swap": base64.b64encode(seen.swap).decode()}
        return event("map", {"group": seen.group, "group_swap": seen.group_swap, **cells})


class EventStream:
    """The ASGI app of /api/stream."""

    def __init__(
        self,
        views: Views,
        interval_s: float = FRAME_INTERVAL_S,
        keep_alive_s: float = KEEP_ALIVE_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._ticker = Ticker(views, interval_s)
        self._keep_alive_s, self._stalled_s = keep_alive_s, stalled_s
        self._num_streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_streams >= MAX_STREAMS:
            await refusal(503, f"{MAX_STREAMS} pages are open, which is the limit")(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._stalled_s):
                await send(message)

        self._num_streams += 1
        try:
            await StreamingResponse(self._events(), media_type="text/event-stream")(scope, receive, send_in_time)
        except TimeoutError:
            pass  # the server closes the connection of an incomplete response
        finally:
            self._num_streams -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        yield _RETRY + self._ticker.hello()
        number, sent_map = 0, b""
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    tick = await self._ticker.newer_than(number)
            except TimeoutError:
                yield _KEEP_ALIVE
                continue
            yield tick.frame if tick.map is sent_map else tick.map + tick.frame
            number, sent_map = tick.number, tick.map


def event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(data))


def encode(data: Any) -> bytes:
    """Return compact JSON in which ids are strings, and numbers that are not finite are null."""
    return plain_json.dumps(_with_text_ids(data), separators=(",", ":")).encode()


def _with_text_ids(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: str(value) if key in _IDS else _with_text_ids(value) for key, value in data.items()}
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return [_with_text_ids(row) for row in data]
    return data
