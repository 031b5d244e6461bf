"""Quotas: what the namespaces of one tenant may have together, of the pool's blocks and of sequences.

An operation of a namespace with a quota sees less of the pool: what its tenant may not take is withheld from it, and
so is what other tenants have guaranteed. So `can_...` and the operation, and a scheduler, agree as they do for the pool
itself. `BlockOwners` says whose blocks are, and so who loses cached blocks first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import BoolArray, Int64Array, item_view
from kvservice.errors import QuotaExceededError


class QuotaNamespace(Protocol):
    """A quota counts the sequences and the pins of a SessionNamespace, and uses nothing else of it."""

    @property
    def rows(self) -> Mapping[int, int]: ...

    @property
    def on_disk(self) -> Sized: ...

    @property
    def pins(self) -> Mapping[int, Int64Array]: ...


class QuotaPool(Protocol):
    """A quota reads these counts of the pool, and sets `withheld`."""

    withheld: int

    @property
    def num_free(self) -> int: ...

    @property
    def evictable(self) -> Sized: ...


class QuotaSlots(Protocol):
    """A quota reads these parts of SequenceTable."""

    @property
    def swapped(self) -> Int64Array: ...

    def table_entries(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]: ...


class TenantQuota:
    """The quota of one tenant. None: no limit but the pool's. The blocks that it limits are those that the tenant owns,
    see BlockOwners, and that cannot be evicted: each counts once, however many sequences have it."""

    def __init__(
        self, tenant: str, max_blocks: int | None, max_sequences: int | None, max_pins: int | None = None
    ) -> None:
        self.tenant, self.namespaces = tenant, set[QuotaNamespace]()
        self.set_limits(max_blocks, max_sequences, max_pins)

    def set_limits(self, max_blocks: int | None, max_sequences: int | None, max_pins: int | None) -> None:
        self.max_blocks, self.max_sequences, self.max_pins = max_blocks, max_sequences, max_pins

    @property
    def num_sequences(self) -> int:
        """The number of sequences, those on a disk included."""
        return sum(len(namespace.rows) + len(namespace.on_disk) for namespace in self.namespaces)

    @property
    def num_pins(self) -> int:
        return sum(len(namespace.pins) for namespace in self.namespaces)

    def require_pin(self, field: str) -> None:
        """Raise QuotaExceededError if the tenant may not have one more pin."""
        if self.max_pins is not None and (used := self.num_pins) >= self.max_pins:
            raise quota_exceeded(self.tenant, "max_pins", self.max_pins, used, 1, field)

    def blocks(self, sequences: QuotaSlots) -> Int64Array:
        """Return the blocks of the pool that the tenant's sequences and pins have, each once."""
        rows = np.array([row for namespace in self.namespaces for row in namespace.rows.values()], np.int64)
        _, blocks = sequences.table_entries(rows[sequences.swapped[rows] == 0])
        pinned = [pin for namespace in self.namespaces for pin in namespace.pins.values()]
        return np.unique(np.concatenate([blocks, *pinned]))

    def withhold(self, device: QuotaPool, num_held: int) -> None:
        """Withhold from the next operation the available blocks that are more than the tenant may take, which holds so
        many."""
        if self.max_blocks is not None:
            available = device.num_free + len(device.evictable)
            device.withheld = max(device.withheld, available - max(0, self.max_blocks - num_held))

    def never(self, num_blocks: int, num_sequences: int) -> QuotaExceededError | None:
        """Return the error if the tenant may never have so much."""
        if self.max_blocks is not None and num_blocks > self.max_blocks:
            return quota_exceeded(self.tenant, "max_blocks", self.max_blocks, 0, num_blocks)
        if self.max_sequences is not None and num_sequences > self.max_sequences:
            return quota_exceeded(self.tenant, "max_sequences", self.max_sequences, 0, num_sequences)
        return None

    def blocks_exceeded(self, required: int, left: int) -> QuotaExceededError:
        """Return the error for an operation that needs so many blocks, of which the tenant may take `left`."""
        assert self.max_blocks is not None, "it is exceeded"
        return quota_exceeded(self.tenant, "max_blocks", self.max_blocks, self.max_blocks - left, required)

    def sequences_exceeded(self, count: int, field: str) -> QuotaExceededError:
        assert self.max_sequences is not None, "it is exceeded"
        return quota_exceeded(self.tenant, "max_sequences", self.max_sequences, self.num_sequences, count, field)


# The owner of blocks of the daemon itself, and of sessions without a tenant.
NOBODY: Final = 0
_PATTERN_BLOCKS: Final = 512


class BlockOwners:
    """Which tenant each block belongs to: the one that took it last, when it was free or could be evicted. So the
    cached blocks of a tenant are its own until another one finds them.

    Each tenant can hold the number of blocks that it has guaranteed, at any time. Others get these only as cached
    blocks. Who has most above its guaranteed blocks loses cached blocks first.

    `of` int16[num_blocks] are the numbers of the owners; those of free blocks do not count.
    """

    def __init__(
        self, num_blocks: int, guaranteed: Mapping[str, int], domains: Mapping[str, str] | None = None
    ) -> None:
        """Tenants with the same domain find each other's blocks. By default each has its own name's."""
        self.numbers = {name: number for number, name in enumerate(guaranteed, start=NOBODY + 1)}
        self._domains = ["", *((domains or {}).get(name, name) for name in guaranteed)]
        self.of: npt.NDArray[np.int16] = np.zeros(num_blocks, np.int16)
        self.current = NOBODY
        self._guaranteed = np.array([0, *guaranteed.values()], np.int64)
        self._total_guaranteed = int(self._guaranteed.sum())
        # The blocks of each tenant that can be evicted, and the others that are not free.
        self._cached, self._held = np.zeros_like(self._guaranteed), np.zeros_like(self._guaranteed)
        # The same as items, and the sum of what tenants do not hold of their guaranteed blocks.
        self._items = item_view(self._guaranteed), item_view(self._held), item_view(self._cached)
        self._missing = self._total_guaranteed
        # The bytes of many blocks of the same owner, for each owner. To compare bytes is the fastest test that blocks
        # have the same owner.
        self._patterns = [np.full(_PATTERN_BLOCKS, i, np.int16).tobytes() for i in range(len(self._guaranteed))]

    def inherit(self, other: BlockOwners) -> None:
        """Let the tenants own what they owned in another one. What a tenant owned that is no more is nobody's."""
        numbers = np.full(len(other._held), NOBODY, np.int16)
        for name, number in other.numbers.items():
            numbers[number] = self.numbers.get(name, NOBODY)
        self.of = numbers[other.of]

    def claim(self, blocks: Int64Array, tenant: str) -> None:
        """Let a tenant own those of the blocks that it holds that are nobody's, before the first `count`."""
        self.of[blocks[self.of[blocks] == NOBODY]] = self.numbers.get(tenant, NOBODY)

    def count(self, used: BoolArray, cached: BoolArray) -> None:
        """Count all blocks: which ones are not free, and which can be evicted, bool[num_blocks] each."""
        self._held[:], self._cached[:] = self.counted(slice(None), used, cached)
        self._missing = int(np.maximum(self._guaranteed - self._held, 0).sum())

    def counted(self, part: slice, used: BoolArray, cached: BoolArray) -> Int64Array:
        """Return how many of a part of the blocks the tenants hold, and have cached, int64[2, tenants]. `used` and
        `cached` are bool[n], see `count`."""
        owners, size = self.of[part], len(self._held)
        return np.array([np.bincount(owners[one], minlength=size) for one in (used & ~cached, cached)])

    def agree(self, counted: int | Int64Array) -> bool:
        """Return whether these are the counts of all blocks."""
        missing = np.maximum(self._guaranteed - self._held, 0).sum()
        return np.array_equal([self._held, self._cached], counted) and self._missing == missing

    def enter(self, quota: TenantQuota | None) -> int:
        """Begin an operation of a tenant. Returns how many blocks are kept from it, because others have them
        guaranteed."""
        self.current = number = self._number(quota)
        if not self._missing:
            return 0
        guaranteed, held, _ = self._items
        return self._missing - max(0, guaranteed[number] - held[number])

    def _number(self, quota: TenantQuota | None) -> int:
        return NOBODY if quota is None else self.numbers.get(quota.tenant, NOBODY)

    def guaranteed_to_others(self, quota: TenantQuota | None) -> int:
        """Return how many blocks the tenant with this quota may never have."""
        return self._total_guaranteed - int(self._guaranteed[self._number(quota)])

    def domains_of(self, blocks: Int64Array) -> str | list[str]:
        """Return the domains of these blocks, at least one, or the one of all of them. Nobody's is ""."""
        numbers = self.of[blocks]
        if self._patterns[first := int(numbers[0])].startswith(numbers.tobytes()):
            return self._domains[first]
        return [self._domains[number] for number in numbers.tolist()]

    @property
    def num_owners(self) -> int:
        """One more than the greatest number of an owner."""
        return len(self._domains)

    def num_held(self, tenant: str) -> int:
        """Return how many blocks of a tenant are neither free nor can be evicted."""
        return self._items[1][self.numbers.get(tenant, NOBODY)]

    def take(self, blocks: Int64Array) -> None:
        """Record that the tenant of the operation got blocks that were free or evicted."""
        self.of[blocks] = self.current
        self._add(self.current, len(blocks), 0)

    def take_over(self, blocks: Int64Array) -> None:
        """Record that the tenant of the operation got blocks that could be evicted, and left the queue."""
        self.free(blocks)
        self.take(blocks)

    def free(self, blocks: Int64Array) -> None:
        """Record that blocks that nobody could evict are free."""
        self._move(blocks, -1, 0)

    def queue(self, blocks: Int64Array) -> None:
        """Record that blocks can be evicted from now on."""
        self._move(blocks, -1, 1)

    def unqueue(self, blocks: Int64Array) -> None:
        """Record that blocks cannot be evicted any more."""
        self._move(blocks, 1, -1)

    def lose(self, number: int, count: int) -> None:
        """Record that cached blocks of this owner are evicted."""
        self._add(number, 0, -count)

    def _move(self, blocks: Int64Array, held: int, cached: int) -> None:
        numbers = self.of[blocks]
        if self._patterns[self.current].startswith(numbers.tobytes()):  # as nearly always
            self._add(self.current, held * len(numbers), cached * len(numbers))
            return
        for number, count in enumerate(np.bincount(numbers).tolist()):
            self._add(number, held * count, cached * count)

    def _add(self, number: int, more_held: int, more_cached: int) -> None:
        guaranteed, held, cached = self._items
        before = held[number]
        held[number] = after = before + more_held
        cached[number] += more_cached
        if limit := guaranteed[number]:
            self._missing += max(0, limit - after) - max(0, limit - before)

    def losing(self, count: int) -> list[tuple[int, int]]:
        """Return who loses how many of the next `count` cached blocks: who has most above what is guaranteed, until
        others have as much. Of those who have equally much, the last one loses a block first.

        Above a level, owner i loses min(cached[i], excess[i] - level). The level is where the sum of that is `count`.
        """
        excess = self._held + self._cached - self._guaranteed
        left = np.where(self._cached > 0, excess, -(1 << 62))
        furthest = int(left.argmax())
        left[furthest] = -(1 << 62)
        if count <= self._cached[furthest] and excess[furthest] - count >= left.max():
            return [(furthest, count)]
        edges = np.concatenate([excess, excess - self._cached])
        order = np.argsort(-edges, kind="stable")
        edges = edges[order]
        slopes = np.cumsum(np.where(order < len(excess), 1, -1))
        lost_above = np.concatenate([[0], np.cumsum(slopes[:-1] * (edges[:-1] - edges[1:]))])
        last = int(np.searchsorted(lost_above, count))
        level = int(edges[last]) + (int(lost_above[last]) - count) // max(int(slopes[last - 1]), 1)
        lost = np.clip(excess - level, 0, self._cached)
        # They are as many as `count`, or a few more, as the last ones lose together what does not divide by them.
        surplus = int(lost.sum()) - count
        lost[np.flatnonzero((excess - lost == level) & (lost > 0))[:surplus]] -= 1
        return [(number, int(lost[number])) for number in np.flatnonzero(lost).tolist()]

    def order_of_losing(self, losing: list[tuple[int, int]]) -> Int64Array:
        """Return the order int64[n] in which these owners lose these blocks, see `losing`: indices into all of them, of
        each owner the oldest first, and one owner after another."""
        numbers, counts = np.array(losing).T
        # So many blocks has the owner of each block above its guaranteed ones when it loses this block.
        levels = np.repeat((self._held + self._cached - self._guaranteed)[numbers], counts) - places_within(counts)
        keys = -(levels * self.num_owners + np.repeat(numbers, counts))
        return np.argsort(keys, kind="stable")  # it merges the owners' blocks, which are in order


def places_within(counts: Int64Array) -> Int64Array:
    """Return 0, ..., counts[i] - 1 for each i, one after the other: int64[sum(counts)]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def quota_exceeded(
    tenant: str, limit: str, value: int, used: int, required: int, field: str = ""
) -> QuotaExceededError:
    """Return the error for a tenant that uses so much of a quota, and needs more than is left."""
    return QuotaExceededError(
        f"tenant {tenant} has {used} of {limit} {value}, and {required} more are needed",
        field=field, tenant=tenant, limit=limit, value=value, used=used, required=required,
    )  # fmt: skip
