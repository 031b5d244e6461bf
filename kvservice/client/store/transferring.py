"""Reads and writes of blocks through remote regions, by Transfer Engines:

    put   compute checksums ─▶ BatchPut: the daemon transfers the blocks, compares and stores them
    get   BatchGet: the daemon transfers the blocks ─▶ compare checksums

Blocks that do not lie in a region of the caller are copied through the staging region. Blocks that did not arrive, or
with another checksum, are left to messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from kvservice import _ext
from kvservice.client.remote import REFUSED, RemoteRegion
from kvservice.client.store import copies
from kvservice.client.store.link import StoreLink
from kvservice.client.store.pieces import Numbers, Pieces
from kvservice.client.store.splits import blocks_in_request, parts
from kvservice.client.store.values import DAMAGED, Flags, Statuses, flags_of, num_keys, statuses_of
from kvservice.errors import InternalError, TransferFailedError
from kvservice.v1 import store_pb2

Get: TypeAlias = Callable[[slice, store_pb2.Scatter], Awaitable[store_pb2.BatchGetResponse]]
Put: TypeAlias = Callable[[slice, store_pb2.Scatter, bytes], Awaitable[store_pb2.BatchPutResponse]]
Move: TypeAlias = "Callable[[Route, Executor], Awaitable[bool]]"
# Most bytes of blocks in a request, unless one block is larger.
AHEAD_BYTES: Final = 128 << 20


@dataclass(frozen=True)
class PlacedBlocks:
    """Blocks of `part` at `places` of a region."""

    part: slice
    places: Numbers


@dataclass(frozen=True)
class Route:
    """The way of all blocks through one region, request by request. If they are `staged`, requests use the halves of
    the staging region by turns."""

    region: RemoteRegion
    requests: list[PlacedBlocks]
    staged: bool


class BlockTransfer:
    """One `get` or `put`. Blocks that it did not finish are false in `done`, bool `[num_keys]`.

    While the daemon executes a request, a thread here computes checksums for the next one, or compares those of the one
    before."""

    def __init__(self, link: StoreLink, keys: bytes, pieces: Pieces, timeout_s: float | None) -> None:
        self._link, self._pieces, self._timeout_s = link, pieces, timeout_s
        self.done: Flags = np.zeros(num_keys(keys), np.bool_)

    async def get(self, ask: Get, found: Flags) -> None:
        """Set the flags in `found` of blocks that are copied."""

        async def move(route: Route, beside: Executor) -> bool:
            all_right, last = True, None
            for placed in route.requests:
                scatter = store_pb2.Scatter(region=route.region.name, offsets=placed.places.tobytes())
                response = await ask(placed.part, scatter)
                if last is not None:
                    all_right &= await self._link.connection.run(last.result)
                last = beside.submit(self._take, route, placed, response, found)
            return all_right and (last is None or await self._link.connection.run(last.result))

        await self._run(move)

    def _take(self, route: Route, placed: PlacedBlocks, response: store_pb2.BatchGetResponse, found: Flags) -> bool:
        """Compare the checksums of blocks that have arrived. Returns whether all were right."""
        there, link = flags_of(response.found, len(placed.places)), self._link
        checksums, places = response.checksums, placed.places[there].tobytes()
        if len(checksums) != len(places):
            raise InternalError(f"the daemon has sent {len(checksums)} bytes of checksums")
        if route.staged:
            target = self._pieces.part(placed.part).part(there)
            threads = link.copy_threads
            right = copies.copy_out(route.region.address, places, link.block_bytes, target, threads, checksums)
        else:
            now = _ext.store_checksums(route.region.address, places, link.block_bytes, link.copy_threads)
            right = np.frombuffer(now, np.uint64) == np.frombuffer(checksums, np.uint64)
        copied = there.copy()
        copied[there] = right
        found[placed.part] = copied
        self.done[placed.part] = copied | ~there
        return bool(right.all())

    async def put(self, send: Put, statuses: Statuses) -> None:
        """Set the statuses of blocks that the daemon has taken or refused."""

        async def move(route: Route, beside: Executor) -> bool:
            all_right = True
            prepared = [beside.submit(self._give, route, placed) for placed in route.requests[:1]]
            for number, placed in enumerate(route.requests, 1):
                checksums = await self._link.connection.run(prepared.pop().result)
                prepared += [beside.submit(self._give, route, one) for one in route.requests[number : number + 1]]
                scatter = store_pb2.Scatter(region=route.region.name, offsets=placed.places.tobytes())
                response = await send(placed.part, scatter, checksums)
                answered = statuses_of(response.statuses, len(placed.places))
                right: Flags = answered != DAMAGED
                statuses[placed.part] = np.where(right, answered, statuses[placed.part])
                self.done[placed.part] = right
                all_right &= bool(right.all())
            return all_right

        await self._run(move)

    def _give(self, route: Route, placed: PlacedBlocks) -> bytes:
        """Return the checksums of blocks, which lie in the region then."""
        link, places = self._link, placed.places.tobytes()
        if not route.staged:
            return _ext.store_checksums(route.region.address, places, link.block_bytes, link.copy_threads)
        source = self._pieces.part(placed.part)
        return copies.copy_in(route.region.address, places, link.block_bytes, source, link.copy_threads)

    async def _run(self, move: Move) -> None:
        """Move all blocks, from and to where they lie, or through the staging region."""
        remote = self._link.remote
        for region in remote.regions if len(self._pieces.sizes) == 1 else []:
            if (places := self._pieces.offsets_in(region.address, region.num_bytes)) is not None:
                await self._move(move, self._direct(region, places[:, 0]))
                return
        async with remote.lock:
            if (staging := remote.staging()) is not None:
                await self._move(move, self._through(staging))

    def _direct(self, region: RemoteRegion, places: Numbers) -> Route:
        most = min(blocks_in_request(self._link), max(1, AHEAD_BYTES // self._link.block_bytes))
        return Route(region, [PlacedBlocks(part, places[part]) for part in parts(len(self.done), most)], False)

    def _through(self, staging: RemoteRegion) -> Route:
        block_bytes = self._link.block_bytes
        most = min(blocks_in_request(self._link), staging.num_bytes // 2 // block_bytes)
        halves = (0, staging.num_bytes // 2)
        requests = [
            PlacedBlocks(part, copies.packed(part.stop - part.start, block_bytes) + np.uint64(halves[number % 2]))
            for number, part in enumerate(parts(len(self.done), most))
        ]
        return Route(staging, requests, True)

    async def _move(self, move: Move, route: Route) -> None:
        """Give the region up after a failure, and after a call without an answer, which may still be executed."""
        remote, own = self._link.remote, None if route.staged else route.region
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="kvservice-checksums") as beside:
                all_right = await move(route, beside)
        except REFUSED as error:
            remote.fail(error, own)
        except BaseException:
            remote.drop(own)
            raise
        else:
            if not all_right:
                remote.fail(TransferFailedError("blocks arrived with wrong checksums"), own)


def is_worth_it(link: StoreLink, count: int) -> bool:
    """Return whether this many blocks should be transferred."""
    return link.remote.is_worth_it(count * link.block_bytes)
