"""The daemon's process is killed at each change of the store, and the next one goes on."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

import pytest
from blocks_rig import finish, identity, keys
from each_row import each_row
from killed_store import Host, Killed, StoreProcess, checksums, content, killed_everywhere
from store_rig import unpack

from kvservice.errors import UnknownLeaseError, UnknownReservationError
from kvservice.store import Reservation

FIRST, SECOND, LOST = 1, 2, 3
NUMBERS = tuple(range(100))


class Scene:
    """Two sessions and what is left of a third. The first has a lease on 1 and on 2, which was removed, and a
    reservation of 10 and 11; the second has one of 20; one of 30 is in quarantine. A process of each can write."""

    def __init__(self) -> None:
        self.host = Host(num_slabs=5)
        self.process = process = self.host.process((FIRST, SECOND, LOST))
        self.writers = {number: process.add_writer(number) for number in (FIRST, SECOND, LOST)}
        process.put(1, 2, 3, 4)
        namespace = process.namespace(FIRST)
        self.lease_id, _ = process.sessions[FIRST].acquire(namespace, keys(1, 2), False, 30.0)
        process.store.remove(namespace, keys(2))
        self.reservations: dict[int, int] = {}
        # The places where the writers of each session may still write.
        self.writable: dict[int, set[int]] = {}
        for session_id, numbers in ((FIRST, (10, 11)), (SECOND, (20,)), (LOST, (30,))):
            reserved = process.sessions[session_id].reserve(process.namespace(session_id), keys(*numbers))
            self.reservations[session_id] = reserved[0]
            self.writable[session_id] = set(unpack(reserved[1].offsets))
        process.sessions[LOST].close()
        del process.sessions[LOST]
        self.before = process.found(SECOND, *NUMBERS)

    def fill(self) -> None:
        """Let the writers of the first session write."""
        reservation = self.process.sessions[FIRST].reservation(self.reservations[FIRST])
        for number, offset in zip((10, 11), unpack(reservation.offsets), strict=True):
            self.host.block(offset)[:] = content(number)

    def commit(self, written: bytes) -> None:
        own, reservation_id = self.process.sessions[FIRST], self.reservations[FIRST]
        parts: tuple[Reservation, Reservation] = own.reservation(reservation_id).split(written)
        own.begin_commit(reservation_id)
        own.commit(reservation_id, *parts, checksums([10, 11] if not written else [10]))


def acquire(scene: Scene) -> None:
    scene.process.sessions[FIRST].acquire(scene.process.namespace(FIRST), keys(3, 4), False, 1.0)


def renew(scene: Scene) -> None:
    scene.process.sessions[FIRST].renew(scene.lease_id, 40.0)


def release(scene: Scene) -> None:
    scene.process.sessions[FIRST].release(scene.lease_id)


def reserve(scene: Scene) -> None:
    """Nobody is told about these places, so they may be used again."""
    scene.process.sessions[FIRST].reserve(scene.process.namespace(FIRST), keys(*range(40, 50)))


def commit(scene: Scene) -> None:
    scene.fill()
    scene.commit(b"")


def commit_a_part(scene: Scene) -> None:
    scene.fill()
    scene.commit(b"\x01")


def commit_in_progress(scene: Scene) -> None:
    scene.process.sessions[FIRST].begin_commit(scene.reservations[FIRST])
    scene.process.put(5)


def abort(scene: Scene) -> None:
    scene.process.sessions[FIRST].abort(scene.reservations[FIRST])


def close(scene: Scene) -> None:
    scene.process.sessions[FIRST].close(writers_done=True)


def lose(scene: Scene) -> None:
    scene.process.sessions[FIRST].close()


def a_writer_ends(scene: Scene) -> None:
    scene.process.end_writer(scene.writers[LOST])


def put(scene: Scene) -> None:
    scene.process.put(*range(50, 60))


def remove(scene: Scene) -> None:
    scene.process.store.remove(scene.process.namespace(FIRST), keys(1, 3))


def open_another(scene: Scene) -> None:
    finish(scene.process.store.make_place(identity("other")))
    scene.process.sessions[FIRST].open(identity("other"), 1 << 14)


def next_writer(scene: Scene) -> None:
    scene.process.add_writer(FIRST)


# Operations, the blocks of before that each may end, and the sessions whose places it gives back.
OPERATIONS: list[tuple[Callable[[Scene], None], set[int], set[int]]] = [
    (acquire, set(), set()),
    (renew, set(), set()),
    (release, set(), set()),
    (reserve, {3, 4}, set()),
    (commit, set(), {FIRST}),
    (commit_a_part, set(), {FIRST}),
    (commit_in_progress, set(), set()),
    (abort, set(), {FIRST}),
    (close, set(), {FIRST}),
    (lose, set(), set()),
    (a_writer_ends, set(), {LOST}),
    (put, {3, 4}, set()),
    (remove, {1, 3}, set()),
    (open_another, set(), set()),
    (next_writer, set(), set()),
]


@pytest.mark.parametrize("survivors", [(FIRST, SECOND), (SECOND,)], ids=["sessions go on", "a session is lost"])
def test_killed_at_each_change(survivors: tuple[int, ...]) -> None:
    """It fails if a block is lost or moved, or if a place is given away where a process may still write."""
    with each_row() as row:
        for operation, ended, given_back in OPERATIONS:
            with row(operation.__name__):
                check_killed(operation, ended, given_back, survivors)


def check_killed(
    operation: Callable[[Scene], None], ended: set[int], given_back: set[int], survivors: tuple[int, ...]
) -> None:
    def run(count: int) -> bool:
        scene, killed = Scene(), False
        try:
            with scene.host.point.at(count):
                operation(scene)
        except Killed:
            killed = True
        process = scene.host.process(survivors)
        finish(process.store.check_in_slices())
        found = process.found(SECOND, *NUMBERS)
        for number, place in scene.before.items():
            assert found.get(number, place) == place, "a block has another place or version"
        assert scene.before.keys() - ended <= found.keys()
        forbidden = set().union(*(places for number, places in scene.writable.items() if number not in given_back))
        assert forbidden.isdisjoint(places_for_all(process)), "a place is given away where a process may still write"
        process.end()
        return killed

    killed_everywhere(run)


def places_for_all(process: StoreProcess) -> set[int]:
    """Fill the store with other blocks. Returns their places."""
    reserved = process.store.reserve(process.namespace(SECOND), keys(*range(1000, 1100)))
    places = set(unpack(reserved.offsets))
    process.store.abort(reserved.slots)
    return places


@pytest.mark.parametrize("survivors", [(FIRST, SECOND), (SECOND,)], ids=["sessions go on", "a session is lost"])
def test_killed_at_each_change_of_the_recovery(survivors: tuple[int, ...]) -> None:
    def run(count: int) -> bool:
        scene, killed = Scene(), False
        scene.process.store.reserve(scene.process.namespace(FIRST), keys(60))
        scene.host.living.discard(scene.writers[SECOND])
        try:
            with scene.host.point.at(count):
                scene.host.process(survivors)
        except Killed:
            killed = True
        process = scene.host.process(survivors)
        assert process.found(SECOND, *NUMBERS) == scene.before
        assert (scene.writable[FIRST] | scene.writable[LOST]).isdisjoint(places_for_all(process))
        if FIRST in survivors:
            assert process.sessions[FIRST].reservation(scene.reservations[FIRST]).num_blocks == 2
        process.end()
        return killed

    killed_everywhere(run)


def test_leases_and_reservations_go_on() -> None:
    scene = Scene()
    first, second = scene.process.sessions[FIRST], scene.process.sessions[SECOND]
    namespace = scene.process.namespace(FIRST)
    ids = [first.open(identity())[0], second.open(identity())[0]]
    scene.host.clock.advance(25.0)
    process = scene.host.process((FIRST, SECOND))
    counts = process.recovery
    assert (counts.blocks, counts.leases, counts.reservations, counts.quarantined) == (3, 1, 2, 1)
    own = process.sessions[FIRST]
    assert own.namespace(ids[0]).number == namespace.number
    assert own.namespace(ids[0]).num_users == len(ids)
    assert own.opening.writers == {scene.writers[FIRST]}
    assert own.reservation(scene.reservations[FIRST]) == Reservation(
        own.namespace(ids[0]),
        *(getattr(first.reservation(scene.reservations[FIRST]), n) for n in ("slots", "offsets", "keys")),
    )
    assert process.store.totals().num_leased == 3, "1, 2 and the block in quarantine"
    own.renew(scene.lease_id, 10.0)
    scene.host.clock.advance(9.0)
    assert process.store.totals().num_leased == 3
    scene.host.clock.advance(1.0)
    assert process.store.totals().num_leased == 1
    with pytest.raises(UnknownLeaseError):
        own.renew(scene.lease_id, 10.0)


def test_a_lease_whose_time_passed_meanwhile_ends() -> None:
    scene = Scene()
    scene.host.clock.now += 31.0
    process = scene.host.process((FIRST, SECOND))
    scene.host.clock.advance(0.0)
    assert process.store.totals().num_leased == 1


def test_ids_are_never_used_again() -> None:
    scene = Scene()
    own = scene.process.sessions[FIRST]
    own.release(scene.lease_id)
    own.abort(scene.reservations[FIRST])
    namespace_id, _ = own.open(identity())
    scene.process.sessions[SECOND].close()
    process = scene.host.process((FIRST, SECOND))
    own, namespace = process.sessions[FIRST], process.namespace(FIRST)
    lease_id, _ = own.acquire(namespace, keys(1), False, 1.0)
    reservation_id, _ = own.reserve(namespace, keys(70))
    assert min(lease_id, reservation_id) > max(scene.lease_id, *scene.reservations.values(), *scene.writers.values())
    assert process.sessions[SECOND].open(identity())[0] > namespace_id
    with pytest.raises(UnknownReservationError):
        own.reservation(scene.reservations[FIRST])


def test_the_order_of_eviction_goes_on() -> None:
    scene = Scene()
    namespace = scene.process.namespace(FIRST)
    scene.process.store.touch(namespace, keys(3))
    process = scene.host.process((FIRST, SECOND))
    room = (process.host.num_bytes - process.store.totals().used_bytes) // 4096
    process.put(*range(200, 200 + room))
    evicted = [number for number in (1, 3, 4) if number not in process.found(SECOND, *NUMBERS)]
    assert 1 not in evicted
    process.put(300)
    assert process.found(SECOND, 1, 3).keys() >= {1}


def test_a_namespace_keeps_its_quota() -> None:
    scene = Scene()
    namespace = scene.process.namespace(FIRST)
    scene.process.store.set_quota(namespace, 20_000)
    process = scene.host.process((FIRST, SECOND))
    assert process.namespace(SECOND).quota_bytes == 20_000
    process.put(80)
    assert process.store.totals().used_bytes <= 10 * 4096


def test_random_operations_with_kills() -> None:
    """Clients write wherever they may, also long after their sessions were lost."""
    with each_row() as row:
        for seed in range(10):
            with row(seed):
                run_with_kills(seed)


def run_with_kills(seed: int) -> None:
    random = Random(seed)
    host = Host(num_slabs=5)
    sessions = {1, 2}
    process = host.process(tuple(sessions))
    writers = {number: process.add_writer(number) for number in sessions}
    # The places and keys that each writer was told, until it says that it has finished with them.
    told: dict[int, dict[int, int]] = {}
    reservations: list[tuple[int, int]] = []
    for _ in range(150):
        number, some = random.choice(sorted(sessions)), [random.randrange(30) for _ in range(random.randint(1, 4))]
        for places in told.values():
            for offset, key in places.items():
                host.block(offset)[:] = content(key)
        host.point.left = random.randrange(0, 12)
        try:
            random_operation(process, random, number, some, told, reservations, writers)
            host.point.left = 0
        except Killed:
            if random.random() < 0.3:  # this session does not come back
                reservations = [one for one in reservations if one[0] != number]
                sessions.remove(number)
                sessions.add(max(sessions | {number}) + 1)
            process = host.process(tuple(sessions))
            for added in sessions - writers.keys():
                writers[added] = process.add_writer(added)
        for own in sessions:
            process.found(own, *range(30))
        finish(process.store.check_in_slices())
    told.clear()
    process.end()


def random_operation(
    process: StoreProcess,
    random: Random,
    number: int,
    some: list[int],
    told: dict[int, dict[int, int]],
    reservations: list[tuple[int, int]],
    writers: dict[int, int],
) -> None:
    own, namespace = process.sessions[number], process.namespace(number)
    choice = random.randrange(7)
    if choice == 0:
        reservation_id, reserved = own.reserve(namespace, keys(*some))
        if reservation_id:
            listed = struct.iter_unpack("<Q24x", reserved.keys)
            told[reservation_id] = dict(zip(unpack(reserved.offsets), (key for (key,) in listed), strict=True))
            reservations.append((number, reservation_id))
    elif choice == 1:
        mine = [one for one in reservations if one[0] == number]
        if mine:
            reservations.remove(mine[0])
            written = told.pop(mine[0][1])  # the client writes no more
            try:
                parts = own.reservation(mine[0][1]).split(b"")
                own.begin_commit(mine[0][1])
                own.commit(mine[0][1], *parts, checksums(list(written.values())))
            except UnknownReservationError:
                pass
    elif choice == 2:
        process.put(*some)
    elif choice == 3:
        own.acquire(namespace, keys(*some), False, random.uniform(1.0, 20.0))
    elif choice == 4:
        process.store.remove(namespace, keys(*some))
    elif choice == 5:
        process.host.clock.advance(random.uniform(0.0, 5.0))
    else:
        ended = writers.pop(number)
        for reservation_id in [one for owner, one in reservations if owner == number]:
            told.pop(reservation_id, None)
        reservations[:] = [one for one in reservations if one[0] != number]
        process.end_writer(ended)
        own.close()
        writers[number] = process.add_writer(number)
