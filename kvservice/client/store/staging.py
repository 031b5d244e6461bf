"""The shared memory through which blocks travel if the store is not mapped."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager

from kvservice.client.region_memory import SharedRegion
from kvservice.client.regions import RegionTable
from kvservice.errors import ConnectionLostError, KVServiceError, RegionsNotAllowedError, ResourceExhaustedError

logger = logging.getLogger(__name__)

# Size of the region, unless one block is larger.
STAGING_BYTES = 64 << 20


class StoreStaging:
    """A region of the session. One call uses it at a time, holding `lock`. `allowed` is whether the daemon gives the
    session regions at all."""

    def __init__(self, regions: RegionTable, lock: AbstractAsyncContextManager[object], allowed: bool) -> None:
        self.lock, self.allowed = lock, allowed
        self._regions = regions
        self._region: SharedRegion | None = None
        self._has_warned = False

    async def room(self, num_bytes: int, least_bytes: int, timeout_s: float | None) -> SharedRegion | None:
        """Return a region of `num_bytes`, at least of `least_bytes`, or None if the daemon has no memory for it now,
        gives this session none, or its fd-passing socket cannot be reached."""
        size = max(least_bytes, min(num_bytes, STAGING_BYTES))
        if self._region is not None and self._region.num_bytes < size:
            self.drop()
        while self._region is None:
            try:
                self._region = await self._regions.create(size, timeout_s=timeout_s)
            except RegionsNotAllowedError:
                self.allowed = False
                return None
            except ConnectionLostError as error:
                if not self._regions.connected:
                    raise
                self.allowed = False
                self._warn_once(error)
                return None
            except ResourceExhaustedError as error:
                if size == least_bytes:
                    self._warn_once(error)
                    return None
                size = max(least_bytes, size // 2)
        return self._region

    async def check(self, least_bytes: int, timeout_s: float | None) -> None:
        """Set `allowed`. Only the attempt to make a region shows whether the daemon gives this user any."""
        await self.room(least_bytes, least_bytes, timeout_s)
        self.drop()

    def _warn_once(self, error: KVServiceError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("blocks of the store travel in messages, which is slow: %s", error)

    def drop(self) -> None:
        """Do not use the region again. A call that was given up may still be executed, and use it."""
        if self._region is not None:
            self._regions.drop(self._region)
            self._region = None
