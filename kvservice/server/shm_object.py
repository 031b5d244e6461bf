"""A shared-memory object of a client's, opened.

It is never mapped: a client may truncate its object at any moment, and a process that touches a mapping past its
object's end is killed by SIGBUS. Reading and writing by the descriptor come up short instead.
"""

from __future__ import annotations

import errno
import os
import stat

import numpy as np

from kvservice.errors import InvalidArgumentError, RegionNotOpenedError, RegionShrunkError, ResourceExhaustedError
from kvservice.server.budget import Budget
from kvservice.server.peers import Peer
from kvservice.server.region import Array

# Where Linux keeps POSIX shared-memory objects.
SHM_DIRECTORY = b"/dev/shm"
MAX_KEY_BYTES = 255
_ACL = "system.posix_acl_access"
# Not the client's fault, or not only: the daemon has too many files, or the kernel too little memory.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ShmObject:
    """The bytes of an object from `offset` on: a region's `Memory`. They count in the budget: where the object has
    holes, it is the daemon that fills them."""

    def __init__(self, key: str, offset: int, byte_size: int, peer: Peer, budget: Budget) -> None:
        """`key`: a name as for shm_open. `peer`: for whom it is opened. Raises InvalidArgumentError,
        RegionNotOpenedError, QuotaExceededError, ResourceExhaustedError."""
        self._offset, self._num_bytes, self._budget = offset, byte_size, budget
        self._descriptor = _open(_path_of(key), peer)
        try:
            _check_extent(self._descriptor, offset, byte_size)
            budget.take(byte_size, "byte_size")
        except BaseException:
            os.close(self._descriptor)
            raise

    def check(self, end: int) -> None:
        """Raise RegionShrunkError unless the object still has the bytes before `end`."""
        size = os.fstat(self._descriptor).st_size
        if self._offset + end > size:
            raise RegionShrunkError(f"the region needs {self._offset + end} bytes of its object, which has {size} now")

    def read(self, begin: int, num_bytes: int) -> Array:
        """A copy, uint8 `[num_bytes]`. Raises RegionShrunkError."""
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
        """`data` uint8. Raises RegionShrunkError; ResourceExhaustedError where the object has a hole and the system no
        memory to fill it."""
        self.check(begin + len(data))
        done = 0
        while done < len(data):
            try:
                done += os.pwritev(self._descriptor, [data[done:].data], self._offset + begin + done)
            except OSError as error:
                raise ResourceExhaustedError(f"the region cannot be written: {error.strerror}") from None

    def view(self, _: int, __: int) -> None:
        """Never: it may be taken away."""

    def close(self) -> None:
        os.close(self._descriptor)
        self._budget.give_back(self._num_bytes)


def _path_of(key: str) -> bytes:
    """Where the object of this key is, by the rules of shm_open: a name, with or without one leading slash."""
    name = key.removeprefix("/").encode()
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name or len(name) > MAX_KEY_BYTES:
        raise InvalidArgumentError("is not the name of a shared-memory object", field="key")
    return SHM_DIRECTORY + b"/" + name


def _open(path: bytes, peer: Peer) -> int:
    """Open an object if the peer could. It is looked at before it is opened: the directory may hold other things than
    shared memory, on which an open could wait or have effects. An open that conflicts with a lease of the owner's
    (fcntl(2), F_SETLEASE) would wait 45 s for it; O_NONBLOCK makes it fail, and changes nothing else of a file."""
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
        raise RegionNotOpenedError("is no shared-memory object", field="key")
    # The mode does not say whom an access control list lets in.
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
