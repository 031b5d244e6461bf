"""Reads of blocks: from the mapped memory, through a region, by a Transfer Engine, or in messages.

The daemon never writes into memory that the caller sees. A call that was given up may be executed later, when the
caller uses the memory for something else.
"""

from __future__ import annotations

import numpy as np

from kvservice.client.store import copies
from kvservice.client.store.link import StoreLink
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.patience import Patience
from kvservice.client.store.pieces import Numbers, Pieces
from kvservice.client.store.splits import blocks_in_message, blocks_in_request, parts
from kvservice.client.store.transferring import BlockTransfer, is_worth_it
from kvservice.client.store.values import Flags, chosen_keys, flags_of, num_keys, some_keys
from kvservice.errors import InternalError
from kvservice.v1 import store_pb2


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
                places = copies.packed(part.stop - part.start, block_bytes)
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
        for part in parts(num_keys(self._keys), blocks_in_message(self._link)):
            if done[part].all():
                continue
            response = await self._batch_get(part, None)
            found = flags_of(response.found, part.stop - part.start)
            data = np.frombuffer(response.data, np.uint8)
            places = copies.packed(int(found.sum()), self._link.block_bytes)
            if data.size != len(places) * self._link.block_bytes:
                raise InternalError(f"the daemon has sent {data.size} bytes for {len(places)} blocks")
            await self._unpack(int(data.ctypes.data), places, part, found)

    async def _unpack(self, address: int, places: Numbers, part: slice, found: Flags) -> None:
        """Copy received blocks to their pieces."""
        link = self._link
        target = self._target.part(part).part(found)
        await link.connection.run(
            copies.copy_out, address, places.tobytes(), link.block_bytes, target, link.copy_threads
        )
        self._found[part] = found

    async def _batch_get(
        self, part: slice, region: store_pb2.Scatter | None, *, return_checksums: bool = False
    ) -> store_pb2.BatchGetResponse:
        request = store_pb2.BatchGetRequest(
            namespace_id=self._link.namespace_id,
            keys=some_keys(self._keys, part),
            region=region,
            verify=self._verify,
            return_checksums=return_checksums,
            max_wait_s=self._patience.left_s(self._link),
        )
        response: store_pb2.BatchGetResponse = await self._link.call("store_batch_get", request, self._timeout_s)
        return response
