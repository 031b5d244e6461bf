"""A link maps the memory of the store, or says why it does not."""

from __future__ import annotations

import logging
import os

from kvservice.client.connection import SessionConnection
from kvservice.client.fd_passing import FdPassing
from kvservice.client.store.memory import Geometry, MappedStore
from kvservice.errors import (
    ConnectionLostError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    StoreNotSharedError,
)
from kvservice.v1 import store_pb2

logger = logging.getLogger(__name__)


class StoreMapper:
    """Maps the store in one session. `shared` is the daemon's share_store, `limit_s` the time limit of each call."""

    def __init__(
        self, connection: SessionConnection, fds: FdPassing, geometry: Geometry, shared: str, limit_s: float
    ) -> None:
        self._connection, self._fds, self._geometry = connection, fds, geometry
        self._shared, self._limit_s = shared, limit_s

    async def open(self, num_threads: int) -> MappedStore:
        """Map the store, for writing if the daemon allows it. Raises StoreNotSharedError if it is not mapped, and logs
        a warning if that is because file descriptors or memory have run out."""
        if self._fds.path is None:
            raise StoreNotSharedError("the store is shared with clients on the unix socket")
        if self._shared == "off":
            raise StoreNotSharedError("the daemon runs with --share-store off")
        try:
            await self._fds.introduce_once()
        except (ConnectionLostError, RegionsNotAllowedError, ResourceExhaustedError) as error:
            raise _not_mapped(error) from None
        if self._shared != "read":
            try:
                return await self._map(True, num_threads)
            except ResourceExhaustedError as error:
                logger.warning("the block store is not mapped for writing: %s", error)
            except StoreNotSharedError as error:
                if error.field != "writable":
                    raise
        try:
            return await self._map(False, num_threads)
        except ResourceExhaustedError as error:
            raise _not_mapped(error) from None

    async def _map(self, writable: bool, num_threads: int) -> MappedStore:
        """Raises StoreNotSharedError, and ResourceExhaustedError."""
        request = store_pb2.MapStoreRequest(request_id=self._connection.next_request_id(), writable=writable)
        response = await self._connection.call("store_map_store", request, self._limit_s)
        try:
            (descriptor,) = await self._fds.fetch(response.handover_token, 1)
        except (ConnectionLostError, RegionsNotAllowedError) as error:
            raise _not_mapped(error) from None
        try:
            return MappedStore.open(descriptor, response.num_bytes, self._geometry, writable, num_threads)
        except (OSError, ValueError) as error:
            raise ResourceExhaustedError(f"it cannot be mapped here: {error}") from None
        finally:
            os.close(descriptor)


def _not_mapped(error: Exception) -> StoreNotSharedError:
    """Warn unless the daemon does not trust the user of this process."""
    if not isinstance(error, RegionsNotAllowedError):
        logger.warning("the block store is not mapped, blocks take a slower way: %s", error)
    return StoreNotSharedError(str(error))
