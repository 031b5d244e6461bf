"""Memory that a burst of large messages has left behind goes back to the system.

malloc is told to keep what is freed (see kvservice.environment), since large messages come again, and pages that are
given back have to be faulted in anew. What has been free for a while is not such memory.
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
# Memory is given back that was there to give in all of so many samples.
NUM_SAMPLES: Final = 4
# Less is kept.
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
    """This process's."""

    def __init__(self) -> None:
        """Raises AttributeError where the C library is not glibc 2.33 or later."""
        library = ctypes.CDLL(None)
        self._info = library.mallinfo2
        self._info.restype = _MallocInfo
        self._trim = library.malloc_trim

    def resident_bytes(self) -> int:
        """Memory of this process alone, in bytes; what it shares with others, such as the pool, is not in it."""
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0

    def free_bytes(self) -> int:
        """What malloc has to give, whether it is resident or was given back already."""
        return int(self._info().fordblks)

    def trim(self) -> None:
        """Give free pages back. It takes about 0.1 ms for each MiB, and nobody else allocates meanwhile."""
        self._trim(0)


class HeapTrimmer:
    """`sample` is called at equal intervals, and trims when it is time to."""

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
    """Python's collector leaves alone what there is now. A look at the modules alone holds the event loop for tens of
    milliseconds, and comes whenever a request has made many objects."""
    gc.collect()
    gc.freeze()


async def trim_heap() -> None:
    """Until cancelled, where there is a way to."""
    try:
        trimmer = HeapTrimmer(Malloc())
    except AttributeError:
        return
    while True:
        await asyncio.sleep(SAMPLE_S)
        trimmer.sample()
