"""Sealed memory files: they cannot be truncated, and read-only ones stay read-only."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from constants import set_constants
from each_row import each_row
from open_files import num_open_files

from kvservice.pool import SealedMemory, await_children

NUM_BYTES = 4 * mmap.PAGESIZE
# Sizes of slices in these tests, and after how many bytes the available memory is checked again.
SLICE_BYTES, CHECKED_BYTES = 16 * mmap.PAGESIZE, 64 * mmap.PAGESIZE

HOLD = """
import sys
from kvservice.mooncake.process import lock_memory
lock_memory(int(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


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


def test_more_than_there_is() -> None:
    before = num_open_files()
    with pytest.raises(OSError, match="memory"):
        SealedMemory("test", 1 << 60, read_only=False)
    assert num_open_files() == before


def test_memory_is_used_when_no_child_process_holds_it() -> None:
    memory = SealedMemory("test", 4096, read_only=False)
    await_children(memory.fd)
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(memory.fd)],
        pass_fds=[memory.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(BlockingIOError):
            await_children(memory.fd, limit_s=0.0)
        child.kill()
        await_children(memory.fd)
    memory.close()


def test_memory_that_children_write_is_read_only_for_others() -> None:
    memory = SealedMemory("test", 4096, read_only=True, kept=True)
    mmap.mmap(memory.fd, 4096)[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(memory.shared_fd, 4096)
    memory.close()
