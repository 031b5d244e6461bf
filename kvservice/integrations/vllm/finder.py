"""One worker's blocks in the store: found and leased in the mapped memory, or by asking the daemon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvservice.client.store.memory import MappedStore, SharedLease
from kvservice.client.store.values import KEY_BYTES, Flags, SharedUses, num_keys
from kvservice.integrations.common import ComputeTime, FoundBlocks, find_blocks
from kvservice.integrations.vllm.steps import LeasedBlocks, Rank

# A lease is of blocks that are in memory. 0 would stand for no limit.
NO_WAIT_S = 1e-6


class BlockLease(Protocol):
    """A lease of the client."""

    offsets: bytes
    versions: bytes

    @property
    def found(self) -> Any: ...

    @property
    def alive(self) -> bool: ...

    def renew(self, *, timeout_s: float | None = None) -> bool: ...

    def release(self) -> None: ...


Leases = Mapping[Rank, BlockLease]


class StoreFinder:
    """The blocks of one worker, in the store. A daemon that is away has none. The worker reads the blocks, so leases do
    not count as reads unless it reads under them. Keys are those of blocks, one after the other. Methods raise
    KVServiceError."""

    def __init__(self, rank: Rank, store: Any, background: Any, compute: ComputeTime) -> None:
        """`background` is the same store in a session of its own: calls of a session wait for one another."""
        self.rank, self._store, self._background, self.compute = rank, store, background, compute

    @property
    def memory(self) -> MappedStore | None:
        """The memory of the store, if it is mapped."""
        return self._store.memory  # type: ignore[no-any-return]

    @property
    def sees_all(self) -> bool:
        """Whether `see` and `share` need no daemon, and what they do not find is nowhere."""
        memory = self.memory
        return memory is not None and memory.tells_all and memory.writable

    def is_nowhere(self, key: bytes, max_age_s: float) -> bool:
        """Whether it is seen, without the daemon, that there is no such block."""
        memory = self.memory
        return memory is not None and memory.tells_all and not memory.has(key, max_age_s=max_age_s)

    def see(self, keys: bytes, max_age_s: float) -> Flags | None:
        """Return which blocks are there, from the mapped memory; None: ask the daemon."""
        return None if (memory := self.memory) is None else memory.find(keys, max_age_s=max_age_s)

    def share(self, keys: bytes, max_age_s: float) -> SharedLease | None:
        """Lease the blocks before the first that is missing, in the mapped memory; None: ask the daemon, which may have
        more. It counts nothing."""
        memory: MappedStore | None = self._store.memory
        lease = None if memory is None else memory.lease(keys, leading_only=True, max_age_s=max_age_s)
        if memory is None or lease is None or memory.tells_all or lease.num_blocks == num_keys(keys):
            return lease
        lease.release()
        return None

    def look(self) -> None:
        """Take the time to see all new blocks."""
        if (memory := self.memory) is not None:
            memory.look()

    def find(self, keys: bytes, timeout_s: float) -> FoundBlocks:
        """Return how many keys are there before the first missing one, and how many of them are in memory. The daemon
        counts the answer, but not why a block is missing."""
        return find_blocks(self._store, keys, self.compute, explained=False, timeout_s=timeout_s)

    def present(self, keys: bytes, num_blocks: int, timeout_s: float) -> Flags:
        """Return which keys are there, in memory, or below it and there sooner than this many blocks are computed. The
        daemon counts the answer, but not why a block is missing."""
        wait_s = self.compute.wait_s(num_blocks)
        found: Flags = self._store.lookup(keys, explained=False, max_wait_s=wait_s, timeout_s=timeout_s).found
        return found

    def flags(self, keys: bytes, timeout_s: float) -> Flags:
        """Return which blocks are there, in memory or below. The daemon does not count the answer."""
        found: Flags = self._background.lookup(keys, counted=False, timeout_s=timeout_s).found
        return found

    def lease(self, keys: bytes, timeout_s: float, *, wait_s: float = 0.0, counted: bool = False) -> BlockLease:
        """Lease the blocks before the first that is missing, and bring those below the daemon's memory up, at most for
        `wait_s` seconds. `counted`: the blocks are read under this lease."""
        lease: BlockLease = (self._background if wait_s else self._store).acquire(
            keys,
            leading_only=True,
            counted=counted,
            max_wait_s=wait_s or NO_WAIT_S,
            timeout_s=timeout_s + 2 * wait_s,
        )
        return lease

    @staticmethod
    def places(memory: MappedStore, lease: BlockLease, num_blocks: int) -> LeasedBlocks | None:
        """Return where the first blocks of a lease lie in the memory of the store; None: it has ended, or is of
        another memory."""
        if not lease.alive:
            return None
        if isinstance(lease, SharedLease) and lease.memory.identity != memory.identity:
            return None
        stop = 8 * num_blocks
        return LeasedBlocks(memory.identity, lease.offsets[:stop], lease.versions[:stop])

    def touch(self, keys: bytes, uses: SharedUses | None) -> None:
        """Make the blocks the most recently used; the first key is the most recent. The daemon counts `uses`."""
        self._background.touch(keys, uses=uses)

    def answers(self, timeout_s: float) -> bool:
        """Ask anything. Returns whether the answer came in time."""
        self._store.lookup(bytes(KEY_BYTES), counted=False, timeout_s=timeout_s)
        return bool(self._store.reachable)

    def close(self) -> None:
        """Close the sessions."""
        self._store.close()
        self._background.close()
