"""A shared-memory object of a client's, opened.

It is never mapped: a client may truncate its object at any moment, and a process that touches a mapping past its
object's end is killed by SIGBUS. Reading and writing by the descriptor come up short instead. They copy, which is
needed anyway: what was checked must not be changed by the client while it is computed on.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.errors import InvalidArgumentError, RegionNotOpenedError, RegionShrunkError, ResourceExhaustedError

Array = np.ndarray[Any, Any]

# Where Linux keeps POSIX shared-memory objects.
SHM_DIRECTORY = b"/dev/shm"
MAX_KEY_BYTES = 255
# Not the client's fault, or not only: the daemon has too many files, or the kernel too little memory.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass
class RegionTotals:
    """Regions of all sessions whose objects are open."""

    count: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Place:
    """A piece of a region, in bytes."""

    region: str
    offset: int
    byte_size: int


class Region:
    """`byte_size` bytes of an open object, from `offset` on. Closed when it has ended and nobody uses it any more."""

    def __init__(self, key: str, offset: int, byte_size: int, descriptor: int, totals: RegionTotals) -> None:
        self.key, self.offset, self.byte_size = key, offset, byte_size
        self._descriptor = descriptor
        self._totals = totals
        self._users = 1  # the session
        totals.count += 1
        totals.num_bytes += byte_size

    def release(self) -> None:
        """One user less."""
        self._users -= 1
        assert self._users >= 0, "a region was closed twice"
        if self._users == 0:
            os.close(self._descriptor)
            self._totals.count -= 1
            self._totals.num_bytes -= self.byte_size

    @contextmanager
    def in_use(self) -> Iterator[Region]:
        self._users += 1
        try:
            yield self
        finally:
            self.release()

    def check_object(self, end: int) -> None:
        """Raise RegionShrunkError unless the object still has the region's bytes before `end`."""
        size = os.fstat(self._descriptor).st_size
        if self.offset + end > size:
            raise RegionShrunkError(f"the region needs {self.offset + end} bytes of its object, which has {size} now")

    def read(self, begin: int, num_bytes: int) -> Array:
        """A copy, uint8 `[num_bytes]`. Raises RegionShrunkError."""
        self.check_object(begin + num_bytes)
        data = np.empty(num_bytes, np.uint8)
        done = 0
        while done < num_bytes:
            count = os.preadv(self._descriptor, [data[done:].data], self.offset + begin + done)
            if count == 0:
                raise RegionShrunkError("the region's object was truncated while it was read")
            done += count
        return data

    def write(self, begin: int, array: Array) -> None:
        """The array's elements, in row-major order. Raises RegionShrunkError; ResourceExhaustedError where the object
        has a hole and the system no memory to fill it."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.check_object(begin + len(data))
        done = 0
        while done < len(data):
            try:
                done += os.pwritev(self._descriptor, [data[done:].data], self.offset + begin + done)
            except OSError as error:
                raise ResourceExhaustedError(f"the region cannot be written: {error.strerror}") from None


def path_of(key: str) -> bytes:
    """Where the object of this key is, by the rules of shm_open: a name, with or without one leading slash."""
    name = key.removeprefix("/").encode()
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name or len(name) > MAX_KEY_BYTES:
        raise InvalidArgumentError("is not the name of a shared-memory object", field="key")
    return SHM_DIRECTORY + b"/" + name


def open_object(path: bytes) -> int:
    """Raises RegionNotOpenedError, ResourceExhaustedError."""
    try:
        # Not blocking: the directory may hold other things than shared memory, on which an open could wait.
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise ResourceExhaustedError(f"the daemon cannot open one more: {error.strerror}", field="key") from None
        raise RegionNotOpenedError(f"cannot be opened: {error.strerror}", field="key") from None


def check_extent(descriptor: int, offset: int, byte_size: int) -> None:
    """Raises RegionNotOpenedError for what is no shared memory, InvalidArgumentError for what it does not have."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise RegionNotOpenedError("is no shared-memory object", field="key")
    if offset >= found.st_size:
        raise InvalidArgumentError(f"{offset} is not below the object's {found.st_size} bytes", field="offset")
    if not 0 < byte_size <= found.st_size - offset:
        raise InvalidArgumentError(
            f"{byte_size} bytes from {offset} on, the object has {found.st_size}", field="byte_size"
        )
