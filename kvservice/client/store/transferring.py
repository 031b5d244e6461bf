"""Reads and writes of blocks through remote regions, by Transfer Engines:

    put   compute checksums ─▶ BatchPut: the daemon transfers the blocks, compares and stores them
    get   BatchGet: the daemon transfers the blocks ─▶ compare checksums

Blocks that do not lie in a region of the caller are copied through the staging region. Blocks that did not arrive, or
with another checksum, are left to messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import numpy as np

from kvservice import _ext
from kvservice.client.remote import LEAST_BYTES, REFUSED, RemoteRegion
from kvservice.client.store import copies
from kvservice.client.store.link import StoreLink
from kvservice.client.store.pieces import Numbers, Pieces
from kvservice.client.store.splits import blocks_in_request, parts
from kvservice.client.store.values import DAMAGED, Flags, Statuses, flags_of, num_keys, statuses_of
from kvservice.errors import InternalError, TransferFailedError
from kvservice.v1 import store_pb2

Get: TypeAlias = Callable[[slice, store_pb2.Scatter], Awaitable[store_pb2.BatchGetResponse]]
Put: TypeAlias = Callable[[slice, store_pb2.Scatter, bytes], Awaitable[store_pb2.BatchPutResponse]]
# Moves the blocks of a part, whose places in the region are given; the last argument is whether they are staged.
Move: TypeAlias = Callable[[RemoteRegion, slice, Numbers, bool], Awaitable[bool]]


class BlockTransfer:
    """One `get` or `put`. Blocks that it did not finish are false in `done`, bool `[num_keys]`."""

    def __init__(self, link: StoreLink, keys: bytes, pieces: Pieces, timeout_s: float | None) -> None:
        self._link, self._pieces, self._timeout_s = link, pieces, timeout_s
        self.done: Flags = np.zeros(num_keys(keys), np.bool_)

    async def get(self, ask: Get, found: Flags) -> None:
        """Set the flags in `found` of blocks that are copied."""

        async def move(region: RemoteRegion, part: slice, places: Numbers, staged: bool) -> bool:
            response = await ask(part, store_pb2.Scatter(region=region.name, offsets=places.tobytes()))
            there = flags_of(response.found, len(places))
            checksums = response.checksums
            if len(checksums) != 8 * int(there.sum()):
                raise InternalError(f"the daemon has sent {len(checksums)} bytes of checksums")
            if staged:
                target, link = self._pieces.part(part).part(there), self._link
                right = await link.connection.run(
                    copies.copy_out,
                    region.address,
                    places[there].tobytes(),
                    link.block_bytes,
                    target,
                    link.copy_threads,
                    checksums,
                )
            else:
                right = np.frombuffer(await self._checksums(region, places[there]), np.uint64) == np.frombuffer(
                    checksums, np.uint64
                )
            copied = there.copy()
            copied[there] = right
            found[part] = copied
            self.done[part] = copied | ~there
            return bool(right.all())

        await self._run(move)

    async def put(self, send: Put, statuses: Statuses) -> None:
        """Set the statuses of blocks that the daemon has taken or refused."""

        async def move(region: RemoteRegion, part: slice, places: Numbers, staged: bool) -> bool:
            link = self._link
            if staged:
                checksums = await link.connection.run(
                    copies.copy_in,
                    region.address,
                    places.tobytes(),
                    link.block_bytes,
                    self._pieces.part(part),
                    link.copy_threads,
                )
            else:
                checksums = await self._checksums(region, places)
            response = await send(part, store_pb2.Scatter(region=region.name, offsets=places.tobytes()), checksums)
            answered = statuses_of(response.statuses, len(places))
            right: Flags = answered != DAMAGED
            statuses[part] = np.where(right, answered, statuses[part])
            self.done[part] = right
            return bool(right.all())

        await self._run(move)

    async def _checksums(self, region: RemoteRegion, places: Numbers) -> bytes:
        link = self._link
        return await link.connection.run(
            _ext.store_checksums, region.address, places.tobytes(), link.block_bytes, link.copy_threads
        )

    async def _run(self, move: Move) -> None:
        """Move all blocks, from and to where they lie, or through the staging region."""
        remote = self._link.remote
        count, most = len(self.done), blocks_in_request(self._link)
        if len(self._pieces.sizes) == 1:
            for region in remote.regions:
                places = self._pieces.offsets_in(region.address, region.num_bytes)
                if places is not None:
                    flat = places[:, 0]
                    await self._move_parts(region, move, [(part, flat[part]) for part in parts(count, most)], False)
                    return
        async with remote.lock:
            staging = remote.staging()
            if staging is None:
                return
            block_bytes = self._link.block_bytes
            most = min(most, staging.num_bytes // block_bytes)
            packed = [(part, copies.packed(part.stop - part.start, block_bytes)) for part in parts(count, most)]
            await self._move_parts(staging, move, packed, True)

    async def _move_parts(
        self, region: RemoteRegion, move: Move, places: list[tuple[slice, Numbers]], staged: bool
    ) -> None:
        """Give the region up after a failure, and after a call without an answer, which may still be executed."""
        remote, own = self._link.remote, None if staged else region
        try:
            results = [await move(region, part, some, staged) for part, some in places]
        except REFUSED as error:
            remote.fail(error, own)
        except BaseException:
            remote.drop(own)
            raise
        else:
            if not all(results):
                remote.fail(TransferFailedError("blocks arrived with wrong checksums"), own)


def is_worth_it(link: StoreLink, count: int) -> bool:
    """Return whether this many blocks should be transferred."""
    return link.remote.allowed and count * link.block_bytes >= LEAST_BYTES
