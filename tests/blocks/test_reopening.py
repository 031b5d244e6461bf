"""Reopen: steps over tokens that are computed already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from each_row import each_row

from kvservice.blocks import AllocationRequest, BlockManager, SessionNamespace
from kvservice.errors import InvalidArgumentError, KVServiceError, OutOfBlocksError, UnknownSequenceError

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any) -> None:
    """Allocate and compute a sequence."""
    manager.allocate(space, [AllocationRequest(sequence_id, list(tokens))])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def test_a_full_block_leaves_the_index_until_it_is_computed_again(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(8))
    assert manager.match_prefix(range(8)) == 8
    step = manager.reopen(space, [1], [7], [1])
    assert (step.query_lens.tolist(), step.context_lens.tolist(), len(step.copies)) == ([1], [8], 0)
    assert manager.match_prefix(range(8)) == 4
    assert manager.describe(space)[0].num_computed == 7
    manager.check_integrity()
    manager.mark_all_layers(space, step.step_id)
    assert manager.match_prefix(range(8)) == 8
    manager.check_integrity()


def test_a_shared_block_is_copied_first(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(8))
    add(manager, space, 2, range(9))
    step = manager.reopen(space, [1], [6], [2])
    assert len(step.copies) == 1
    assert manager.match_prefix(range(8)) == 8
    manager.check_integrity()


def test_a_reopened_step_replaces_the_one_before(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(5))
    old = manager.append(space, [1], [9])
    new = manager.reopen(space, [1], [5], [1])
    assert new.slot_mapping.tolist() == old.slot_mapping.tolist()
    with pytest.raises(KVServiceError):
        manager.mark_all_layers(space, old.step_id)
    manager.mark_all_layers(space, new.step_id)
    manager.check_integrity()


REFUSED: list[tuple[Any, ...]] = [
    ([9], [0], [1], UnknownSequenceError, "sequence_ids[0]"),
    ([1, 2], [5, 6], [1, 1], InvalidArgumentError, "starts[1]"),
    ([1, 2], [5], [1, 1], InvalidArgumentError, "starts"),
    ([1], [-1], [1], InvalidArgumentError, "starts[0]"),
    ([1, 2], [4, 4], [1, 2], InvalidArgumentError, "num_tokens[1]"),
    ([1], [4], [0], InvalidArgumentError, "num_tokens[0]"),
]


def test_refused(make: Make, snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for ids, starts, counts, error, field in REFUSED:
            with row((ids, starts, counts, error, field)):
                manager, space = make()
                add(manager, space, 1, range(8))
                add(manager, space, 2, range(100, 105))
                before = snapshot(manager)
                with pytest.raises(error) as caught:
                    manager.reopen(space, ids, starts, counts)
                assert getattr(caught.value, "field", None) == field
                assert snapshot(manager) == before


def test_without_a_block_for_the_copy_nothing_changes(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make(num_blocks=3, watermark=0.0)
    add(manager, space, 1, range(8))
    add(manager, space, 2, range(9))
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError):
        manager.reopen(space, [1], [7], [1])
    assert snapshot(manager) == before
