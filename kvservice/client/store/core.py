"""The operations of the block store, shared by the sync and async API, and what they hold: leases and reservations of
blocks in the memory of the store that this process may read, or write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvservice.client.messages import flag, wait_time
from kvservice.client.regions import SharedRegion, whole_bytes
from kvservice.client.remote import RemoteRegion
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.link import Patience, StoreLink, blocks_in_request, keys_in_request, parts
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.moving import BlockReader, BlockWriter
from kvservice.client.store.values import (
    Blocks,
    Flags,
    Keys,
    Lookup,
    Numbers,
    PutStatus,
    SharedUses,
    Statuses,
    StoreNamespace,
    bitmap_of,
    flags_of,
    key_bytes,
    num_keys,
    pieces_of,
    some_keys,
    statuses_of,
)
from kvservice.errors import (
    DaemonAwayError,
    InvalidArgumentError,
    StoreNotSharedError,
    UnknownLeaseError,
    UnknownReservationError,
)
from kvservice.v1 import store_pb2
from kvservice.wire.tensors import Array


class Held(NamedTuple):
    """The leased or reserved blocks of a part of the keys."""

    number: int
    part: slice
    offsets: bytes
    versions: bytes = b""


class Holding:
    """The leases or reservations of one batch of keys on one link. Each part of the batch has its own request."""

    def __init__(self, access: StoreAccess, link: StoreLink | None, held: list[Held]) -> None:
        self._access, self._link, self._held = access, link, held

    @property
    def memory(self) -> MappedStore:
        """The mapped memory that the blocks lie in. Raises StoreNotSharedError if the store is not mapped."""
        memory = None if self._link is None else self._link.memory
        if memory is None:
            raise StoreNotSharedError("the store is not mapped")
        return memory

    def _views(self, chosen: Flags, *, writable: bool) -> list[Array | None]:
        """Return an array for each chosen key, None for the others."""
        if not self._held:
            return [None] * len(chosen)
        views = iter(self.memory.views(b"".join(held.offsets for held in self._held), writable=writable))
        return [next(views) if one else None for one in chosen.tolist()]

    def _addresses(self, chosen: Flags) -> Numbers:
        """Return the address for each chosen key, 0 for the others."""
        addresses: Numbers = np.zeros(len(chosen), np.uint64)
        if self._held:
            addresses[chosen] = self.memory.addresses(b"".join(held.offsets for held in self._held))
        return addresses


class LeaseCore(Holding):
    """A lease on blocks of the store. `found` has one flag per key. Blocks found are not evicted, and their bytes stay
    as they are, until the lease is released, its time has passed, or the session is lost. Leaving a with block releases
    it."""

    def __init__(self, access: StoreAccess, link: StoreLink | None, held: list[Held], found: Flags) -> None:
        super().__init__(access, link, held)
        self.found = found

    @property
    def views(self) -> list[Array | None]:
        """A read-only array uint8[block_bytes] over each block found, None for the other keys. The arrays stay valid
        after the lease has ended, but then the blocks in them may change at any time: `check` notices. Raises
        StoreNotSharedError if blocks were found and the store is not mapped."""
        return self._views(self.found, writable=False)

    @property
    def addresses(self) -> Numbers:
        """The addresses of the `views`, uint64[num_keys], 0 for keys that were not found: for copies by a GPU. They are
        valid as long as `memory` is referenced. Raises StoreNotSharedError as `views` does."""
        return self._addresses(self.found)

    @property
    def alive(self) -> bool:
        """Whether the session is not lost. The time of the lease may have passed."""
        return not self._held or self._access.link is self._link

    @property
    def offsets(self) -> bytes:
        """The places of the blocks found in the memory of the store: for `MappedStore.read` of another process."""
        return b"".join(held.offsets for held in self._held)

    @property
    def versions(self) -> bytes:
        """The versions of the blocks found, by which a reader notices that they have changed."""
        return b"".join(held.versions for held in self._held)

    def check(self) -> Flags:
        """Return which blocks found are still the leased ones: everything that was read from their views before this
        call is right. Raises StoreNotSharedError as `views` does."""
        right = self.found.copy()
        if self._held:
            right[right] = self.memory.unchanged(self.offsets, self.versions)
        return right

    async def renew(self, ttl_s: float = 0.0, *, timeout_s: float | None = None) -> bool:
        """Let the lease end `ttl_s` seconds from now, 0: after the daemon's max_lease_s. Returns False if it has ended
        already, or the daemon is away."""
        ttl_s = wait_time(ttl_s, "ttl_s")
        renewed = True

        async def work(link: StoreLink) -> None:
            nonlocal renewed
            for held in self._held:
                try:
                    request = store_pb2.RenewRequest(lease_id=held.number, ttl_s=ttl_s)
                    await link.call("store_renew", request, timeout_s)
                except UnknownLeaseError:
                    renewed = False

        return not self._held or (await self._access.attempt_on(self._link, work) and renewed)

    async def release(self, *, timeout_s: float | None = None) -> None:
        """End the lease. Does nothing if it has ended. Without an answer, the lease ends when the daemon is back."""
        numbers = [held.number for held in self._held]

        async def work(link: StoreLink) -> None:
            await link.call("store_release", store_pb2.ReleaseRequest(lease_ids=numbers), timeout_s)

        done = not numbers
        try:
            done = done or await self._access.attempt_on(self._link, work)
        finally:
            if not done and self._link is not None:
                self._link.release(numbers)


class ReservationCore(Holding):
    """Room for blocks in the mapped memory of the store. `statuses` has a PutStatus per key: DONE for those that are
    reserved. Leaving a with block aborts what was not committed."""

    def __init__(self, access: StoreAccess, link: StoreLink | None, held: list[Held], statuses: Statuses) -> None:
        super().__init__(access, link, held)
        self.statuses = statuses

    @property
    def reserved(self) -> Flags:
        flags: Flags = self.statuses == PutStatus.DONE
        return flags

    @property
    def views(self) -> list[Array | None]:
        """A writable array uint8[block_bytes] for each reserved block, None for the other keys. They must not be
        written after `commit` or `abort`."""
        return self._views(self.reserved, writable=True)

    @property
    def addresses(self) -> Numbers:
        """The addresses of the `views`, uint64[num_keys], 0 for keys that are not reserved. See LeaseCore.addresses."""
        return self._addresses(self.reserved)

    async def commit(self, written: Any = None, *, checksums: Any = None, timeout_s: float | None = None) -> int:
        """Publish the reserved blocks; with `written`, flags for all keys, only those, and abort the others. The daemon
        computes their checksums, unless the caller has: `checksums` uint64[num_keys], see StoreCommitRequest in
        store.proto. Returns how many are stored now: 0 if the daemon is away or has lost the reservation."""
        flags = self._per_key(written, "written", np.bool_) if written is not None else np.ones_like(self.reserved)
        sums = None if checksums is None else self._per_key(checksums, "checksums", np.uint64)
        num_blocks = 0

        async def work(link: StoreLink) -> None:
            nonlocal num_blocks
            for held in self._held:
                reserved = self.reserved[held.part]
                request = store_pb2.StoreCommitRequest(
                    request_id=link.next_request_id(),
                    reservation_id=held.number,
                    written=bitmap_of(flags[held.part][reserved]),
                    checksums=b"" if sums is None else sums[held.part][reserved & flags[held.part]].tobytes(),
                )
                with contextlib.suppress(UnknownReservationError):
                    num_blocks += (await link.call("store_commit", request, timeout_s)).num_blocks
                link.reservations.discard(held.number)
            self._held.clear()

        try:
            await self._access.attempt_on(self._link, work)
        finally:
            self._give_up()
        return num_blocks

    async def abort(self, *, timeout_s: float | None = None) -> None:
        """Give the room back. Does nothing after `commit`."""

        async def work(link: StoreLink) -> None:
            for held in self._held:
                await link.call("store_abort", store_pb2.AbortRequest(reservation_id=held.number), timeout_s)
                link.reservations.discard(held.number)
            self._held.clear()

        try:
            if self._held:
                await self._access.attempt_on(self._link, work)
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Abort what is neither committed nor aborted, without waiting for the daemon."""
        for held in self._held:
            assert self._link is not None, "it has reserved them"
            self._link.abort(held.number)
        self._held.clear()

    def _per_key(self, values: Any, field: str, dtype: type[np.generic]) -> Array:
        """Check that there is one value per key."""
        array = np.asarray(values)
        if not array.size:
            array = array.astype(dtype)  # that of an empty list
        if array.shape != self.statuses.shape or array.dtype != dtype:
            wanted = f"{np.dtype(dtype)}[{len(self.statuses)}]"
            raise InvalidArgumentError(f"is {array.dtype}{list(array.shape)}, must be {wanted}", field=field)
        return array


async def acquire(
    link: StoreLink,
    keys: bytes,
    found: Flags,
    held: list[Held],
    *,
    ttl_s: float,
    leading_only: bool,
    counted: bool,
    patience: Patience,
    timeout_s: float | None,
) -> None:
    """Lease blocks. Adds to `held` and sets flags in `found`."""
    for part in parts(num_keys(keys), keys_in_request(link)):
        request = store_pb2.AcquireRequest(
            request_id=link.next_request_id(),
            namespace_id=link.namespace_id,
            keys=some_keys(keys, part),
            ttl_s=ttl_s,
            leading_only=leading_only,
            uncounted=not counted,
            max_wait_s=patience.left_s(link),
        )
        response = await link.hold("store_acquire", request, timeout_s)
        if response.lease_id:
            held.append(Held(response.lease_id, part, response.offsets, response.versions))
            found[part] = flags_of(response.found, part.stop - part.start)
        if leading_only and not found[part].all():
            return


async def reserve(
    link: StoreLink, keys: bytes, statuses: Statuses, held: list[Held], *, timeout_s: float | None
) -> None:
    """Reserve blocks. Adds to `held` and sets `statuses`. Raises StoreNotSharedError unless the store is mapped for
    writing."""
    if link.memory is None or not link.memory.writable:
        raise StoreNotSharedError("the store is not mapped for writing")
    for part in parts(num_keys(keys), blocks_in_request(link)):
        request = store_pb2.ReserveRequest(
            request_id=link.next_request_id(), namespace_id=link.namespace_id, keys=some_keys(keys, part)
        )
        response = await link.hold("store_reserve", request, timeout_s)
        statuses[part] = statuses_of(response.statuses, part.stop - part.start)
        if response.reservation_id:
            held.append(Held(response.reservation_id, part, response.offsets))
            link.reservations.add(response.reservation_id)


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
        self,
        keys: Keys,
        *,
        counted: bool = True,
        explained: bool = True,
        max_wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Lookup:
        """Return which blocks are there, in memory or in the tiers below. They may be evicted at any time. Changes
        nothing but the daemon's counters of hits and misses, and not these unless `counted`: for a look-up that only
        prepares a put. Without `explained` the daemon does not count why a block is missing: `touch` reports that.
        Blocks that `get` would not have within `max_wait_s` seconds, by measured speeds, count as missing; 0: there is
        no such limit."""
        packed, max_wait_s = key_bytes(keys), wait_time(max_wait_s, "max_wait_s")
        counted, explained = flag(counted, "counted"), flag(explained, "explained")
        found: Flags = np.zeros(num_keys(packed), np.bool_)
        num_in_memory = 0

        async def work(link: StoreLink) -> None:
            nonlocal num_in_memory
            for part in parts(len(found), keys_in_request(link)):
                request = store_pb2.LookupRequest(
                    namespace_id=link.namespace_id,
                    keys=some_keys(packed, part),
                    uncounted=not counted,
                    # Only the first missing key of all parts has its reason counted.
                    unexplained=not explained or not found[: part.start].all(),
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
        packed, patience, verify = key_bytes(keys), Patience(max_wait_s, timeout_s), flag(verify, "verify")
        found: Flags = np.zeros(num_keys(packed), np.bool_)
        target = pieces_of(out, len(found), self.namespace.block_bytes, "out", writable=True)
        await self._access.attempt(
            lambda link: BlockReader(link, packed, target, found, verify, patience, timeout_s).read()
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
        leading_only, counted = flag(leading_only, "leading_only"), flag(counted, "counted")
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
                leading_only=leading_only,
                counted=counted,
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
        if uses is not None and not isinstance(uses, SharedUses):
            raise InvalidArgumentError(f"is {type(uses).__name__}, not SharedUses", field="uses")
        touched = 0

        async def work(link: StoreLink) -> None:
            nonlocal touched
            if uses is not None:
                reported = store_pb2.TouchRequest(
                    namespace_id=link.namespace_id,
                    num_hits=uses.hits,
                    num_misses=uses.misses,
                    num_read=uses.read,
                    missing=b"".join(uses.missing),
                    num_not_whole=uses.not_whole,
                    engine=uses.engine,
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

    async def unregister_region(self, region: SharedRegion, *, timeout_s: float | None = None) -> None:
        """Give a region of `create_region` up, whose number is limited. Its arrays are still usable, as any other
        memory; they must not be in use by a call. A daemon that is away has given it up already. Raises
        InvalidArgumentError, and otherwise the errors of SessionCore.unregister_region."""
        if not isinstance(region, SharedRegion):
            raise InvalidArgumentError(f"is {type(region).__name__}, not a region", field="region")

        async def work(link: StoreLink) -> None:
            if isinstance(region, RemoteRegion):
                if region in link.remote.regions:
                    link.remote.drop(region)
            elif link.regions.has(region):
                await link.regions.unregister(region, timeout_s=timeout_s)

        await self._access.attempt(work)

    async def close(self) -> None:
        """Close the session: its leases and reservations end. Arrays over the mapped memory stay readable; those of
        reservations must not be written any more."""
        await self._access.close()
