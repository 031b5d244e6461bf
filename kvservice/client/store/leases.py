"""Leases and reservations: blocks in the memory of the store that this process may read, or write."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from kvservice.client.requests import wait_time
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.link import StoreLink
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.pieces import Numbers
from kvservice.client.store.values import (
    Flags,
    PutStatus,
    Statuses,
    bitmap_of,
)
from kvservice.errors import InvalidArgumentError, StoreNotSharedError, UnknownLeaseError, UnknownReservationError
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
