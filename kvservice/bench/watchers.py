"""Observers of a daemon, for `observers.py`: `python -m kvservice.bench.watchers PORT PAGES SCRAPES ADDRESS`.

It prints "watching" when each observer has received its first response, and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop

from kvservice.client import AsyncKVClient

SCRAPE_EVERY_S = 1.0


async def get(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


async def page(port: int, first: asyncio.Event) -> None:
    reader, _ = await get(port, "/api/stream")
    while data := await reader.read(1 << 20):
        if b"event: frame" in data:
            first.set()
    raise ConnectionError("the page's stream has ended")


async def scrape(port: int, first: asyncio.Event) -> None:
    while True:
        reader, writer = await get(port, "/metrics")
        if b"kvservice_blocks" not in await reader.read():
            raise ConnectionError("no metrics")
        writer.close()
        first.set()
        await asyncio.sleep(SCRAPE_EVERY_S)


async def follow(address: str, first: asyncio.Event) -> None:
    async with AsyncKVClient(address) as client:
        async for _ in client.events(start_number=1):
            first.set()


async def watch(port: int, pages: int, scrapes: bool, address: str) -> None:
    firsts = [asyncio.Event() for _ in range(pages + scrapes + bool(address))]
    left = iter(firsts)
    watching = [page(port, next(left)) for _ in range(pages)]
    watching += [scrape(port, next(left))] if scrapes else []
    watching += [follow(address, next(left))] if address else []
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in watching]
    ready: asyncio.Future[Any] = asyncio.gather(*(first.wait() for first in firsts))
    await asyncio.wait([ready, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        print("watching", flush=True)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    uvloop.run(watch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4]))
