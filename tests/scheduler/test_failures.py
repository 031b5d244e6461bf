"""Errors while a batch is made: one request's failure is its own, and a batch has what was planned before an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from schedule_rig import EngineRig, alone, make_rig

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig, FoundPrompt, KeptMaps, SessionNamespace
from kvservice.errors import DuplicateSequenceError
from kvservice.scheduler import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    PoolShares,
    PreemptionMode,
    QueueOrder,
    Request,
    check_integrity,
)

FAULT = MemoryError("no memory for the sequence")


def raises(*_: Any, **__: Any) -> Any:
    raise FAULT


def fail_for(monkeypatch: pytest.MonkeyPatch, rig: EngineRig, name: int) -> None:
    """Let the allocation of a sequence fail, as one without memory does."""
    allocate = rig.manager.allocate_found

    def allocate_found(namespace: SessionNamespace, prompts: list[FoundPrompt]) -> Any:
        if any(prompt.new.sequence_id == name for prompt in prompts):
            raise FAULT
        return allocate(namespace, prompts)

    monkeypatch.setattr(rig.manager, "allocate_found", allocate_found)


@pytest.mark.parametrize("on_disk", [5, 6])
def test_the_ids_of_sequences_on_the_disk_are_in_use(on_disk: int) -> None:
    rig = make_rig()
    rig.namespace.on_disk[on_disk] = (3, 0)
    with pytest.raises(DuplicateSequenceError) as refused:
        rig.engine.add(Request(5, range(8), 4, width=2))
    assert refused.value.metadata["sequence_id"] == str(on_disk)
    rig.add(7, range(8))
    rig.run()
    assert rig.finished == [7]


@pytest.mark.parametrize("failing", [10, 11, 12])
def test_a_request_that_cannot_be_allocated_fails_alone(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    rig = make_rig()
    prompts = {number: range(100 * number, 100 * number + 12) for number in (10, 11, 12)}
    for number, prompt in prompts.items():
        rig.add(number, prompt)
    with monkeypatch.context() as fault:
        fail_for(fault, rig, failing)
        batch = rig.begin()
    assert batch.failed == ((failing, FAULT),)
    assert batch.step is not None
    assert batch.step.sequence_ids.tolist() == [number for number in prompts if number != failing]
    assert failing not in rig.engine.queues.requests
    rig.end(batch)
    check_integrity(rig.engine)
    rig.add(20, prompts[failing])  # nobody computes its blocks, so it waits for nobody
    assert 20 in rig.begin().step.sequence_ids.tolist()  # type: ignore[union-attr]
    rig.manager.check_integrity()


def test_beams_that_cannot_be_allocated_again_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    rig.add(1, range(12), width=2, beams=True)
    rig.step()
    assert rig.engine.schedule().step is not None
    with monkeypatch.context() as fault:
        fault.setattr(rig.manager, "reopen", raises)
        batch = rig.engine.retry()
    assert batch is not None
    assert batch.step is None
    assert batch.error is FAULT
    assert sorted(one.sequence_id for one in batch.preempted) == [1, 2]
    check_integrity(rig.engine)
    with monkeypatch.context() as fault:
        fail_for(fault, rig, 2)
        assert rig.engine.schedule().failed == ((1, FAULT),)
    assert not len(rig.engine)
    assert not len(rig.namespace)
    rig.manager.check_integrity()


def test_swaps_before_a_failed_admission_are_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks have moved in the tables, so the device must copy them."""
    rig = make_rig(8, {"num_swap_blocks": 8}, order=QueueOrder.PRIORITY, preemption=PreemptionMode.SWAP)
    rig.add(1, range(20), max_tokens=6, priority=5)
    rig.step()
    rig.add(2, range(100, 120), max_tokens=6, priority=0)
    with monkeypatch.context() as fault:
        fail_for(fault, rig, 2)
        batch = rig.begin()
    assert len(batch.swapped_out) == 1
    assert batch.failed == ((2, FAULT),)
    check_integrity(rig.engine)
    rig.end(batch)
    for _ in range(8):
        rig.step()
    assert rig.outputs[1] == alone(rig.prompts[1], 6)


@pytest.mark.parametrize("name", ["can_swap_in", "swap_in"])
def test_a_request_that_cannot_be_swapped_in_fails_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rig = make_rig(8, {"num_swap_blocks": 8}, order=QueueOrder.PRIORITY, preemption=PreemptionMode.SWAP)
    rig.add(1, range(20), max_tokens=6, priority=5)
    rig.step()
    rig.add(2, range(100, 120), max_tokens=1, priority=0)
    rig.step()
    assert len(rig.engine.queues.swapped) == 1
    rig.add(3, range(200, 208), max_tokens=2, priority=9)
    with monkeypatch.context() as fault:
        fault.setattr(rig.manager, name, raises)
        batch = rig.begin()
    assert batch.failed == ((1, FAULT),)
    rig.end(batch)
    check_integrity(rig.engine)
    rig.run()
    assert rig.finished == [2, 3]


@pytest.mark.parametrize("name", ["swap_out", "free"])
def test_a_preemption_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mode = PreemptionMode.SWAP if name == "swap_out" else PreemptionMode.RECOMPUTE
    rig = make_rig(8, {"num_swap_blocks": 8}, order=QueueOrder.PRIORITY, preemption=mode)
    rig.add(1, range(20), max_tokens=6, priority=5)
    rig.step()
    rig.add(2, range(100, 120), max_tokens=6, priority=0)
    with monkeypatch.context() as fault:
        fault.setattr(rig.manager, name, raises)
        batch = rig.begin()
    assert batch.error is FAULT
    assert not batch.preempted
    check_integrity(rig.engine)
    rig.run()
    rig.check_outputs()


@pytest.mark.parametrize("names", [("open_step",), ("append",), ("advance",)])
def test_a_step_that_cannot_be_opened_leaves_its_sequences_to_the_next(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    rig = make_rig()
    rig.add(1, range(12))
    if names != ("open_step",):
        rig.step()
    if names == ("advance",):
        rig.add(2, range(100, 112))
    with monkeypatch.context() as fault:
        for name in names:
            fault.setattr(rig.manager, name, raises)
        batch = rig.begin()
    assert batch.step is None
    assert batch.error is FAULT
    check_integrity(rig.engine)
    rig.manager.check_integrity()
    rig.run()
    rig.check_outputs()


@pytest.mark.parametrize("beams", [False, True])
def test_samples_that_cannot_be_forked_run_later(monkeypatch: pytest.MonkeyPatch, beams: bool) -> None:
    """The report that would fork them is accepted."""
    rig = make_rig()
    rig.add(1, range(12), width=3, beams=beams)
    batch = rig.begin()
    fork, calls = rig.manager.fork, list[int]()

    def fails_later(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise FAULT
        fork(*arguments)

    with monkeypatch.context() as fault:
        fault.setattr(rig.manager, "fork", fails_later)
        rig.end(batch)
    assert len(calls) == 2
    check_integrity(rig.engine)
    rig.run()
    assert rig.finished == [1]
    rig.check_outputs()


class FullTable(dict[int, bytes]):
    """Kept values for which there is no memory after `left` of them."""

    left = 1

    def reserve(self, _: int, num_values: int) -> None:
        if num_values > self.left:
            raise FAULT
        self.left -= num_values


def allocate_two(manager: BlockManager, namespace: SessionNamespace) -> None:
    manager.allocate(namespace, [AllocationRequest(i, range(12), extra_keys=[(0, b"salt")]) for i in (1, 2)])


def fork_two(manager: BlockManager, namespace: SessionNamespace) -> None:
    manager.fork(namespace, [0, 0], [1, 2])


@pytest.mark.parametrize("create", [allocate_two, fork_two])
def test_sequences_whose_extra_keys_cannot_be_kept_are_not_created(
    create: Callable[[BlockManager, SessionNamespace], None],
) -> None:
    table = FullTable()
    manager = BlockManager(
        BlocksConfig(num_blocks=20, block_size=4), kept=KeptMaps(extra_keys=table, reserve=table.reserve)
    )
    namespace = manager.open_namespace()
    manager.allocate(namespace, [AllocationRequest(0, range(12), extra_keys=[(0, b"salt")])])
    before = manager.stats()
    table.left = 1
    with pytest.raises(MemoryError):
        create(manager, namespace)
    assert len(table) == 1
    assert manager.stats() == before
    manager.check_integrity()
    table.left = 2
    create(manager, namespace)
    manager.check_integrity()


def test_engines_of_a_tenant_share_what_it_has() -> None:
    """More engines or weights give a tenant no more of the pool."""
    shares = PoolShares(2**31 - 1)
    several = [shares.add(MAX_WEIGHT, "a") for _ in range(1000)]
    small, other = shares.add(MIN_WEIGHT, "a"), shares.add(1.0, "b")
    for share in (*several, small, other):
        share.active = True
    assert shares.entitled(other) == (2**31 - 1) // 2
    assert sum(map(shares.entitled, several)) == pytest.approx(2**30, rel=1e-4)
    assert shares.entitled(small) == 0
