"""The store's index, compared with the model after each call, over memory whose contents are checked.

A writer fills a reserved block with bytes that derive from its key and version. Blocks under a lease must keep those
bytes and their version, and afterwards the version must tell whether they are still there. All results of the two must
be equal, except that the versions of the model start at another number.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from store_model import StoreModel
from store_rig import DONE, RECORD_BYTES, Store, bits, key_of, keys_of, pack, unpack

from kvservice import _ext

NAMES = st.lists(st.integers(0, 25), max_size=12)
SLAB_BYTES = 16384
# The last one is the largest block of a slab.
BLOCK_BYTES = (1, 63, 64, 1000, 4095, 4096, 4097, SLAB_BYTES - 4096)
COUNTS = (
    "num_blocks",
    "num_leased",
    "num_reserved",
    "num_condemned",
    "num_slabs",
    "num_busy_slabs",
    "used_bytes",
    "num_evicted",
    "num_unoffered",
    "num_offered",
)


@dataclass(frozen=True)
class Lease:
    """Blocks of one namespace, by slot, with their names, places and versions."""

    namespace: int
    names: tuple[int, ...]
    slots: bytes
    offsets: bytes
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Reservation:
    namespace: int
    names: tuple[int, ...]
    slots: bytes
    offsets: bytes


class StoreMachine(RuleBasedStateMachine):
    """Calls in any order, with valid arguments."""

    @initialize(
        num_slabs=st.integers(1, 5),
        sizes=st.lists(st.sampled_from(BLOCK_BYTES), min_size=1, max_size=4),
        quota=st.sampled_from([0, 1, 3, 1 << 20]),
        seed=st.integers(0, (1 << 64) - 1),
    )
    def open(self, num_slabs: int, sizes: list[int], quota: int, seed: int) -> None:
        self.store = Store(num_slabs, SLAB_BYTES, seed)
        self.model = StoreModel(0, num_slabs * SLAB_BYTES, SLAB_BYTES, 0, 0)
        self.sizes: dict[int, int] = {}
        self.quotas: dict[int, int] = {}
        self.leases: list[Lease] = []
        self.ended: list[Lease] = []
        self.reservations: list[Reservation] = []
        self.condemned: list[bytes] = []
        self.first_version: int | None = None
        # One namespace has a quota of a few blocks.
        for size, blocks in zip(sizes, [quota] + [1 << 20] * len(sizes), strict=False):
            number = self.both("open", size, size * blocks)
            self.sizes[number], self.quotas[number] = size, size * blocks
        for number in self.sizes:
            self.both("geometry", number)
        self.both("record_removed", True)

    def both(self, name: str, *arguments: Any) -> Any:
        result = getattr(self.store.index, name)(*arguments)
        assert result == getattr(self.model, name)(*arguments), name
        return result

    def block(self, namespace: int, offset: int) -> NDArray[np.uint8]:
        return self.store.memory[offset : offset + self.sizes[namespace]]

    def content(self, namespace: int, name: int, version: int) -> NDArray[np.uint8]:
        seed = [namespace, name, version & 0xFFFFFFFF, version >> 32]
        return np.random.default_rng(seed).integers(0, 256, self.sizes[namespace], dtype=np.uint8)

    def namespace(self, index: int) -> int:
        return list(self.sizes)[index % len(self.sizes)]

    @rule(index=st.integers(0, 3), names=NAMES)
    def reserve(self, index: int, names: list[int]) -> None:
        namespace = self.namespace(index)
        statuses, slots, offsets = self.both("reserve", namespace, keys_of(names))
        reserved = tuple(name for name, status in zip(names, statuses, strict=True) if status == DONE)
        if reserved:
            self.reservations.append(Reservation(namespace, reserved, slots, offsets))

    @precondition(lambda self: self.reservations)
    @rule(index=st.integers(0, 100))
    def commit(self, index: int) -> None:
        reservation = self.reservations.pop(index % len(self.reservations))
        namespace = reservation.namespace
        versions = self.store.versions(namespace, reservation.offsets)
        for name, offset, version in zip(reservation.names, unpack(reservation.offsets), versions, strict=True):
            self.block(namespace, offset)[:] = self.content(namespace, name, version)
        checksums = _ext.store_checksums(self.store.address, reservation.offsets, self.sizes[namespace], 1)
        self.both("commit", reservation.slots, checksums)
        assert self.both("checksums", reservation.slots) == checksums

    @precondition(lambda self: self.reservations)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        self.both("abort", self.reservations.pop(index % len(self.reservations)).slots)

    @precondition(lambda self: self.reservations)
    @rule(index=st.integers(0, 100))
    def condemn(self, index: int) -> None:
        reservation = self.reservations.pop(index % len(self.reservations))
        self.both("condemn", reservation.slots)
        self.condemned.append(reservation.slots)

    @precondition(lambda self: self.condemned)
    @rule(index=st.integers(0, 100))
    def release_condemned(self, index: int) -> None:
        self.both("release", self.condemned.pop(index % len(self.condemned)))

    @rule(index=st.integers(0, 3), names=NAMES, leading_only=st.booleans(), counted=st.booleans())
    def acquire(self, index: int, names: list[int], leading_only: bool, counted: bool) -> None:
        namespace = self.namespace(index)
        arguments = namespace, keys_of(names), leading_only, counted
        found, slots, offsets, versions = self.store.index.acquire(*arguments)
        *expected, modelled = self.model.acquire(*arguments)
        assert [found, slots, offsets] == expected
        for version, number in zip(unpack(versions), unpack(modelled), strict=True):
            self.first_version = self.first_version or version - number
            assert version - number == self.first_version
        leased = tuple(name for name, bit in zip(names, bits(found, len(names)), strict=True) if bit)
        if leased:
            self.leases.append(Lease(namespace, leased, slots, offsets, unpack(versions)))

    @rule(index=st.integers(0, 3), most=st.integers(0, 5), newest_first=st.booleans())
    def coldest(self, index: int, most: int, newest_first: bool) -> None:
        namespace = self.namespace(index)
        slots, keys, offsets, _, _ = self.both("coldest", namespace, most, newest_first)
        assert len(keys) == 4 * len(slots)
        if slots:
            known = {key_of(name): name for name in range(26)}
            self.leases.append(
                Lease(
                    namespace,
                    tuple(known[keys[begin : begin + 32]] for begin in range(0, len(keys), 32)),
                    slots,
                    offsets,
                    self.store.versions(namespace, offsets),
                )
            )

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        lease = self.leases.pop(index % len(self.leases))
        self.both("release", lease.slots)
        self.ended = [*self.ended[-20:], lease]

    @rule(index=st.integers(0, 3), names=NAMES)
    def touch(self, index: int, names: list[int]) -> None:
        self.both("touch", self.namespace(index), keys_of(names))

    @rule(index=st.integers(0, 3), names=NAMES)
    def remove(self, index: int, names: list[int]) -> None:
        self.both("remove", self.namespace(index), keys_of(names))

    @rule(index=st.integers(0, 3), most=st.integers(0, 9))
    def clear(self, index: int, most: int) -> None:
        self.both("clear", self.namespace(index), most)

    @rule(index=st.integers(0, 3), most=st.integers(0, 5))
    def evict_blocks(self, index: int, most: int) -> None:
        self.both("evict_blocks", self.namespace(index), most)

    @rule(index=st.integers(0, 3), most_slabs=st.integers(0, 3), most_blocks=st.integers(0, 5))
    def empty_slabs(self, index: int, most_slabs: int, most_blocks: int) -> None:
        self.both("empty_slabs", self.namespace(index), most_slabs, most_blocks)

    @rule(index=st.integers(0, 3), blocks=st.sampled_from([0, 1, 3, 1 << 20]))
    def set_quota(self, index: int, blocks: int) -> None:
        namespace = self.namespace(index)
        self.quotas[namespace] = self.sizes[namespace] * blocks
        self.both("set_quota", namespace, self.quotas[namespace])

    @rule(seed=st.integers(0, (1 << 64) - 1), choices=st.randoms(use_true_random=False))
    def restart(self, seed: int, choices: Random) -> None:
        """Kill the process between two calls. Some leases, reservations and blocks in quarantine go on."""
        self.store.restart(seed)
        sizes = [(number, size, self.quotas[number]) for number, size in self.sizes.items()]
        found = [set(unpack(slots)) for slots in self.store.index.recover(sizes)]
        assert found == [set(unpack(slots)) for slots in self.model.recover(sizes)]
        reservations, condemned, leases = self.reservations, self.condemned, self.leases
        assert found[0] == {slot for one in reservations for slot in unpack(one.slots)}
        self.reservations = [one for one in reservations if choices.random() < 0.5]
        self.condemned = [slots for slots in condemned if choices.random() < 0.5]
        self.leases = [one for one in leases if choices.random() < 0.5]
        for lease in self.leases:
            self.both("lease", lease.slots)
        for reservation in reservations:
            if reservation not in self.reservations:
                self.both("abort", reservation.slots)
        self.both("release", pack(sorted(found[1].difference(*map(unpack, self.condemned)))))
        self.ended = [*self.ended[-20:], *(one for one in leases if one not in self.leases)]
        self.both("record_removed", True)

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def same_state(self) -> None:
        for number in self.sizes:
            self.both("lookup", number, keys_of(range(26)))
            self.both("needed", number, keys_of([*range(26), 3]))
        for counts, modelled in [
            *((self.store.index.stats(number), self.model.stats(number)) for number in self.sizes),
            (self.store.index.totals(), self.model.totals()),
        ]:
            assert [getattr(counts, name) for name in COUNTS] == [getattr(modelled, name) for name in COUNTS]
        assert self.store.index.num_free_slabs == self.model.num_free_slabs
        self.both("take_removed")
        self.model.check(1)
        self.store.check()

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def leased_blocks_are_unchanged(self) -> None:
        for lease in self.leases:
            assert self.store.versions(lease.namespace, lease.offsets) == lease.versions
            for name, offset, version in zip(lease.names, unpack(lease.offsets), lease.versions, strict=True):
                assert np.array_equal(self.block(lease.namespace, offset), self.content(lease.namespace, name, version))
                self.check_record(lease.namespace, name, offset, version)

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def the_version_tells_whether_a_block_is_still_there(self) -> None:
        for lease in self.ended:
            now = self.store.versions(lease.namespace, lease.offsets)
            for name, offset, version, current in zip(
                lease.names, unpack(lease.offsets), lease.versions, now, strict=True
            ):
                if current == version:
                    expected = self.content(lease.namespace, name, version)
                    assert np.array_equal(self.block(lease.namespace, offset), expected)

    def check_record(self, namespace: int, name: int, offset: int, version: int) -> None:
        first_block, stride, _ = self.store.index.geometry(namespace)
        slab = offset // SLAB_BYTES * SLAB_BYTES
        at = slab + (offset - slab - first_block) // stride * RECORD_BYTES
        record = self.store.memory[at : at + RECORD_BYTES].tobytes()
        checksum = _ext.store_checksums(self.store.address, pack([offset]), self.sizes[namespace], 1)
        assert record[:16] == pack([version]) + checksum
        assert record[16:48] == key_of(name)
        assert record[48:52] == namespace.to_bytes(4, "little")
        assert record[56:] == pack([stride])


def of_examples(count: int) -> settings:
    return settings(max_examples=count, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


class LongStoreMachine(StoreMachine):
    """The same calls, for a longer run."""


TestStore = StoreMachine.TestCase
TestStore.settings = of_examples(10)
TestLongStore = pytest.mark.slow(LongStoreMachine.TestCase)
TestLongStore.settings = of_examples(40)
