"""The connector of a worker of vLLM, without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from fake_store import FakeStore
from vllm_connector import NUM_BLOCKS, Engine, connector_config
from vllm_requests import FakeOutput
from waiting import until

KEYS = tuple(bytes([n]) * 32 for n in range(NUM_BLOCKS))
OpenRig = Callable[..., "Rig"]


class Rig:
    """An engine with a worker, whose blocks have the keys of their numbers."""

    def __init__(self, connector: Any, **options: Any) -> None:
        self.store = FakeStore()
        self.engine = Engine(connector, self.store, **options)
        self.blocks, self.worker = self.engine.blocks, self.engine.worker
        self.num_saves = 0

    def save(self, *block_ids: int) -> None:
        self.num_saves += 1
        self.engine.save(f"save {self.num_saves}", [KEYS[b] for b in block_ids], block_ids)

    def load(self, request_id: str, *block_ids: int) -> None:
        self.engine.load(request_id, [KEYS[b] for b in block_ids], block_ids)

    def overwrite(self, block_id: int) -> None:
        """Let a new request compute something else in a block, as soon as the connector allows it."""
        message = self.engine.step(FakeOutput({}, new=[(self.engine.request("writer", [bytes(32)]), [block_id], 0)]))
        self.worker.handle_preemptions(message)
        self.blocks[block_id] = 99

    def counted(self, **expected: int) -> None:
        """Wait until the counters since the last call are these."""
        found = dict.fromkeys(expected, 0)

        def reached() -> bool:
            if (stats := self.worker.get_kv_connector_stats()) is not None:
                found.update({name: found[name] + int(stats.data[name]) for name in found})
            return found == expected

        until(reached)

    def value(self, block_id: int) -> bytes:
        return (torch.ones(16, dtype=torch.int32) * (block_id + 1)).numpy().tobytes()


@pytest.fixture
def open_rig(vllm_connector: Any) -> Iterator[OpenRig]:
    with ExitStack() as stack:

        def make(**options: Any) -> Rig:
            made = Rig(vllm_connector, **options)
            stack.callback(made.engine.close)
            return made

        yield make


@pytest.fixture
def rig(open_rig: OpenRig) -> Rig:
    return open_rig()


def test_what_is_saved_is_loaded(rig: Rig) -> None:
    rig.save(1, 2, 3)
    rig.counted(blocks_saved=3, bytes_saved=3 * 64)
    expected = rig.blocks.clone()
    rig.blocks.zero_()
    rig.load("a", 1, 2, 3)
    assert rig.engine.loaded() == ({"a"}, set())
    assert torch.equal(rig.blocks[1:4], expected[1:4])
    rig.counted(blocks_loaded=3, bytes_loaded=3 * 64)
    assert rig.worker.get_kv_connector_stats() is None


def test_missing_blocks_are_reported_with_the_request(rig: Rig) -> None:
    rig.save(1)
    rig.counted(blocks_saved=1)
    rig.load("a", 1, 2)
    assert rig.engine.loaded() == ({"a"}, {2})
    assert rig.worker.get_finished(set()) == (None, set())
    assert rig.worker.get_block_ids_with_load_errors() == set()


def test_damaged_blocks_are_reported_if_loads_are_verified(open_rig: OpenRig) -> None:
    for verify in (False, True):
        rig = open_rig(config=connector_config(extra={"verify": verify}))
        rig.save(1, 2)
        rig.counted(blocks_saved=2)
        rig.store.damaged.add(KEYS[2])
        rig.load("a", 1, 2)
        assert rig.engine.loaded() == ({"a"}, {2} if verify else set())


def test_a_store_that_fails_ends_loads_with_all_blocks_failed(open_rig: OpenRig) -> None:
    for state in ("away", "broken"):
        rig = open_rig()
        setattr(rig.store, state, True)
        rig.save(1)
        rig.load("a", 1, 2)
        assert rig.engine.loaded() == ({"a"}, {1, 2}), state
        rig.counted(blocks_not_saved=1, blocks_not_loaded=2, blocks_saved=0)


def test_blocks_that_are_there_are_not_copied(rig: Rig) -> None:
    rig.store.values[KEYS[1]] = b"as it was"
    rig.save(1)
    rig.save(2)
    rig.counted(blocks_saved=1)
    assert rig.store.calls == ["lookup", "lookup", "put"]
    assert rig.store.values[KEYS[1]] == b"as it was"


def test_the_first_block_is_the_most_recent(rig: Rig) -> None:
    rig.save(1, 2, 3)
    rig.counted(blocks_saved=3)
    assert list(rig.store.values) == [KEYS[3], KEYS[2], KEYS[1]]


def test_many_bytes_are_copied_by_several_calls(open_rig: OpenRig) -> None:
    """Two blocks of 6 MiB fit a call."""
    rig = open_rig(values=6 << 18)
    rig.save(1, 2, 3)
    rig.counted(blocks_saved=3)
    rig.load("a", 1, 2, 3)
    assert rig.engine.loaded() == ({"a"}, set())
    assert [rig.store.calls.count(name) for name in ("put", "get")] == [2, 2]


def test_loads_overtake_saves(rig: Rig) -> None:
    rig.store.values[KEYS[5]] = rig.value(5)
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.save(2)
        rig.load("a", 5)
    assert rig.engine.loaded() == ({"a"}, set())
    rig.counted(blocks_saved=2)
    assert [call for call in rig.store.calls if call != "lookup"] == ["put", "get", "put"]


def test_a_step_waits_for_saves_of_blocks_that_it_overwrites(rig: Rig) -> None:
    """The step writes other bytes as soon as it may. The stored value must be the old one, however long that takes."""
    stepping = threading.Event()

    def step() -> None:
        rig.overwrite(1)
        stepping.set()

    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        thread = threading.Thread(target=step)
        thread.start()
        assert not stepping.wait(0.5)
    thread.join(60)
    rig.counted(blocks_saved=1)
    assert rig.store.values[KEYS[1]] == rig.value(1)


def test_a_save_that_has_not_begun_is_given_up(rig: Rig) -> None:
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.save(2)
        rig.overwrite(2)
    rig.counted(blocks_saved=1, blocks_not_saved=1)
    assert set(rig.store.values) == {KEYS[1]}


def test_a_save_whose_look_up_is_not_answered_is_given_up(rig: Rig) -> None:
    """The daemon may be frozen. The step does not wait for it."""
    with rig.store.held_up("lookup"):
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.overwrite(1)
    rig.counted(blocks_not_saved=1)
    assert rig.store.values == {}


def test_a_step_does_not_wait_for_saves_of_other_blocks(rig: Rig) -> None:
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.overwrite(2)
    rig.counted(blocks_saved=1)
    assert set(rig.store.values) == {KEYS[1]}


def test_closing_saves_what_is_pending(vllm_connector: Any) -> None:
    rig = Rig(vllm_connector)
    with rig.store.held_up():
        rig.save(1)
        rig.save(2)
    rig.engine.close()
    assert set(rig.store.values) == {KEYS[1], KEYS[2]}
