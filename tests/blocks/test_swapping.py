"""Swapping: capacity of both tiers, preserved sharing, reuse of blocks still on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from each_row import each_row
from listed import listed

from kvservice.blocks import AllocationRequest, AllocStatus, BlockManager, SessionNamespace
from kvservice.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceNotSwappedError,
    SequenceSwappedError,
)

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any) -> None:
    manager.allocate(space, [AllocationRequest(sequence_id, list(tokens))])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def tables(manager: BlockManager, space: SessionNamespace) -> dict[int, list[int]]:
    return {info.sequence_id: listed(info.block_ids) for info in manager.describe(space, include_blocks=True)}


def test_a_shared_block_moves_once_and_is_still_shared(make: Make) -> None:
    manager, space = make(enable_prefix_caching=False)
    add(manager, space, 1, range(10))
    manager.fork(space, [1], [2])
    manager.mark_all_layers(space, manager.append(space, [2], [9]).step_id)
    before = tables(manager, space)
    out = manager.swap_out(space, [1, 2])
    assert sorted(out.src.tolist()) == sorted({*before[1], *before[2]})
    there = tables(manager, space)
    moved = dict(zip(out.src.tolist(), out.dst.tolist(), strict=True))
    assert there == {name: [moved[block] for block in blocks] for name, blocks in before.items()}
    stats = manager.stats()
    assert (stats.used_swap_blocks, stats.active_blocks, stats.swapped_sequences) == (4, 0, 2)
    manager.check_integrity()
    back = manager.swap_in(space, [1, 2])
    moved = dict(zip(back.src.tolist(), back.dst.tolist(), strict=True))
    assert tables(manager, space) == {name: [moved[block] for block in blocks] for name, blocks in there.items()}
    assert manager.stats().shared_blocks == 2
    assert listed(manager.describe(space, [2], include_tokens=True)[0].token_ids) == [*range(10), 9]
    manager.check_integrity()


def test_a_block_that_stays_in_use_is_copied_out(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    manager.fork(space, [1], [2])
    at = tables(manager, space)[1]
    assert sorted(manager.swap_out(space, [2]).src.tolist()) == sorted(at)
    assert tables(manager, space)[1] == at
    assert manager.stats().shared_blocks == 0
    manager.check_integrity()


def test_blocks_that_the_device_still_has_come_back_without_a_copy(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    at = tables(manager, space)[1]
    manager.swap_out(space, [1])
    assert manager.stats().cached_blocks == 2
    plan = manager.swap_in(space, [1])
    assert len(plan) == 1
    assert tables(manager, space)[1][:2] == at[:2]
    assert (manager.stats().swapped_out_blocks, manager.stats().swapped_in_blocks) == (3, 1)
    manager.check_integrity()


def test_blocks_swapped_in_are_findable_again(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(10))
    manager.swap_out(space, [1])
    manager.reset_prefix_cache()
    assert manager.match_prefix(range(10)) == 0
    assert len(manager.swap_in(space, [1])) == 3
    assert manager.match_prefix(range(10)) == 8
    manager.check_integrity()


def test_two_sequences_of_one_content_come_back_to_one_block(make: Make) -> None:
    manager, space = make()
    manager.allocate(space, [AllocationRequest(1, range(4)), AllocationRequest(2, range(4))])
    manager.mark_all_layers(space, manager.open_step(space, [1, 2]).step_id)
    assert len(manager.swap_out(space, [1, 2])) == 2
    assert len(manager.swap_in(space, [1, 2])) == 0
    assert tables(manager, space)[1] == tables(manager, space)[2]
    manager.check_integrity()


def test_pending_tokens_survive(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    manager.append(space, [1], [60, 70, 80], [3])
    manager.swap_out(space, [1])
    manager.swap_in(space, [1])
    info = manager.describe(space, [1], include_tokens=True)[0]
    assert (info.length, info.num_computed, listed(info.token_ids)) == (9, 6, [*range(6), 60, 70, 80])
    assert manager.open_step(space, [1]).query_lens.tolist() == [3]
    manager.check_integrity()


def test_no_room_in_the_swap_tier(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make(num_swap_blocks=3)
    add(manager, space, 1, range(8))
    add(manager, space, 2, range(100, 108))
    before = snapshot(manager)
    assert not manager.can_swap_out(space, [1, 2])
    with pytest.raises(OutOfBlocksError) as caught:
        manager.swap_out(space, [1, 2])
    assert (caught.value.tier, caught.value.required, caught.value.free, caught.value.never) == ("swap", 4, 3, True)
    assert snapshot(manager) == before
    manager.swap_out(space, [1])
    with pytest.raises(OutOfBlocksError) as later:
        manager.swap_out(space, [2])
    assert (later.value.required, later.value.free, later.value.never) == (2, 1, False)


WATERMARKS: list[tuple[Any, ...]] = [
    (16, 0, AllocStatus.OK),
    (20, 0, AllocStatus.LATER),
    (16, 3, AllocStatus.LATER),
    (16, 18, AllocStatus.NEVER),
    (0, 11, AllocStatus.OK),
]


def test_the_watermark_on_the_way_in(make: Make) -> None:
    """8 blocks, watermark 2; another sequence has `taken` tokens; 2 blocks and the lookahead are swapped in."""
    with each_row() as row:
        for taken, lookahead, status in WATERMARKS:
            with row((taken, lookahead, status)):
                manager, space = make(num_blocks=8, watermark=0.25, enable_prefix_caching=False)
                add(manager, space, 1, range(7))
                manager.swap_out(space, [1])
                if taken:
                    add(manager, space, 2, range(taken))
                assert manager.can_swap_in(space, [1], lookahead) is status
                if status is AllocStatus.OK:
                    manager.swap_in(space, [1], lookahead)
                else:
                    with pytest.raises(OutOfBlocksError) as caught:
                        manager.swap_in(space, [1], lookahead)
                    assert caught.value.never == (status is AllocStatus.NEVER)
                manager.check_integrity()


def test_a_cached_block_taken_back_is_counted_exactly(make: Make) -> None:
    """Two of three blocks are still cached, one must be allocated, and exactly one is available."""
    manager, space = make(num_blocks=6)
    add(manager, space, 1, range(10))
    manager.swap_out(space, [1])
    add(manager, space, 2, range(100, 112))
    assert (manager.stats().free_blocks, manager.stats().cached_blocks) == (1, 2)
    assert manager.can_swap_in(space, [1]) is AllocStatus.OK
    assert manager.can_swap_in(space, [1], lookahead=3) is AllocStatus.LATER
    assert len(manager.swap_in(space, [1])) == 1
    manager.check_integrity()


def test_which_operations_a_swapped_out_sequence_takes(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    add(manager, space, 2, range(100, 106))
    manager.swap_out(space, [2])
    before = snapshot(manager)
    both = [1, 2]
    for call in (
        lambda: manager.append(space, both, [1, 1]),
        lambda: manager.can_append(space, both),
        lambda: manager.open_step(space, both),
        lambda: manager.truncate(space, both, [1, 1]),
        lambda: manager.swap_out(space, both),
        lambda: manager.can_swap_out(space, both),
        lambda: manager.common_prefix_blocks(space, both),
    ):
        with pytest.raises(SequenceSwappedError) as caught:
            call()
        assert caught.value.field == "sequence_ids[1]"
    with pytest.raises(SequenceSwappedError) as fork:
        manager.fork(space, both, [3, 4])
    assert fork.value.field == "parent_ids[1]"
    with pytest.raises(SequenceSwappedError):
        manager.read_slots(space, [(2, 0, 1)])
    for swap_in in (manager.can_swap_in, manager.swap_in):
        with pytest.raises(SequenceNotSwappedError) as resident:
            swap_in(space, both)
        assert resident.value.field == "sequence_ids[0]"
        with pytest.raises(InvalidArgumentError) as lookahead:
            swap_in(space, [2], 256)
        assert lookahead.value.field == "lookahead[0]"
    assert snapshot(manager) == before
    assert listed(manager.describe(space, [2], include_tokens=True)[0].token_ids) == list(range(100, 106))
    manager.free(space, both)
    assert manager.stats().used_swap_blocks == 0
    manager.check_integrity()
