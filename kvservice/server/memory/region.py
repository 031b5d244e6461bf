"""A region: memory shared by a client and the daemon. It stays open while the session has it or a call uses it.

The memory of a region is an object of the client (ShmObject), made by the daemon (MadeMemory in regions), of a GPU
(kvservice.devices), or on another host (remote).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvservice.errors import InvalidArgumentError, RegionNotOpenedError, RegionShrunkError, ResourceExhaustedError
from kvservice.server.memory.budget import Budget
from kvservice.server.memory.fd_passing import Peer
from kvservice.telemetry.tables import REGION_BYTES, REGIONS, SessionRow

Array = np.ndarray[Any, Any]


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
    `device_id` are the values that the client registered it with; host memory has no `device_id`. A remote region, for
    a client on another host, is given `reach`, the size of the client's memory. Places end below it."""

    def __init__(
        self,
        memory: Memory,
        byte_size: int,
        totals: RegionTotals,
        *,
        key: str = "",
        offset: int = 0,
        device_id: int | None = None,
        reach: int | None = None,
    ) -> None:
        self.memory, self.byte_size = memory, byte_size
        self.key, self.offset, self.device_id = key, offset, device_id
        self.is_remote = reach is not None
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


# ---- places of blocks in a region or in a message, see Scatter in the contract

Uint64Array = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Places:
    """Pieces of `piece_bytes` uint64 `[num_pieces]` bytes at `offsets` uint64 `[num_blocks][num_pieces]`."""

    piece_bytes: Uint64Array
    offsets: Uint64Array

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    def packed(num_blocks: int, block_bytes: int) -> Places:
        """Blocks of one piece, one after the other."""
        offsets = np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        return Places(np.array([block_bytes], np.uint64), offsets[:, None])

    def of(self, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Places:
        """The places of chosen blocks, bool `[num_blocks]`."""
        return Places(self.piece_bytes, self.offsets[chosen])

    def ranges(self) -> Iterator[tuple[np.uint64, np.uint64]]:
        """The offset and size of each piece, block by block."""
        sizes = np.broadcast_to(self.piece_bytes, self.offsets.shape)
        return zip(self.offsets.reshape(-1), sizes.reshape(-1), strict=True)


# ---- a POSIX shared memory object of a client

# The object is never mapped, because a client can truncate it at any time, and SIGBUS would kill the daemon if it
# touched a mapping past the end of the object. Reads and writes through the descriptor return short counts instead.


# The directory of POSIX shared memory objects on Linux.
SHM_DIRECTORY = b"/dev/shm"
MAX_KEY_BYTES = 255
_ACL = "system.posix_acl_access"
# Errors that are not the client's mistake: the daemon has too many open files, or the kernel too little memory.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ShmObject:
    """Implements `Memory` with the bytes of an object from `offset` on. They count against the budget, because the
    daemon allocates pages when it writes to holes in the object."""

    def __init__(self, key: str, offset: int, byte_size: int, peer: Peer, budget: Budget) -> None:
        """Open the object `key`, a name for shm_open, with the permissions of `peer`. Raises InvalidArgumentError,
        RegionNotOpenedError, QuotaExceededError, ResourceExhaustedError."""
        self._offset, self._num_bytes, self._budget = offset, byte_size, budget
        self._descriptor = _open(_path_of(key), peer)
        try:
            _check_extent(self._descriptor, offset, byte_size)
            budget.reserve(byte_size, "byte_size")
        except BaseException:
            os.close(self._descriptor)
            raise

    def check(self, end: int) -> None:
        """Raise RegionShrunkError if the object is now too short for the first `end` bytes of the region."""
        size = os.fstat(self._descriptor).st_size
        if self._offset + end > size:
            raise RegionShrunkError(f"the region needs {self._offset + end} bytes of its object, which has {size} now")

    def read(self, begin: int, num_bytes: int) -> Array:
        """Return a copy, uint8 `[num_bytes]`. Raises RegionShrunkError."""
        self.check(begin + num_bytes)
        data = np.empty(num_bytes, np.uint8)
        done = 0
        while done < num_bytes:
            count = os.preadv(self._descriptor, [data[done:].data], self._offset + begin + done)
            if count == 0:
                raise RegionShrunkError("the region's object was truncated while it was read")
            done += count
        return data

    def write(self, begin: int, data: Array) -> None:
        """Write `data`, uint8. Raises RegionShrunkError, and ResourceExhaustedError if the object has a hole and the
        host has no memory to fill it."""
        self.check(begin + len(data))
        done = 0
        while done < len(data):
            try:
                done += os.pwritev(self._descriptor, [data[done:].data], self._offset + begin + done)
            except OSError as error:
                raise ResourceExhaustedError(f"the region cannot be written: {error.strerror}") from None

    def view(self, _: int, __: int) -> None:
        """Return None: the client can truncate the object, so it is never accessed in place."""

    def close(self) -> None:
        os.close(self._descriptor)
        self._budget.release(self._num_bytes)


def _path_of(key: str) -> bytes:
    """Return the path of the object by the rules of shm_open: `key` is a name with an optional leading slash."""
    name = key.removeprefix("/").encode()
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name or len(name) > MAX_KEY_BYTES:
        raise InvalidArgumentError("is not the name of a shared-memory object", field="key")
    return SHM_DIRECTORY + b"/" + name


def _open(path: bytes, peer: Peer) -> int:
    """Open an object if the peer could.

    The file type is checked before the open, because the directory can contain other files, such as pipes or devices,
    whose open could block or have side effects. An open that conflicts with a lease of the owner (fcntl(2), F_SETLEASE)
    would block for 45 s; O_NONBLOCK makes it fail and has no other effect on a regular file.
    """
    try:
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_object(found, peer)
            return os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(found)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise ResourceExhaustedError(f"the daemon cannot open one more: {error.strerror}", field="key") from None
        raise RegionNotOpenedError(f"cannot be opened: {error.strerror}", field="key") from None


def _check_object(descriptor: int, peer: Peer) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise RegionNotOpenedError("is not a shared-memory object", field="key")
    # The file mode does not include the entries of an access control list.
    if not peer.may_read_and_write(found) or (found.st_uid != peer.uid and _has_acl(descriptor)):
        raise RegionNotOpenedError(f"user {peer.uid} may not read and write it", field="key")


def _has_acl(descriptor: int) -> bool:
    try:
        return _ACL in os.listxattr(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return False
        raise


def _check_extent(descriptor: int, offset: int, byte_size: int) -> None:
    size = os.fstat(descriptor).st_size
    if offset >= size:
        raise InvalidArgumentError(f"{offset} is not below the object's {size} bytes", field="offset")
    if not 0 < byte_size <= size - offset:
        raise InvalidArgumentError(f"{byte_size} bytes from {offset} on, the object has {size}", field="byte_size")
