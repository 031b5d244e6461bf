"""Host memory of lanes for a pool on a GPU. It uses `fake_cuda`, so it needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_cuda import FakeCuda

from kvservice import _ext
from kvservice.devices.compute import Compute
from kvservice.devices.cuda_lanes import CudaLaneSession
from kvservice.errors import ResourceExhaustedError

NUM_BYTES = 4096


@pytest.fixture
def session_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda], tuple[CudaLaneSession, Compute]]:
    monkeypatch.setattr(FakeCuda, "LaneSession", _ext.LaneSession, raising=False)

    def make(fake: FakeCuda) -> tuple[CudaLaneSession, Compute]:
        compute = Compute(fake, 0)
        return CudaLaneSession(fake, 2, compute), compute

    return make


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_page_locked_until_calls_that_nobody_waited_for_are_done(
    seed: int, session_over: Callable[[FakeCuda], tuple[CudaLaneSession, Compute]]
) -> None:
    fake = FakeCuda(seed)
    session, compute = session_over(fake)
    memory = np.zeros(NUM_BYTES + 16, np.uint8)
    begin = -memory.ctypes.data % 16
    number = session.add_region(memory[begin:].ctypes.data, NUM_BYTES)
    for byte in range(1, 31):
        fake.fill_async(memory[begin:].ctypes.data, byte, NUM_BYTES, compute.stream.handle)
    session.remove_region(number)
    assert (memory[begin : begin + NUM_BYTES] == 30).all()
    assert fake.memory == {}
    session.remove_region(number)


def test_memory_that_cannot_be_page_locked_is_no_region(
    session_over: Callable[[FakeCuda], tuple[CudaLaneSession, Compute]],
) -> None:
    fake = FakeCuda()
    fake.lockable_bytes = 100
    session, _ = session_over(fake)
    with pytest.raises(ResourceExhaustedError):
        session.add_region(4096, 101)
    assert session.add_region(4096, 100) == 0
