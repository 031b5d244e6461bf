"""Trimming of the heap: memory that stays free after a burst of large messages is returned to the kernel.

malloc is configured to keep freed memory (see kvservice.environment), because large messages recur and returned pages
have to be faulted in again. Memory that has been free for NUM_SAMPLES samples is returned.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import re
from collections import deque
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

SAMPLE_S: Final = 5.0
# Memory is returned if it was free in this number of consecutive samples.
NUM_SAMPLES: Final = 4
# Smaller amounts are kept.
LEAST_BYTES: Final = 64 << 20


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


class Malloc:
    """The allocator of this process (glibc)."""

    def __init__(self) -> None:
        """Raises AttributeError if the C library is not glibc 2.33 or later."""
        library = ctypes.CDLL(None)
        self._info = library.mallinfo2
        self._info.restype = _MallocInfo
        self._trim = library.malloc_trim

    def resident_bytes(self) -> int:
        """Return the private resident memory in bytes, without shared memory such as the pool."""
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0

    def free_bytes(self) -> int:
        """Return the free bytes of the heap, resident or already returned to the kernel."""
        return int(self._info().fordblks)

    def trim(self) -> None:
        """Return free pages to the kernel. This takes about 0.1 ms per MiB and blocks all other allocations."""
        self._trim(0)


class HeapTrimmer:
    """Decides when to trim. `sample` must be called at equal intervals."""

    def __init__(self, malloc: Malloc) -> None:
        self._malloc = malloc
        self._kept_bytes = malloc.resident_bytes()
        self._samples: deque[int] = deque(maxlen=NUM_SAMPLES)

    def sample(self) -> None:
        resident = self._malloc.resident_bytes()
        self._kept_bytes = min(self._kept_bytes, resident)
        grown = resident - self._kept_bytes
        self._samples.append(min(grown, self._malloc.free_bytes()) if grown >= LEAST_BYTES else 0)
        if len(self._samples) == NUM_SAMPLES and min(self._samples) >= LEAST_BYTES:
            self._malloc.trim()
            self._kept_bytes = self._malloc.resident_bytes()
            self._samples.clear()
            logger.info("%d MiB that were free are given back", (resident - self._kept_bytes) >> 20)


def freeze_heap() -> None:
    """Exclude all current objects from garbage collection.

    A full collection runs whenever requests have created many objects. Traversing the imported modules alone would
    block the event loop for tens of milliseconds. Until then a daemon that starts collects nothing.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


async def trim_heap() -> None:
    """Trim the heap until cancelled. Returns at once if the C library does not support it."""
    try:
        trimmer = HeapTrimmer(Malloc())
    except AttributeError:
        return
    while True:
        await asyncio.sleep(SAMPLE_S)
        trimmer.sample()
