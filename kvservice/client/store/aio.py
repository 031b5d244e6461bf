"""The async API of the store."""

from __future__ import annotations

from kvservice.client.store.core import StoreCore
from kvservice.client.store.leases import LeaseCore, ReservationCore


class AsyncStoreLease(LeaseCore):
    """See LeaseCore. An async context manager."""

    async def __aenter__(self) -> AsyncStoreLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncStoreReservation(ReservationCore):
    """See ReservationCore. An async context manager."""

    async def __aenter__(self) -> AsyncStoreReservation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abort()


class AsyncStore(StoreCore[AsyncStoreLease, AsyncStoreReservation]):
    """See StoreCore. AsyncKVClient.store opens it for a block."""
