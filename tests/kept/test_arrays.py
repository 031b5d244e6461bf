"""Arrays that keep their content over restarts, and arrays that are zero at every start."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kept_files import HeldFiles

from kvservice.kept import KeptArrays, KeptState


@pytest.fixture
def keeper() -> Iterator[HeldFiles]:
    keeper = HeldFiles()
    yield keeper
    keeper.close()


def next_process(keeper: HeldFiles) -> KeptState:
    return KeptState.open(keeper.start(), {})


def read(arrays: KeptArrays) -> dict[str, list[Any]]:
    """Read the arrays as the observer does, from a descriptor that only reads and the manifest."""
    found = {}
    fd = arrays.read_only()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE)
        for name, kind, shape, offset in arrays.manifest:
            num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
            memory = mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ, offset=offset) if num_bytes else b""
            found[name] = np.frombuffer(memory, kind).reshape(shape).tolist()
    finally:
        os.close(fd)
    return found


def test_kept_arrays_keep_their_content_and_others_do_not(keeper: HeldFiles) -> None:
    state = next_process(keeper)
    state.arrays.kept("lengths", (2, 3), np.int64)[:] = 5
    state.arrays.kept("nothing", (0, 3), np.int64)
    state.arrays.zeros("calls", (4,), np.float64)[:] = 6
    state.ready()
    for _ in range(2):
        state = next_process(keeper)
        arrays = state.arrays
        calls, lengths = arrays.zeros("calls", (4,), np.float64), arrays.kept("lengths", (2, 3), np.int64)
        arrays.kept("nothing", (0, 3), np.int64)
        assert read(arrays) == {"calls": [0] * 4, "lengths": [[5] * 3] * 2, "nothing": []}
        calls[:], lengths[0] = 7, 5
        state.ready()


def test_an_array_that_is_no_longer_the_same_size_moves(keeper: HeldFiles) -> None:
    state = next_process(keeper)
    state.arrays.zeros("calls", (4000,), np.int64)[:] = 6
    state.arrays.kept("lengths", (2,), np.int64)[:] = 5
    state.ready()
    arrays = next_process(keeper).arrays
    calls, lengths = arrays.zeros("calls", (9000,), np.int64), arrays.kept("lengths", (2,), np.int64)
    more = arrays.zeros("more", (3,), np.int8)
    assert not calls.any()
    calls[:], more[:] = 8, 9
    assert lengths.tolist() == [5, 5]
    assert read(arrays) == {"calls": [8] * 9000, "lengths": [5, 5], "more": [9] * 3}


def test_a_kept_array_of_another_kind_is_refused(keeper: HeldFiles) -> None:
    state = next_process(keeper)
    state.arrays.kept("lengths", (2,), np.int64)
    state.ready()
    kinds: tuple[tuple[tuple[int, ...], npt.DTypeLike], ...] = (((3,), np.int64), ((2,), np.int32))
    for shape, dtype in kinds:
        state = next_process(keeper)
        with pytest.raises(ValueError, match="lengths was <i8"):
            state.arrays.kept("lengths", shape, dtype)
        state.end_attempt()


def test_a_name_is_one_array_and_private_ones_have_no_readers(keeper: HeldFiles) -> None:
    arrays = next_process(keeper).arrays
    one = arrays.kept("unfinished_device", (4,), np.int32, private=True)
    one[2] = 1
    assert arrays.kept("unfinished_device", (4,), np.int32, private=True) is one
    with pytest.raises(ValueError, match="has shape"):
        arrays.kept("unfinished_device", (5,), np.int32, private=True)
    arrays.kept("lengths", (2,), np.int64)
    arrays.zeros("calls", (1,), np.int64)
    assert list(read(arrays)) == ["lengths", "calls"]


def test_what_cannot_be_allocated_is_refused(keeper: HeldFiles) -> None:
    with pytest.raises(MemoryError, match="tables takes"):
        next_process(keeper).arrays.kept("tables", (1 << 40,), np.int64)
