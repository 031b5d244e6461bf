"""A region: memory that a client and the daemon share, for as long as the session has it or a call uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from kvservice.telemetry.sessions import REGION_BYTES, REGIONS, SessionRow

Array = np.ndarray[Any, Any]
# What a region's memory is of. Each kind has its own calls.
Kind = Literal["host", "gpu"]
HOST: Kind = "host"
GPU: Kind = "gpu"


class Memory(Protocol):
    """What a region's bytes lie in. Offsets are from the region's start; that they are inside has been checked."""

    def check(self, end: int) -> None:
        """Raise RegionShrunkError unless the bytes before `end` are there."""

    def read(self, begin: int, num_bytes: int) -> Array:
        """uint8 `[num_bytes]`. The client may change what is there meanwhile, but not take it away."""

    def write(self, begin: int, data: Array) -> None:
        """`data` uint8."""

    def view(self, begin: int, num_bytes: int, /) -> Array | None:
        """uint8 `[num_bytes]` to be written in place; None where that cannot be."""

    def close(self) -> None: ...


@dataclass
class RegionTotals:
    """Open regions of one session, in whose row they are told, or of all, which are the `whole` of each."""

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
    """A piece of a region, in bytes."""

    region: str
    offset: int
    byte_size: int


class Region:
    """`byte_size` bytes of shared memory. Closed when it has ended and nobody uses it any more. `key`, `offset`
    and `device_id` are what its client said of it."""

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
    ) -> None:
        self.memory, self.byte_size, self.kind = memory, byte_size, kind
        self.key, self.offset, self.device_id = key, offset, device_id
        self._totals = totals
        self._users = 1  # the session
        totals.add(1, byte_size)

    def release(self) -> None:
        """One user less."""
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
        """The array's elements, in row-major order."""
        self.memory.write(begin, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
