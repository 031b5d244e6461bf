"""The operations of the block store, shared by the sync and async API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from kvservice.client.region_memory import SharedRegion
from kvservice.client.regions import whole_bytes
from kvservice.client.requests import wait_time
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.holding import acquire, reserve
from kvservice.client.store.leases import Held
from kvservice.client.store.link import StoreLink
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.patience import Patience
from kvservice.client.store.pieces import Blocks, pieces_of
from kvservice.client.store.reading import BlockReader
from kvservice.client.store.splits import keys_in_request, parts
from kvservice.client.store.values import (
    Flags,
    Keys,
    Lookup,
    PutStatus,
    SharedUses,
    Statuses,
    StoreNamespace,
    flags_of,
    key_bytes,
    num_keys,
    some_keys,
)
from kvservice.client.store.writing import BlockWriter
from kvservice.errors import DaemonAwayError
from kvservice.v1 import store_pb2

LeaseT = TypeVar("LeaseT")
ReservationT = TypeVar("ReservationT")


class StoreCore(Generic[LeaseT, ReservationT]):
    """Blocks by key in a namespace of the daemon's store, over a session of its own. Threads and tasks may share it.

    `keys` have 32 bytes each: one after the other in one `bytes`, or a sequence of `bytes`. Batches may have any size;
    large ones are split into several requests.

    Unreachable is a miss: unless the store was opened with unreachable="raise", no method raises because the daemon is
    away, has restarted, or does not answer within the time limit of a request. Blocks then count as missing, and a put
    as UNREACHABLE. After the first failure methods return at once, until the client, which goes on trying in the
    background, has an answer again. `reachable` is whether they do not. If the daemon was only slow, leases and
    reservations last. If the connection broke, or the client gave up, its session ends, with all leases and
    reservations of the store. `create_region` has no such answer, and raises. After `close` all methods raise
    ConnectionLostError, except those that end something.

    Wrong arguments raise InvalidArgumentError naming the argument, in most cases before anything is sent. `timeout_s`
    is the time limit of each request of a call in seconds, math.inf for no limit; None: the store's.
    """

    def __init__(
        self,
        access: StoreAccess,
        namespace: StoreNamespace,
        make_lease: Callable[[StoreAccess, StoreLink | None, list[Held], Flags], LeaseT],
        make_reservation: Callable[[StoreAccess, StoreLink | None, list[Held], Statuses], ReservationT],
    ) -> None:
        self._access = access
        self._make_lease, self._make_reservation = make_lease, make_reservation
        self.namespace = namespace

    @property
    def reachable(self) -> bool:
        """Whether there is a connection to the daemon now, and no call waits in vain for its answer."""
        return self._access.reachable

    @property
    def transport(self) -> str:
        """How `get` copies now: "mapped", "region", "transfer" or "inline"; "" while the daemon is away."""
        return "" if (link := self._access.answering) is None else link.transport

    @property
    def num_transfer_failures(self) -> int:
        """How often blocks took messages because Transfer Engines failed, over the present link to the daemon."""
        return 0 if (link := self._access.link) is None else link.remote.num_failures

    @property
    def memory(self) -> MappedStore | None:
        """The memory of the store if it is mapped now. Another link to the daemon has another mapping."""
        return None if (link := self._access.link) is None else link.memory

    async def lookup(
        self, keys: Keys, *, counted: bool = True, max_wait_s: float = 0.0, timeout_s: float | None = None
    ) -> Lookup:
        """Return which blocks are there, in memory or in the tiers below. They may be evicted at any time. Changes
        nothing but the daemon's counters of hits and misses, and not these unless `counted`: for a look-up that only
        prepares a put. Blocks that `get` would not have within `max_wait_s` seconds, by measured speeds, count as
        missing; 0: there is no such limit."""
        packed, max_wait_s = key_bytes(keys), wait_time(max_wait_s, "max_wait_s")
        found: Flags = np.zeros(num_keys(packed), np.bool_)
        num_in_memory = 0

        async def work(link: StoreLink) -> None:
            nonlocal num_in_memory
            for part in parts(len(found), keys_in_request(link)):
                request = store_pb2.LookupRequest(
                    namespace_id=link.namespace_id,
                    keys=some_keys(packed, part),
                    uncounted=not counted,
                    max_wait_s=max_wait_s,
                )
                response = await link.call("store_lookup", request, timeout_s)
                found[part] = flags_of(response.found, part.stop - part.start)
                if num_in_memory == part.start:
                    num_in_memory += response.num_in_memory

        await self._access.attempt(work)
        return Lookup.of(found, num_in_memory)

    async def get(
        self,
        keys: Keys,
        out: Blocks,
        *,
        verify: bool = False,
        max_wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Flags:
        """Copy blocks to `out`: uint8[num_keys, block_bytes], contiguous and in host memory, or a Scatter. Returns one
        flag per key: whether its block was copied. The contents of `out` for the other keys are undefined.

        Copies from the mapped memory if the daemon shares it; else through a region; else in messages. A block that is
        evicted during the copy counts as missing. With `verify`, checksums are compared; a damaged block is removed and
        counts as missing. Raises MessageTooLargeError if a block must fit into a message and does not.

        Blocks in tiers below the daemon's memory are brought up first. Those that are not there within `max_wait_s`
        seconds, or within half of the time limit of a request, count as missing.
        """
        packed, patience = key_bytes(keys), Patience(max_wait_s, timeout_s)
        found: Flags = np.zeros(num_keys(packed), np.bool_)
        target = pieces_of(out, len(found), self.namespace.block_bytes, "out", writable=True)
        await self._access.attempt(
            lambda link: BlockReader(link, packed, target, found, bool(verify), patience, timeout_s).read()
        )
        return found

    async def put(self, keys: Keys, values: Blocks, *, timeout_s: float | None = None) -> Statuses:
        """Store blocks whose bytes are in `values`: uint8[num_keys, block_bytes], contiguous and in host memory, or a
        Scatter. Returns a PutStatus per key. They must not change during the call.

        Copies from `values` if they lie in a region of this store; else into the mapped memory if the daemon allows
        that; else through a region; else in messages. Raises MessageTooLargeError as `get` does.
        """
        packed = key_bytes(keys)
        statuses: Statuses = np.full(num_keys(packed), PutStatus.UNREACHABLE, np.uint8)
        source = pieces_of(values, len(statuses), self.namespace.block_bytes, "values", writable=False)
        await self._access.attempt(lambda link: BlockWriter(link, packed, source, statuses, timeout_s).write())
        return statuses

    async def acquire(
        self,
        keys: Keys,
        ttl_s: float = 0.0,
        *,
        leading_only: bool = False,
        counted: bool = True,
        max_wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> LeaseT:
        """Lease blocks for `ttl_s` seconds, 0: for the daemon's max_lease_s. With `leading_only`, only those before the
        first that is missing. The daemon refuses a longer time with InvalidArgumentError. Without `counted`,
        the daemon does not count the blocks as read: for a lease that protects what another call reads. `max_wait_s`
        is as in `get`."""
        packed, ttl_s, patience = key_bytes(keys), wait_time(ttl_s, "ttl_s"), Patience(max_wait_s, timeout_s)
        found: Flags = np.zeros(num_keys(packed), np.bool_)
        held: list[Held] = []
        used: StoreLink | None = None

        async def work(link: StoreLink) -> None:
            nonlocal used
            used = link
            await acquire(
                link,
                packed,
                found,
                held,
                ttl_s=ttl_s,
                leading_only=bool(leading_only),
                counted=bool(counted),
                patience=patience,
                timeout_s=timeout_s,
            )

        done = False
        try:
            done = await self._access.attempt(work)
        finally:
            if used is not None and held and not done:
                used.release([one.number for one in held])
        if not done:
            held.clear()
            found[:] = False
        return self._make_lease(self._access, used, held, found)

    async def reserve(self, keys: Keys, *, timeout_s: float | None = None) -> ReservationT:
        """Reserve room in the mapped memory for blocks that are missing. They are found after they are committed.
        Raises StoreNotSharedError unless the store is mapped for writing."""
        packed = key_bytes(keys)
        statuses: Statuses = np.full(num_keys(packed), PutStatus.UNREACHABLE, np.uint8)
        held: list[Held] = []
        used: StoreLink | None = None

        async def work(link: StoreLink) -> None:
            nonlocal used
            used = link
            await reserve(link, packed, statuses, held, timeout_s=timeout_s)

        done = False
        try:
            done = await self._access.attempt(work)
        finally:
            if used is not None and not done:
                for one in held:
                    used.abort(one.number)
        if not done:
            held.clear()
            statuses[:] = PutStatus.UNREACHABLE
        return self._make_reservation(self._access, used, held, statuses)

    async def touch(self, keys: Keys, *, uses: SharedUses | None = None, timeout_s: float | None = None) -> int:
        """Make blocks the most recently used. Returns how many keys were there. `uses` are counted by the daemon: what
        this process has done in the mapped memory by itself."""
        packed = key_bytes(keys)
        touched = 0

        async def work(link: StoreLink) -> None:
            nonlocal touched
            if uses is not None:
                reported = store_pb2.TouchRequest(
                    namespace_id=link.namespace_id, num_hits=uses.hits, num_misses=uses.misses, num_read=uses.read
                )
                await link.call("store_touch", reported, timeout_s)
            for part in parts(num_keys(packed), keys_in_request(link)):
                request = store_pb2.TouchRequest(namespace_id=link.namespace_id, keys=some_keys(packed, part))
                touched += (await link.call("store_touch", request, timeout_s)).num_blocks

        await self._access.attempt(work)
        return touched

    async def remove(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Remove blocks. Returns how many were there."""
        packed = key_bytes(keys)
        removed = 0

        async def work(link: StoreLink) -> None:
            nonlocal removed
            for part in parts(num_keys(packed), keys_in_request(link)):
                request = store_pb2.RemoveRequest(
                    request_id=link.next_request_id(), namespace_id=link.namespace_id, keys=some_keys(packed, part)
                )
                removed += (await link.call("store_remove", request, timeout_s)).num_blocks

        await self._access.attempt(work)
        return removed

    async def clear(self, *, timeout_s: float | None = None) -> int:
        """Remove all blocks of the namespace. Returns how many of them were in memory."""
        removed = 0

        async def work(link: StoreLink) -> None:
            nonlocal removed
            request = store_pb2.ClearRequest(request_id=link.next_request_id(), namespace_id=link.namespace_id)
            removed = (await link.call("store_clear", request, timeout_s)).num_blocks

        await self._access.attempt(work)
        return removed

    async def create_region(self, num_bytes: int, *, timeout_s: float | None = None) -> SharedRegion:
        """Create a region of shared memory: `put` of values in it copies no bytes in this process. By a Transfer Engine
        `get` does not copy them either, and `timeout_s` is not used. After the daemon was away, its arrays are still
        usable, as any other memory. Raises DaemonAwayError, TransferFailedError, and otherwise the errors of
        SessionCore.create_region."""
        regions: list[SharedRegion] = []

        async def work(link: StoreLink) -> None:
            if link.remote.allowed:
                regions.append(await link.remote.create(whole_bytes(num_bytes)))
            else:
                regions.append(await link.regions.create(num_bytes, timeout_s=timeout_s))

        if not await self._access.attempt(work):
            raise DaemonAwayError("the store is out of reach")
        return regions[0]

    async def close(self) -> None:
        """Close the session: its leases and reservations end. Arrays over the mapped memory stay readable; those of
        reservations must not be written any more."""
        await self._access.close()
