"""A region: memory shared by a client and the daemon. It stays open while the session has it or a call uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from kvservice.telemetry.sessions import REGION_BYTES, REGIONS, SessionRow

Array = np.ndarray[Any, Any]
# Whether a region is host memory or GPU memory of a client on this host, or memory for a client on another host. Each
# kind has its own calls.
Kind = Literal["host", "gpu", "remote"]
HOST: Kind = "host"
GPU: Kind = "gpu"
REMOTE: Kind = "remote"


class Memory(Protocol):
    """The memory of a region. Offsets are in bytes from the start of the region; the caller has checked that they are
    inside it."""

    def check(self, end: int) -> None:
        """Raise RegionShrunkError if the memory is now shorter than `end` bytes."""

    def read(self, begin: int, num_bytes: int) -> Array:
        """Return uint8 `[num_bytes]`. The client can change the contents concurrently, but cannot unmap them."""

    def write(self, begin: int, data: Array) -> None:
        """Write `data`, uint8."""

    def view(self, begin: int, num_bytes: int, /) -> Array | None:
        """Return a writable view, uint8 `[num_bytes]`, or None if the memory cannot be accessed in place."""

    def close(self) -> None: ...


@dataclass
class RegionTotals:
    """Number and size of open regions of one session or of all sessions. The totals of a session report to its `row`
    and add to `whole`, the totals of all sessions."""

    count: int = 0
    num_bytes: int = 0
    whole: RegionTotals | None = None
    row: SessionRow | None = None

    def add(self, count: int, num_bytes: int) -> None:
        self.count += count
        self.num_bytes += num_bytes
        if self.row is not None:
            self.row.set(REGIONS, self.count)
            self.row.set(REGION_BYTES, self.num_bytes)
        if self.whole is not None:
            self.whole.add(count, num_bytes)


@dataclass(frozen=True)
class Place:
    """A range of a region, in bytes."""

    region: str
    offset: int
    byte_size: int


class Region:
    """`byte_size` bytes of shared memory with a reference count; the last `release` closes it. `key`, `offset` and
    `device_id` are the values that the client registered it with. Places end below `reach`: the size of the client's
    memory, if that is on another host."""

    def __init__(
        self,
        memory: Memory,
        byte_size: int,
        totals: RegionTotals,
        kind: Kind,
        *,
        key: str = "",
        offset: int = 0,
        device_id: int = 0,
        reach: int | None = None,
    ) -> None:
        self.memory, self.byte_size, self.kind = memory, byte_size, kind
        self.key, self.offset, self.device_id = key, offset, device_id
        self.reach = byte_size if reach is None else reach
        self._totals = totals
        self._users = 1  # the session
        totals.add(1, byte_size)

    def release(self) -> None:
        """Drop one reference; the last one closes the memory."""
        self._users -= 1
        assert self._users >= 0, "a region was closed twice"
        if self._users == 0:
            self.memory.close()
            self._totals.add(-1, -self.byte_size)

    @contextmanager
    def in_use(self) -> Iterator[Region]:
        self._users += 1
        try:
            yield self
        finally:
            self.release()

    def write(self, begin: int, array: Array) -> None:
        """Write the elements of the array in row-major order."""
        self.memory.write(begin, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
