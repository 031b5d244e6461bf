"""Journal of changes of the prefix index and of the block store, in numbered batches.

It keeps the latest batches for replay.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

# A block that entered the index: (hash, hash of its parent, tokens). The first block of a prompt has no parent. The
# tokens are little-endian int32, or b"" if the journal omits them. It is a plain tuple because every block needs one.
StoredBlock: TypeAlias = tuple[bytes, bytes | None, bytes]


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Hashes that left the index."""

    block_hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The index became empty."""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """Keys of 32 bytes that a namespace of the block store gained or lost, or that it was cleared. `namespace` is its
    identity."""

    kind: Literal["stored", "removed", "cleared"]
    namespace: Any
    keys: bytes

    @property
    def num_keys(self) -> int:
        return len(self.keys) // 32


Change: TypeAlias = "list[StoredBlock] | RemovedBlocks | Cleared | StoreChange"


class EventBatch(NamedTuple):
    """The changes of one operation. `number` starts at 1; `time_s` is in seconds since 1970. `domains` are those
    of the tenants whose blocks were stored or removed, or the one of all of them; "" stands for nobody."""

    number: int
    time_s: float
    change: Change
    num_blocks: int
    domains: str | list[str] = ""


def _nobody_listens() -> None:
    pass


@dataclass
class EventJournal:
    """Keeps the latest batches, with at most `window` blocks in total, and always the last one.

    `on_change` is called after each batch. `with_tokens` says that stored blocks are recorded with their tokens.
    """

    window: int
    with_tokens: bool = False
    clock: Callable[[], float] = time.time
    on_change: Callable[[], object] = _nobody_listens
    num_stored: int = 0
    num_removed: int = 0
    num_cleared: int = 0
    newest: int = 0
    _batches: deque[EventBatch] = field(default_factory=deque)
    _num_blocks: int = 0

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that is kept, or of the next batch if none is kept."""
        return self._batches[0].number if self._batches else self.newest + 1

    def stored(self, blocks: list[StoredBlock], domains: str | list[str] = "") -> None:
        self.num_stored += len(blocks)
        self._add(blocks, len(blocks), domains)

    def removed(self, block_hashes: list[bytes], domains: str | list[str] = "") -> None:
        self.num_removed += len(block_hashes)
        self._add(RemovedBlocks(block_hashes), len(block_hashes), domains)

    def cleared(self) -> None:
        self.num_cleared += 1
        self._add(Cleared(), 1)

    def store_changed(self, change: StoreChange) -> None:
        self._add(change, max(1, change.num_keys))

    def since(self, number: int, limit: int) -> list[EventBatch]:
        """Return at most `limit` of the batches that are kept, from this number on."""
        first = max(0, number - self.oldest)
        return [self._batches[i] for i in range(first, min(first + limit, len(self._batches)))]

    def _add(self, change: Change, num_blocks: int, domains: str | list[str] = "") -> None:
        self.newest += 1
        self._batches.append(EventBatch(self.newest, self.clock(), change, num_blocks, domains))
        self._num_blocks += num_blocks
        while self._num_blocks > self.window and len(self._batches) > 1:
            self._num_blocks -= self._batches.popleft().num_blocks
        self.on_change()
