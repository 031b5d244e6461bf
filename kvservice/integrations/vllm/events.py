"""Reports to routers which blocks the store has, by vLLM's own events of its K/V cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StoreEvents:
    """Blocks that have come to the store of a worker, and gone from it: also those of other engines. The keys of blocks
    must be the hashes of vLLM."""

    def __init__(self, memory: Callable[[], Any]) -> None:
        """`memory` returns the memory of the store, a MappedStore, or None if it is not mapped."""
        self._memory = memory
        self._told: set[bytes] = set()

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of the blocks that have gone since the last call, and of those that have come. If the
        store cannot be seen any more, all have gone."""
        memory = self._memory()
        gone, come, is_all = (None if memory is None else memory.changes()) or ([], [], True)
        # A block can come again before it was seen to go.
        left = (self._told if is_all else self._told.intersection(gone)).difference(come)
        gone, come = sorted(left), [key for key in dict.fromkeys(come) if key not in self._told]
        self._told.difference_update(gone)
        self._told.update(come)
        return gone, come
