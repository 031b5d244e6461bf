"""A thread that returns memory to the kernel.

The kernel takes about 0.2 ms per MiB to unmap or free pages. This thread does that work without the GIL, so that it
does not block the event loop.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from kvservice.pool.sealed import SealedMemory

# Pages are unmapped in pieces, so that a thread that maps memory at the same time waits for one piece only.
_PIECE_BYTES = 4 << 20

_libc = ctypes.CDLL(None)
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvservice-unmapping")


def start() -> None:
    """Start the thread now. Otherwise the first release would start it, and it would look like a leaked thread."""
    _thread.submit(int).result()


def unmap(memory: SealedMemory) -> None:
    """Unmap the pages of memory that the daemon no longer uses. Their content stays, because a client may still map
    them. The mapping itself ends when `memory.map` is dropped."""
    _thread.submit(_unmap_pages, memory.map, memory.address, memory.num_bytes)


def close(descriptor: int) -> None:
    """Close a file descriptor. If it is the last one of its memory, the kernel frees the pages."""
    _thread.submit(os.close, descriptor)


def _unmap_pages(_mapping: mmap.mmap, address: int, num_bytes: int) -> None:
    """Unmap the pages piece by piece. The argument `_mapping` keeps the mapping alive during the call."""
    for begin in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - begin)
        _libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
