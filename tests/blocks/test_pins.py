"""Pins: protection from eviction for a limited time, limits, and exact block counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from blocks_calls import can_allocate
from constants import set_constants

from kvservice.blocks import AllocationRequest, AllocStatus, BlockManager, SessionNamespace
from kvservice.errors import InvalidArgumentError, NotComputedError, QuotaExceededError, UnknownPinError

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any) -> None:
    manager.allocate(space, [AllocationRequest(sequence_id, list(tokens))])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pinned(make: Make, **changes: Any) -> tuple[BlockManager, SessionNamespace, Clock]:
    """Return a manager with eight blocks, three of them cached, two of these pinned for ten seconds."""
    clock = Clock()
    manager, space = make(clock=clock, num_blocks=8, **changes)
    add(manager, space, 1, range(12))
    manager.free(space, [1])
    pin = manager.pin(space, range(9), ttl_s=10.0)
    assert (pin.pin_id, pin.num_tokens, pin.num_blocks) == (1, 8, 2)
    return manager, space, clock


def test_pinned_blocks_are_not_evicted_and_not_free(make: Make) -> None:
    manager, space, _ = pinned(make)
    assert manager.stats().cached_blocks == 1
    assert manager.stats().pinned_blocks == 2
    assert can_allocate(manager, space, [AllocationRequest(2, range(100, 125))]) is AllocStatus.LATER
    assert can_allocate(manager, space, [AllocationRequest(2, range(100, 124))]) is AllocStatus.OK
    manager.allocate(space, [AllocationRequest(2, range(100, 124))])
    assert manager.match_prefix(range(12)) == 8
    assert manager.reset_prefix_cache() == 0
    assert manager.match_prefix(range(12)) == 8
    manager.check_integrity()


def test_a_pin_is_over_at_its_deadline(make: Make) -> None:
    manager, space, clock = pinned(make)
    clock.now += 9.99
    assert can_allocate(manager, space, [AllocationRequest(2, range(100, 132))]) is AllocStatus.LATER
    clock.now += 0.01
    assert can_allocate(manager, space, [AllocationRequest(2, range(100, 132))]) is AllocStatus.OK
    with pytest.raises(UnknownPinError) as caught:
        manager.unpin(space, 1)
    assert caught.value.field == "pin_id"
    manager.check_integrity()


def test_unpin(make: Make) -> None:
    manager, space, _ = pinned(make)
    other = manager.open_namespace()
    with pytest.raises(UnknownPinError):
        manager.unpin(other, 1)
    manager.unpin(space, 1)
    assert manager.stats().pinned_blocks == 0
    assert can_allocate(manager, space, [AllocationRequest(2, range(100, 132))]) is AllocStatus.OK
    manager.allocate(space, [AllocationRequest(2, range(100, 132))])
    manager.check_integrity()


def test_two_pins_of_one_block(make: Make) -> None:
    manager, space, clock = pinned(make)
    manager.pin(space, range(4), ttl_s=20.0)
    clock.now += 15
    assert manager.match_prefix(range(12)) == 12
    assert manager.stats().pinned_blocks == 1
    manager.check_integrity()


def test_a_pin_is_no_holder(make: Make) -> None:
    """A sequence uses a pinned cached block and releases it, and the pin continues."""
    manager, space, _ = pinned(make)
    (made,) = manager.allocate(space, [AllocationRequest(2, range(10))])
    assert made.num_cached_tokens == 8
    stats = manager.stats()
    assert (stats.active_blocks, stats.shared_blocks, stats.pinned_blocks) == (3, 0, 0)
    manager.check_integrity()
    manager.free(space, [2])
    assert (manager.stats().pinned_blocks, manager.stats().cached_blocks) == (2, 1)
    manager.check_integrity()


def test_writing_into_a_pinned_block_makes_a_copy(make: Make) -> None:
    """A pinned block is copied even if no other sequence holds it, and the copy is counted."""
    manager, space, _ = pinned(make)
    manager.allocate(space, [AllocationRequest(2, range(9))])
    manager.truncate(space, [2], [6])
    assert manager.can_append(space, [2])
    step = manager.append(space, [2], [77])
    assert len(step.copies) == 1
    assert manager.match_prefix(range(9)) == 8
    manager.check_integrity()


def test_bounds(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space, _ = pinned(make, max_pinned_fraction=0.25)
    before = snapshot(manager)
    with pytest.raises(QuotaExceededError) as caught:
        manager.pin(space, range(12), ttl_s=1.0)
    assert caught.value.metadata["limit"] == "max_pinned_fraction"
    with pytest.raises(NotComputedError):
        manager.pin(space, range(50, 60), ttl_s=1.0)
    wrong: tuple[Any, ...] = (0, -1.0, float("nan"), float("inf"), True, "1")
    for ttl_s in wrong:
        with pytest.raises(InvalidArgumentError) as refused:
            manager.pin(space, range(8), ttl_s=ttl_s)
        assert refused.value.field == "ttl_s"
    assert snapshot(manager) == before
    manager.pin(space, range(8), ttl_s=1.0)
    with pytest.raises(QuotaExceededError):
        manager.pin(space, range(8), ttl_s=1.0)


def test_pins_name_so_many_blocks_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.blocks", PINS_PER_BLOCK=1)
    manager, space, _ = pinned(make)
    limit = manager.config.max_pinned_blocks
    ids = [manager.pin(space, range(8), ttl_s=1e6).pin_id for _ in range(limit // 2 - 1)]
    with pytest.raises(QuotaExceededError):
        manager.pin(space, range(8), ttl_s=1e6)
    manager.unpin(space, ids[0])
    manager.pin(space, range(8), ttl_s=1e6)
    manager.check_integrity()


def test_ended_pins_do_not_pile_up(make: Make) -> None:
    manager, space, _ = pinned(make)
    for _ in range(1000):
        manager.unpin(space, manager.pin(space, range(8), ttl_s=1e6).pin_id)
    assert len(manager.pins.deadlines) < 100
    manager.check_integrity()
