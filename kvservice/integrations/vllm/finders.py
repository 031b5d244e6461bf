"""The blocks of one worker in the store, as the scheduler sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvservice.errors import KVServiceError

logger = logging.getLogger(__name__)


class StoreFinder:
    """Asks a store of the client. A daemon that is away or refuses has no blocks; no method raises KVServiceError. The
    worker reads the blocks, so leases do not count as reads."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def num_leading(self, keys: Sequence[bytes]) -> int:
        try:
            return int(self._store.lookup(keys).num_leading)
        except KVServiceError as error:
            logger.warning("blocks could not be looked up: %s", error)
            return 0

    def lease(self, keys: Sequence[bytes]) -> Callable[[], None]:
        try:
            lease = self._store.acquire(keys, counted=False)
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
