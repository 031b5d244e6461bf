"""Writes of blocks: into the mapped memory, from a region, by a Transfer Engine, or in messages."""

from __future__ import annotations

import numpy as np

from kvservice.client.region_memory import HostRegion
from kvservice.client.store import copies
from kvservice.client.store.link import StoreLink
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.pieces import Numbers, Pieces
from kvservice.client.store.splits import blocks_in_message, blocks_in_request, parts
from kvservice.client.store.transferring import BlockTransfer, is_worth_it
from kvservice.client.store.values import Flags, PutStatus, Statuses, num_keys, some_keys, statuses_of
from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError
from kvservice.v1 import store_pb2
from kvservice.wire.encoded import Encoded


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
                await self._batch_put(part, region=scatter)
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
                places = copies.packed(part.stop - part.start, block_bytes)
                await self._pack(region.address, places, part)
                try:
                    scatter = store_pb2.Scatter(region=region.name, offsets=places.tobytes())
                    await self._batch_put(part, region=scatter)
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
        for part in parts(num_keys(self._keys), blocks_in_message(self._link)):
            if done[part].all():
                continue
            source = self._source.part(part)
            if (data := source.view()) is None:
                places = copies.packed(len(source.addresses), self._link.block_bytes)
                packed = np.empty(len(places) * self._link.block_bytes, np.uint8)
                await self._pack(int(packed.ctypes.data), places, part)
                data = packed.data
            await self._batch_put(part, data=data)

    async def _pack(self, address: int, places: Numbers, part: slice) -> None:
        """Copy blocks from their pieces one after the other to `address`."""
        link = self._link
        await link.connection.run(
            copies.copy_in, address, places.tobytes(), link.block_bytes, self._source.part(part), link.copy_threads
        )

    async def _batch_put(
        self, part: slice, region: store_pb2.Scatter | None = None, data: memoryview | None = None
    ) -> None:
        """Store the blocks at their places in the region, or those in `data`."""
        response = await self._send(part, region, b"", data)
        statuses = statuses_of(response.statuses, part.stop - part.start)
        # A block that was stored before, in this call, is there now.
        stored = (self._statuses[part] == PutStatus.DONE) & (statuses == PutStatus.PRESENT)
        self._statuses[part] = np.where(stored, self._statuses[part], statuses)

    async def _send(
        self, part: slice, region: store_pb2.Scatter | None, checksums: bytes, data: memoryview | None = None
    ) -> store_pb2.BatchPutResponse:
        request = store_pb2.BatchPutRequest(
            namespace_id=self._link.namespace_id,
            keys=some_keys(self._keys, part),
            region=region,
            checksums=checksums,
        )
        encoded = Encoded((request.SerializeToString(),))
        if data is not None:
            encoded += Encoded((data,)).inside(store_pb2.BatchPutRequest.DATA_FIELD_NUMBER)
        response: store_pb2.BatchPutResponse = await self._link.call("store_batch_put", encoded, self._timeout_s)
        return response
