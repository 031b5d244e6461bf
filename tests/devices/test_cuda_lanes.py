"""Host memory of lanes for a pool on a GPU. It uses `fake_cuda`, so it needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_cuda import FakeCuda

from kvservice import _ext
from kvservice.devices.cuda_lanes import CudaLaneSession
from kvservice.errors import ResourceExhaustedError

NUM_BYTES = 4096


@pytest.fixture
def session_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda], CudaLaneSession]:
    monkeypatch.setattr(FakeCuda, "LaneSession", _ext.LaneSession, raising=False)
    return lambda fake: CudaLaneSession(fake, 2, _ext.FinishedSteps(), 0, np.zeros(8, np.int64))


def test_memory_is_page_locked_while_it_is_a_region(session_over: Callable[[FakeCuda], CudaLaneSession]) -> None:
    fake = FakeCuda()
    session = session_over(fake)
    memory = np.zeros(NUM_BYTES + 16, np.uint8)
    begin = -memory.ctypes.data % 16
    number = session.add_region(memory[begin:].ctypes.data, NUM_BYTES)
    assert list(fake.memory) == [memory[begin:].ctypes.data]
    session.remove_region(number)
    assert fake.memory == {}
    session.remove_region(number)


def test_memory_that_cannot_be_page_locked_is_no_region(
    session_over: Callable[[FakeCuda], CudaLaneSession],
) -> None:
    fake = FakeCuda()
    fake.lockable_bytes = 100
    session = session_over(fake)
    with pytest.raises(ResourceExhaustedError):
        session.add_region(4096, 101)
    assert session.add_region(4096, 100) == 0
