"""The conditions under which the heap is trimmed."""

from __future__ import annotations

import ctypes
import gc

import pytest

from kvservice.server.watching.housekeeping import LEAST_BYTES, NUM_SAMPLES, HeapTrimmer, Malloc, freeze_heap

MIB = 1 << 20


class FakeMalloc(Malloc):
    """An allocator with 100 MiB in use. Trimmed memory still counts as free, as in glibc."""

    def __init__(self) -> None:
        self.spare, self.free, self.num_trims = 0, 0, 0

    def resident_bytes(self) -> int:
        return 100 * MIB + self.spare

    def free_bytes(self) -> int:
        return self.free

    def trim(self) -> None:
        self.num_trims += 1
        self.spare = 0


@pytest.fixture
def malloc() -> FakeMalloc:
    return FakeMalloc()


def sample(trimmer: HeapTrimmer, times: int) -> None:
    for _ in range(times):
        trimmer.sample()


def test_what_was_free_for_a_while_is_given_back(malloc: FakeMalloc) -> None:
    trimmer = HeapTrimmer(malloc)
    malloc.spare = malloc.free = LEAST_BYTES
    sample(trimmer, NUM_SAMPLES - 1)
    assert malloc.num_trims == 0
    trimmer.sample()
    assert (malloc.num_trims, malloc.spare) == (1, 0)
    sample(trimmer, 3 * NUM_SAMPLES)
    assert malloc.num_trims == 1, "what is free is resident no longer"


def test_the_collector_does_not_look_again_at_what_there_was() -> None:
    before, marker = gc.get_freeze_count(), [object()]
    freeze_heap()
    try:
        assert gc.get_freeze_count() > before
        assert not any(each is marker for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_what_comes_and_goes_is_kept(malloc: FakeMalloc) -> None:
    trimmer = HeapTrimmer(malloc)
    malloc.spare = LEAST_BYTES
    for n in range(5 * NUM_SAMPLES):
        malloc.free = 0 if n % NUM_SAMPLES == 0 else LEAST_BYTES
        trimmer.sample()
    assert malloc.num_trims == 0


def test_little_is_kept_and_what_is_in_use(malloc: FakeMalloc) -> None:
    trimmer = HeapTrimmer(malloc)
    malloc.spare = malloc.free = LEAST_BYTES - 1
    sample(trimmer, 3 * NUM_SAMPLES)
    malloc.spare, malloc.free = 10 * LEAST_BYTES, 0
    sample(trimmer, 3 * NUM_SAMPLES)
    assert malloc.num_trims == 0


def test_of_this_process() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library is not glibc")
    malloc = Malloc()
    assert malloc.resident_bytes() > MIB
    kept = [bytes(100_000) for _ in range(50)]
    before = malloc.free_bytes()
    del kept
    assert malloc.free_bytes() >= before
    malloc.trim()
