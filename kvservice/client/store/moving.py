"""Reads and writes of blocks: in the mapped memory, through a region, by a Transfer Engine, or in messages.

The daemon never writes into memory that the caller sees. A call that was given up may be executed later, when the
caller uses the memory for something else.

By Transfer Engines, through remote regions:

    put   compute checksums ─▶ BatchPut: the daemon transfers the blocks, compares and stores them
    get   BatchGet: the daemon transfers the blocks ─▶ compare checksums

Blocks that do not lie in a region of the caller are copied through the staging region. Blocks that did not arrive, or
with another checksum, are left to messages.

In messages, of 2 MiB, of which several are on their way:

    client    make 1, 2, 3 ─────────▶ take answer 1, make 4 ─▶ take answer 2, make 5
    daemon    read 1 ─▶ store 1, read 2 ─▶ store 2, read 3 ─▶ store 3, read 4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from kvservice import _ext
from kvservice.client.connection import BegunCall
from kvservice.client.regions import HostRegion
from kvservice.client.remote import REFUSED, RemoteRegion
from kvservice.client.store.link import (
    IN_FLIGHT_BYTES,
    MESSAGES_IN_FLIGHT,
    Patience,
    StoreLink,
    blocks_in_message,
    blocks_in_request,
    parts,
)
from kvservice.client.store.memory import MappedStore, copy_in, copy_out, packed
from kvservice.client.store.values import (
    DAMAGED,
    Flags,
    Numbers,
    Pieces,
    PutStatus,
    Statuses,
    chosen_keys,
    flags_of,
    num_keys,
    some_keys,
    statuses_of,
)
from kvservice.errors import CallTimeoutError, ConnectionLostError, InternalError, KVServiceError, TransferFailedError
from kvservice.v1 import store_pb2
from kvservice.wire.tensors import Encoded

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
            right = copy_out(route.region.address, places, link.block_bytes, target, threads, checksums)
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
        return copy_in(route.region.address, places, link.block_bytes, source, link.copy_threads)

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
            PlacedBlocks(part, packed(part.stop - part.start, block_bytes) + np.uint64(halves[number % 2]))
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


# ---- messages


async def exchange_messages(
    link: StoreLink,
    name: str,
    done: Flags,
    request: Callable[[slice], Awaitable[Any]],
    take: Callable[[slice, Any], Awaitable[None]],
    timeout_s: float | None,
) -> None:
    """Make a call for each part of the blocks that is not `done`, bool `[num_keys]`, and `take` its response. While the
    daemon works on one, the next is made and sent, or the response before is taken. If one fails, those that were sent
    may be executed. `timeout_s` is the time limit of each, from the response before on."""
    connection, num_blocks = link.connection, blocks_in_message(link)
    most_begun = max(1, min(MESSAGES_IN_FLIGHT, IN_FLIGHT_BYTES // (num_blocks * link.block_bytes)))
    begun: deque[tuple[slice, BegunCall]] = deque()

    async def finish_first() -> None:
        part, call = begun.popleft()
        try:
            response = await call.answer(connection.deadline(timeout_s))
        finally:
            call.drop()
        await take(part, response)

    try:
        for part in parts(len(done), num_blocks):
            if not done[part].all():
                begun.append((part, await connection.begin(name, await request(part), timeout_s)))
                if len(begun) == most_begun:
                    await finish_first()
        while begun:
            await finish_first()
    finally:
        for _, call in begun:
            call.drop()


# ---- reads


class BlockReader:
    """One `get`: copies blocks to `target`, and sets the flags in `found` of those that it has copied."""

    def __init__(
        self,
        link: StoreLink,
        keys: bytes,
        target: Pieces,
        found: Flags,
        verify: bool,
        patience: Patience,
        timeout_s: float | None,
    ) -> None:
        self._link, self._keys, self._target, self._found = link, keys, target, found
        self._verify, self._patience, self._timeout_s = verify, patience, timeout_s

    async def read(self) -> None:
        """Take the fastest way. Raises the errors of calls; flags set by then are right."""
        if self._link.memory is not None:
            await self._by_mapping(self._link.memory)
        elif not (self._link.staging.allowed and await self._by_staging()):
            await self._by_messages(await self._by_transfer())

    async def _by_mapping(self, memory: MappedStore) -> None:
        link = self._link
        for part in parts(num_keys(self._keys), blocks_in_request(link)):
            keys = some_keys(self._keys, part)
            request = store_pb2.AcquireRequest(
                request_id=link.next_request_id(),
                namespace_id=link.namespace_id,
                keys=keys,
                max_wait_s=self._patience.left_s(self._link),
            )
            response = await link.hold("store_acquire", request, self._timeout_s)
            if not response.lease_id:
                continue
            found = flags_of(response.found, part.stop - part.start)
            try:
                target = self._target.part(part).part(found)
                found[found] = await self._copy(memory, response, chosen_keys(keys, found), target)
                self._found[part] = found
            finally:
                link.release([response.lease_id])

    async def _copy(self, memory: MappedStore, leased: store_pb2.AcquireResponse, keys: bytes, target: Pieces) -> Flags:
        """Copy leased blocks. Returns which of them are right."""
        checksums = memory.checksums(leased.offsets) if self._verify else b""
        right = await self._link.connection.run(memory.copy_out, leased.offsets, target, checksums)
        unchanged = memory.unchanged(leased.offsets, leased.versions)
        if (damaged := unchanged & ~right).any():
            request = store_pb2.RemoveRequest(
                request_id=self._link.next_request_id(),
                namespace_id=self._link.namespace_id,
                keys=chosen_keys(keys, damaged),
            )
            await self._link.call("store_remove", request, self._timeout_s)
        return unchanged & right

    async def _by_staging(self) -> bool:
        """Returns whether there is memory for it."""
        link, block_bytes = self._link, self._link.block_bytes
        async with link.staging.lock:
            count = num_keys(self._keys)
            region = await link.staging.room(count * block_bytes, block_bytes, self._timeout_s)
            if region is None:
                return False
            for part in parts(count, min(blocks_in_request(link, 1), region.num_bytes // block_bytes)):
                places = packed(part.stop - part.start, block_bytes)
                try:
                    scatter = store_pb2.Scatter(region=region.name, offsets=places.tobytes())
                    response = await self._batch_get(part, scatter)
                except BaseException:
                    link.staging.drop()
                    raise
                found = flags_of(response.found, len(places))
                await self._unpack(region.address, places[found], part, found)
        return True

    async def _by_transfer(self) -> Flags:
        """Returns which blocks need no messages any more."""
        count = num_keys(self._keys)
        if not is_worth_it(self._link, count):
            return np.zeros(count, np.bool_)
        transfer = BlockTransfer(self._link, self._keys, self._target, self._timeout_s)
        await transfer.get(lambda part, region: self._batch_get(part, region, return_checksums=True), self._found)
        return transfer.done

    async def _by_messages(self, done: Flags) -> None:
        async def request(part: slice) -> store_pb2.BatchGetRequest:
            return self._request(part, None)

        async def take(part: slice, response: Any) -> None:
            found = flags_of(response.found, part.stop - part.start)
            data = np.frombuffer(response.data, np.uint8)
            places = packed(int(found.sum()), self._link.block_bytes)
            if data.size != len(places) * self._link.block_bytes:
                raise InternalError(f"the daemon has sent {data.size} bytes for {len(places)} blocks")
            await self._unpack(int(data.ctypes.data), places, part, found)

        await exchange_messages(self._link, "store_batch_get", done, request, take, self._timeout_s)

    async def _unpack(self, address: int, places: Numbers, part: slice, found: Flags) -> None:
        """Copy received blocks to their pieces."""
        link = self._link
        target = self._target.part(part).part(found)
        await link.connection.run(copy_out, address, places.tobytes(), link.block_bytes, target, link.copy_threads)
        self._found[part] = found

    async def _batch_get(
        self, part: slice, region: store_pb2.Scatter, *, return_checksums: bool = False
    ) -> store_pb2.BatchGetResponse:
        request = self._request(part, region, return_checksums=return_checksums)
        response: store_pb2.BatchGetResponse = await self._link.call("store_batch_get", request, self._timeout_s)
        return response

    def _request(
        self, part: slice, region: store_pb2.Scatter | None, *, return_checksums: bool = False
    ) -> store_pb2.BatchGetRequest:
        return store_pb2.BatchGetRequest(
            namespace_id=self._link.namespace_id,
            keys=some_keys(self._keys, part),
            region=region,
            verify=self._verify,
            return_checksums=return_checksums,
            max_wait_s=self._patience.left_s(self._link),
        )


# ---- writes


class BlockWriter:
    """One `put`: stores the blocks at `source`, and sets their `statuses`."""

    def __init__(
        self, link: StoreLink, keys: bytes, source: Pieces, statuses: Statuses, timeout_s: float | None
    ) -> None:
        self._link, self._keys, self._source = link, keys, source
        self._statuses, self._timeout_s = statuses, timeout_s

    async def write(self) -> None:
        """Take the fastest way. Raises the errors of calls; statuses set by then are right."""
        memory = self._link.memory
        if (place := self._link.find(self._source)) is not None:
            await self._from_region(*place)
        elif memory is not None and memory.writable:
            await self._by_mapping(memory)
        elif not (self._link.staging.allowed and await self._by_staging()):
            await self._by_messages(await self._by_transfer())

    async def _by_mapping(self, memory: MappedStore) -> None:
        link = self._link
        for part in parts(num_keys(self._keys), blocks_in_request(link)):
            request = store_pb2.ReserveRequest(
                request_id=link.next_request_id(),
                namespace_id=link.namespace_id,
                keys=some_keys(self._keys, part),
            )
            response = await link.hold("store_reserve", request, self._timeout_s)
            statuses = statuses_of(response.statuses, part.stop - part.start)
            if response.reservation_id:
                source = self._source.part(part).part(statuses == PutStatus.DONE)
                await self._fill(memory, response, source)
            self._statuses[part] = statuses

    async def _fill(self, memory: MappedStore, reserved: store_pb2.ReserveResponse, source: Pieces) -> None:
        """Write reserved blocks and publish them."""
        link = self._link
        try:
            with link.writes:
                checksums = await link.connection.run(memory.copy_in, reserved.offsets, source)
            commit = store_pb2.StoreCommitRequest(
                request_id=link.next_request_id(), reservation_id=reserved.reservation_id, checksums=checksums
            )
            await link.call("store_commit", commit, self._timeout_s)
        except BaseException:
            link.abort(reserved.reservation_id)
            raise

    async def _from_region(self, region: HostRegion, offsets: Numbers) -> None:
        """The caller may change the values after a call without an answer, which may still be executed. It must not
        store other bytes then."""
        sizes = self._source.sizes.tolist()
        for part in parts(num_keys(self._keys), blocks_in_request(self._link, len(sizes))):
            scatter = store_pb2.Scatter(region=region.name, piece_bytes=sizes, offsets=offsets[part].tobytes())
            try:
                self._take(part, await self._send(part, scatter))
            except BaseException as error:
                if not isinstance(error, KVServiceError) or isinstance(error, (ConnectionLostError, CallTimeoutError)):
                    self._link.regions.give_up(region)
                raise

    async def _by_staging(self) -> bool:
        """Returns whether there is memory for it."""
        link, block_bytes = self._link, self._link.block_bytes
        async with link.staging.lock:
            count = num_keys(self._keys)
            region = await link.staging.room(count * block_bytes, block_bytes, self._timeout_s)
            if region is None:
                return False
            for part in parts(count, min(blocks_in_request(link), region.num_bytes // block_bytes)):
                places = packed(part.stop - part.start, block_bytes)
                await self._pack(region.address, places, part)
                try:
                    scatter = store_pb2.Scatter(region=region.name, offsets=places.tobytes())
                    self._take(part, await self._send(part, scatter))
                except BaseException:
                    link.staging.drop()
                    raise
        return True

    async def _by_transfer(self) -> Flags:
        """Returns which blocks need no messages any more."""
        count = num_keys(self._keys)
        if not is_worth_it(self._link, count):
            return np.zeros(count, np.bool_)
        transfer = BlockTransfer(self._link, self._keys, self._source, self._timeout_s)
        await transfer.put(self._send, self._statuses)
        return transfer.done

    async def _by_messages(self, done: Flags) -> None:
        async def request(part: slice) -> Encoded:
            source = self._source.part(part)
            if (data := source.view()) is None:
                places = packed(len(source.addresses), self._link.block_bytes)
                joined = np.empty(len(places) * self._link.block_bytes, np.uint8)
                await self._pack(int(joined.ctypes.data), places, part)
                data = joined.data
            blocks = Encoded((data,)).inside(store_pb2.BatchPutRequest.DATA_FIELD_NUMBER)
            return Encoded((self._request(part, None).SerializeToString(),)) + blocks

        async def take(part: slice, response: store_pb2.BatchPutResponse) -> None:
            self._take(part, response)

        await exchange_messages(self._link, "store_batch_put", done, request, take, self._timeout_s)

    async def _pack(self, address: int, places: Numbers, part: slice) -> None:
        """Copy blocks from their pieces one after the other to `address`."""
        link = self._link
        await link.connection.run(
            copy_in, address, places.tobytes(), link.block_bytes, self._source.part(part), link.copy_threads
        )

    def _take(self, part: slice, response: store_pb2.BatchPutResponse) -> None:
        statuses = statuses_of(response.statuses, part.stop - part.start)
        # A block that was stored before, in this call, is there now.
        stored = (self._statuses[part] == PutStatus.DONE) & (statuses == PutStatus.PRESENT)
        self._statuses[part] = np.where(stored, self._statuses[part], statuses)

    async def _send(self, part: slice, region: store_pb2.Scatter, checksums: bytes = b"") -> store_pb2.BatchPutResponse:
        """Store the blocks at their places in the region."""
        request = self._request(part, region, checksums)
        response: store_pb2.BatchPutResponse = await self._link.call("store_batch_put", request, self._timeout_s)
        return response

    def _request(
        self, part: slice, region: store_pb2.Scatter | None, checksums: bytes = b""
    ) -> store_pb2.BatchPutRequest:
        return store_pb2.BatchPutRequest(
            namespace_id=self._link.namespace_id,
            keys=some_keys(self._keys, part),
            region=region,
            checksums=checksums,
        )
