"""What one session has in the block store: namespaces, leases and reservations, also after a restart of the daemon."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.errors import (
    InvalidArgumentError,
    QuotaExceededError,
    ResourceExhaustedError,
    UnknownLeaseError,
    UnknownNamespaceError,
    UnknownReservationError,
)
from kvservice.store.index import KEY_BYTES, WORD_BYTES
from kvservice.store.leases import Lease
from kvservice.store.namespaces import EngineFigures, NamespaceIdentity, StoredNamespace
from kvservice.store.records import LeaseRecord, NameList, ReservationRecord
from kvservice.store.store import BlockStore, Pinned, Reserved, chosen

# Limits of one session: its leases, the blocks of all of them, and its reservations.
MAX_LEASES = 4096
MAX_LEASED_BLOCKS = 1 << 18
MAX_RESERVATIONS = 4096


@dataclass(eq=False)
class Opening:
    """The state of one session in the store, until `SessionStore.close`. `writers` are the processes that fetched the
    memory of the store for writing."""

    writers: frozenset[int] = frozenset()
    ended: bool = False


@dataclass
class Ended:
    """The leases and reservations that ended because their client was gone."""

    leases: int = 0
    reservations: int = 0

    def __str__(self) -> str:
        return f"{self.leases} leases and {self.reservations} reservations ended"


@dataclass(frozen=True)
class Reservation:
    """Reserved blocks of a namespace."""

    namespace: StoredNamespace
    slots: bytes
    offsets: bytes
    keys: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.slots) // WORD_BYTES

    def split(self, written: bytes) -> tuple[Reservation, Reservation]:
        """Return the blocks whose bit is set in `written`, and the others. Empty stands for all blocks."""
        if not written:
            return self, Reservation(self.namespace, b"", b"", b"")
        bits = np.unpackbits(np.frombuffer(written, np.uint8), count=self.num_blocks, bitorder="little")
        return self._of(bits == 1), self._of(bits == 0)

    def _of(self, flags: np.ndarray[Any, np.dtype[np.bool_]]) -> Reservation:
        return Reservation(
            self.namespace,
            chosen(self.slots, WORD_BYTES, flags),
            chosen(self.offsets, WORD_BYTES, flags),
            chosen(self.keys, KEY_BYTES, flags),
        )


class SessionStore:
    """The session's side of the store. Ids are never used again, so those of an earlier client are unknown. `tenant`
    is a part of its namespaces' identities, and `session_id` names the session also after a restart of the daemon."""

    def __init__(self, store: BlockStore, tenant: str, session_id: int) -> None:
        self._store = store
        self._records = store.records
        self._session_id = session_id
        self.tenant = tenant
        self._namespaces: dict[int, StoredNamespace] = {}
        self._leases: dict[int, Lease] = {}
        self._num_leased = 0
        self._reservations: dict[int, Reservation] = {}
        # Reservations that the client has ended, whose blocks have no checksums yet.
        self._committing: dict[int, Reservation] = {}
        self.opening = Opening()
        self.ended = Ended()
        # The last report of the client's engine.
        self.engine: EngineFigures | None = None

    # ---- namespaces

    def open(self, identity: NamespaceIdentity, quota_bytes: int = 0) -> tuple[int, StoredNamespace]:
        """Open a namespace, or return the id that the session has for it. Raises the errors of `BlockStore.open`."""
        for namespace_id, namespace in self._namespaces.items():
            if namespace.identity == identity:
                self._store.set_quota(namespace, quota_bytes)
                return namespace_id, namespace
        namespace = self._store.open(identity, quota_bytes)
        namespace_id = self._records.new_opening(self._session_id, namespace.number)
        self._namespaces[namespace_id] = namespace
        return namespace_id, namespace

    def namespace(self, namespace_id: int) -> StoredNamespace:
        """Raises UnknownNamespaceError."""
        namespace = self._namespaces.get(namespace_id)
        if namespace is None:
            raise UnknownNamespaceError(f"the session has not opened namespace {namespace_id}", field="namespace_id")
        return namespace

    # ---- leases

    def acquire(
        self, namespace: StoredNamespace, keys: bytes, leading_only: bool, ttl_s: float, *, counted: bool = True
    ) -> tuple[int, Pinned]:
        """Lease the blocks that are there. Returns the id of the lease, 0 if none was found. Raises
        InvalidArgumentError naming ttl_s, and QuotaExceededError."""
        ttl_s = self._checked(ttl_s)
        if len(self._leases) >= MAX_LEASES:
            raise QuotaExceededError(f"the session has {MAX_LEASES} leases", limit="leases", value=MAX_LEASES)
        pinned = self._store.acquire(namespace, keys, leading_only, counted=counted)
        if pinned.num_blocks == 0:
            return 0, pinned
        if self._num_leased + pinned.num_blocks > MAX_LEASED_BLOCKS:
            self._store.release(pinned.slots)
            raise QuotaExceededError(
                f"the session's leases have {self._num_leased} blocks", limit="leased_blocks", value=MAX_LEASED_BLOCKS
            )
        lease_id = next(self._store.ids)
        deadline = self._store.leases.deadline(ttl_s)
        try:
            self._records.leases[lease_id] = LeaseRecord(self._session_id, deadline, pinned.slots)
        except ResourceExhaustedError:
            self._store.release(pinned.slots)
            raise
        self._add_lease(lease_id, pinned.slots, deadline)
        return lease_id, pinned

    def _add_lease(self, lease_id: int, slots: bytes, deadline: float) -> None:
        self._num_leased += len(slots) // WORD_BYTES
        self._leases[lease_id] = self._store.leases.add(slots, deadline, lambda lease: self._ended(lease_id, lease))

    def _ended(self, lease_id: int, lease: Lease) -> None:
        del self._leases[lease_id]
        self._num_leased -= len(lease.slots) // WORD_BYTES
        self._records.leases.discard(lease_id)
        self._store.release(lease.slots)

    def renew(self, lease_id: int, ttl_s: float) -> None:
        """Raises UnknownLeaseError, and InvalidArgumentError naming ttl_s."""
        ttl_s = self._checked(ttl_s)
        if (lease := self._leases.get(lease_id)) is None:
            raise UnknownLeaseError(f"lease {lease_id} has ended", field="lease_id")
        deadline = self._store.leases.deadline(ttl_s)
        self._records.leases[lease_id] = LeaseRecord(self._session_id, deadline, lease.slots)
        self._store.leases.renew(lease, deadline)

    def release(self, lease_id: int) -> None:
        """End a lease, if it has not ended."""
        if (lease := self._leases.get(lease_id)) is not None:
            self._store.leases.end(lease)

    def _checked(self, ttl_s: float) -> float:
        limit = self._store.config.max_lease_s
        if not (math.isfinite(ttl_s) and 0 <= ttl_s <= limit):
            raise InvalidArgumentError(f"{ttl_s} is not from 0 to {limit}", field="ttl_s")
        return ttl_s or limit

    # ---- reservations

    def reserve(self, namespace: StoredNamespace, keys: bytes) -> tuple[int, Reserved]:
        """Reserve room for the blocks that are missing. Returns the id of the reservation, 0 if there is room for none.
        Raises QuotaExceededError."""
        if len(self._reservations) >= MAX_RESERVATIONS:
            raise QuotaExceededError(
                f"the session has {MAX_RESERVATIONS} reservations", limit="reservations", value=MAX_RESERVATIONS
            )
        reserved = self._store.reserve(namespace, keys)
        if not reserved.slots:
            return 0, reserved
        reservation_id = next(self._store.ids)
        record = ReservationRecord(self._session_id, namespace.number, (), reserved.slots)
        try:
            self._records.reservations[reservation_id] = record
        except ResourceExhaustedError:
            self._store.abort(reserved.slots)
            raise
        self._reservations[reservation_id] = Reservation(namespace, reserved.slots, reserved.offsets, reserved.keys)
        return reservation_id, reserved

    def reservation(self, reservation_id: int) -> Reservation:
        """Raises UnknownReservationError."""
        if (found := self._reservations.get(reservation_id)) is None:
            raise UnknownReservationError(f"reservation {reservation_id} has ended", field="reservation_id")
        return found

    def begin_commit(self, reservation_id: int) -> None:
        """End a reservation for the client. Its blocks stay reserved until `commit` or `fail`. Raises
        UnknownReservationError."""
        self._committing[reservation_id] = self.reservation(reservation_id)
        del self._reservations[reservation_id]

    def commit(self, reservation_id: int, written: Reservation, others: Reservation, checksums: bytes) -> None:
        """Publish the blocks `written` after `begin_commit`, and free the room of the others. Raises
        UnknownReservationError if the session ended meanwhile: then nothing is published."""
        if self._committing.pop(reservation_id, None) is None:
            raise UnknownReservationError("the session ended meanwhile", field="reservation_id")
        self._records.reservations.discard(reservation_id)
        self._store.abort(others.slots)
        self._store.commit(written.namespace, written.slots, written.keys, checksums)

    def fail(self, reservation_id: int) -> None:
        """Free the room of a reservation after `begin_commit`."""
        self._free(self._committing.pop(reservation_id, None), reservation_id)

    def abort(self, reservation_id: int) -> None:
        """End a reservation and free its room, if it has not ended."""
        self._free(self._reservations.pop(reservation_id, None), reservation_id)

    def _free(self, reservation: Reservation | None, reservation_id: int) -> None:
        if reservation is not None:
            self._records.reservations.discard(reservation_id)
            self._store.abort(reservation.slots)

    # ---- writers

    def add_writer(self, writer: int) -> None:
        """Note a process that fetches the memory of the store for writing. Its name is that of no earlier process."""
        self._store.quarantine.began(writer)
        # Without those that have ended, so that they do not become more and more.
        self.opening.writers = frozenset(self._store.quarantine.living(self.opening.writers) | {writer})
        self._records.session_writers[self._session_id] = NameList(self.opening.writers)

    # ---- a restart of the daemon

    def restore_namespace(self, namespace_id: int, namespace: StoredNamespace) -> None:
        namespace.num_users += 1
        self._namespaces[namespace_id] = namespace

    def restore_lease(self, lease_id: int, slots: bytes, deadline: float) -> None:
        self._store.lease(slots)
        self._add_lease(lease_id, slots, deadline)

    def restore_reservation(self, reservation_id: int, namespace: StoredNamespace, slots: bytes) -> None:
        keys, offsets = self._store.places(slots)
        self._reservations[reservation_id] = Reservation(namespace, slots, offsets, keys)

    def restore_writers(self, writers: frozenset[int]) -> None:
        self.opening.writers = writers

    # ---- the end

    def close(self, *, writers_done: bool = False) -> None:
        """End all namespaces, leases and reservations. The next client of the session opens its own. `writers_done`:
        the client has promised that it does not write any more; else reserved blocks wait for its end."""
        if writers_done:
            self.opening.writers = frozenset()
        self.ended.leases += len(self._leases)
        self.ended.reservations += len(self._reservations)
        while self._leases:
            self._store.leases.end(next(iter(self._leases.values())))
        for reservations in (self._reservations, self._committing):
            while reservations:
                reservation_id, one = reservations.popitem()
                self._store.quarantine.hold(reservation_id, one.namespace, one.slots, self.opening.writers)
        while self._namespaces:
            namespace_id, namespace = self._namespaces.popitem()
            self._records.openings.discard(namespace_id)
            self._store.leave(namespace)
        self._records.session_writers.discard(self._session_id)
        self.opening.ended = True
        self.engine = None
        self.opening = Opening()


# ---- recovery of what sessions had in the store when the daemon's process before this one ended


@dataclass(frozen=True)
class StoreRecovery:
    """Numbers of blocks that can be found, of leases and reservations that go on, and of blocks in quarantine."""

    blocks: int = 0
    leases: int = 0
    reservations: int = 0
    quarantined: int = 0


def recover(store: BlockStore, sessions: Mapping[int, SessionStore], living: Collection[int]) -> StoreRecovery:
    """Give the sessions that there still are, by id, what they had in the store, and free what the others had. `living`
    are the names of writers whose processes live. Called once, before the store is used.

    Blocks that are reserved without a record have never been offered to a client: only the daemon wrote them.
    """
    return _Recovery(store, sessions, living).run()


class _Recovery:
    def __init__(self, store: BlockStore, sessions: Mapping[int, SessionStore], living: Collection[int]) -> None:
        self._store, self._records, self._sessions = store, store.records, sessions
        self._namespaces = {one.number: one for one in store}
        self._living = frozenset(living)
        self._writers = {session_id: names.names for session_id, names in self._records.session_writers.items()}
        # Slots that nobody has claimed.
        self._reserved = set(_unpack(store.found_reserved))
        self._condemned = set(_unpack(store.found_condemned))

    def run(self) -> StoreRecovery:
        for writer in self._living:
            self._store.quarantine.began(writer)
        self._recover_openings()
        leases = self._recover_leases()
        kept = [self._recover_reservation(*item) for item in self._records.reservations.items()]
        for session_id, writers in self._writers.items():
            if (session := self._sessions.get(session_id)) is None:
                self._records.session_writers.discard(session_id)
            else:
                session.restore_writers(writers & self._living)
        self._store.abort(_pack(self._reserved))
        self._store.release(_pack(self._condemned))
        self._store.found_reserved = self._store.found_condemned = b""
        quarantined = sum(one.num_quarantined for one in self._store)
        return StoreRecovery(self._store.totals().num_blocks, leases, sum(kept), quarantined)

    def _recover_openings(self) -> None:
        for namespace_id, record in self._records.openings.items():
            session, namespace = self._sessions.get(record.session_id), self._namespaces.get(record.number)
            # The tenants with whom a session shares may be others now.
            if session is not None and namespace is not None and namespace.identity.tenant == session.tenant:
                session.restore_namespace(namespace_id, namespace)
            elif record.session_id:
                self._records.openings.discard(namespace_id)

    def _recover_leases(self) -> int:
        """Return the number of leases that go on."""
        count = 0
        for lease_id, record in self._records.leases.items():
            session = self._sessions.get(record.session_id)
            if session is None:
                self._records.leases.discard(lease_id)
            else:
                session.restore_lease(lease_id, record.slots, record.deadline)
                count += 1
        return count

    def _recover_reservation(self, reservation_id: int, record: ReservationRecord) -> bool:
        """Return whether the reservation goes on. Without its session it is in quarantine while a writer lives."""
        slots = set(_unpack(record.slots))
        session, namespace = self._sessions.get(record.session_id), self._namespaces.get(record.number)
        if namespace is None:
            self._records.reservations.discard(reservation_id)
        elif session is not None and slots <= self._reserved:
            self._reserved -= slots
            session.restore_reservation(reservation_id, namespace, record.slots)
            return True
        else:
            self._hold(reservation_id, namespace, record, slots)
        return False

    def _hold(
        self, reservation_id: int, namespace: StoredNamespace, record: ReservationRecord, slots: set[int]
    ) -> None:
        writers = self._writers.get(record.session_id, frozenset()).union(record.writers)
        reserved, condemned = slots & self._reserved, slots & self._condemned
        held = self._store.quarantine.restore(reservation_id, namespace, _pack(reserved), _pack(condemned), writers)
        if held:
            self._reserved -= reserved
            self._condemned -= condemned
        else:
            self._records.reservations.discard(reservation_id)


def _unpack(slots: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(slots) // WORD_BYTES}Q", slots)


def _pack(slots: Collection[int]) -> bytes:
    return struct.pack(f"<{len(slots)}Q", *sorted(slots))
