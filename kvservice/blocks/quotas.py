"""Quotas: what the namespaces of one tenant may have together, of the pool's blocks and of sequences.

An operation of a namespace with a quota sees less of the pool: what its tenant may not take is withheld from it. So
`can_...` and the operation, and a scheduler, agree as they do for the pool itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Protocol

import numpy as np

from kvservice.blocks.plans import Int64Array
from kvservice.errors import QuotaExceededError


class QuotaNamespace(Protocol):
    """A quota counts the sequences of a SessionNamespace, and uses nothing else of it."""

    @property
    def rows(self) -> Mapping[int, int]: ...


class QuotaPool(Protocol):
    """A quota reads these counts of the pool, and sets `withheld`."""

    withheld: int

    @property
    def num_free(self) -> int: ...

    @property
    def num_shared(self) -> int: ...

    @property
    def evictable(self) -> Sized: ...


class QuotaSlots(Protocol):
    """A quota reads these parts of SequenceSlots, and sets `withheld`."""

    withheld: int

    @property
    def free_rows(self) -> Sequence[int]: ...

    @property
    def num_blocks(self) -> Int64Array: ...

    @property
    def swapped(self) -> Int64Array: ...

    def table_entries(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]: ...


class TenantQuota:
    """The quota of one tenant. None: no limit but the pool's. A block counts once, however many of the tenant's
    sequences have it."""

    def __init__(self, tenant: str, max_blocks: int | None, max_sequences: int | None) -> None:
        self.tenant, self.max_blocks, self.max_sequences = tenant, max_blocks, max_sequences
        self.namespaces: set[QuotaNamespace] = set()

    @property
    def num_sequences(self) -> int:
        return sum(len(namespace.rows) for namespace in self.namespaces)

    def num_blocks(self, sequences: QuotaSlots) -> int:
        """Return how many blocks of the pool the tenant's sequences hold."""
        _, blocks = sequences.table_entries(self._resident(sequences))
        return len(np.unique(blocks))

    def _resident(self, sequences: QuotaSlots) -> Int64Array:
        """Return the rows of the tenant's sequences that are not swapped out."""
        rows = np.array([row for namespace in self.namespaces for row in namespace.rows.values()], np.int64)
        resident: Int64Array = rows[sequences.swapped[rows] == 0]
        return resident

    def withhold(self, device: QuotaPool, sequences: QuotaSlots) -> None:
        """Withhold from the next operation what is available, and is more than the tenant may take."""
        if self.max_blocks is not None:
            available = device.num_free + len(device.evictable)
            # The sum counts shared blocks more than once. They are counted exactly where that matters.
            held = int(sequences.num_blocks[self._resident(sequences)].sum())
            if device.num_shared and self.max_blocks - held < available:
                held = self.num_blocks(sequences)
            device.withheld = max(0, available - max(0, self.max_blocks - held))
        if self.max_sequences is not None:
            left = max(0, self.max_sequences - self.num_sequences)
            sequences.withheld = max(0, len(sequences.free_rows) - left)

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


def quota_exceeded(
    tenant: str, limit: str, value: int, used: int, required: int, field: str = ""
) -> QuotaExceededError:
    """Return the error for a tenant that uses so much of a quota, and needs more than is left."""
    return QuotaExceededError(
        f"tenant {tenant} has {used} of {limit} {value}, and {required} more are needed",
        field=field, tenant=tenant, limit=limit, value=value, used=used, required=required,
    )  # fmt: skip
