"""Memory of a region that the daemon allocated. No client can shrink it, so calls access it in place."""

from __future__ import annotations

import numpy as np

from kvservice.server import unmapping
from kvservice.server.budget import BudgetedMemory
from kvservice.server.host_access import HostAccess
from kvservice.server.region import Array


class MadeMemory:
    """Implements `Memory`. `number` identifies the region in lane entries. `token` is the handover token of its file
    descriptor."""

    def __init__(self, memory: BudgetedMemory, access: HostAccess) -> None:
        """Raises QuotaExceededError and ResourceExhaustedError; the caller then still owns the memory."""
        self._access = access
        self._memory = memory
        self.token = access.hand_over(memory)
        self._bytes: Array = np.frombuffer(memory.sealed.map, np.uint8)
        self.number = access.add_region(memory.sealed.address, memory.sealed.num_bytes)

    def check(self, end: int) -> None:
        """Do nothing: the memory cannot shrink."""

    def read(self, begin: int, num_bytes: int) -> Array:
        return self.view(begin, num_bytes)

    def write(self, begin: int, data: Array) -> None:
        self._bytes[begin : begin + len(data)] = data

    def view(self, begin: int, num_bytes: int) -> Array:
        return self._bytes[begin : begin + num_bytes]

    def close(self) -> None:
        self._access.remove_region(self.number)
        self._access.withdraw(self.token)
        unmapping.unmap(self._memory.sealed)
        self._memory.close()
