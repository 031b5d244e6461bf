"""Arrays in a memory file that one process writes and another reads.

There are no locks. Reads of elements of up to eight bytes are atomic; related elements may be read in the middle of a
change.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.pool.available import available_bytes

# Name, dtype, shape, and offset in the file.
Manifest: TypeAlias = list[tuple[str, str, Sequence[int], int]]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


class SharedArrays:
    """The writer's arrays. The kernel allocates their memory on first use."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvservice-telemetry", os.MFD_CLOEXEC)
        self.manifest: Manifest = []
        self._num_bytes = 0
        self.close = weakref.finalize(self, os.close, self.fd)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Create an array. Raises MemoryError if not enough memory is available."""
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if num_bytes > available_bytes():
            raise MemoryError(f"{name} takes {num_bytes} bytes")
        offset = self._num_bytes
        self.manifest.append((name, kind.str, shape, offset))
        if num_bytes == 0:  # an empty range cannot be mapped
            return np.zeros(shape, kind)
        self._num_bytes += -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.fd, self._num_bytes)
        memory = mmap.mmap(self.fd, num_bytes, offset=offset)
        return np.frombuffer(memory, kind).reshape(shape)

    def read_only(self) -> int:
        """Return a read-only descriptor of the file. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)


def open_arrays(fd: int, manifest: Manifest) -> Arrays:
    """Map the writer's arrays read-only in the reader. Returns them by name."""
    arrays = {}
    for name, kind, shape, offset in manifest:
        dtype = np.dtype(kind)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ, offset=offset) if num_bytes else b""
        arrays[name] = np.frombuffer(memory, dtype).reshape(shape)
    return arrays
