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

from kvservice.pool.sealed import available_bytes

# Name, dtype, shape, and offset in the file.
ManifestEntry: TypeAlias = tuple[str, str, Sequence[int], int]
Manifest: TypeAlias = Sequence[ManifestEntry]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


class SharedArrays:
    """The writer's arrays. The kernel allocates their memory on first use.

    `fd` and `earlier` are the file and the manifest of an earlier process, whose arrays `kept` returns. `manifest`
    lists the arrays of this process only. A manifest that does not fit its file raises ValueError.
    """

    def __init__(self, name: str = "kvservice-telemetry", fd: int | None = None, earlier: Manifest = ()) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC) if fd is None else fd
        self.manifest: list[ManifestEntry] = []
        self._num_bytes = os.fstat(self.fd).st_size
        self._earlier = {entry[0]: entry for entry in earlier if _checked(entry, self._num_bytes)}
        self.close = weakref.finalize(self, os.close, self.fd)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Create an array, in the place of an earlier one of this name if that has the same size. Raises MemoryError if
        not enough memory is available."""
        kind = np.dtype(dtype)
        num_bytes = _num_bytes(shape, kind)
        earlier = self._earlier.pop(name, None)
        if earlier is not None and (earlier_bytes := _num_bytes(earlier[2], np.dtype(earlier[1]))):
            memory = mmap.mmap(self.fd, earlier_bytes, offset=earlier[3])
            memory.madvise(mmap.MADV_REMOVE)  # zeroes the range, and gives its memory back
            if earlier_bytes == num_bytes:
                self.manifest.append((name, kind.str, shape, earlier[3]))
                return np.frombuffer(memory, kind).reshape(shape)
        if num_bytes > available_bytes():
            raise MemoryError(f"{name} takes {num_bytes} bytes")
        self.manifest.append((name, kind.str, shape, self._num_bytes))
        if num_bytes:
            self._num_bytes += -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self.fd, self._num_bytes)
        return self._map(self.manifest[-1])

    def kept(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return the earlier process's array with its content, or create a zeroed one if there is none. Raises
        ValueError if it had another shape or dtype, and MemoryError as `zeros`."""
        earlier = self._earlier.pop(name, None)
        if earlier is None:
            return self.zeros(name, shape, dtype)
        if (earlier[1], tuple(earlier[2])) != (np.dtype(dtype).str, shape):
            raise ValueError(f"{name} was {earlier[1]}{list(earlier[2])}, is {np.dtype(dtype).str}{list(shape)}")
        self.manifest.append((name, earlier[1], shape, earlier[3]))
        return self._map(self.manifest[-1])

    def _map(self, entry: ManifestEntry) -> npt.NDArray[Any]:
        _, kind, shape, offset = entry
        num_bytes = _num_bytes(shape, np.dtype(kind))
        if num_bytes == 0:  # an empty range cannot be mapped
            return np.zeros(shape, kind)
        return np.frombuffer(mmap.mmap(self.fd, num_bytes, offset=offset), kind).reshape(shape)

    def read_only(self) -> int:
        """Return a read-only descriptor of the file. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)


def open_arrays(fd: int, manifest: Manifest) -> Arrays:
    """Map the writer's arrays read-only in the reader. Returns them by name."""
    arrays = {}
    for name, kind, shape, offset in manifest:
        dtype = np.dtype(kind)
        num_bytes = _num_bytes(shape, dtype)
        memory = mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ, offset=offset) if num_bytes else b""
        arrays[name] = np.frombuffer(memory, dtype).reshape(shape)
    return arrays


def _num_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _checked(entry: ManifestEntry, file_bytes: int) -> bool:
    """Return True, or raise ValueError if an earlier process cannot have written this entry."""
    name, kind, shape, offset = entry
    try:
        end = offset + _num_bytes(shape, np.dtype(kind))
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    if offset < 0 or offset % mmap.ALLOCATIONGRANULARITY or end > file_bytes or any(size < 0 for size in shape):
        raise ValueError(f"{name} of shape {list(shape)} at {offset} is not in its file of {file_bytes} bytes")
    return True
