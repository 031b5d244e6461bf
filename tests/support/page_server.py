"""The page over made-up views, served as the observer does: `page_server.py PORT NUM_BLOCKS NUM_SWAP_BLOCKS`.

A line on standard input lets the pool change: "step", "drop SEQUENCE_ID", "drain".
"""

from __future__ import annotations

import asyncio
import sys

import uvicorn
from fake_views import FakeViews

from kvservice.observer.access import HttpOptions
from kvservice.observer.web import make_app


async def no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain"


async def serve(port: int, views: FakeViews) -> None:
    app = make_app(views, HttpOptions(loopback=True), no_metrics)
    server = uvicorn.Server(uvicorn.Config(app, port=port, access_log=False, log_level="warning"))
    served = asyncio.create_task(server.serve())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = line.split()
        if command == "step":
            views.step()
        elif command == "drop":
            views.drop(int(arguments[0]))
        elif command == "drain":
            views.draining = True
    server.should_exit = server.force_exit = True
    await served


if __name__ == "__main__":
    port, num_blocks, num_swap_blocks = (int(argument) for argument in sys.argv[1:])
    asyncio.run(serve(port, FakeViews(num_blocks, num_swap_blocks, num_sequences=24)))
