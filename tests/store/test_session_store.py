"""Leases, reservations and the end of a session's side of the store."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from blocks_rig import SMALL_BYTES, SMALL_PER_SLAB, Rig, identity, keys, rig_of
from each_row import each_row

from kvservice.errors import (
    InvalidArgumentError,
    QuotaExceededError,
    UnknownLeaseError,
    UnknownNamespaceError,
    UnknownReservationError,
)
from kvservice.store import DONE, SessionStore, StoredNamespace


def opened(rig: Rig) -> tuple[SessionStore, StoredNamespace]:
    own = SessionStore(rig.store, "", 1)
    return own, own.open(identity())[1]


def leased(rig: Rig) -> int:
    return rig.store.totals().num_leased


def test_namespaces_of_a_session(rig: Rig) -> None:
    own, namespace = opened(rig)
    assert own.open(identity()) == (1, namespace)
    assert own.namespace(1) is namespace
    assert namespace.num_users == 1
    for unknown in (0, 2):
        with pytest.raises(UnknownNamespaceError) as refused:
            own.namespace(unknown)
        assert refused.value.field == "namespace_id"


def test_a_lease_ends_when_its_time_is_up(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1, 2)
    lease_id, pinned = own.acquire(namespace, keys(1, 2, 3), False, 5.0)
    assert pinned.found == b"\x03"
    rig.clock.advance(4.9)
    assert leased(rig) == 2
    rig.clock.advance(0.2)
    assert leased(rig) == 0
    with pytest.raises(UnknownLeaseError):
        own.renew(lease_id, 1.0)
    own.release(lease_id)


def test_no_lease_on_nothing(rig: Rig) -> None:
    own, namespace = opened(rig)
    assert own.acquire(namespace, keys(1), False, 0.0)[0] == 0
    assert len(rig.store.leases) == 0


def test_leading_only(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1, 3)
    assert own.acquire(namespace, keys(1, 2, 3), True, 0.0)[1].found == b"\x01"


def test_renewing_sets_the_remaining_time(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1)
    lease_id, _ = own.acquire(namespace, keys(1), False, 5.0)
    own.renew(lease_id, 20.0)
    rig.clock.advance(19.9)
    assert leased(rig) == 1
    own.renew(lease_id, 1.0)
    rig.clock.advance(1.0)
    assert leased(rig) == 0


def test_each_lease_ends_at_its_own_time(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1, 2, 3)
    for number, ttl_s in ((1, 3.0), (2, 1.0), (3, 2.0)):
        own.acquire(namespace, keys(number), False, ttl_s)
    left = []
    for _ in range(4):
        left.append(leased(rig))
        rig.clock.advance(1.0)
    assert left == [3, 2, 1, 0]


def test_renewing_often_takes_no_more_memory(rig: Rig) -> None:
    """Each renewal is for a shorter time, so that the lease is looked at earlier. The clock of this test keeps the
    callbacks of cancelled timers, of 64 bytes each; an entry of the lease has twice as much."""
    own, namespace = opened(rig)
    rig.put(namespace, 1)
    lease_id, _ = own.acquire(namespace, keys(1), False, 60.0)
    tracemalloc.start()
    try:
        for i in range(4000):
            own.renew(lease_id, 50.0 - i / 400)
        assert len(rig.store.leases) == 1
        entries = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/kvservice/store/*")])
    finally:
        tracemalloc.stop()
    assert sum(one.size for one in entries.statistics("filename")) < 400_000
    rig.clock.advance(40.0)
    assert leased(rig) == 1
    rig.clock.advance(0.1)
    assert leased(rig) == 0


def test_times_that_are_refused(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1)
    lease_id, _ = own.acquire(namespace, keys(1), False, 60.0)

    def acquire(ttl_s: float) -> None:
        own.acquire(namespace, keys(1), False, ttl_s)

    with each_row() as row:
        for ttl_s in (-1.0, 60.1, math.nan, math.inf):
            for name, call in (("acquire", acquire), ("renew", lambda ttl_s: own.renew(lease_id, ttl_s))):
                with row((name, ttl_s)):
                    with pytest.raises(InvalidArgumentError) as refused:
                        call(ttl_s)
                    assert refused.value.field == "ttl_s"
    own.release(lease_id)
    assert leased(rig) == 0


def test_a_time_of_0_is_the_longest(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1)
    own.acquire(namespace, keys(1), False, 0.0)
    rig.clock.advance(59.9)
    assert leased(rig) == 1
    rig.clock.advance(0.1)
    assert leased(rig) == 0


def test_limits_of_one_session() -> None:
    """It may have 4096 leases on 262,144 blocks together, and 4096 reservations."""
    most, some = 4096, keys(*range(SMALL_PER_SLAB))
    with rig_of(most // SMALL_PER_SLAB + 2) as rig:
        own = SessionStore(rig.store, "", 1)
        namespace = own.open(identity(block_bytes=SMALL_BYTES))[1]
        rig.put(namespace, *range(SMALL_PER_SLAB))
        for _ in range((1 << 18) // SMALL_PER_SLAB - 1):
            own.acquire(namespace, some, False, 0.0)
        own.acquire(namespace, keys(*range(1, SMALL_PER_SLAB)), False, 0.0)
        with pytest.raises(QuotaExceededError) as refused:
            own.acquire(namespace, keys(1, 2), False, 0.0)
        assert refused.value.metadata["limit"] == "leased_blocks"
        own.acquire(namespace, keys(1), False, 0.0)
        own.close()
        namespace = own.open(namespace.identity)[1]
        for _ in range(most):
            own.acquire(namespace, keys(0), False, 0.0)
        with pytest.raises(QuotaExceededError) as refused:
            own.acquire(namespace, keys(0), False, 0.0)
        assert refused.value.metadata["limit"] == "leases"
        assert len(rig.store.leases) == most
        for number in range(most):
            own.reserve(namespace, keys(1000 + number))
        with pytest.raises(QuotaExceededError) as refused:
            own.reserve(namespace, keys(8000))
        assert refused.value.metadata["limit"] == "reservations"
        assert rig.store.totals().num_reserved == most


def test_leases_and_reservations_are_a_sessions_own(rig: Rig) -> None:
    (own, namespace), (other, _) = opened(rig), opened(rig)
    rig.put(namespace, 1)
    lease_id, _ = own.acquire(namespace, keys(1), False, 0.0)
    reservation_id, _ = own.reserve(namespace, keys(2))
    other.release(lease_id)
    other.abort(reservation_id)
    with pytest.raises(UnknownLeaseError):
        other.renew(lease_id, 1.0)
    with pytest.raises(UnknownReservationError):
        other.reservation(reservation_id)
    assert (leased(rig), rig.store.totals().num_reserved) == (1, 1)


def test_a_part_of_a_reservation(rig: Rig) -> None:
    own, namespace = opened(rig)
    reservation_id, _ = own.reserve(namespace, keys(1, 2, 3))
    written, others = own.reservation(reservation_id).split(b"\x05")
    assert (written.keys, others.keys) == (keys(1, 3), keys(2))
    own.begin_commit(reservation_id)
    with pytest.raises(UnknownReservationError):
        own.begin_commit(reservation_id)
    own.commit(reservation_id, written, others, bytes(16))
    assert rig.store.lookup(namespace, keys(1, 2, 3)) == (1, b"\x05")
    assert rig.store.totals().num_reserved == 0
    with pytest.raises(UnknownReservationError):
        own.begin_commit(reservation_id)
    whole, none = written.split(b"")
    assert (whole, none.num_blocks) == (written, 0)


def test_closing_ends_everything(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1)
    lease_id, _ = own.acquire(namespace, keys(1), False, 0.0)
    reservation_id, _ = own.reserve(namespace, keys(2))
    opening = own.opening
    own.close()
    totals = rig.store.totals()
    assert (totals.num_leased, totals.num_reserved, namespace.num_users) == (0, 0, 0)
    assert (opening.ended, own.opening.ended) == (True, False)
    with pytest.raises(UnknownNamespaceError):
        own.namespace(1)
    with pytest.raises(UnknownReservationError):
        own.reservation(reservation_id)
    # The next client of the session gets other ids.
    namespace_id, namespace = own.open(identity())
    assert namespace_id > 1
    rig.put(namespace, 1)
    assert own.acquire(namespace, keys(1), False, 0.0)[0] > reservation_id > lease_id
    rig.clock.advance(100.0)


def test_reserved_blocks_of_a_writer_wait_for_its_end(rig: Rig) -> None:
    own, namespace = opened(rig)
    own.add_writer(1)
    own.add_writer(2)
    own.reserve(namespace, keys(1))
    in_use = rig.store.totals().used_bytes
    assert in_use > 0
    own.close()
    assert rig.store.totals().used_bytes == in_use
    rig.store.quarantine.ended(1)
    assert rig.store.totals().used_bytes == in_use
    rig.store.quarantine.ended(3)
    assert len(rig.store.quarantine) == 1
    rig.store.quarantine.ended(2)
    assert rig.store.totals().used_bytes == 0
    assert len(rig.store.quarantine) == 0


def test_reserved_blocks_of_a_writer_that_has_ended_are_free_at_once(rig: Rig) -> None:
    own, namespace = opened(rig)
    own.add_writer(1)
    own.reserve(namespace, keys(1))
    rig.store.quarantine.ended(1)
    own.close()
    assert rig.store.totals().used_bytes == 0
    assert len(rig.store.quarantine) == 0


def test_a_writer_that_closes_its_session_leaves_its_room_at_once(rig: Rig) -> None:
    own, namespace = opened(rig)
    own.add_writer(1)
    own.reserve(namespace, keys(1, 2))
    own.close(writers_done=True)
    assert rig.store.totals().used_bytes == 0
    assert len(rig.store.quarantine) == 0


def test_the_figures_show_blocks_in_quarantine(rig: Rig) -> None:
    own, namespace = opened(rig)
    own.add_writer(1)
    rig.put(namespace, 3)
    own.acquire(namespace, keys(3), False, 0.0)
    own.reserve(namespace, keys(1))
    own.reserve(namespace, keys(2, 4))

    def figures() -> tuple[int, int, int]:
        (one,) = rig.store.figures().values()
        return one.leased, one.reserved, one.quarantined

    assert figures() == (1, 3, 0)
    own.close()
    assert figures() == (0, 0, 3)
    rig.store.quarantine.ended(1)
    assert figures() == (0, 0, 0)


def test_a_key_of_a_lost_reservation_can_be_stored_elsewhere_at_once(rig: Rig) -> None:
    own, namespace = opened(rig)
    own.add_writer(1)
    _, lost = own.reserve(namespace, keys(1))
    own.close()
    others, namespace = opened(rig)
    _, again = others.reserve(namespace, keys(1))
    assert again.statuses == bytes([DONE])
    assert again.offsets != lost.offsets
    rig.store.quarantine.ended(1)
    assert rig.store.totals().num_reserved == 1


def test_nothing_waits_for_a_writer_without_reservations(rig: Rig) -> None:
    own, _ = opened(rig)
    own.add_writer(1)
    own.close()
    assert len(rig.store.quarantine) == 0
    assert own.opening.writers == frozenset()


def test_what_ended_with_its_client_is_counted(rig: Rig) -> None:
    own, namespace = opened(rig)
    rig.put(namespace, 1, 2)
    released, _ = own.acquire(namespace, keys(1), False, 0.0)
    for number in (1, 2):
        own.acquire(namespace, keys(number), False, 0.0)
    own.release(released)
    own.reserve(namespace, keys(3))
    own.close()
    assert str(own.ended) == "2 leases and 1 reservations ended"
    own.close()
    assert (own.ended.leases, own.ended.reservations) == (2, 1)
