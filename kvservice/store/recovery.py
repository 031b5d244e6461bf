"""Recovery of what sessions had in the store when the daemon's process before this one ended."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvservice.store.index import WORD_BYTES
from kvservice.store.namespaces import StoredNamespace
from kvservice.store.records import ReservationRecord
from kvservice.store.session import SessionStore
from kvservice.store.store import BlockStore


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
