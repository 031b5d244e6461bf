"""A thread that gives memory back to the system.

The kernel takes about 0.2 ms for each MiB of pages that are unmapped or freed. The event loop would stand still for so
long, so this thread does it, without the interpreter lock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from kvservice.pool.sealed import SealedMemory

# A thread that maps memory waits for one piece, not for all of it.
_PIECE_BYTES = 4 << 20

_libc = ctypes.CDLL(None)
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvservice-unmapping")


def start() -> None:
    """Start the thread. Otherwise the first memory that is given back does, and a thread seems to be left of it."""
    _thread.submit(int).result()


def unmap(memory: SealedMemory) -> None:
    """Unmap the pages of memory that nobody works on any more. The mapping ends when `memory.map` is dropped."""
    _thread.submit(_unmap_pages, memory.map, memory.address, memory.num_bytes)


def close(descriptor: int) -> None:
    """Close a descriptor, perhaps the last of its memory, which frees the pages."""
    _thread.submit(os.close, descriptor)


def _unmap_pages(_mapping: mmap.mmap, address: int, num_bytes: int) -> None:
    """`_mapping` lasts as long as this call, which refers to it."""
    for begin in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - begin)
        _libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
