"""The queue of work on the pool: its order, and that it keeps no references to finished work."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvservice import _ext
from kvservice.devices.cpu import NO_BLOCKS, BlockUse, ByteQueue

SMALL, MEDIUM, LARGE = 0, _ext.CPU_SIZE_CLASSES[0] + 1, _ext.CPU_SIZE_CLASSES[1] + 1


@pytest.fixture
def queue() -> Iterator[ByteQueue]:
    opened = ByteQueue(lambda: None, num_blocks=8)
    yield opened
    opened.close()


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_result_is_its_callers_alone(queue: ByteQueue, on_loop: bool) -> None:
    async def run() -> weakref.ref[np.ndarray]:
        return weakref.ref(await queue.run(lambda: np.zeros(4), on_loop=on_loop))

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


def test_it_is_idle_when_all_is_done_and_work_on_the_loop_waits_until_then(queue: ByteQueue) -> None:
    let_go = threading.Event()
    order: list[str] = []

    def slow() -> None:
        let_go.wait(10)
        order.append("first")

    assert queue.idle
    queue.post(slow, on_loop=False)
    assert not queue.idle
    queue.post(lambda: order.append("second"), on_loop=True)
    let_go.set()
    queue.submit(lambda: None).result(10)
    assert order == ["first", "second"]
    queue.submit(lambda: None).result(10)
    assert queue.idle


# ---- sizes


def use(reads: list[int], writes: list[int]) -> Callable[[], BlockUse]:
    return lambda: BlockUse(np.array(reads, np.int32), np.array(writes, np.int64))


@contextlib.contextmanager
def held(queue: ByteQueue, num_bytes: int, of_held: Callable[[], BlockUse] | None) -> Iterator[None]:
    """Keep work of this size in progress for the duration of the context."""
    begun, let_go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        let_go.wait(60)

    held_work = queue.submit(work, num_bytes, of_held)
    try:
        assert begun.wait(60)
        yield
    finally:
        let_go.set()
        held_work.result(60)


@pytest.mark.parametrize(("larger", "smaller"), [(LARGE, SMALL), (LARGE, MEDIUM), (MEDIUM, SMALL)])
def test_smaller_work_passes_larger_work_of_other_blocks(queue: ByteQueue, larger: int, smaller: int) -> None:
    with held(queue, larger, use([0, 1], [2, 2])):
        assert queue.is_free(use([0, 1, 5], [6]))
        queue.submit(lambda: None, smaller, use([0, 1, 5], [6])).result(60)


def test_small_work_runs_at_once_beside_larger_work_of_other_blocks(queue: ByteQueue) -> None:
    with held(queue, LARGE, use([0, 1], [2])):
        here = queue.run(threading.get_ident, on_loop=True, use=use([0], [3]))
        assert asyncio.run(here) == threading.get_ident()  # type: ignore[arg-type]


CONFLICTS = {
    "reads what is being written": use([2], []),
    "writes what is being read": use([], [1]),
    "writes what is being written": use([], [2]),
    "may use all": None,
}


@pytest.mark.parametrize("number_of_bytes", [SMALL, MEDIUM])
@pytest.mark.parametrize("later", CONFLICTS.values(), ids=CONFLICTS)
def test_smaller_work_follows_larger_work_whose_blocks_it_uses(
    queue: ByteQueue, later: Callable[[], BlockUse] | None, number_of_bytes: int
) -> None:
    """Also if the larger work has not begun."""
    order: list[str] = []
    with held(queue, LARGE, use([], [7])):
        queue.submit(lambda: order.append("larger"), LARGE, use([0, 1], [2]))
        assert not queue.is_free(later)
        followed = queue.submit(lambda: order.append("smaller"), number_of_bytes, later)
    followed.result(60)
    assert order == ["larger", "smaller"]


def test_larger_work_that_may_use_all_blocks_is_passed_by_none(queue: ByteQueue) -> None:
    with held(queue, LARGE, None):
        assert not queue.is_free(use([], []))


def test_work_follows_small_work_that_could_not_pass(queue: ByteQueue) -> None:
    """It uses a block of the small work, and none of the large work."""
    order: list[str] = []
    with held(queue, LARGE, use([], [1])):
        queue.post(lambda: order.append("first"), on_loop=True, use=use([1], [2]))
        assert not queue.is_free(use([2], []))
        second = queue.submit(lambda: order.append("second"), SMALL, use([2], []))
    second.result(60)
    assert order == ["first", "second"]


@pytest.mark.parametrize("before", [SMALL, MEDIUM])
def test_larger_work_follows_all_smaller_work(queue: ByteQueue, before: int) -> None:
    order: list[str] = []
    with held(queue, before, use([], [1])):
        queue.submit(lambda: order.append("smaller"), before, use([], [1]))
        larger = queue.submit(lambda: order.append("larger"), LARGE, use([2], [3]))
    larger.result(60)
    assert order == ["smaller", "larger"]


def test_blocks_of_finished_work_are_free(queue: ByteQueue) -> None:
    for _ in range(3):
        queue.submit(lambda: None, LARGE, use([0, 0, 1], [2, 2])).result(60)
    with held(queue, LARGE, use([], [7])):
        assert queue.is_free(use([2], [0, 1]))
        assert not queue.is_free(lambda: BlockUse(NO_BLOCKS, np.array([7])))
