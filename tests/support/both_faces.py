"""Runs one scenario with the sync and the async API."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from kvservice.client import AsyncKVClient, EngineBatch, KVClient, KVScheduler, Step, StoreLease, StoreReservation

Face = Literal["blocking", "asyncio"]


class Awaitable:
    """Wraps an object of the sync API so that its methods can be awaited."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not inspect.ismethod(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return awaitable(result)

        return call


def awaitable(result: Any) -> Any:
    """Wrap the objects of the sync API in a result."""
    if isinstance(result, EngineBatch):
        return dataclasses.replace(result, step=awaitable(result.step))
    kinds = (KVScheduler, Step, StoreLease, StoreReservation)
    return Awaitable(result) if isinstance(result, kinds) else result


@asynccontextmanager
async def session_of(face: Face, address: str, transport: str, **options: Any) -> AsyncIterator[Any]:
    """Open a session whose methods are awaited. `options` are passed to the client."""
    if face == "blocking":
        with KVClient(address, transport=transport, **options) as client, client.session() as session:
            yield Awaitable(session)
    else:
        async with AsyncKVClient(address, transport=transport, **options) as waiting, waiting.session() as session:
            yield session
