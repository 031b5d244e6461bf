"""Blocks of vLLM's pool while they are being saved, or wait for it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from fake_store import FakeStore
from vllm_connector import Engine, FakePool, OpenEngine, run, saves
from vllm_requests import FULL, FakeOutput, FakeRequest, chain
from vllm_stub import name_of_block
from waiting import until

from kvservice.integrations.vllm.scheduling import HOLD_S, ConnectorScheduler, SchedulingOptions
from kvservice.integrations.vllm.steps import ConnectorStep, WorkerReport

TOKENS = list(range(18))


def held(engine: OpenEngine, *stores: FakeStore, **options: Any) -> tuple[Engine, Any]:
    """Return an engine and its first step, which saves four blocks."""
    made = engine(*stores, **options)
    request = FakeRequest("a", TOKENS)
    run(made, request, [1, 2, 3, 4, 5])
    return made, made.step(FakeOutput({"a": 18}, new=[(request, [1, 2, 3, 4, 5], 0)]))


def test_blocks_are_held_until_all_workers_have_saved_them(engine: OpenEngine) -> None:
    stores = FakeStore(), FakeStore()
    made, message = held(engine, *stores)
    assert made.pool.used == {1, 2, 3, 4}
    assert made.scheduler.has_pending_push_work()
    with stores[1].held_up():
        made.compute(message)
        assert stores[1].waiting.wait(60)
        made.scheduler.request_finished(FakeRequest("a", TOKENS), [1, 2, 3, 4, 5])
        until(lambda: len(stores[0].values) == 4)
        made.compute(made.step())
        assert made.pool.used == {1, 2, 3, 4}
        assert made.scheduler.has_pending_block_frees()
    made.settle()
    assert made.pool.used == set()
    assert not made.scheduler.has_pending_block_frees()
    assert [len(store.values) for store in stores] == [4, 4]


def test_ranks_with_the_same_blocks_keep_one_copy_which_all_load(engine: OpenEngine) -> None:
    """As with MLA. The step that loads needs the memory of both workers mapped."""
    values: dict[bytes, bytes] = {}
    stores = FakeStore(values), FakeStore(values)
    made, message = held(engine, *stores, replicas=2)
    made.compute(message)
    made.settle()
    assert made.pool.used == set()
    assert ["put" in store.calls for store in stores] == [True, False]
    assert (len(values), made.counted["blocks_saved"]) == (4, 4)
    request = FakeRequest("b", TOKENS)
    for remapped, in_step in ((False, True), (True, False)):
        if remapped:
            stores[1].is_mapped = False
            made.compute(made.step())  # the worker tells it
        assert made.asked_for(request) == (16, not in_step)
        made.allocated(request, [6, 7, 8, 9, 10], 16)
        message = made.step()
        assert (message.step.step_load is not None) == in_step
        made.compute(message)
        made.scheduler.request_finished(request, [6, 7, 8, 9, 10])
    assert ["read" in store.calls for store in stores] == [True, True]


def test_blocks_come_back_if_they_cannot_be_saved(engine: OpenEngine) -> None:
    for state in ("away", "broken"):
        store = FakeStore()
        made, message = held(engine, store)
        setattr(store, state, True)
        made.compute(message)
        made.settle()
        assert (made.pool.used, store.values) == (set(), {}), state


def test_blocks_that_a_request_uses_delay_nobody(engine: OpenEngine) -> None:
    made, _ = held(engine, FakeStore())
    made.pool.touch(made.pool.blocks[1:6])  # the request's own reference
    assert not made.scheduler.has_pending_block_frees()
    made.pool.free_blocks(made.pool.blocks[4:5])
    assert made.scheduler.has_pending_block_frees()


class TightPool:
    """An engine of whose 800 blocks four are held, and eight times as many together with requests."""

    def __init__(self, engine: OpenEngine) -> None:
        self.store = FakeStore()
        self.made, self.first = held(engine, self.store, num_blocks=800, extra={"max_held_percent": 0.5})
        self.pool = self.made.pool

    def offered(self, name: str, token: int, blocks: range) -> Any:
        """Return the message of a step in which a request, that stays, has computed these blocks."""
        self.pool.touch(self.pool.blocks[blocks.start : blocks.stop])
        request = FakeRequest(name, [token] * 4 * len(blocks))
        run(self.made, request, list(blocks))
        self.pool.cache(request, blocks)
        return self.made.step(FakeOutput({name: 4 * len(blocks)}, new=[(request, list(blocks), 0)]))

    def end(self, name: str, token: int, blocks: range) -> None:
        self.made.scheduler.request_finished(FakeRequest(name, [token] * 4 * len(blocks)), list(blocks))
        self.pool.free_blocks(self.pool.blocks[blocks.start : blocks.stop])

    def save_first(self) -> None:
        """Let the worker save the blocks of the first step, which are free then, and nothing else."""
        self.made.compute(self.first)
        nothing = type(self.first)(ConnectorStep())

        def is_free() -> bool:
            self.made.compute(nothing)
            return self.pool.used.isdisjoint(range(1, 5))

        until(is_free)

    def skipped(self) -> int:
        return self.made.counted["blocks_skipped"]


def test_a_part_of_the_pool_is_held_and_other_saves_wait(engine: OpenEngine) -> None:
    tight = TightPool(engine)
    # The blocks of the first request are held for its save alone now.
    assert saves(tight.offered("b", 8, range(6, 8))) == []
    tight.save_first()
    # The blocks of the others are in use: the first ones are held, eight times as many, and the last ones wait.
    many = tight.offered("c", 9, range(10, 47))
    assert saves(many)[0][1] == [6, 7, *range(10, 40)]
    tight.end("c", 9, range(10, 47))
    tight.made.compute(many)
    tight.made.settle()
    assert len(tight.store.values) == 4 + 2 + 37
    assert tight.skipped() == 0
    assert tight.pool.used == {6, 7}


def test_blocks_that_wait_can_be_offered_again_by_others(engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = TightPool(engine)
    monkeypatch.setitem(tight.made.scheduler._scheduler.step.__globals__, "HELD_AT_ONCE", 2)
    first, second = FakeRequest("b", [8] * 9), FakeRequest("c", [8] * 9)
    tight.pool.touch(tight.pool.blocks[6:8])
    tight.pool.cache(first, [6, 7])
    for request, found in ((first, 0), (second, 8)):
        tight.made.matched(request, found)
        tight.made.allocated(request, [6, 7])
    # The first request offers all that a step may, which wait for room. There is room when the second one offers them.
    assert saves(tight.made.step(FakeOutput({"b": 9, "c": 1}, new=[(first, [6, 7], 0), (second, [6, 7], 8)]))) == []
    tight.save_first()
    message = tight.made.step(FakeOutput({"b": 1, "c": 1}, cached=[("b", None, 9), ("c", None, 9)]))
    assert saves(message) == [(chain([8] * 8), [6, 7])]


def test_blocks_that_are_held_are_not_saved_again_after_a_load(engine: OpenEngine) -> None:
    """vLLM says once more that a request has blocks when its asynchronous load has ended."""
    store = FakeStore(dict.fromkeys(chain(TOKENS)[2:], bytes(64)))
    made = engine(store, extra={"max_step_load_mib": 0})
    first, second = FakeRequest("a", TOKENS[:9]), FakeRequest("b", TOKENS)
    run(made, first, [1, 2, 3])
    assert saves(made.step(FakeOutput({"a": 9}, new=[(first, [1, 2, 3], 0)]))) == [(chain(TOKENS)[:2], [1, 2])]
    assert made.asked_for(second, 8) == (8, True)
    made.allocated(second, [1, 2, 6, 7], 8)
    made.allocated(second, [1, 2, 6, 7, 8])
    assert saves(made.step(FakeOutput({"b": 2}, new=[(second, [1, 2, 6, 7, 8], 16)]))) == []


def test_a_long_prompt_that_ends_is_held_in_parts(engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = TightPool(engine)
    pool = tight.made.scheduler._scheduler._pool
    assert pool is not None
    monkeypatch.setitem(pool.choose.__globals__, "HELD_AT_ONCE", 3)
    request = FakeRequest("b", [8] * 40)
    tight.pool.cache(request, [*range(10, 20)])
    run(tight.made, request, [*range(10, 20)])
    tight.save_first()
    tight.made.scheduler.request_finished(request, [*range(10, 20)])
    # The first step saves what was held when the request ended, and as many again. The last token has no K/V.
    message = tight.made.step()
    assert [block_ids for _, block_ids in saves(message)] == [[10, 11, 12], [13, 14, 15]]
    tight.made.compute(message)
    tight.made.settle()
    assert set(tight.store.values) == {*chain(TOKENS), *chain([8] * 36)}
    assert tight.skipped() == 0


def test_a_block_that_waits_is_skipped_if_it_is_taken_for_others(engine: OpenEngine) -> None:
    tight = TightPool(engine)
    assert saves(tight.offered("b", 8, range(6, 9))) == []
    tight.end("b", 8, range(6, 9))
    # Two requests get a block each. One of them has just these tokens, and offers the block itself.
    other, same = FakeRequest("c", [9] * 4), FakeRequest("d", [8] * 5)
    tight.pool.cache(other, [7])
    run(tight.made, other, [7])
    run(tight.made, same, [6, 9])
    message = tight.made.step(FakeOutput({"c": 4, "d": 1}, new=[(other, [7], 0), (same, [6, 9], 4)]))
    tight.save_first()
    tight.made.compute(message)
    tight.made.settle()
    assert tight.skipped() == 1
    assert set(tight.store.values) == {*chain(TOKENS), *chain([9] * 4), chain([8] * 12)[0], chain([8] * 12)[2]}


def test_blocks_that_wait_leave_as_many_free_as_may_be_held(engine: OpenEngine) -> None:
    tight = TightPool(engine)
    assert saves(tight.offered("b", 8, range(6, 8))) == []
    tight.end("b", 8, range(6, 8))
    tight.save_first()
    assert tight.pool.used == set()
    used = [block for block in tight.pool.blocks if block.block_id not in (0, 1, 2, 6, 7)]
    tight.pool.touch(used)
    first = tight.made.step()
    assert [block_ids for _, block_ids in saves(first)] == [[6]]
    assert saves(tight.made.step()) == []
    tight.made.compute(first)
    tight.made.settle()
    assert len(tight.store.values) == 6


def test_vllm_forgets_its_prefix_cache_while_blocks_are_held(engine: OpenEngine) -> None:
    """A save that has not begun is given up. One that reads its blocks ends before they can be overwritten."""
    store = FakeStore()
    made, message = held(engine, store)
    with store.held_up():
        made.compute(message)
        assert store.waiting.wait(60)
        other = FakeRequest("b", [9] * 8)
        run(made, other, [6, 7])
        made.compute(made.step(FakeOutput({"b": 8}, new=[(other, [6, 7], 0)])))
        assert made.pool.used == {1, 2, 3, 4, 6, 7}
        assert made.pool.reset_prefix_cache()
        assert made.pool.used == set()
        step = made.step()
        stepping = threading.Thread(target=made.worker.handle_preemptions, args=(step,))
        stepping.start()
        stepping.join(0.2)
        assert stepping.is_alive()
    stepping.join(60)
    assert set(store.values) == set(chain(TOKENS))
    made.settle()
    assert made.pool.used == set()


def test_workers_that_do_not_report_hold_no_blocks_for_ever() -> None:
    options = SchedulingOptions(
        FULL, loads=True, saves=True, max_step_bytes=0, max_beside_bytes=0, max_held=0.5, save_decode=False
    )
    times = [0.0]
    scheduler, pool = ConnectorScheduler(options, clock=lambda: times[0]), FakePool(20)
    scheduler.bind(pool, name_of_block)
    request = FakeRequest("a", TOKENS)
    scheduler.allocated(request, lambda: [[1, 2, 3, 4, 5]], 0)
    (save,) = scheduler.step(FakeOutput({"a": 18}, new=[(request, [1, 2, 3, 4, 5], 0)])).saves
    times[0] = HOLD_S - 1
    assert not scheduler.step(FakeOutput({})).abandoned
    assert pool.used == {1, 2, 3, 4}
    assert not scheduler.delays_others
    times[0] = HOLD_S
    assert list(scheduler.step(FakeOutput({})).abandoned) == [save.number]
    assert pool.used == set()
    scheduler.received(WorkerReport(saves=Counter({save.number: 1})), (), set())
    assert pool.used == set()
