"""Memory files that are handed to other processes and that none of them can make shorter.

Whoever touches a mapping past its file's end is killed by SIGBUS. A seal on the size (memfd_create(2), fcntl(2)) takes
that away for good, so that a process may work on memory that others, whom it does not trust, have mapped too.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Generator
from typing import Final

import numpy as np

from kvservice.pool.available import available_bytes

_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
# What `in_slices` takes at one time: at most a few milliseconds.
SLICE_BYTES: Final = 1 << 20
# After so much it asks again what there is, which takes as long.
CHECKED_BYTES: Final = 16 << 20


class SealedMemory:
    """`num_bytes` of zeroed memory, all of it taken at once, mapped for writing as `map` at `address`.

    `fd` is its descriptor. With `read_only` no mapping that is made later, by whomever, can be written to.
    """

    def __init__(self, name: str, num_bytes: int, *, read_only: bool, reserve_bytes: int = 0) -> None:
        """Raises OSError where there is not that much memory, with `reserve_bytes` left."""
        self._create(name, num_bytes, reserve_bytes)
        try:
            os.posix_fallocate(self.fd, 0, num_bytes)
            self.map = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._seal(read_only=read_only)
        except OSError:
            os.close(self.fd)
            raise

    @classmethod
    def in_slices(
        cls, name: str, num_bytes: int, *, read_only: bool, reserve_bytes: int = 0
    ) -> Generator[None, None, SealedMemory]:
        """The same in slices of SLICE_BYTES. Returns the memory."""
        memory = cls.__new__(cls)
        memory._create(name, num_bytes, reserve_bytes)
        try:
            os.ftruncate(memory.fd, num_bytes)
            memory.map = mmap.mmap(memory.fd, num_bytes, flags=mmap.MAP_SHARED)
            pages = np.frombuffer(memory.map, np.uint8)[:: mmap.PAGESIZE]
            for begin in range(0, num_bytes, SLICE_BYTES):
                if begin:
                    yield
                if begin and begin % CHECKED_BYTES == 0:
                    _require(num_bytes - begin + reserve_bytes)
                end = min(begin + SLICE_BYTES, num_bytes)
                os.posix_fallocate(memory.fd, begin, end - begin)
                pages[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)] = 0  # as they are, so that they are mapped
            memory._seal(read_only=read_only)
        except BaseException:  # also where nobody wants the rest any more
            os.close(memory.fd)
            raise
        return memory

    def _create(self, name: str, num_bytes: int, reserve_bytes: int) -> None:
        _require(num_bytes + reserve_bytes)
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def _seal(self, *, read_only: bool) -> None:
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL | (_SEAL_FUTURE_WRITE if read_only else 0)
        fcntl.fcntl(self.fd, _ADD_SEALS, seals)
        self.address: int = np.frombuffer(self.map, np.uint8).ctypes.data
        self._close_fd = weakref.finalize(self, os.close, self.fd)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last view of `map` is gone, here and elsewhere."""
        self._close_fd()


def _require(num_bytes: int) -> None:
    if num_bytes > available_bytes():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
