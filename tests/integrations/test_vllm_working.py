"""The connector of a worker of vLLM, without vLLM."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from fake_store import FakeStore
from vllm_connector import NUM_BLOCKS, Engine, connector_config
from vllm_requests import FakeOutput
from waiting import until

from kvservice.errors import InternalError
from kvservice.integrations.vllm.steps import ConnectorStep, StepLoad
from kvservice.integrations.vllm.working import KEEP_STEPS

KEYS = tuple(bytes([n]) * 32 for n in range(NUM_BLOCKS))
OpenRig = Callable[..., "Rig"]


class Rig:
    """An engine with a worker, whose blocks have the keys of their numbers."""

    def __init__(self, connector: Any, **options: Any) -> None:
        self.store = FakeStore()
        self.engine = Engine(connector, self.store, **options)
        self.blocks, self.worker = self.engine.blocks, self.engine.worker
        self.num_saves = 0
        self.before: Counter[str] = Counter()

    def save(self, *block_ids: int) -> int:
        """Return the number of the save."""
        self.num_saves += 1
        (save,) = self.engine.save(f"save {self.num_saves}", [KEYS[b] for b in block_ids], block_ids).step.saves
        return int(save.number)

    def load(self, request_id: str, *block_ids: int) -> None:
        self.engine.load(request_id, [KEYS[b] for b in block_ids], block_ids)

    def load_in_step(self, *block_ids: int) -> Any:
        """Let a step load blocks, which it computes with. Returns the output."""
        leased = self.store.lease_of([KEYS[b] for b in block_ids])
        step = ConnectorStep(step_load=StepLoad(7, np.array(block_ids), {(0, 0): leased}))
        return self.engine.compute(self.engine.message_of(step))

    def counted(self, **expected: int) -> None:
        """Wait until the counters since the last call are these."""
        counted = self.engine.counted

        def reached() -> bool:
            if (stats := self.worker.get_kv_connector_stats()) is not None:
                counted.update(stats.data)
            return {name: counted[name] - self.before[name] for name in expected} == expected

        until(reached)
        self.before = counted.copy()

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
    rig.engine.settle()
    rig.save(2)
    rig.counted(blocks_saved=1)
    assert rig.store.calls == ["put", "put"], "it is not asked before"
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


def test_all_saves_of_a_step_are_one_call(rig: Rig) -> None:
    requests = [rig.engine.request(str(number), [KEYS[number]]) for number in (1, 2, 3)]
    for number, request in enumerate(requests, 1):
        rig.engine.allocated(request, [number])
    new = [(request, [number], 0) for number, request in enumerate(requests, 1)]
    tokens = {request.request_id: 4 for request in requests}
    rig.engine.compute(rig.engine.step(FakeOutput(tokens, new=new)))
    rig.engine.settle()
    assert rig.store.calls == ["put"]
    assert set(rig.store.values) == {KEYS[1], KEYS[2], KEYS[3]}


def test_saves_of_steps_that_follow_soon_are_one_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first goes at once. Nothing is computed in the last step: nobody has to be spared then."""
    monkeypatch.setattr("kvservice.integrations.vllm.working.SAVE_INTERVAL_S", 3600.0)
    rig.save(1)
    until(lambda: rig.store.calls == ["put"])
    rig.save(2)
    rig.save(3)
    assert rig.store.calls == ["put"]
    rig.engine.compute(rig.engine.message_of(ConnectorStep(computes=False)))
    until(lambda: set(rig.store.values) == {KEYS[1], KEYS[2], KEYS[3]})
    assert rig.store.calls == ["put", "put"]


def test_a_save_that_has_not_begun_is_given_up_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.integrations.vllm.working.SAVE_INTERVAL_S", 3600.0)
    rig.save(1)
    until(lambda: rig.store.calls == ["put"])
    number = rig.save(2)
    rig.engine.compute(rig.engine.message_of(ConnectorStep(abandoned=frozenset({number}))))
    rig.counted(blocks_saved=1, blocks_not_saved=1)
    assert set(rig.store.values) == {KEYS[1]}


def test_loads_do_not_wait_for_saves(rig: Rig) -> None:
    rig.store.values[KEYS[5]] = rig.store.values[KEYS[6]] = rig.value(5)
    with rig.store.held_up("put"):
        rig.save(1)
        assert rig.store.waiting.wait(60)
        rig.load("a", 5)
        assert rig.engine.loaded() == ({"a"}, set())
        assert rig.load_in_step(6).invalid_block_ids == set()


def test_a_step_loads_before_it_computes(rig: Rig) -> None:
    rig.store.values |= {KEYS[5]: rig.value(1), KEYS[6]: rig.value(2)}
    output = rig.load_in_step(5, 6)
    assert output.invalid_block_ids == set()
    assert output.kv_connector_worker_meta.report.loads == {7: 1}
    assert rig.blocks[5:7, 0].tolist() == [2, 3]
    rig.counted(blocks_loaded=2, blocks_loaded_in_step=2, bytes_loaded=2 * 64)
    assert rig.store.calls == ["acquire", "read"], "the worker asks nobody"


def test_wrong_blocks_of_a_step_are_named_in_the_same_step(rig: Rig) -> None:
    rig.store.values |= {KEYS[5]: rig.value(1), KEYS[6]: rig.value(2)}
    rig.store.broken_leases = {rig.store.number(KEYS[6])}
    output = rig.load_in_step(5, 6)
    assert output.invalid_block_ids == {6}
    assert output.kv_connector_worker_meta.report.loads == {7: 1}
    rig.counted(blocks_loaded=1, blocks_not_loaded=1)


def test_no_wrong_block_becomes_a_token_if_vllm_schedules_ahead(open_rig: OpenRig) -> None:
    """vLLM would compute the block again, but not the token of the next step."""
    rig = open_rig(config=connector_config(ahead=True))
    rig.store.values[KEYS[5]] = rig.value(5)
    assert rig.load_in_step(5).invalid_block_ids == set()
    rig.store.broken_leases = {rig.store.number(KEYS[5])}
    with pytest.raises(InternalError, match="max_step_load_mib"):
        rig.load_in_step(5)


def test_a_mapping_that_is_lost_is_kept_for_steps_that_are_scheduled(rig: Rig) -> None:
    """The daemon has ended, and its memory is as it was."""
    rig.store.values[KEYS[5]] = rig.value(5)
    step = ConnectorStep(step_load=StepLoad(7, np.array((5,)), {(0, 0): rig.store.lease_of([KEYS[5]])}))
    rig.store.is_mapped = False
    output = rig.engine.compute(rig.engine.message_of(step))
    assert output.invalid_block_ids == set()
    assert output.kv_connector_worker_meta.report.memories == {(0, 0): None}
    for _ in range(KEEP_STEPS):
        rig.engine.compute(rig.engine.step())
    assert rig.engine.compute(rig.engine.message_of(step)).invalid_block_ids == {5}


def test_a_step_without_tokens_waits_a_little_for_loads(rig: Rig) -> None:
    """Nothing else is held up."""
    rig.store.values[KEYS[5]] = rig.value(5)
    taken: set[str] = set()

    def is_taken() -> bool:
        taken.update(rig.worker.get_finished(set())[1])
        return taken == {"a"}

    with rig.store.held_up("get"):
        rig.load("a", 5)
        assert rig.store.waiting.wait(60)
        assert rig.worker.get_finished(set()) == (None, set())
    until(is_taken)


def test_no_step_waits_for_a_save(rig: Rig) -> None:
    """Another request computes in its block only after it was given back."""
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        for _ in range(3):
            rig.engine.compute(rig.engine.step())
    rig.engine.settle()
    assert rig.store.values[KEYS[1]] == rig.value(1)


def test_a_save_that_has_not_begun_is_given_up(rig: Rig) -> None:
    with rig.store.held_up():
        rig.save(1)
        assert rig.store.waiting.wait(60)
        number = rig.save(2)
        step = ConnectorStep(abandoned=frozenset({number, 99}))
        stepping = threading.Thread(target=rig.worker.handle_preemptions, args=(rig.engine.message_of(step),))
        stepping.start()
        stepping.join(0.2)
        assert stepping.is_alive(), "its turn comes after the first"
    stepping.join(60)
    assert not stepping.is_alive()
    rig.counted(blocks_saved=1, blocks_not_saved=1)
    assert set(rig.store.values) == {KEYS[1]}


def test_closing_saves_what_is_pending(vllm_connector: Any) -> None:
    rig = Rig(vllm_connector)
    with rig.store.held_up():
        rig.save(1)
        rig.save(2)
    rig.engine.close()
    assert set(rig.store.values) == {KEYS[1], KEYS[2]}
