"""Streams of block events. A subscriber receives the batches in the journal, then new ones as they are added."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import asdict

import numpy as np

from kvservice.blocks import EventJournal
from kvservice.blocks.events import Cleared, EventBatch, RemovedBlocks, StoreChange, StoredBlock
from kvservice.config import ServeConfig
from kvservice.errors import EventsOffError, InvalidArgumentError, QuotaExceededError
from kvservice.store.index import KEY_BYTES
from kvservice.v1 import events_pb2, store_pb2

# A subscriber waits this long after a change, so that a burst of operations wakes it once.
GATHER_S = 0.005
# The number of batches read from the journal at a time.
MAX_BURST = 64


class EventStreams:
    """All event streams. Operations on the event loop write the journal, and each stream reads it at its own pace. A
    stream reports a gap if the journal no longer has the next batch."""

    def __init__(self, config: ServeConfig, journal: EventJournal | None) -> None:
        self._journal = journal
        self._limit = config.max_event_streams
        self._block_size = config.block_size
        self._medium = "CPU" if config.cuda_device is None else "GPU"
        # Never 0, because 0 in a request means any daemon.
        self._daemon_id = secrets.randbits(64) or 1
        self._changed = asyncio.Event()
        self._encoded: dict[int, bytes] = {}
        self.count = 0
        if journal is not None:
            journal.on_change = self._changed.set

    async def subscribe(
        self, request: events_pb2.SubscribeRequest, domain: Callable[[], str | None] = lambda: None
    ) -> AsyncGenerator[bytes]:
        """Yield serialized KVEventBatch messages. `domain` returns that of the tenants whose events the subscriber may
        see now, or None for all; what it raises ends the stream. Raises EventsOffError, QuotaExceededError,
        InvalidArgumentError."""
        journal = self._journal
        if journal is None:
            raise EventsOffError("the daemon runs with event_window 0")
        if request.start_number < 0:
            raise InvalidArgumentError("is negative", field="start_number")
        if self.count >= self._limit:
            raise QuotaExceededError(
                f"{self._limit} streams of events are open", limit="max_event_streams", value=self._limit
            )
        self.count += 1
        try:
            async with contextlib.aclosing(self._from(journal, request, domain)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self.count -= 1

    async def _from(
        self, journal: EventJournal, request: events_pb2.SubscribeRequest, domain: Callable[[], str | None]
    ) -> AsyncGenerator[bytes]:
        number = request.start_number or journal.newest + 1
        gap: events_pb2.Gap | None = None
        if request.daemon_id not in (0, self._daemon_id) or number > journal.newest + 1:
            number, gap = journal.oldest, events_pb2.Gap()
        while True:
            burst = journal.since(number, MAX_BURST)
            if burst and burst[0].number > number:
                gap = events_pb2.Gap(first_number=number, count=burst[0].number - number)
            told = False
            for batch in burst:
                number = batch.number + 1
                own = batch if (name := domain()) is None else _part(batch, name)
                if own is not None:
                    told = True
                    shared = own is batch and gap is None
                    yield self._message(batch) if shared else self._with_gap(own, gap)
                    gap = None
            if not burst:
                await self._change()
            elif not told:
                await asyncio.sleep(0)  # others' events may be many

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        await asyncio.sleep(GATHER_S)

    def _message(self, batch: EventBatch) -> bytes:
        """Return the serialized batch. A small cache shares it among streams that read at about the same time."""
        data = self._encoded.get(batch.number)
        if data is None:
            data = self._encoded[batch.number] = self._encode(batch).SerializeToString()
            if len(self._encoded) > 2 * MAX_BURST:
                del self._encoded[next(iter(self._encoded))]
        return data

    def _with_gap(self, batch: EventBatch, gap: events_pb2.Gap | None) -> bytes:
        message = self._encode(batch)
        if gap is not None:
            message.gap.CopyFrom(gap)
        return message.SerializeToString()

    def _encode(self, batch: EventBatch) -> events_pb2.KVEventBatch:
        return events_pb2.KVEventBatch(
            number=batch.number, ts=batch.time_s, daemon_id=self._daemon_id, events=self._events(batch)
        )

    def _events(self, batch: EventBatch) -> Iterator[events_pb2.KVEvent]:
        if isinstance(batch.change, Cleared):
            yield events_pb2.KVEvent(all_blocks_cleared=events_pb2.AllBlocksCleared())
        elif isinstance(batch.change, RemovedBlocks):
            removed = events_pb2.BlockRemoved(block_hashes=batch.change.block_hashes, medium=self._medium)
            yield events_pb2.KVEvent(block_removed=removed)
        elif isinstance(batch.change, StoreChange):
            yield _store_event(batch.change)
        else:
            for chain in chains(batch.change):
                yield events_pb2.KVEvent(block_stored=self._stored(chain))

    def _stored(self, chain: list[StoredBlock]) -> events_pb2.BlockStored:
        hashes, parents, tokens = zip(*chain, strict=True)
        return events_pb2.BlockStored(
            block_hashes=hashes,
            parent_block_hash=parents[0],
            token_ids=np.frombuffer(b"".join(tokens), "<i4").tolist(),
            block_size=self._block_size,
            medium=self._medium,
        )


def _part(batch: EventBatch, domain: str) -> EventBatch | None:
    """Return the part of a batch that the tenants of a domain may see, or None."""
    change, domains = batch.change, batch.domains
    if isinstance(change, Cleared):
        return batch
    if isinstance(change, StoreChange):
        return batch if change.namespace.tenant == domain else None
    if isinstance(domains, str):
        return batch if domains == domain else None
    own = [one == domain for one in domains]
    if not any(own):
        return None
    if isinstance(change, RemovedBlocks):
        return batch._replace(change=RemovedBlocks(list(itertools.compress(change.block_hashes, own))))
    return batch._replace(change=list(itertools.compress(change, own)))


def _store_event(change: StoreChange) -> events_pb2.KVEvent:
    identity = asdict(change.namespace)
    tenant = identity.pop("tenant")
    namespace = store_pb2.StoreNamespace(**identity)
    keys = [change.keys[i : i + KEY_BYTES] for i in range(0, len(change.keys), KEY_BYTES)]
    if change.kind == "stored":
        return events_pb2.KVEvent(
            store_blocks_stored=events_pb2.StoreBlocksStored(namespace=namespace, tenant=tenant, keys=keys)
        )
    if change.kind == "removed":
        return events_pb2.KVEvent(
            store_blocks_removed=events_pb2.StoreBlocksRemoved(namespace=namespace, tenant=tenant, keys=keys)
        )
    return events_pb2.KVEvent(store_cleared=events_pb2.StoreCleared(namespace=namespace, tenant=tenant))


def chains(blocks: Iterable[StoredBlock]) -> Iterator[list[StoredBlock]]:
    """Group consecutive blocks into chains in which each block is the parent of the next."""
    chain: list[StoredBlock] = []
    for block in blocks:
        _, parent, _ = block
        if chain and parent != chain[-1][0]:
            yield chain
            chain = []
        chain.append(block)
    if chain:
        yield chain
