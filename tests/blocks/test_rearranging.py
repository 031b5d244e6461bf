"""Rearrange and tail_blocks: what beams and samples need of the block manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from each_row import each_row
from listed import listed

from kvservice.blocks import AllocationRequest, BlockManager, SessionNamespace
from kvservice.errors import (
    InvalidArgumentError,
    SequenceSwappedError,
    StaleStepError,
    UnknownSequenceError,
)

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any, **more: Any) -> None:
    """Allocate and compute a sequence."""
    manager.allocate(space, [AllocationRequest(sequence_id, list(tokens), **more)])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def tokens(manager: BlockManager, space: SessionNamespace, sequence_id: int) -> list[int]:
    return listed(manager.describe(space, [sequence_id], include_tokens=True)[0].token_ids)


def test_sequences_exchange_what_they_have(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    add(manager, space, 2, range(100, 106))
    add(manager, space, 3, range(200, 209))
    before = manager.stats()
    manager.rearrange(space, [1, 2, 3], [2, 3, 1])
    assert [tokens(manager, space, name)[0] for name in (1, 2, 3)] == [100, 200, 0]
    assert [len(tokens(manager, space, name)) for name in (1, 2, 3)] == [6, 9, 10]
    assert manager.stats() == before
    manager.check_integrity()


def test_several_may_continue_one_and_what_nobody_continues_is_released(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    add(manager, space, 2, range(100, 106))
    add(manager, space, 3, range(200, 209))
    manager.rearrange(space, [1, 2, 3], [1, 1, 1])
    assert all(tokens(manager, space, name) == list(range(10)) for name in (1, 2, 3))
    stats = manager.stats()
    assert (stats.shared_blocks, stats.active_blocks, stats.tokens) == (3, 0, 30)
    manager.check_integrity()
    step = manager.append(space, [1, 2, 3], [7, 8, 9])
    assert len(step.copies) == 2
    manager.mark_all_layers(space, step.step_id)
    assert [tokens(manager, space, name)[-1] for name in (1, 2, 3)] == [7, 8, 9]
    manager.check_integrity()


def test_lookahead_blocks_stay_with_their_sequence(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(8))
    add(manager, space, 2, range(100, 108))
    step = manager.append(space, [1, 2], [5, 6], lookahead=9)
    manager.mark_all_layers(space, step.step_id)
    manager.rearrange(space, [1, 2], [1, 1])
    assert [one.num_blocks for one in manager.describe(space)] == [5, 3]
    manager.check_integrity()


def test_extra_keys_go_with_the_content(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6), extra_keys=((0, b"tenant"),))
    add(manager, space, 2, range(6))
    manager.rearrange(space, [1, 2], [2, 1])
    step = manager.append(space, [1, 2], [6, 7, 6, 7], [2, 2])
    manager.mark_all_layers(space, step.step_id)
    manager.check_integrity()
    manager.free(space, [1])
    manager.reset_prefix_cache()
    assert manager.match_prefix(range(8), ((0, b"tenant"),)) == 0
    manager.check_integrity()


def test_steps_of_moved_sequences_and_of_their_parents_end(make: Make) -> None:
    manager, space = make()
    for name in (1, 2, 3):
        add(manager, space, name, range(100 * name, 100 * name + 5))
    steps = [manager.append(space, [name], [9]).step_id for name in (1, 2, 3)]
    manager.rearrange(space, [1, 3], [2, 3])
    for step_id in steps[:2]:
        with pytest.raises(StaleStepError):
            space.live_step(step_id)
    manager.mark_all_layers(space, steps[2])
    manager.check_integrity()


BAD_ORDERS: list[tuple[Any, ...]] = [
    ([1, 9], [1, 1], UnknownSequenceError, "sequence_ids[1]"),
    ([1, 2], [2, 9], UnknownSequenceError, "parent_ids[1]"),
    ([1, 2], [-3, 1], InvalidArgumentError, "parent_ids[0]"),
    ([1, 1], [2, 2], InvalidArgumentError, "sequence_ids[1]"),
    ([1, 2], [2], InvalidArgumentError, "parent_ids"),
    ([1], [3], SequenceSwappedError, "parent_ids[0]"),
    ([3], [1], SequenceSwappedError, "sequence_ids[0]"),
]


def test_refused_rearrangements(make: Make, snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for ids, parents, error, field in BAD_ORDERS:
            with row((ids, parents, error, field)):
                manager, space = make(num_swap_blocks=8)
                for name in (1, 2, 3):
                    add(manager, space, name, range(100 * name, 100 * name + 5))
                manager.swap_out(space, [3])
                before = snapshot(manager)
                with pytest.raises(error) as caught:
                    manager.rearrange(space, ids, parents)
                assert caught.value.field == field
                assert snapshot(manager) == before


def test_tail_blocks_are_those_of_the_next_tokens(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    add(manager, space, 2, range(100, 108))
    manager.fork(space, [1, 2], [3, 4])
    blocks, holders = manager.tail_blocks(space, [1, 2, 3, 4])
    last = manager.describe(space, [1], include_blocks=True)[0].block_ids
    assert last is not None
    assert blocks.tolist() == [last[-1], 0, last[-1], 0]
    assert holders.tolist() == [2, 0, 2, 0]
