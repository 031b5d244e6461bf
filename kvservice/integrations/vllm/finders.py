"""The blocks of one worker in the store, as the scheduler sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvservice.errors import KVServiceError
from kvservice.integrations.common.waiting import ComputeTime, FoundBlocks, bring_up, find_blocks

logger = logging.getLogger(__name__)

# A lease is of blocks that are in memory. 0 would stand for no limit.
_NO_WAIT_S = 1e-6


class StoreFinder:
    """Asks a store of the client. A daemon that is away or refuses has no blocks; no method raises KVServiceError. The
    worker reads the blocks, so leases do not count as reads."""

    def __init__(self, store: Any, compute: ComputeTime, timeout_s: float) -> None:
        """`timeout_s` is the time limit of a call that does not wait for blocks below the daemon's memory."""
        self._store, self._compute, self._timeout_s = store, compute, timeout_s

    def find(self, keys: Sequence[bytes]) -> FoundBlocks:
        try:
            return find_blocks(self._store, keys, self._compute, timeout_s=self._timeout_s)
        except KVServiceError as error:
            logger.warning("blocks could not be looked up: %s", error)
            return FoundBlocks(0, 0)

    def bring_up(self, keys: Sequence[bytes], num_in_memory: int) -> int:
        wait_s = self._compute.wait_s(len(keys) - num_in_memory)
        try:
            return bring_up(self._store, keys, wait_s, self._timeout_s)
        except KVServiceError as error:
            logger.warning("blocks could not be brought into the daemon's memory: %s", error)
            return 0

    def lease(self, keys: Sequence[bytes]) -> Callable[[], None]:
        try:
            lease = self._store.acquire(keys, counted=False, max_wait_s=_NO_WAIT_S, timeout_s=self._timeout_s)
        except KVServiceError as error:
            logger.warning("blocks could not be leased: %s", error)
            return lambda: None
        return lambda: self._release(lease)

    def touch(self, keys: Sequence[bytes]) -> None:
        try:
            self._store.touch(keys)
        except KVServiceError as error:
            logger.warning("blocks could not be touched: %s", error)

    def close(self) -> None:
        self._store.close()

    @staticmethod
    def _release(lease: Any) -> None:
        try:
            lease.release()
        except KVServiceError as error:
            logger.warning("a lease could not be released, it will expire: %s", error)
