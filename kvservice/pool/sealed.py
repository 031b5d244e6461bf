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

import numpy as np

from kvservice.pool.available import available_bytes

_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16


class SealedMemory:
    """`num_bytes` of zeroed memory, all of it taken at once, mapped for writing as `map` at `address`.

    `fd` is its descriptor. With `read_only` no mapping that is made later, by whomever, can be written to.
    """

    def __init__(self, name: str, num_bytes: int, *, read_only: bool, reserve_bytes: int = 0) -> None:
        """Raises OSError where there is not that much memory, with `reserve_bytes` left."""
        if num_bytes + reserve_bytes > available_bytes():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, num_bytes)
            self.map = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL | (_SEAL_FUTURE_WRITE if read_only else 0)
            fcntl.fcntl(self.fd, _ADD_SEALS, seals)
        except OSError:
            os.close(self.fd)
            raise
        self.address: int = np.frombuffer(self.map, np.uint8).ctypes.data
        self._close_fd = weakref.finalize(self, os.close, self.fd)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last view of `map` is gone, here and elsewhere."""
        self._close_fd()
