"""GPU memory and events between two processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import gpu_peer
import pytest
from gpu_peer import Peer, download, peer
from open_files import num_open_files

from kvservice.errors import InvalidArgumentError

_cuda = pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def other() -> Iterator[Peer]:
    with peer() as running:
        yield running


def refused_field(handle: bytes, num_bytes: int = 1) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        _cuda.IpcMemory(0, handle, num_bytes)
    return caught.value.field


def refused_code(handle: bytes) -> int:
    with pytest.raises(_cuda.CudaError) as caught:
        _cuda.IpcMemory(0, handle, 1)
    return int(caught.value.code)


def assert_the_device_works() -> None:
    memory = _cuda.DeviceMemory(0, MIB)
    _cuda.fill_async(memory.pointer, 3, MIB, 0)
    assert (download(memory.pointer, MIB) == 3).all()


def free_bytes() -> int:
    return int(_cuda.memory_info(0)[0])


def wait_until_free(num_bytes: int) -> None:
    deadline = time.monotonic() + 5
    while free_bytes() < num_bytes:
        assert time.monotonic() < deadline, f"{free_bytes()} bytes are free, {num_bytes} should be"
        time.sleep(0.01)


# --- memory by handle


def test_both_sides_see_what_either_writes(other: Peer) -> None:
    handle = other.run(gpu_peer.allocate, "memory", 3 * MIB, 7)
    assert len(handle) == 64
    memory = _cuda.IpcMemory(0, handle, 3 * MIB)
    assert memory.num_bytes == 3 * MIB
    assert (download(memory.pointer, 3 * MIB) == 7).all()
    _cuda.fill_async(memory.pointer, 9, MIB, 0)
    gpu_peer.wait()
    assert other.run(gpu_peer.read, "memory", MIB - 1) == 9
    assert other.run(gpu_peer.read, "memory", MIB) == 7
    memory.close()
    with pytest.raises(InvalidArgumentError):
        _ = memory.pointer


def test_sizes_are_those_of_the_allocation(other: Peer) -> None:
    handle = other.run(gpu_peer.allocate, "memory", 5 * MIB, 1)
    size = other.run(gpu_peer.size_of, "memory")
    assert size == 6 * MIB
    assert refused_field(handle, size + 1) == "byte_size"
    assert refused_field(handle, 0) == "byte_size"
    assert _cuda.IpcMemory(0, handle, size).num_bytes == size


def test_wrong_handles_are_refused(other: Peer) -> None:
    handle = other.run(gpu_peer.allocate, "memory", 2 * MIB, 1)
    assert refused_field(handle[:-1]) == "raw_handle"
    assert refused_field(handle + b"\0") == "raw_handle"
    assert refused_field(b"") == "raw_handle"
    for wrong in (bytes(64), b"\x5a" * 64, os.urandom(64)):
        assert refused_code(wrong) > 0
    assert_the_device_works()


def test_what_is_open_is_not_opened_again(other: Peer) -> None:
    handle = other.run(gpu_peer.allocate, "memory", 2 * MIB, 4)
    memory = _cuda.IpcMemory(0, handle, MIB)
    assert refused_field(handle) == "raw_handle"
    assert (download(memory.pointer, MIB) == 4).all(), "the refused one took it away"
    memory.close()
    again = _cuda.IpcMemory(0, handle, MIB)
    assert (download(again.pointer, MIB) == 4).all()


def test_an_own_handle_is_refused() -> None:
    memory = _cuda.IpcAllocation(0, MIB)
    assert refused_code(memory.handle) == 201  # cudaErrorDeviceUninitialized
    assert_the_device_works()


def test_stale_handles_are_refused(other: Peer) -> None:
    freed = other.run(gpu_peer.allocate, "freed", 2 * MIB, 1)
    other.run(gpu_peer.close, "freed")
    assert refused_code(freed) > 0
    left = other.run(gpu_peer.allocate, "left", 2 * MIB, 1)
    other.kill()
    assert refused_code(left) > 0
    assert_the_device_works()


def test_a_handle_with_any_bit_changed_reaches_nobody_elses_memory(other: Peer) -> None:
    """Some bytes of a handle have no meaning. Some drivers accept invalid handles; reading such memory is a device
    fault."""
    handle = other.run(gpu_peer.allocate, "memory", 2 * MIB, 6)
    with contextlib.ExitStack() as probers:
        prober = probers.enter_context(peer())
        for bit in range(8 * len(handle)):
            changed = bytearray(handle)
            changed[bit // 8] ^= 1 << bit % 8
            found = prober.run(gpu_peer.probe_handle, bytes(changed), 2 * MIB)
            assert found in ("refused", "the same memory", "a fault"), f"bit {bit}"
            if found == "a fault":
                prober = probers.enter_context(peer())
        assert prober.run(gpu_peer.probe_handle, handle, 2 * MIB) == "the same memory"
    assert_the_device_works()


@pytest.mark.alone
def test_memory_of_a_killed_process_stays_until_it_is_closed(other: Peer) -> None:
    assert_the_device_works()
    handle = other.run(gpu_peer.allocate, "memory", 16 * GIB, 5)
    memory = _cuda.IpcMemory(0, handle, 16 * GIB)
    while_shared = free_bytes()
    other.kill()
    _cuda.fill_async(memory.pointer, 6, GIB, 0)
    assert download(memory.pointer + GIB - 1, 2).tolist() == [6, 5]
    assert free_bytes() < while_shared + 8 * GIB
    memory.close()
    wait_until_free(while_shared + 12 * GIB)


def test_memory_that_its_maker_frees_stays_until_it_is_closed(other: Peer) -> None:
    handle = other.run(gpu_peer.allocate, "memory", 64 * MIB, 5)
    memory = _cuda.IpcMemory(0, handle, 64 * MIB)
    other.run(gpu_peer.close, "memory")
    other.run(gpu_peer.allocate, "next", 64 * MIB, 8)
    _cuda.fill_async(memory.pointer, 6, 64 * MIB, 0)
    assert (download(memory.pointer, 64 * MIB) == 6).all()
    assert other.run(gpu_peer.read, "next") == 8


def test_a_process_killed_while_its_memory_is_written_harms_nobody(other: Peer) -> None:
    handle = other.run(gpu_peer.allocate, "memory", 4 * GIB, 5)
    memory = _cuda.IpcMemory(0, handle, 4 * GIB)
    for byte in range(200):
        _cuda.fill_async(memory.pointer, byte, 4 * GIB, 0)
    other.kill()
    assert download(memory.pointer + 4 * GIB - 1, 1)[0] == 199


@pytest.mark.alone
def test_memory_comes_and_goes(other: Peer) -> None:
    """Memory is opened and closed many times, as by many clients, and nothing leaks."""
    for _ in range(3):
        other.run(gpu_peer.allocate, "warm", 2 * MIB, 1)
    fds = num_open_files()
    before = free_bytes()
    for _ in range(40):
        handle = other.run(gpu_peer.allocate, "memory", 512 * MIB, 1)
        _cuda.IpcMemory(0, handle, 512 * MIB).close()
        other.run(gpu_peer.close, "memory")
    assert free_bytes() > before - 8 * GIB
    assert num_open_files() <= fds + 4


# --- the pool by descriptor


def test_a_pool_that_another_process_made(other: Peer) -> None:
    fd = other.fetch_fd(gpu_peer.export_pool, "pool", 8 * MIB, 7)
    pool = _cuda.ImportedMemory(0, fd, 8 * MIB, True)
    os.close(fd)
    assert (download(pool.pointer, 8 * MIB) == 7).all()
    _cuda.fill_async(pool.pointer, 9, 8 * MIB, 0)
    gpu_peer.wait()
    assert other.run(gpu_peer.read, "pool") == 9
    other.kill()
    assert (download(pool.pointer, 8 * MIB) == 9).all()
    pool.close()
    pool.close()


def test_a_read_only_pool_refuses_writes() -> None:
    pool = _cuda.DeviceMemory(0, 4 * MIB)
    _cuda.fill_async(pool.pointer, 5, 4 * MIB, 0)
    gpu_peer.wait()
    with peer() as other:
        fd = pool.export_fd()
        other.send_fd(fd)
        os.close(fd)
        other.run(gpu_peer.import_pool, "pool", 4 * MIB, False)
        assert other.run(gpu_peer.read, "pool", 4 * MIB - 1) == 5
        with pytest.raises(RuntimeError, match="CudaError"):
            other.run(gpu_peer.fill, "pool", 6)
    assert (download(pool.pointer, 4 * MIB) == 5).all()


def test_wrong_descriptors_and_sizes_are_refused(other: Peer) -> None:
    def refused(fd: int, num_bytes: int) -> str:
        with pytest.raises(InvalidArgumentError) as caught:
            _cuda.ImportedMemory(0, fd, num_bytes, False)
        return caught.value.field

    with open(os.devnull, "rb") as file:
        assert refused(file.fileno(), 4 * MIB) == "fd"
    memory_file = os.memfd_create("no GPU memory")
    os.truncate(memory_file, 4 * MIB)
    assert refused(memory_file, 4 * MIB) == "fd"
    os.close(memory_file)
    assert refused(-1, 4 * MIB) == "fd"
    assert refused(1 << 20, 4 * MIB) == "fd"
    fd = other.fetch_fd(gpu_peer.export_pool, "pool", 4 * MIB, 7)
    for wrong in (2 * MIB, 6 * MIB, 4 * MIB - 1, 1, 0, -1):
        assert refused(fd, wrong) == "num_bytes"
    pool = _cuda.ImportedMemory(0, fd, 4 * MIB, False)
    assert (download(pool.pointer, 4 * MIB) == 7).all()
    os.close(fd)
