"""Waiting with a time limit of an injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from kvservice.store import LeaseClock


async def wait_for_all(clock: LeaseClock, futures: Collection[asyncio.Future[Any]], limit_s: float) -> None:
    """Wait until all futures are done, at most `limit_s` seconds. Cancels none of them."""
    pending = {future for future in futures if not future.done()}
    if not pending:
        return
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(future: asyncio.Future[Any]) -> None:
        pending.discard(future)
        if not pending:
            over.cancel()

    for future in list(pending):
        future.add_done_callback(ended)
    timer = clock.call_later(limit_s, over.cancel) if limit_s < float("inf") else None
    try:
        await asyncio.wait({over})
    finally:
        if timer is not None:
            timer.cancel()
        for future in pending:
            future.remove_done_callback(ended)
