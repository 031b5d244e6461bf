"""The workers' side of the vLLM connector, without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from fake_store import FakeStore

from kvservice.integrations.vllm import working
from kvservice.integrations.vllm.copiers import block_copier
from kvservice.integrations.vllm.layout import block_layout
from kvservice.integrations.vllm.steps import BlockLoad, BlockSave, ConnectorStep
from kvservice.integrations.vllm.working import ConnectorWorker

NUM_BLOCKS = 8
KEYS = tuple(bytes([n]) * 32 for n in range(NUM_BLOCKS))


class Rig:
    """A worker over a tensor whose block b is full of b + 1."""

    def __init__(self, *, verify: bool = False) -> None:
        self.blocks = (torch.arange(NUM_BLOCKS, dtype=torch.int32)[:, None] + 1).repeat(1, 16)
        self.store = FakeStore()
        layout = block_layout({"layer": self.blocks}, NUM_BLOCKS)
        self.worker = ConnectorWorker(self.store, block_copier(layout, verify=verify), layout.block_bytes)

    def save(self, *block_ids: int) -> None:
        save = BlockSave(tuple(KEYS[b] for b in block_ids), block_ids)
        self.worker.start_saves(ConnectorStep(saves=(save,)))

    def load(self, request_id: str, *block_ids: int) -> None:
        load = BlockLoad(request_id, tuple(KEYS[b] for b in block_ids), block_ids)
        self.worker.start_loads(ConnectorStep(loads=(load,)))

    def loaded(self) -> tuple[set[str], set[int]]:
        """Wait until a load has ended."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            finished, failed = self.worker.take_finished_loads()
            if finished:
                return finished, failed
            time.sleep(0.001)
        raise AssertionError("no load has ended")

    def settle(self) -> None:
        """Wait until all saves have ended."""
        for pending in self.worker._pending:
            assert pending.ended.wait(60)

    def value(self, block_id: int) -> bytes:
        return (torch.ones(16, dtype=torch.int32) * (block_id + 1)).numpy().tobytes()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.worker.close(60)
    assert made.store.closed


def test_what_is_saved_is_loaded(rig: Rig) -> None:
    rig.save(1, 2, 3)
    rig.settle()
    expected = rig.blocks.clone()
    rig.blocks.zero_()
    rig.load("a", 1, 2, 3)
    assert rig.loaded() == ({"a"}, set())
    assert torch.equal(rig.blocks[1:4], expected[1:4])
    counters = rig.worker.take_counters()
    assert (counters.blocks_saved, counters.bytes_saved) == (3, 3 * 64)
    assert (counters.blocks_loaded, counters.bytes_loaded) == (3, 3 * 64)
    assert rig.worker.take_counters().empty


def test_missing_blocks_are_reported_with_the_request(rig: Rig) -> None:
    rig.save(1)
    rig.settle()
    rig.load("a", 1, 2)
    assert rig.loaded() == ({"a"}, {2})
    assert rig.worker.take_finished_loads() == (set(), set())


@pytest.mark.parametrize("verify", [False, True])
def test_damaged_blocks_are_reported_if_loads_are_verified(verify: bool) -> None:
    rig = Rig(verify=verify)
    rig.save(1, 2)
    rig.settle()
    rig.store.damaged.add(KEYS[2])
    rig.load("a", 1, 2)
    assert rig.loaded() == ({"a"}, {2} if verify else set())
    rig.worker.close(60)


@pytest.mark.parametrize("state", ["away", "broken"])
def test_a_store_that_fails_ends_loads_with_all_blocks_failed(rig: Rig, state: str) -> None:
    setattr(rig.store, state, True)
    rig.save(1)
    rig.settle()
    rig.load("a", 1, 2)
    assert rig.loaded() == ({"a"}, {1, 2})
    counters = rig.worker.take_counters()
    assert (counters.blocks_not_saved, counters.blocks_not_loaded, counters.blocks_saved) == (1, 2, 0)


def test_blocks_that_are_there_are_not_copied(rig: Rig) -> None:
    rig.store.values[KEYS[1]] = b"as it was"
    rig.save(1)
    rig.settle()
    assert rig.store.calls == ["lookup"]


def test_the_first_block_is_the_most_recent(rig: Rig) -> None:
    rig.save(1, 2, 3)
    rig.settle()
    assert list(rig.store.values) == [KEYS[3], KEYS[2], KEYS[1]]


def test_many_blocks_are_copied_by_several_calls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.worker, "_at_once", 2)
    rig.save(1, 2, 3)
    rig.settle()
    rig.load("a", 1, 2, 3)
    assert rig.loaded() == ({"a"}, set())
    assert [rig.store.calls.count(name) for name in ("put", "get")] == [2, 2]


def test_loads_overtake_saves(rig: Rig) -> None:
    rig.store.values[KEYS[5]] = rig.value(5)
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.save(2)
        rig.load("a", 5)
    assert rig.loaded() == ({"a"}, set())
    rig.settle()
    assert [call for call in rig.store.calls if call != "lookup"] == ["put", "get", "put"]


def test_a_step_waits_for_saves_of_blocks_that_it_overwrites(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step writes other bytes as soon as it may. The stored value must be the old one."""
    monkeypatch.setattr(working, "PATIENCE_S", 60.0)
    stepping = threading.Event()

    def step() -> None:
        rig.worker.before_step(ConnectorStep(overwritten=frozenset({1})))
        rig.blocks[1] = 99
        stepping.set()

    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        thread = threading.Thread(target=step)
        thread.start()
        assert not stepping.wait(0.05)
    thread.join(60)
    rig.settle()
    assert rig.store.values[KEYS[1]] == rig.value(1)


def test_a_save_that_has_not_begun_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "PATIENCE_S", 0.0)
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.save(2)
        rig.worker.before_step(ConnectorStep(overwritten=frozenset({2})))
        rig.blocks[2] = 99
    rig.settle()
    assert set(rig.store.values) == {KEYS[1]}
    assert rig.worker.take_counters().blocks_not_saved == 1


def test_a_save_whose_look_up_is_not_answered_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may be frozen. The step does not wait for it."""
    monkeypatch.setattr(working, "PATIENCE_S", 0.0)
    with rig.store.held_up("lookup"):
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.worker.before_step(ConnectorStep(overwritten=frozenset({1})))
        rig.blocks[1] = 99
    rig.settle()
    assert rig.store.values == {}
    assert rig.worker.take_counters().blocks_not_saved == 1


def test_a_step_does_not_wait_for_saves_of_other_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "PATIENCE_S", 3600.0)
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.worker.before_step(ConnectorStep(overwritten=frozenset({2})))
    rig.settle()
    assert set(rig.store.values) == {KEYS[1]}


def test_closing_saves_what_is_pending() -> None:
    rig = Rig()
    with rig.store.held_up():
        rig.save(1)
        rig.save(2)
    rig.worker.close(60)
    assert set(rig.store.values) == {KEYS[1], KEYS[2]}
