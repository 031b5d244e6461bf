"""Sealed memory files: they cannot be truncated, and read-only ones stay read-only."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from constants import set_constants
from each_row import each_row
from open_files import num_open_files

from kvservice.pool import SealedMemory

NUM_BYTES = 4 * mmap.PAGESIZE
# Sizes of slices in these tests, and after how many bytes the available memory is checked again.
SLICE_BYTES, CHECKED_BYTES = 16 * mmap.PAGESIZE, 64 * mmap.PAGESIZE


def reopened(memory: SealedMemory) -> int:
    """Reopen the file through the descriptor, as a receiving process could to get write access."""
    return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)


def test_its_size_is_for_good() -> None:
    with each_row() as row:
        for read_only in (False, True):
            with row(read_only):
                memory = SealedMemory("test", NUM_BYTES, read_only=read_only)
                descriptor = reopened(memory)
                for size in (0, NUM_BYTES - 1, NUM_BYTES + 1):
                    for one in (memory.fd, descriptor):
                        with pytest.raises(PermissionError):
                            os.ftruncate(one, size)
                os.close(descriptor)
                memory.close()


def test_sparse_memory_takes_the_pages_that_are_used() -> None:
    num_bytes = 1 << 46  # more than any host has
    memory = SealedMemory.sparse("test", num_bytes)
    memory.map[num_bytes - 1] = 1
    assert os.fstat(memory.fd).st_blocks * 512 == mmap.PAGESIZE
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    memory.close()


def test_read_only_means_for_everybody_else() -> None:
    memory = SealedMemory("test", NUM_BYTES, read_only=True)
    descriptor = reopened(memory)
    view = mmap.mmap(descriptor, NUM_BYTES, prot=mmap.PROT_READ)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, NUM_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    np.frombuffer(memory.map, np.uint8)[7] = 9
    assert view[7] == 9
    os.close(descriptor)
    memory.close()


def test_kept_memory_is_mapped_again_by_a_later_process_of_the_daemon() -> None:
    memory = SealedMemory("test", NUM_BYTES, read_only=True, kept=True)
    memory.map[3] = 8
    again = SealedMemory.reopen(os.dup(memory.fd), NUM_BYTES, read_only=True)
    again.map[4] = 9
    assert memory.map[3:5] == again.map[3:5] == bytes([8, 9])
    assert again.address == np.frombuffer(again.map, np.uint8).ctypes.data
    for one in (memory, again):
        view = mmap.mmap(one.shared_fd, NUM_BYTES, prot=mmap.PROT_READ)
        assert view[3] == 8
        with pytest.raises(PermissionError):
            mmap.mmap(one.shared_fd, NUM_BYTES)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(one.shared_fd, b"x", 0)
        assert stat.S_IMODE(os.fstat(one.shared_fd).st_mode) == stat.S_IRUSR  # other users cannot open it again
        with pytest.raises(PermissionError):
            os.ftruncate(one.fd, 0)
        one.close()


def test_kept_memory_that_others_may_write_is_shared_as_it_is() -> None:
    memory = SealedMemory("test", NUM_BYTES, read_only=False, kept=True)
    again = SealedMemory.reopen(os.dup(memory.fd), NUM_BYTES, read_only=False)
    mmap.mmap(again.shared_fd, NUM_BYTES)[3] = 8
    assert memory.map[3] == 8


def test_others_may_write_where_that_is_wanted() -> None:
    memory = SealedMemory("test", NUM_BYTES, read_only=False)
    other = mmap.mmap(memory.fd, NUM_BYTES)
    other[3] = 8
    assert memory.map[3] == 8
    assert memory.address == np.frombuffer(memory.map, np.uint8).ctypes.data
    memory.close()
    assert memory.map[3] == 8


def test_nothing_stays() -> None:
    before = num_open_files()
    memory = SealedMemory("kvservice-test-sealed", NUM_BYTES, read_only=False)
    memory.close()
    memory.close()
    del memory
    assert num_open_files() == before
    assert "kvservice-test-sealed" not in Path("/proc/self/maps").read_text()


def test_memory_is_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """check_slices fails if it is not whole after the right number of slices."""
    set_constants(monkeypatch, "kvservice.pool", SLICE_BYTES=SLICE_BYTES, CHECKED_BYTES=CHECKED_BYTES)
    for num_bytes, slices in ((1, 1), (SLICE_BYTES, 1), (2 * SLICE_BYTES + mmap.PAGESIZE, 3)):
        check_slices(num_bytes, slices)


def check_slices(num_bytes: int, slices: int) -> None:
    making = SealedMemory.in_slices("test", num_bytes, read_only=True)
    for _ in range(slices - 1):
        next(making)
    with pytest.raises(StopIteration) as end:
        next(making)
    memory: SealedMemory = end.value.value
    assert len(memory.map) == memory.num_bytes == num_bytes
    assert memory.map[-1] == 0
    assert os.fstat(memory.fd).st_blocks * 512 >= num_bytes, "all of it is taken"
    descriptor = reopened(memory)
    for change in (lambda: os.ftruncate(descriptor, 0), lambda: os.pwrite(descriptor, b"x", 0)):
        with pytest.raises(PermissionError):
            change()
    os.close(descriptor)
    memory.close()


def test_memory_may_become_less_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.pool", SLICE_BYTES=SLICE_BYTES, CHECKED_BYTES=CHECKED_BYTES)
    before = num_open_files()
    making = SealedMemory.in_slices("test", 2 * CHECKED_BYTES, read_only=False)
    for _ in range(CHECKED_BYTES // SLICE_BYTES):
        next(making)
    set_constants(monkeypatch, "kvservice.pool", available_bytes=lambda: CHECKED_BYTES - 1)
    with pytest.raises(OSError, match="memory"):
        next(making)
    assert num_open_files() == before


@pytest.mark.parametrize("is_old", [False, True])
def test_all_pages_are_allocated_by_several_threads_and_the_log_says_how_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_old: bool
) -> None:
    """Kernels before 5.14 have no MADV_POPULATE_WRITE. No more is allocated than there is room for."""
    set_constants(monkeypatch, "kvservice.pool", POPULATE_BYTES=4 << 20, SAY_EVERY_S=0.0, MAX_POPULATE_THREADS=2)
    if is_old:
        set_constants(monkeypatch, "kvservice.pool", _populate=lambda *_: errno.EINVAL)
    num_bytes = (10 << 20) + mmap.PAGESIZE
    with caplog.at_level("INFO", "kvservice.pool"):
        memory = SealedMemory("store", num_bytes, read_only=False)
    assert os.fstat(memory.fd).st_blocks * 512 == num_bytes
    assert not memory.map[:].strip(b"\0")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0] == "store: 0.0 of 0.0 GiB are allocated"
    assert "store: 0.0 GiB are allocated, " in said[-1]
    memory.close()


def test_the_rest_is_allocated_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only all of it together must be available at once."""
    num_bytes = 16 << 20
    memory = SealedMemory("store", num_bytes, read_only=True, first_bytes=5 << 20)
    assert os.fstat(memory.fd).st_blocks * 512 == 5 << 20
    for begin, size in ((12 << 20, 4 << 20), (5 << 20, 7 << 20), (0, num_bytes)):
        memory.allocate(begin, size)
    assert os.fstat(memory.fd).st_blocks * 512 == num_bytes
    set_constants(monkeypatch, "kvservice.pool", _populate=lambda *_: errno.EFAULT)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        memory.allocate(0, num_bytes)
    with pytest.raises(OSError, match="memory"):
        SealedMemory("store", 1 << 60, read_only=True, first_bytes=4096)
    memory.close()


def test_more_than_there_is() -> None:
    before = num_open_files()
    with pytest.raises(OSError, match="memory"):
        SealedMemory("test", 1 << 60, read_only=False)
    assert num_open_files() == before


def test_memory_that_children_write_is_read_only_for_others() -> None:
    memory = SealedMemory("test", 4096, read_only=True, kept=True)
    mmap.mmap(memory.fd, 4096)[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(memory.shared_fd, 4096)
    memory.close()
