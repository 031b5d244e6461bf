"""A dedicated thread returns memory to the kernel, so that the event loop does not wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import until

from kvservice.pool.sealed import SealedMemory
from kvservice.server import unmapping

NUM_BYTES = 9 << 20
NAME = "test-unmapping"


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """The thread is blocked until this event is set."""
    event = threading.Event()
    unmapping._thread.submit(event.wait)
    yield event
    event.set()


def mapped_kib() -> list[int]:
    """Resident KiB of each mapping of the memory in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return [int(next(line for line in lines if line.startswith("Rss:")).split()[1]) for line in lines if NAME in line]


def test_the_thread_that_drops_memory_unmaps_none_of_it(held: threading.Event) -> None:
    memory = SealedMemory(NAME, NUM_BYTES, read_only=False)
    unmapping.unmap(memory)
    memory.close()
    del memory
    assert mapped_kib() == [NUM_BYTES >> 10]
    held.set()
    until(lambda: mapped_kib() == [])


def test_all_pages_are_unmapped_and_keep_their_content(held: threading.Event) -> None:
    memory = SealedMemory(NAME, NUM_BYTES, read_only=False)
    content = np.frombuffer(memory.map, np.uint8)
    content[:] = 7
    unmapping.unmap(memory)
    held.set()
    until(lambda: mapped_kib() == [0])
    assert (content == 7).all()


def test_a_descriptor_is_closed_by_the_thread(held: threading.Event) -> None:
    reading, writing = os.pipe()
    unmapping.close(writing)
    os.fstat(writing)  # the descriptor is still open
    held.set()
    assert os.read(reading, 1) == b""  # end of file, because the pipe has no writer any more
    os.close(reading)
