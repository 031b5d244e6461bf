"""Reserved blocks of lost sessions whose clients can write to the memory of the store.

A client that was frozen may go on writing after its session has ended. The room of its reserved blocks is therefore
not used again while a process lives that fetched the memory for writing in that session. Others can store the keys at
once, in other places. A client that closes its session promises that it has stopped to write: nothing waits then. The
slots wait also while the daemon restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvservice.store.index import WORD_BYTES
from kvservice.store.namespaces import StoredNamespace
from kvservice.store.records import ReservationRecord, StoreRecords


@dataclass(eq=False)
class _Held:
    reservation_id: int
    namespace: StoredNamespace
    slots: bytes
    writers: set[int]


class Quarantine:
    """Reserved slots that are freed after their writers have ended. `abort` frees slots; `condemn` removes their keys,
    after which `release` frees them."""

    def __init__(
        self,
        abort: Callable[[bytes], None],
        condemn: Callable[[bytes], None],
        release: Callable[[bytes], None],
        records: StoreRecords,
    ) -> None:
        self._abort, self._condemn, self._release = abort, condemn, release
        self._records = records
        self._living: set[int] = set()
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def began(self, writer: int) -> None:
        """Note a process that can write from now on."""
        self._living.add(writer)

    def hold(self, reservation_id: int, namespace: StoredNamespace, slots: bytes, writers: frozenset[int]) -> None:
        """Forget the keys of the slots of a reservation, and free them after all of `writers` have ended: at once if
        none lives. A process that was killed has usually ended before its session is."""
        living = self._living & writers
        if not living:
            self._records.reservations.discard(reservation_id)
            self._abort(slots)
            return
        self._add(reservation_id, namespace, slots, living)
        self._condemn(slots)

    def restore(
        self,
        reservation_id: int,
        namespace: StoredNamespace,
        reserved: bytes,
        condemned: bytes,
        writers: frozenset[int],
    ) -> bool:
        """Hold slots of the process before, unless all writers have ended. `condemned` slots are leased once, and
        `reserved` ones are not condemned yet. Returns whether the slots are held."""
        living = self._living & writers
        if living:
            self._add(reservation_id, namespace, reserved + condemned, living)
            self._condemn(reserved)
        return bool(living)

    def _add(self, reservation_id: int, namespace: StoredNamespace, slots: bytes, writers: set[int]) -> None:
        self._records.reservations[reservation_id] = ReservationRecord(0, namespace.number, tuple(writers), slots)
        namespace.num_quarantined += len(slots) // WORD_BYTES
        self._held.append(_Held(reservation_id, namespace, slots, writers))

    def ended(self, writer: int) -> None:
        """Free the slots that waited for this writer only."""
        self._living.discard(writer)
        for held in list(self._held):
            held.writers.discard(writer)
            if not held.writers:
                self._held.remove(held)
                held.namespace.num_quarantined -= len(held.slots) // WORD_BYTES
                self._records.reservations.discard(held.reservation_id)
                self._release(held.slots)
