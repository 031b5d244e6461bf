"""Reads and writes of blocks through a remote region, by Transfer Engines, a slot at a time:

    put   copy to a slot, with checksums ─▶ transfer ─▶ BatchPut: the daemon copies, compares and stores
    get   BatchGet: the daemon compares and copies ─▶ transfer ─▶ copy from the slot, and compare

While one slot is transferred, this process and the daemon work on others. Blocks that did not arrive, or with another
checksum, are left to messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvservice.client.remote import LEAST_BYTES, NUM_SLOTS, REFUSED, RemoteRegion, RemoteStaging, region_bytes
from kvservice.client.store import copies
from kvservice.client.store.link import StoreLink
from kvservice.client.store.pieces import Pieces
from kvservice.client.store.splits import blocks_in_request, parts
from kvservice.client.store.values import DAMAGED, Flags, Statuses, flags_of, num_keys, statuses_of
from kvservice.errors import InternalError, TransferFailedError
from kvservice.transfer import READ, WRITE, Ticket
from kvservice.v1 import store_pb2

# Most spans of a transfer; blocks between them are transferred too if there are more.
MAX_SPANS = 64
Get: TypeAlias = Callable[[slice, store_pb2.Scatter], Awaitable[store_pb2.BatchGetResponse]]
Put: TypeAlias = Callable[[slice, store_pb2.Scatter, bytes], Awaitable[store_pb2.BatchPutResponse]]


@dataclass(frozen=True)
class Moving:
    """Blocks of `part` that are being transferred. `places` are their offsets in the region."""

    part: slice
    ticket: Ticket
    places: np.ndarray[tuple[int], np.dtype[np.uint64]]
    found: Flags
    checksums: bytes


class BlockTransfer:
    """One `get` or `put` through the region. Blocks that it did not finish are false in `done`, bool `[num_keys]`."""

    def __init__(self, link: StoreLink, keys: bytes, pieces: Pieces, timeout_s: float | None) -> None:
        self._link, self._keys, self._pieces, self._timeout_s = link, keys, pieces, timeout_s
        self.done: Flags = np.zeros(num_keys(keys), np.bool_)

    async def get(self, ask: Get, found: Flags) -> None:
        """Sets the flags in `found` of blocks that are copied."""

        async def begin(region: RemoteRegion, part: slice, offset: int) -> Moving:
            places = self._places(part, offset)
            response = await ask(part, store_pb2.Scatter(region=region.name, offsets=places.tobytes()))
            there = flags_of(response.found, len(places))
            if len(response.checksums) != 8 * int(there.sum()):
                raise InternalError(f"the daemon has sent {len(response.checksums)} bytes of checksums")
            ticket = region.start(READ, spans_of(places[there], self._link.block_bytes))
            return Moving(part, ticket, places[there], there, response.checksums)

        async def end(region: RemoteRegion, moved: Moving) -> bool:
            target = self._pieces.part(moved.part).part(moved.found)
            link = self._link
            right = await link.connection.run(
                copies.copy_out,
                region.address,
                moved.places.tobytes(),
                link.block_bytes,
                target,
                link.copy_threads,
                moved.checksums,
            )
            copied = moved.found.copy()
            copied[moved.found] = right
            found[moved.part] = copied
            self.done[moved.part] = copied | ~moved.found
            return bool(right.all())

        await self._run(begin, end)

    async def put(self, send: Put, statuses: Statuses) -> None:
        """Sets the statuses of blocks that the daemon has taken or refused."""

        async def begin(region: RemoteRegion, part: slice, offset: int) -> Moving:
            places, link = self._places(part, offset), self._link
            source = self._pieces.part(part)
            checksums = await link.connection.run(
                copies.copy_in, region.address, places.tobytes(), link.block_bytes, source, link.copy_threads
            )
            ticket = region.start(WRITE, spans_of(places, link.block_bytes))
            return Moving(part, ticket, places, np.ones(len(places), np.bool_), checksums)

        async def end(region: RemoteRegion, moved: Moving) -> bool:
            scatter = store_pb2.Scatter(region=region.name, offsets=moved.places.tobytes())
            response = await send(moved.part, scatter, moved.checksums)
            answered = statuses_of(response.statuses, len(moved.places))
            right: Flags = answered != DAMAGED
            statuses[moved.part] = np.where(right, answered, statuses[moved.part])
            self.done[moved.part] = right
            return bool(right.all())

        await self._run(begin, end)

    async def _run(
        self,
        begin: Callable[[RemoteRegion, slice, int], Awaitable[Moving]],
        end: Callable[[RemoteRegion, Moving], Awaitable[bool]],
    ) -> None:
        link, remote = self._link, self._link.remote
        async with remote.lock:
            region = remote.room(region_bytes(link.block_bytes))
            if region is None:
                return
            try:
                await self._move(region, remote, begin, end)
            except REFUSED as error:
                remote.fail(error)
            except BaseException:
                remote.drop()
                raise

    async def _move(
        self,
        region: RemoteRegion,
        remote: RemoteStaging,
        begin: Callable[[RemoteRegion, slice, int], Awaitable[Moving]],
        end: Callable[[RemoteRegion, Moving], Awaitable[bool]],
    ) -> None:
        """Move all blocks. Up to NUM_SLOTS - 1 slots are transferred at a time."""
        slot_bytes = region.num_bytes // NUM_SLOTS
        in_slot = min(slot_bytes // self._link.block_bytes, blocks_in_request(self._link))
        moving: deque[Moving] = deque()
        all_right = True
        for number, part in enumerate(parts(len(self.done), in_slot)):
            if len(moving) == NUM_SLOTS - 1:
                await region.wait(moving[0].ticket, self._timeout_s)
                all_right &= await end(region, moving.popleft())
            moving.append(await begin(region, part, number % NUM_SLOTS * slot_bytes))
        while moving:
            await region.wait(moving[0].ticket, self._timeout_s)
            all_right &= await end(region, moving.popleft())
        if not all_right:
            remote.fail(TransferFailedError("blocks arrived with wrong checksums"))

    def _places(self, part: slice, offset: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return copies.packed(part.stop - part.start, self._link.block_bytes) + np.uint64(offset)


def is_worth_it(link: StoreLink, count: int) -> bool:
    """Return whether this many blocks should be transferred."""
    return link.remote.allowed and count * link.block_bytes >= LEAST_BYTES


def spans_of(places: np.ndarray[tuple[int], np.dtype[np.uint64]], block_bytes: int) -> list[tuple[int, int]]:
    """Return the contiguous ranges (offset, size) that blocks at ascending places take."""
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) != block_bytes) + 1
    if len(breaks) >= MAX_SPANS:
        breaks = breaks[:0]
    first = places[np.concatenate(([0], breaks))].astype(np.int64)
    last = places[np.concatenate((breaks - 1, [len(places) - 1]))].astype(np.int64) + block_bytes
    return [(int(begin), int(end - begin)) for begin, end in zip(first, last, strict=True)]
