"""KV-cache events as plain values, with the names of vLLM's events; see events.proto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvservice.client.store.values import StoreNamespace
from kvservice.v1 import events_pb2


@dataclass(frozen=True)
class BlockStored:
    """A chain of blocks was added to the prefix cache. `token_ids` is empty unless the daemon publishes token ids."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks were removed from the prefix cache."""

    block_hashes: tuple[bytes, ...]
    medium: str


@dataclass(frozen=True)
class AllBlocksCleared:
    """The prefix cache was cleared."""


@dataclass(frozen=True)
class StoreBlocksStored:
    """Blocks were added to a namespace of the block store. `keys` are the clients' own, 32 bytes each."""

    namespace: StoreNamespace
    tenant: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class StoreBlocksRemoved:
    """Blocks were removed from a namespace of the block store, or evicted."""

    namespace: StoreNamespace
    tenant: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class StoreCleared:
    """All blocks of a namespace of the block store were removed, or evicted."""

    namespace: StoreNamespace
    tenant: str


KVEvent: TypeAlias = (
    BlockStored | BlockRemoved | AllBlocksCleared | StoreBlocksStored | StoreBlocksRemoved | StoreCleared
)


@dataclass(frozen=True)
class Gap:
    """`count` batches from `first_number` on are lost. Both are 0 if the daemon has restarted in between."""

    first_number: int
    count: int


@dataclass(frozen=True)
class KVEventBatch:
    """The events of one operation. `ts` is in seconds since 1970. `gap` describes the batches that are missing before
    this one; None: no batch is missing."""

    number: int
    ts: float
    events: tuple[KVEvent, ...]
    daemon_id: int
    gap: Gap | None


def to_batch(message: events_pb2.KVEventBatch) -> KVEventBatch:
    """Convert a message. Events of unknown kinds, from a later version of the daemon, are left out."""
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
    return AllBlocksCleared() if kind == "all_blocks_cleared" else _to_store_event(kind, message)


def _to_store_event(kind: str | None, message: events_pb2.KVEvent) -> KVEvent | None:
    if kind == "store_blocks_stored":
        stored = message.store_blocks_stored
        return StoreBlocksStored(StoreNamespace.of(stored.namespace), stored.tenant, tuple(stored.keys))
    if kind == "store_blocks_removed":
        removed = message.store_blocks_removed
        return StoreBlocksRemoved(StoreNamespace.of(removed.namespace), removed.tenant, tuple(removed.keys))
    if kind == "store_cleared":
        return StoreCleared(StoreNamespace.of(message.store_cleared.namespace), message.store_cleared.tenant)
    return None
