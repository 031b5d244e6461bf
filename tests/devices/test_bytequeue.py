"""The queue of work on the pool: its order, and that it keeps no references to finished work."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvservice.devices.cpu import ByteQueue


@pytest.fixture
def queue() -> Iterator[ByteQueue]:
    opened = ByteQueue(lambda: None)
    yield opened
    opened.close()


@pytest.mark.parametrize("inline", [False, True])
def test_a_result_is_its_callers_alone(queue: ByteQueue, inline: bool) -> None:
    async def run() -> weakref.ref[np.ndarray]:
        return weakref.ref(await queue.run(lambda: np.zeros(4), inline=inline))

    result = asyncio.run(run())
    # The worker drops its references when it waits for the next work.
    barrier = queue.submit(lambda: None)
    barrier.result(10)
    assert result() is None


def test_the_last_result_is_not_kept_until_the_next(queue: ByteQueue) -> None:
    class Memory:
        pass

    gone = threading.Event()

    def work() -> Memory:
        memory = Memory()
        weakref.finalize(memory, gone.set)
        return memory

    queue.submit(work).result(10)
    assert gone.wait(10)


def test_it_is_idle_when_all_is_done_and_inline_work_waits_until_then(queue: ByteQueue) -> None:
    let_go = threading.Event()
    order: list[str] = []

    def slow() -> None:
        let_go.wait(10)
        order.append("first")

    assert queue.idle
    queue.post(slow, inline=False)
    assert not queue.idle
    queue.post(lambda: order.append("second"), inline=True)
    let_go.set()
    queue.submit(lambda: None).result(10)
    assert order == ["first", "second"]
    queue.submit(lambda: None).result(10)
    assert queue.idle
