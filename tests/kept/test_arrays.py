"""Arrays that keep their content over restarts, and arrays that are zero at every start."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvservice.kept import KeptArrays
from kvservice.telemetry.arrays import SharedArrays, open_arrays


def next_process(arrays: SharedArrays) -> SharedArrays:
    return SharedArrays("next", os.dup(arrays.fd), json.loads(json.dumps(arrays.manifest)))


def read(arrays: SharedArrays) -> dict[str, list[Any]]:
    fd = arrays.read_only()
    try:
        return {name: array.tolist() for name, array in open_arrays(fd, arrays.manifest).items()}
    finally:
        os.close(fd)


def test_kept_arrays_keep_their_content_and_others_do_not() -> None:
    arrays = SharedArrays()
    arrays.kept("lengths", (2, 3), np.int64)[:] = 5
    arrays.kept("nothing", (0, 3), np.int64)
    arrays.zeros("calls", (4,), np.float64)[:] = 6
    for _ in range(2):
        arrays = next_process(arrays)
        calls, lengths = arrays.zeros("calls", (4,), np.float64), arrays.kept("lengths", (2, 3), np.int64)
        arrays.kept("nothing", (0, 3), np.int64)
        assert read(arrays) == {"calls": [0] * 4, "lengths": [[5] * 3] * 2, "nothing": []}
        calls[:], lengths[0] = 7, 5


def test_an_array_that_is_no_longer_the_same_size_moves() -> None:
    arrays = SharedArrays()
    arrays.zeros("calls", (4000,), np.int64)[:] = 6
    arrays.kept("lengths", (2,), np.int64)[:] = 5
    arrays = next_process(arrays)
    calls, lengths = arrays.zeros("calls", (9000,), np.int64), arrays.kept("lengths", (2,), np.int64)
    more = arrays.zeros("more", (3,), np.int8)
    assert not calls.any()
    calls[:], more[:] = 8, 9
    assert lengths.tolist() == [5, 5]
    assert read(arrays) == {"calls": [8] * 9000, "lengths": [5, 5], "more": [9] * 3}


@pytest.mark.parametrize(("shape", "dtype"), [((3,), np.int64), ((2,), np.int32)])
def test_a_kept_array_of_another_kind_is_refused(shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    arrays = SharedArrays()
    arrays.kept("lengths", (2,), np.int64)
    with pytest.raises(ValueError, match="lengths was <i8"):
        next_process(arrays).kept("lengths", shape, dtype)


def test_a_name_is_one_array_and_private_ones_have_no_readers() -> None:
    arrays = KeptArrays(SharedArrays(), SharedArrays())
    one = arrays.kept("unfinished_device", (4,), np.int32, private=True)
    one[2] = 1
    assert arrays.kept("unfinished_device", (4,), np.int32, private=True) is one
    with pytest.raises(ValueError, match="has shape"):
        arrays.kept("unfinished_device", (5,), np.int32, private=True)
    arrays.kept("lengths", (2,), np.int64)
    arrays.zeros("calls", (1,), np.int64)
    assert [entry[0] for entry in arrays.manifest] == ["lengths", "calls"]
    fd = arrays.read_only()
    assert list(open_arrays(fd, arrays.manifest)) == ["lengths", "calls"]
    os.close(fd)


def test_what_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(MemoryError, match="tables takes"):
        SharedArrays().kept("tables", (1 << 40,), np.int64)
