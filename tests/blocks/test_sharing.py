"""Fork, truncate, free, eviction from the prefix cache, common prefixes, closing a namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from listed import listed

from kvservice.blocks import AllocationRequest, BlockManager, SessionNamespace
from kvservice.errors import (
    DuplicateSequenceError,
    InvalidArgumentError,
    NotComputedError,
    UnknownSequenceError,
    UnknownSessionError,
)

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any, **more: Any) -> int:
    """Allocate and compute a sequence. Returns the number of its cached tokens."""
    (made,) = manager.allocate(space, [AllocationRequest(sequence_id, list(tokens), **more)])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)
    return made.num_cached_tokens


def table(manager: BlockManager, space: SessionNamespace, sequence_id: int) -> list[int]:
    return listed(manager.describe(space, [sequence_id], include_blocks=True)[0].block_ids)


def test_a_child_shares_every_block_and_knows_the_tokens(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    before = manager.stats()
    manager.fork(space, [1, 1], [2, 3])
    assert table(manager, space, 1) == table(manager, space, 2) == table(manager, space, 3)
    after = manager.stats()
    assert after.free_blocks == before.free_blocks
    assert (after.shared_blocks, after.sequences, after.tokens) == (3, 3, 30)
    child = manager.describe(space, [3], include_tokens=True)[0]
    assert (child.length, child.num_computed, listed(child.token_ids)) == (10, 10, list(range(10)))
    manager.check_integrity()


def test_a_child_keeps_its_parents_extra_keys(make: Make) -> None:
    """The hashes of blocks that the child fills later include the parent's extra keys."""
    manager, space = make()
    keys = ((0, b"tenant"), (9, b"image"))
    add(manager, space, 1, range(6), extra_keys=keys)
    manager.fork(space, [1], [2])
    manager.free(space, [1])
    step = manager.append(space, [2], np.arange(6, 12), [6])
    manager.mark_all_layers(space, step.step_id)
    assert manager.match_prefix(range(12), keys) == 12
    assert manager.match_prefix(range(12), keys[:1]) == 8
    assert manager.match_prefix(range(12)) == 0
    manager.check_integrity()


BAD_FORKS: list[tuple[Any, ...]] = [
    ([9], [2], UnknownSequenceError, "parent_ids[0]"),
    ([1, -4], [2, 3], InvalidArgumentError, "parent_ids[1]"),
    ([1], [1], DuplicateSequenceError, "child_ids[0]"),
    ([1, 1], [2, 2], DuplicateSequenceError, "child_ids[1]"),
    ([1], [2, 3], InvalidArgumentError, "child_ids"),
    ([1], [-1], InvalidArgumentError, "child_ids[0]"),
    ([], [], InvalidArgumentError, "parent_ids"),
]


def test_refused_forks(make: Make, snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for parents, children, error, field in BAD_FORKS:
            with row((parents, children, error, field)):
                manager, space = make()
                add(manager, space, 1, range(10))
                before = snapshot(manager)
                with pytest.raises(error) as caught:
                    manager.fork(space, parents, children)
                assert caught.value.field == field
                assert snapshot(manager) == before


def test_truncate_gives_blocks_back(make: Make) -> None:
    with each_row() as row:
        for length, num_blocks in ((10, 3), (9, 3), (8, 2), (5, 2), (1, 1), (0, 0)):
            with row((length, num_blocks)):
                manager, space = make()
                add(manager, space, 1, range(10))
                manager.append(space, [1], [10], lookahead=4)
                manager.truncate(space, [1], [length])
                info = manager.describe(space, [1], include_tokens=True)[0]
                assert (info.length, info.num_computed, info.num_blocks) == (length, length, num_blocks)
                assert listed(info.token_ids) == list(range(length))
                manager.check_integrity()
                step = manager.append(space, [1], [77])
                assert step.context_lens.tolist() == [length + 1]
                manager.check_integrity()


def test_truncate_refuses_to_lengthen(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    add(manager, space, 2, range(20, 25))
    before = snapshot(manager)
    for lengths, field in (([3, 6], "lengths[1]"), ([-1, 5], "lengths[0]"), ([3], "lengths")):
        with pytest.raises(InvalidArgumentError) as caught:
            manager.truncate(space, [1, 2], lengths)
        assert caught.value.field == field
    assert snapshot(manager) == before


def test_freed_computed_full_blocks_stay_findable(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    manager.free(space, [1])
    stats = manager.stats()
    assert (stats.active_blocks, stats.cached_blocks, stats.free_blocks) == (0, 2, 30)
    assert 1 not in space
    assert add(manager, space, 2, range(10)) == 8
    manager.check_integrity()


def test_a_duplicate_of_a_cached_block_is_simply_free(make: Make) -> None:
    """Two sequences computed the same block; the index keeps one of them."""
    manager, space = make()
    manager.allocate(space, [AllocationRequest(1, range(4)), AllocationRequest(2, range(4))])
    manager.mark_all_layers(space, manager.open_step(space, [1, 2]).step_id)
    manager.free(space, [2])
    assert manager.stats().free_blocks == 31
    manager.free(space, [1])
    assert (manager.stats().free_blocks, manager.stats().cached_blocks) == (31, 1)
    manager.check_integrity()


def test_eviction_takes_the_least_recently_used_and_its_deepest_first(make: Make) -> None:
    manager, space = make(num_blocks=6)
    add(manager, space, 1, range(8))
    add(manager, space, 2, range(100, 108))
    manager.free(space, [2])
    manager.free(space, [1])
    add(manager, space, 3, range(200, 212))
    assert manager.stats().evicted_blocks == 1
    assert manager.match_prefix(range(100, 108)) == 4
    assert manager.match_prefix(range(8)) == 8
    assert add(manager, space, 4, range(8)) == 4
    manager.check_integrity()
    assert manager.match_prefix(range(100, 108)) == 0
    assert manager.match_prefix(range(8)) == 8


def test_free_blocks_go_before_cached_ones(make: Make) -> None:
    manager, space = make(num_blocks=6)
    add(manager, space, 1, range(8))
    manager.free(space, [1])
    add(manager, space, 2, range(100, 116))
    assert (manager.stats().evicted_blocks, manager.match_prefix(range(8))) == (0, 8)


def test_within_one_free_the_deepest_block_goes_first_whatever_the_sequence(make: Make) -> None:
    manager, space = make(num_blocks=7)
    add(manager, space, 1, range(12))
    add(manager, space, 2, [*range(4), *range(50, 54)])
    manager.free(space, [2, 1])
    assert (manager.stats().cached_blocks, manager.stats().free_blocks) == (4, 3)
    manager.allocate(space, [AllocationRequest(3, range(200, 216))])
    assert manager.match_prefix(range(12)) == 8
    assert manager.match_prefix([*range(4), *range(50, 54)]) == 8
    manager.check_integrity()


def test_a_hit_makes_blocks_recently_used(make: Make) -> None:
    manager, space = make(num_blocks=4)
    for sequence_id, start in ((1, 0), (2, 100)):
        add(manager, space, sequence_id, range(start, start + 4))
    manager.free(space, [1])
    manager.free(space, [2])
    assert add(manager, space, 3, [0, 1, 2, 3, 9]) == 4
    manager.free(space, [3])
    add(manager, space, 4, range(200, 212))
    assert manager.match_prefix(range(4)) == 4
    assert manager.match_prefix(range(100, 104)) == 0


def test_reset_forgets_cached_and_held_blocks(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(8))
    add(manager, space, 2, range(100, 108))
    manager.free(space, [1])
    assert manager.reset_prefix_cache() == 2
    assert manager.match_prefix(range(8)) == manager.match_prefix(range(100, 108)) == 0
    assert manager.stats().free_blocks == 30
    manager.check_integrity()
    manager.mark_all_layers(space, manager.append(space, [2], range(4), [4]).step_id)
    manager.check_integrity()


def test_common_prefix(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(13))
    add(manager, space, 2, [*range(8), *range(50, 55)])
    add(manager, space, 3, range(100, 113))
    manager.fork(space, [1], [4])
    assert manager.common_prefix_blocks(space, [1, 2]) == 2
    assert manager.common_prefix_blocks(space, [1, 4]) == 3
    assert manager.common_prefix_blocks(space, [1, 2, 3]) == 0
    assert manager.common_prefix_blocks(space, [1]) == 3


def test_slots_of_what_is_computed(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    add(manager, space, 2, range(100, 101))
    manager.append(space, [1], [7] * 3, [3])
    at = table(manager, space, 1)
    assert manager.read_slots(space, [(1, 2, 6)]).tolist() == [at[p // 4] * 4 + p % 4 for p in range(2, 6)]
    assert manager.read_slots(space, [(1, 3, 3)]).tolist() == []
    parts = [(1, 2, 6), (2, 0, 1), (1, 0, 1), (2, 1, 1), (1, 5, 6)]
    assert manager.read_slots(space, parts).tolist() == [
        slot for part in parts for slot in manager.read_slots(space, [part]).tolist()
    ]
    with pytest.raises(NotComputedError) as caught:
        manager.read_slots(space, [(1, 0, 1), (1, 0, 7)])
    assert caught.value.field == "ranges[1].stop"
    for start, stop, field in ((0, 10, "stop"), (0, -1, "stop"), (4, 3, "start"), (-1, 3, "start")):
        with pytest.raises(InvalidArgumentError) as refused:
            manager.read_slots(space, [(2, 0, 1), (1, start, stop)])
        assert refused.value.field == f"ranges[1].{field}"


def test_closing_a_space_leaves_nothing_but_cached_blocks(make: Make) -> None:
    manager, space = make()
    other = manager.open_namespace()
    add(manager, space, 1, range(10))
    add(manager, other, 1, range(6))
    manager.fork(space, [1], [2])
    manager.append(space, [2], [5])
    manager.swap_out(space, [1])
    manager.pin(space, range(10), ttl_s=60.0)
    assert manager.close_namespace(space) == 2
    assert manager.close_namespace(space) == 0
    stats = manager.stats()
    assert (stats.sequences, stats.used_swap_blocks, stats.pinned_blocks) == (1, 0, 0)
    manager.check_integrity()
    with pytest.raises(UnknownSessionError):
        manager.append(space, [1], [1])
    manager.close_namespace(other)
    assert manager.stats().active_blocks == manager.stats().tokens == 0
    assert manager.stats().cached_blocks + manager.stats().free_blocks == 32
    manager.check_integrity()
