"""The client process, with a store in its place that fails in every way that Mooncake's does."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from each_row import each_row
from mooncake_rig import BLOCK_BYTES, Blocks, keys_of

from kvservice.mooncake import STAGED_BYTES, MooncakeRequest, Operation, Outcome, Status, values_in_request
from kvservice.mooncake.serving import Client, SharedMemory

DIGEST = b"digest of a name"
# A trailer: a mark, the size of the value, its checksum, its key, and the beginning of the space's digest.
TRAILER = struct.Struct("<8sQQ32s8s")
TRAILER_BYTES = TRAILER.size


class FakeStore:
    """The calls of the library that the client makes. `codes` replaces what they return, by key."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.codes: dict[str, int] = {}
        self.registered: list[tuple[int, int]] = []
        self.num_parts: list[int] = []
        self.refuses_memory = False

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return -600 if self.refuses_memory else 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.codes.get(key, int(key in self.objects)) for key in keys]

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return self.batch_put_from_multi_buffers(keys, [[at] for at in addresses], [[size] for size in sizes])

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return self.batch_get_into_multi_buffers(keys, [[at] for at in addresses], [[size] for size in sizes])

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        for key, parts, part_sizes in zip(keys, addresses, sizes, strict=True):
            self.num_parts.append(len(parts))
            self._check_registered(parts, part_sizes)
            if key not in self.codes:
                self.objects[key] = b"".join(map(ctypes.string_at, parts, part_sizes))
        return [self.codes.get(key, 0) for key in keys]

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        codes = []
        for key, parts, part_sizes in zip(keys, addresses, sizes, strict=True):
            found = self.objects.get(key, b"")
            self._check_registered(parts, part_sizes)
            for address, size in zip(parts, part_sizes, strict=True):
                ctypes.memmove(address, found[:size], min(size, len(found)))
                found = found[size:]
            codes.append(self.codes.get(key, len(self.objects[key]) if key in self.objects else -704))
        return codes

    def _check_registered(self, parts: list[int], sizes: list[int]) -> None:
        for begin, size in zip(parts, sizes, strict=True):
            assert any(at <= begin and begin + size <= at + num_bytes for at, num_bytes in self.registered)

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        return [self.codes.get(key, 0 if self.objects.pop(key, None) else -704) for key in keys]

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        assert force
        return self.codes.get(pattern, 0)


class Rig:
    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.blocks = Blocks(num_blocks=16, block_bytes=block_bytes)
        self.store = FakeStore()
        memory = SharedMemory(self.blocks.memory.fd, self.blocks.memory.num_bytes)
        self.client = Client(self.store, memory)

    def serve(self, operation: Operation, *places: int, keys: bytes | None = None) -> tuple[Status, bytes]:
        values = self.blocks.values(*places, keys=keys)
        arrays = (values.offsets, values.checksums) if operation in (Operation.GET, Operation.PUT) else ()
        reply = self.client.serve(MooncakeRequest(operation, 5, DIGEST, self.blocks.block_bytes, values.keys, *arrays))
        assert reply.request_id == 5
        return reply.status, reply.body

    def get(self, *places: int, keys: bytes) -> tuple[bytes, tuple[int, ...]]:
        """Return outcomes and checksums."""
        status, body = self.serve(Operation.GET, *places, keys=keys)
        assert status is Status.OK
        return body[: len(places)], struct.unpack(f"<{len(places)}Q", body[len(places) :])

    def key(self, number: int) -> str:
        return f"kvs/{DIGEST.hex()}/{keys_of(number).hex()}"


def rig_of(block_bytes: int) -> Rig:
    """Return a client that has put the values 0, 1 and 2."""
    rig = Rig(block_bytes)
    rig.blocks.fill(0, 1, 2)
    assert rig.serve(Operation.PUT, 0, 1, 2) == (Status.OK, bytes([Outcome.DONE] * 3))
    return rig


@pytest.fixture(params=[BLOCK_BYTES, STAGED_BYTES + 1], ids=["staged", "direct"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return rig_of(request.param)


@pytest.fixture
def staged() -> Rig:
    return rig_of(BLOCK_BYTES)


def test_values_arrive_byte_by_byte_with_their_checksums(rig: Rig) -> None:
    checksums = struct.unpack("<3Q", rig.blocks.values(0, 1, 2).checksums)
    assert rig.get(10, 11, 12, keys=keys_of(0, 1, 2)) == (bytes([Outcome.DONE] * 3), checksums)
    assert (rig.blocks.bytes[10:13] == rig.blocks.bytes[:3]).all()
    assert rig.store.registered[0][1] == rig.blocks.memory.num_bytes


def test_a_small_value_and_its_trailer_are_one_part() -> None:
    for block_bytes, num_parts in ((1, 1), (STAGED_BYTES, 1), (STAGED_BYTES + 1, 2)):
        rig = Rig(block_bytes)
        rig.blocks.fill(0)
        assert rig.serve(Operation.PUT, 0) == (Status.OK, bytes([Outcome.DONE]))
        assert rig.store.num_parts == [num_parts]


def test_misses_between_values_leave_their_memory_alone(rig: Rig) -> None:
    rig.blocks.fill(10, 11, 12)
    before = rig.blocks.bytes[11].copy()
    checksums = struct.unpack("<2Q", rig.blocks.values(0, 2).checksums)
    outcomes = bytes([Outcome.DONE, Outcome.MISS, Outcome.DONE])
    assert rig.get(10, 11, 12, keys=keys_of(0, 99, 2)) == (outcomes, (checksums[0], 0, checksums[1]))
    assert (rig.blocks.bytes[[10, 12]] == rig.blocks.bytes[[0, 2]]).all()
    assert (rig.blocks.bytes[11] == before).all()


def test_a_request_with_too_many_values_fails() -> None:
    rig = Rig(STAGED_BYTES)
    most = values_in_request(STAGED_BYTES)
    for count, status in ((most, Status.OK), (most + 1, Status.FAILED)):
        values = rig.blocks.values(*[0] * count, keys=keys_of(*range(count)))
        arrays = (values.keys, values.offsets, values.checksums)
        request = MooncakeRequest(Operation.PUT, 5, DIGEST, STAGED_BYTES, *arrays)
        assert rig.client.serve(request).status is status


def test_objects_are_the_value_and_its_trailer(rig: Rig) -> None:
    """In the format that other daemons read."""
    for number in range(3):
        found = rig.store.objects[rig.key(number)]
        assert found[:-TRAILER_BYTES] == rig.blocks.bytes[number].tobytes()
        (checksum,) = struct.unpack("<Q", rig.blocks.values(number).checksums)
        fields = b"kvsblk\0\1", rig.blocks.block_bytes, checksum, keys_of(number), DIGEST[:8]
        assert found[-TRAILER_BYTES:] == TRAILER.pack(*fields)


def test_damage_anywhere_is_noticed(rig: Rig) -> None:
    """In the value, and in each field of its trailer."""
    right = rig.store.objects[rig.key(1)]
    with each_row() as row:
        for at in (0, 1000, -1, *(place - TRAILER_BYTES for place in (0, 8, 16, 30, 56)), None):
            with row(at):
                damaged = bytearray(right)
                if at is None:
                    damaged[-TRAILER_BYTES:] = bytes(TRAILER_BYTES)
                else:
                    damaged[at] ^= 1
                rig.store.objects[rig.key(1)] = bytes(damaged)
                outcomes, checksums = rig.get(10, 11, 12, keys=keys_of(0, 1, 2))
                assert outcomes == bytes([Outcome.DONE, Outcome.CORRUPT, Outcome.DONE])
                assert checksums[1] == 0
                assert 0 not in (checksums[0], checksums[2])


def test_an_object_under_the_key_of_another_is_corrupt(staged: Rig) -> None:
    staged.store.objects[staged.key(1)] = staged.store.objects[staged.key(2)]
    assert staged.get(10, keys=keys_of(1)) == (bytes([Outcome.CORRUPT]), (0,))


NOT_ARRIVED = {0: Outcome.MISS, -704: Outcome.MISS, 100: Outcome.CORRUPT, -800: Outcome.BROKEN, -707: Outcome.BROKEN}


def test_objects_that_do_not_arrive(staged: Rig) -> None:
    """0 is Mooncake's answer for an object whose bytes it has lost."""
    with each_row() as row:
        for code, outcome in NOT_ARRIVED.items():
            with row(code):
                staged.store.codes[staged.key(1)] = code
                assert staged.get(10, 11, keys=keys_of(1, 2))[0] == bytes([outcome, Outcome.DONE])


def test_an_old_trailer_is_not_taken_for_a_new_one(rig: Rig) -> None:
    """The store says that the object has arrived, but nothing was written."""
    size = rig.blocks.block_bytes + TRAILER_BYTES
    for _ in range(16):  # every trailer's place has been used
        assert rig.get(0, keys=keys_of(0))[0] == bytes([Outcome.DONE])
    del rig.store.objects[rig.key(0)]
    rig.store.codes[rig.key(0)] = size
    assert rig.get(0, keys=keys_of(0))[0] == bytes([Outcome.CORRUPT])


PUT = {0: Outcome.DONE, -705: Outcome.DONE, -200: Outcome.REFUSED, -101: Outcome.REFUSED, -800: Outcome.BROKEN}


def test_values_that_are_not_stored(staged: Rig) -> None:
    with each_row() as row:
        for code, outcome in PUT.items():
            with row(code):
                staged.store.codes[staged.key(1)] = code
                assert staged.serve(Operation.PUT, 1, 2) == (Status.OK, bytes([outcome, Outcome.DONE]))


def test_lookups_and_removals(staged: Rig) -> None:
    staged.store.codes[staged.key(2)] = -1
    there = bytes([Outcome.DONE, Outcome.MISS, Outcome.BROKEN])
    assert staged.serve(Operation.EXIST, 0, 9, 2) == (Status.OK, there)
    assert staged.serve(Operation.REMOVE, 0, 9, 2) == (Status.OK, there)
    assert staged.serve(Operation.EXIST, 0) == (Status.OK, bytes([Outcome.MISS]))
    assert staged.serve(Operation.CLEAR) == (Status.OK, b"")


def test_a_master_that_does_not_answer_fails_the_request(staged: Rig) -> None:
    staged.store.codes |= {staged.key(0): -900, staged.key(1): -901}
    with each_row() as row:
        for operation in (Operation.EXIST, Operation.GET, Operation.PUT, Operation.REMOVE):
            with row(operation):
                assert staged.serve(operation, 0, 1) == (Status.FAILED, b"the master does not answer (code -900)")
                assert staged.serve(operation, 0, 2)[0] is Status.OK, "only one value failed"


def test_a_clear_that_fails(staged: Rig) -> None:
    staged.store.codes[f"^kvs/{DIGEST.hex()}/"] = -900
    assert staged.serve(Operation.CLEAR) == (Status.FAILED, b"the master does not clear (code -900)")


def test_offsets_outside_the_memory_fail(rig: Rig) -> None:
    last = rig.blocks.memory.num_bytes - rig.blocks.block_bytes
    for offset, status in ((last, Status.OK), (last + 1, Status.FAILED)):
        packed = struct.pack("<Q", offset)
        request = MooncakeRequest(Operation.PUT, 5, DIGEST, rig.blocks.block_bytes, keys_of(1), packed, packed)
        assert rig.client.serve(request).status is status


def test_memory_that_cannot_be_registered() -> None:
    blocks, store = Blocks(num_blocks=1), FakeStore()
    store.refuses_memory = True
    with pytest.raises(Exception, match=r"cannot be registered \(code -600\)"):
        Client(store, SharedMemory(blocks.memory.fd, blocks.memory.num_bytes))


def test_values_of_no_whole_words() -> None:
    rig = Rig()
    rig.blocks = Blocks(num_blocks=4, block_bytes=4097)
    rig.client = Client(rig.store, SharedMemory(rig.blocks.memory.fd, rig.blocks.memory.num_bytes))
    rig.blocks.bytes[0] = np.arange(4097) % 251
    assert rig.serve(Operation.PUT, 0) == (Status.OK, bytes([Outcome.DONE]))
    assert rig.get(1, keys=keys_of(0))[0] == bytes([Outcome.DONE])
    assert (rig.blocks.bytes[1] == rig.blocks.bytes[0]).all()
