"""The objects of the CUDA extension: memory, streams, events, and their errors."""

from __future__ import annotations

import mmap
import os
import re

import numpy as np
import pytest

from kvservice.errors import InvalidArgumentError

_cuda = pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")

MIB = 1 << 20


def upload(array: np.ndarray, pointer: int) -> None:
    _cuda.copy_async(pointer, array.ctypes.data, array.nbytes, 0)


def download(pointer: int, num_bytes: int) -> np.ndarray:
    array = np.zeros(num_bytes, np.uint8)
    _cuda.copy_async(array.ctypes.data, pointer, num_bytes, 0)
    done = _cuda.Event(0)
    done.record(0)
    done.synchronize()
    return array


def test_facts() -> None:
    facts = _cuda.device_facts(0)
    assert facts["major"] >= 8
    assert facts["num_multiprocessors"] > 0
    assert _cuda.memory_info(0)[1] <= facts["total_bytes"]


def test_device_memory_holds_what_is_written() -> None:
    memory = _cuda.DeviceMemory(0, 3 * MIB)
    assert memory.num_bytes >= 3 * MIB
    data = np.random.default_rng(0).integers(0, 256, 3 * MIB, np.uint8)
    upload(data, memory.pointer)
    assert np.array_equal(download(memory.pointer, data.nbytes), data)


@pytest.mark.alone
def test_device_memory_is_given_back() -> None:
    _cuda.DeviceMemory(0, MIB).close()
    before = _cuda.memory_info(0)[0]
    memory = _cuda.DeviceMemory(0, 1024 * MIB)
    assert _cuda.memory_info(0)[0] <= before - 1024 * MIB
    memory.close()
    memory.close()
    assert _cuda.memory_info(0)[0] > before - 512 * MIB
    with pytest.raises(InvalidArgumentError):
        _ = memory.pointer


def test_device_memory_is_a_file_descriptor() -> None:
    memory = _cuda.DeviceMemory(0, MIB)
    first, second = memory.export_fd(), memory.export_fd()
    assert first != second
    for descriptor in (first, second):
        os.fstat(descriptor)
        os.close(descriptor)


def test_too_much_memory_is_an_error_with_the_numbers() -> None:
    total = _cuda.memory_info(0)[1]
    with pytest.raises(_cuda.CudaError) as caught:
        _cuda.DeviceMemory(0, 2 * total)
    assert caught.value.code == 2  # cudaErrorMemoryAllocation
    said = re.search(r"of (\d+) bytes, where (\d+) of (\d+) are free", str(caught.value))
    assert said is not None
    wanted, free, all_of_it = (int(number) for number in said.groups())
    assert wanted >= 2 * total
    assert free <= all_of_it == total
    # The device still works after the error.
    assert download(_cuda.DeviceMemory(0, MIB).pointer, 16).size == 16


def test_too_much_in_stream_order_is_an_error_too() -> None:
    with pytest.raises(_cuda.CudaError) as caught:
        _cuda.allocate_async(1 << 45, 0)
    assert caught.value.code == 2


def test_memory_in_stream_order() -> None:
    stream = _cuda.Stream(0, high_priority=True)
    pointer = _cuda.allocate_async(4096, stream.handle)
    _cuda.fill_async(pointer, 7, 4096, stream.handle)
    stream.synchronize()
    assert (download(pointer, 4096) == 7).all()
    _cuda.free_async(pointer, stream.handle)
    stream.synchronize()


def test_a_stream_waits_for_an_event() -> None:
    first, second = _cuda.Stream(0), _cuda.Stream(0)
    memory = _cuda.DeviceMemory(0, 512 * MIB)
    written = _cuda.Event(0)
    for byte in (1, 2, 3):
        _cuda.fill_async(memory.pointer, byte, memory.num_bytes, first.handle)
    written.record(first.handle)
    second.wait(written)
    target = _cuda.DeviceMemory(0, MIB)
    _cuda.copy_async(target.pointer, memory.pointer + memory.num_bytes - MIB, MIB, second.handle)
    second.synchronize()
    assert written.done()
    assert (download(target.pointer, MIB) == 3).all()


def test_time_between_events() -> None:
    stream, memory = _cuda.Stream(0), _cuda.DeviceMemory(0, 256 * MIB)
    start, end = _cuda.Event(0, timing=True), _cuda.Event(0, timing=True)
    start.record(stream.handle)
    _cuda.fill_async(memory.pointer, 0, memory.num_bytes, stream.handle)
    end.record(stream.handle)
    end.synchronize()
    assert 0 < end.elapsed_ms(start) < 1000


def test_host_memory_is_locked_and_unlocked() -> None:
    with mmap.mmap(-1, 4 * MIB) as region:
        array = np.frombuffer(region, np.uint8)
        registration = _cuda.HostRegistration(array.ctypes.data, array.nbytes)
        memory = _cuda.DeviceMemory(0, 4 * MIB)
        _cuda.fill_async(memory.pointer, 9, 4 * MIB, 0)
        ids = np.arange(2, dtype=np.int32)
        _cuda.copy_blocks(memory.pointer, array.ctypes.data, 2, 2, 2 * MIB, ids, ids[::-1].copy(), 0)
        done = _cuda.Event(0)
        done.record(0)
        done.synchronize()
        assert (array == 9).all()
        registration.close()
        registration.close()
        with pytest.raises(InvalidArgumentError, match="not page-locked"):
            _cuda.copy_blocks(memory.pointer, array.ctypes.data, 2, 2, 2 * MIB, ids, ids, 0)
        del array


@pytest.mark.parametrize("num_pairs", [1, 399, 400, 401, 900])
@pytest.mark.parametrize("block_bytes", [16, 48, 32768, 32784, 98304])
def test_copies_of_blocks_touch_nothing_else(num_pairs: int, block_bytes: int) -> None:
    """The sizes are around the number of pairs of one launch and the bytes of one thread block."""
    num_blocks = 2 * num_pairs + 3
    memory = _cuda.DeviceMemory(0, num_blocks * block_bytes)
    rng = np.random.default_rng(num_pairs)
    data = rng.integers(0, 256, (num_blocks, block_bytes), np.uint8)
    upload(data, memory.pointer)
    ids = rng.permutation(num_blocks).astype(np.int32)
    src, dst = ids[:num_pairs], ids[num_pairs : 2 * num_pairs]
    _cuda.copy_blocks(memory.pointer, memory.pointer, num_blocks, num_blocks, block_bytes, src, dst, 0)
    data[dst] = data[src]
    assert np.array_equal(download(memory.pointer, data.nbytes).reshape(data.shape), data)


def test_a_failed_call_is_not_blamed_on_the_next() -> None:
    with pytest.raises(_cuda.CudaError):
        _cuda.set_device(4096)
    memory = _cuda.DeviceMemory(0, MIB)
    ids = np.array([0], np.int32)
    _cuda.copy_blocks(memory.pointer, memory.pointer, 2, 2, 16, ids, ids + 1, 0)
