"""A region's memory that the daemon has made: nobody can make it shorter, so it is worked on in place."""

from __future__ import annotations

import numpy as np

from kvservice.errors import ResourceExhaustedError
from kvservice.pool.sealed import SealedMemory
from kvservice.server.host_access import HostAccess
from kvservice.server.region import Array


class MadeMemory:
    """A region's `Memory`. `number` is what the entries of lanes call it."""

    def __init__(self, num_bytes: int, access: HostAccess) -> None:
        """Raises ResourceExhaustedError."""
        self._access = access
        try:
            self._memory = SealedMemory("kvservice-region", num_bytes, read_only=False)
        except OSError as error:
            raise ResourceExhaustedError(
                f"no {num_bytes} bytes of shared memory: {error.strerror}", field="byte_size"
            ) from None
        self._bytes: Array = np.frombuffer(self._memory.map, np.uint8)
        self.number = access.add_region(self._memory.address, num_bytes)

    def hand_over(self) -> bytes:
        """A handover token for it."""
        return self._access.hand_over(self._memory)

    def check(self, end: int) -> None:
        """It is always as long as it was."""

    def read(self, begin: int, num_bytes: int) -> Array:
        return self.view(begin, num_bytes)

    def write(self, begin: int, data: Array) -> None:
        self._bytes[begin : begin + len(data)] = data

    def view(self, begin: int, num_bytes: int) -> Array:
        return self._bytes[begin : begin + num_bytes]

    def close(self) -> None:
        self._access.remove_region(self.number)
        self._memory.close()
