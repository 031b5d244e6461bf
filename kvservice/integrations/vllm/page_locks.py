"""Page-locks on the mapped memory of a store, so that a GPU can copy from and to it."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from kvservice.integrations.vllm.gpu_blocks import Numbers

logger = logging.getLogger(__name__)


class LockablePages(Protocol):
    def page_lock(self, address: int, num_bytes: int, *, read_only: bool) -> Any:
        """Return an object whose `close` unlocks the memory, or None if it cannot be locked."""

    def settle(self) -> None:
        """Wait for all copies from and to locked memory."""


class PageLocks:
    """Locks on one mapping at a time, on the slabs in which blocks have been used: a slab takes a few milliseconds, a
    large store would take seconds. `memory` is a MappedStore."""

    def __init__(self, gpu: LockablePages) -> None:
        self._gpu = gpu
        self._memory: Any = None
        self._slabs: dict[int, Any] = {}
        self._refused = False

    def use(self, memory: Any) -> bool:
        """Use this mapping from now on, and unlock any other; None: no mapping. Returns whether it can be locked, as
        far as is known."""
        if memory is not self._memory:
            self.close()
            self._memory = memory
        return memory is not None and not self._refused

    def cover(self, memory: Any, addresses: Numbers) -> bool:
        """Lock the slabs of blocks. Returns whether all of them are locked."""
        if not self.use(memory):
            return False
        slabs = (addresses - np.uint64(memory.address)) // np.uint64(memory.slab_bytes)
        for slab in np.unique(slabs).tolist():
            if slab not in self._slabs:
                lock = self._gpu.page_lock(
                    memory.address + slab * memory.slab_bytes, memory.slab_bytes, read_only=not memory.writable
                )
                if lock is None:
                    logger.warning("the memory of the store cannot be page-locked: blocks are copied twice")
                    self._refused = True
                    return False
                self._slabs[slab] = lock
        return True

    def close(self) -> None:
        """Unlock everything."""
        if self._slabs:
            self._gpu.settle()
        for lock in self._slabs.values():
            lock.close()
        self._slabs.clear()
        self._memory, self._refused = None, False
