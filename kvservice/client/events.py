"""Block events as plain values, named as vLLM names its own; see events.proto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvservice.v1 import events_pb2


@dataclass(frozen=True)
class BlockStored:
    """A chain of blocks that can be found from now on. `token_ids` is empty unless the daemon tells them."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that can be found no more."""

    block_hashes: tuple[bytes, ...]
    medium: str


@dataclass(frozen=True)
class AllBlocksCleared:
    """None can be found any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class Gap:
    """`count` batches from `first_number` on are forgotten; 0 and 0 where they were another start's of the daemon."""

    first_number: int
    count: int


@dataclass(frozen=True)
class KVEventBatch:
    """What one operation changed. `gap`: what is missing before it, if anything is."""

    number: int
    ts: float
    events: tuple[KVEvent, ...]
    daemon_id: int
    gap: Gap | None


def to_batch(message: events_pb2.KVEventBatch) -> KVEventBatch:
    """Events of a later version are left out."""
    events = tuple(event for event in map(_to_event, message.events) if event is not None)
    gap = Gap(message.gap.first_number, message.gap.count) if message.HasField("gap") else None
    return KVEventBatch(message.number, message.ts, events, message.daemon_id, gap)


def _to_event(message: events_pb2.KVEvent) -> KVEvent | None:
    kind = message.WhichOneof("event")
    if kind == "block_stored":
        stored = message.block_stored
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        hashes, tokens = tuple(stored.block_hashes), tuple(stored.token_ids)
        return BlockStored(hashes, parent, tokens, stored.block_size, stored.medium)
    if kind == "block_removed":
        return BlockRemoved(tuple(message.block_removed.block_hashes), message.block_removed.medium)
    return AllBlocksCleared() if kind == "all_blocks_cleared" else None
