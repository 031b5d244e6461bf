"""Steps: slots, copy-on-write, layers, retries, stale steps."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blocks_calls import mark_layer
from each_row import each_row
from listed import listed

from kvservice.blocks import AllocationRequest, BlockManager, SessionNamespace, StepPlan
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    LayerWrittenError,
    LengthMismatchError,
    OutOfBlocksError,
    StaleStepError,
    UnknownStepError,
)

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def allocate(manager: BlockManager, space: SessionNamespace, *lengths: int, computed: bool = True) -> None:
    """Allocate sequences 0, 1, ... of these lengths, without common prefixes."""
    requests = [AllocationRequest(i, np.arange(n, dtype=np.int32) + 1000 * i) for i, n in enumerate(lengths)]
    manager.allocate(space, requests)
    if computed:
        manager.mark_all_layers(space, manager.open_step(space, list(range(len(lengths)))).step_id)


def tables(manager: BlockManager, space: SessionNamespace) -> dict[int, list[int]]:
    described = manager.describe(space, include_blocks=True)
    return {info.sequence_id: listed(info.block_ids) for info in described}


def slots_of(table: list[int], start: int, stop: int) -> list[int]:
    return [table[position // 4] * 4 + position % 4 for position in range(start, stop)]


def test_a_step_says_where_its_tokens_lie(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 6, 4, 1)
    step = manager.append(space, [2, 0], [1, 2, 3, 4, 5], [3, 2])
    at = tables(manager, space)
    assert step.query_lens.tolist() == [3, 2]
    assert step.context_lens.tolist() == [4, 8]
    assert step.slot_mapping.tolist() == slots_of(at[2], 1, 4) + slots_of(at[0], 6, 8)
    assert step.block_tables.tolist() == [[at[2][0], 0], at[0]]
    assert step.block_tables is step.block_tables
    assert manager.sequences.block_tables[step.rows[1], :2].tolist() == at[0]
    dtypes = (step.sequence_ids, step.rows, step.query_lens, step.context_lens, step.slot_mapping, step.block_tables)
    assert [array.dtype for array in dtypes] == [np.int64, np.int64, np.int32, np.int32, np.int64, np.int32]


def test_the_tables_of_a_step_are_gathered_without_the_others(make: Make) -> None:
    """A manager has thousands of tables, each as wide as the longest sequence. A shorter table ends with padding."""
    manager, space = make(num_blocks=2048, block_size=1, max_sequences=4096, max_sequence_tokens=1025)
    allocate(manager, space, 1023, 2)
    step = manager.append(space, [1, 0], [7, 7])
    tracemalloc.start()
    try:
        found = step.block_tables
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000
    held = tables(manager, space)
    assert found.tolist() == [[*held[1], *[0] * 1021], held[0]]
    assert found.flags.c_contiguous


def test_one_token_each_takes_a_block_only_when_the_last_is_full(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 7, 8)
    before = manager.stats().active_blocks
    step = manager.append(space, [0, 1], [5, 6])
    assert manager.stats().active_blocks == before + 1
    at = tables(manager, space)
    assert step.slot_mapping.tolist() == slots_of(at[0], 7, 8) + slots_of(at[1], 8, 9)
    assert listed(manager.describe(space, [1], include_tokens=True)[0].token_ids)[-1] == 6
    manager.check_integrity()


def test_pending_tokens_are_part_of_the_next_step(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 6, computed=False)
    step = manager.append(space, [0], [7])
    assert (step.query_lens.tolist(), step.context_lens.tolist()) == ([7], [7])
    again = manager.open_step(space, [0], [3])
    assert (again.query_lens.tolist(), again.context_lens.tolist()) == ([3], [3])
    manager.mark_all_layers(space, again.step_id)
    assert manager.describe(space, [0])[0].num_computed == 3
    assert manager.open_step(space, [0]).slot_mapping.tolist() == slots_of(tables(manager, space)[0], 3, 7)


def test_chunks_lie_within_the_pending_tokens(make: Make) -> None:
    with each_row() as row:
        for num_tokens, field in (([0], "num_tokens[0]"), ([7], "num_tokens[0]"), ([1, 1], "num_tokens")):
            with row((num_tokens, field)):
                manager, space = make()
                allocate(manager, space, 6, computed=False)
                with pytest.raises(InvalidArgumentError) as caught:
                    manager.open_step(space, [0], num_tokens)
                assert caught.value.field == field


def test_open_step_needs_a_pending_token(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 6, 6)
    with pytest.raises(FailedPreconditionError) as caught:
        manager.open_step(space, [0, 1])
    assert caught.value.field == "sequence_ids[0]"


def test_lookahead_reserves_blocks_once(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 4)
    manager.append(space, [0], [1], lookahead=8)
    assert manager.describe(space, [0])[0].num_blocks == 4
    free = manager.stats().free_blocks
    manager.append(space, [0], [1] * 8, [8])
    assert manager.stats().free_blocks == free


# Copy-on-write


def test_the_first_to_write_a_shared_block_gets_a_copy(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 6)
    manager.fork(space, [0], [1])
    before = tables(manager, space)[0]
    step = manager.append(space, [1], [9])
    after = tables(manager, space)
    assert after[0] == before
    assert after[1][0] == before[0]
    assert (step.copies.src.tolist(), step.copies.dst.tolist()) == ([before[1]], [after[1][1]])
    assert listed(manager.describe(space, [1], include_tokens=True)[0].token_ids) == [0, 1, 2, 3, 4, 5, 9]
    assert len(manager.append(space, [0], [8]).copies) == 0
    assert manager.stats().cow_copies == 1
    manager.check_integrity()


def test_when_all_holders_write_the_last_keeps_the_block(make: Make) -> None:
    manager, space = make(num_blocks=4)
    allocate(manager, space, 6)
    manager.fork(space, [0, 0], [1, 2])
    old = tables(manager, space)[0][1]
    assert manager.can_append(space, [0, 1, 2])
    step = manager.append(space, [0, 1, 2], [7, 8, 9])
    assert tables(manager, space)[2][1] == old
    assert step.copies.src.tolist() == [old, old]
    assert manager.stats().free_blocks == 0
    manager.check_integrity()


def test_two_of_three_holders_write(make: Make) -> None:
    """The third still reads the block, so both writers need a copy, and the check counts both."""
    manager, space = make(num_blocks=3)
    allocate(manager, space, 6)
    manager.fork(space, [0, 0], [1, 2])
    assert not manager.can_append(space, [0, 1])
    with pytest.raises(OutOfBlocksError):
        manager.append(space, [0, 1], [7, 8])
    assert manager.can_append(space, [0])


def test_a_full_shared_block_needs_no_copy(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 8)
    manager.fork(space, [0], [1])
    step = manager.append(space, [0, 1], [7, 8])
    assert len(step.copies) == 0
    assert manager.stats().cow_copies == 0


def test_a_shared_block_without_computed_tokens_moves_no_bytes(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 8, computed=False)
    manager.mark_all_layers(space, manager.open_step(space, [0], [4]).step_id)
    manager.fork(space, [0], [1])
    step = manager.open_step(space, [1])
    assert manager.stats().cow_copies == 1
    assert len(step.copies) == 0
    assert listed(manager.describe(space, [1], include_tokens=True)[0].token_ids) == list(range(8))
    manager.check_integrity()


def test_a_truncated_block_can_leave_the_index_at_once(make: Make) -> None:
    """Unless another sequence holds it or a pin keeps it: then the next token is written to a copy."""
    for shared, pinned, found in ((False, False, 4), (True, False, 8), (False, True, 8)):
        manager, space = make()
        allocate(manager, space, 8)
        if shared:
            manager.fork(space, [0], [1])
        if pinned:
            manager.pin(space, range(8), ttl_s=1e9)
        manager.truncate(space, [0], [6], unindex=True)
        assert manager.match_prefix(range(8)) == found
        _, holders = manager.tail_blocks(space, [0])
        step = manager.append(space, [0], [9])
        assert len(step.copies) == (holders[0] > 1) == (shared or pinned)
        manager.check_integrity()


def test_a_truncated_block_leaves_the_index_before_it_is_written(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 8)
    manager.truncate(space, [0], [6])
    assert manager.match_prefix(range(8)) == 8
    block = tables(manager, space)[0][1]
    step = manager.append(space, [0], [99])
    assert tables(manager, space)[0][1] == block
    assert (len(step.copies), manager.match_prefix(range(8))) == (0, 4)
    manager.check_integrity()
    manager.mark_all_layers(space, manager.append(space, [0], [98]).step_id)
    assert manager.match_prefix([0, 1, 2, 3, 4, 5, 99, 98]) == 8
    manager.check_integrity()


def test_a_truncated_block_that_others_found_is_copied(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 8)
    manager.truncate(space, [0], [6])
    manager.allocate(space, [AllocationRequest(5, [*range(8), 77])])
    step = manager.append(space, [0], [99])
    assert len(step.copies) == 1
    assert listed(manager.describe(space, [5], include_tokens=True)[0].token_ids) == [*range(8), 77]
    manager.check_integrity()


def test_append_in_mid_batch_out_of_blocks_changes_nothing(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make(num_blocks=3)
    allocate(manager, space, 4, 4)
    before = snapshot(manager)
    assert not manager.can_append(space, [0, 1])
    with pytest.raises(OutOfBlocksError) as caught:
        manager.append(space, [0, 1], [1, 2])
    assert (caught.value.required, caught.value.free, caught.value.never) == (2, 1, False)
    assert snapshot(manager) == before


# Layers


def test_layers_are_written_once_each_in_any_order(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make(num_layers=3)
    allocate(manager, space, 6)
    step = manager.append(space, [0], [1])
    assert manager.check_part(space, step.step_id, 2, 0, 0) is step
    assert not mark_layer(manager, space, step.step_id, 2)
    before = snapshot(manager)
    with pytest.raises(LayerWrittenError):
        manager.check_part(space, step.step_id, 2, 0, 0)
    with pytest.raises(LayerWrittenError):
        manager.mark_part(space, step.step_id, 2, step)
    for whole in (manager.check_all_layers, manager.mark_all_layers):
        with pytest.raises(LayerWrittenError):
            whole(space, step.step_id)
    for layer in (-1, 3, 2**40):
        with pytest.raises(InvalidArgumentError) as caught:
            manager.check_part(space, step.step_id, layer, 0, 0)
        assert caught.value.field == "layer"
    assert snapshot(manager) == before
    assert not mark_layer(manager, space, step.step_id, 0)
    assert manager.describe(space, [0])[0].num_computed == 6
    assert mark_layer(manager, space, step.step_id, 1)
    assert manager.describe(space, [0])[0].num_computed == 7
    with pytest.raises(LayerWrittenError):
        manager.check_part(space, step.step_id, 1, 0, 0)


def test_a_failed_write_leaves_nothing_changed(make: Make, snapshot: Callable[..., Any]) -> None:
    """Checking changes nothing, so a write that fails after it can be tried again."""
    manager, space = make()
    allocate(manager, space, 6)
    step = manager.append(space, [0], [1])
    before = snapshot(manager)
    manager.check_part(space, step.step_id, 0, 0, 0)
    manager.check_all_layers(space, step.step_id)
    assert snapshot(manager) == before


def test_steps_are_numbered_per_space(make: Make) -> None:
    manager, space = make()
    other = manager.open_namespace()
    manager.allocate(space, [AllocationRequest(1, [1])])
    manager.allocate(other, [AllocationRequest(1, [2])])
    assert manager.open_step(space, [1]).step_id == manager.open_step(other, [1]).step_id == 1
    assert manager.open_step(space, [1]).step_id == 2
    with pytest.raises(UnknownStepError):
        other.live_step(2)
    with pytest.raises(UnknownStepError):
        space.live_step(0)
    with pytest.raises(InvalidArgumentError):
        space.live_step(-1)


def outdating(manager: BlockManager, space: SessionNamespace) -> dict[str, Callable[[], object]]:
    return {
        "append": lambda: manager.append(space, [1], [1]),
        "open_step": lambda: manager.open_step(space, [1]),
        "truncate": lambda: manager.truncate(space, [1], [7]),
        "fork": lambda: manager.fork(space, [1], [2]),
        "swap_out": lambda: manager.swap_out(space, [1]),
        "free": lambda: manager.free(space, [1]),
    }


def test_an_operation_on_one_sequence_makes_its_whole_step_stale(make: Make) -> None:
    with each_row() as row:
        for operation in ("append", "open_step", "truncate", "fork", "swap_out", "free"):
            with row(operation):
                manager, space = make()
                allocate(manager, space, 6, 6)
                step = manager.append(space, [0, 1], [1, 2])
                mark_layer(manager, space, step.step_id, 0)
                outdating(manager, space)[operation]()
                with pytest.raises(StaleStepError):
                    manager.check_part(space, step.step_id, 1, 0, 0)
                with pytest.raises(StaleStepError):
                    manager.mark_all_layers(space, step.step_id)
                assert manager.describe(space, [0])[0].num_computed == 6
                manager.check_integrity()


def test_a_row_used_again_does_not_revive_a_step(make: Make) -> None:
    manager, space = make(max_sequences=1)
    allocate(manager, space, 6)
    step = manager.append(space, [0], [1])
    manager.free(space, [0])
    allocate(manager, space, 6, computed=False)
    with pytest.raises(StaleStepError):
        mark_layer(manager, space, step.step_id, 0)


def test_superseded_steps_are_forgotten(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 4, 4)
    for i in range(200):
        for ids in ([0], [1], [0, 1]):
            step = manager.append(space, ids, [i] * len(ids))
            manager.mark_all_layers(space, step.step_id)
        assert len(space.steps) == 1
        manager.truncate(space, [0, 1], [4, 4])
    assert not space.steps


# Retries


def append_again(manager: BlockManager, space: SessionNamespace, **changes: Any) -> StepPlan:
    arguments: dict[str, Any] = {"sequence_ids": [0, 1], "token_ids": [7, 8, 9], "num_tokens": [1, 2]}
    return manager.append(space, **{**arguments, "expected_lengths": [6, 8], **changes})


def test_a_repeated_append_gets_its_step_again(make: Make, snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for written in ("nothing", "a layer", "everything"):
            with row(written):
                manager, space = make()
                allocate(manager, space, 6, 8)
                manager.fork(space, [0], [5])
                step = append_again(manager, space)
                assert len(step.copies) == 1
                if written == "a layer":
                    mark_layer(manager, space, step.step_id, 0)
                elif written == "everything":
                    manager.mark_all_layers(space, step.step_id)
                before = snapshot(manager)
                again = append_again(manager, space)
                assert again.step_id == step.step_id
                assert again.slot_mapping.tolist() == step.slot_mapping.tolist()
                assert len(again.copies) == 0
                assert snapshot(manager) == before


MISMATCHES: list[Any] = [
    {"token_ids": [7, 8, 8]},
    {"num_tokens": [2, 1]},
    {"sequence_ids": [1, 0], "expected_lengths": [8, 6], "num_tokens": [2, 1]},
    {"sequence_ids": [0], "token_ids": [7], "num_tokens": None, "expected_lengths": [6]},
    {"expected_lengths": [6, 10]},
    {"expected_lengths": [5, 7]},
]


def test_anything_but_a_repetition_is_a_mismatch(make: Make, snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for changes in MISMATCHES:
            with row(changes):
                manager, space = make()
                allocate(manager, space, 6, 8)
                append_again(manager, space)
                before = snapshot(manager)
                with pytest.raises(LengthMismatchError):
                    append_again(manager, space, **changes)
                assert snapshot(manager) == before


def test_a_repetition_after_another_operation_is_a_mismatch(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 6, 8)
    append_again(manager, space)
    manager.open_step(space, [0])
    with pytest.raises(LengthMismatchError) as caught:
        append_again(manager, space)
    assert caught.value.field == "expected_lengths[0]"
    assert caught.value.metadata == {"sequence_id": "0", "length": "7", "expected_length": "6"}


def test_expected_lengths_that_hold(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 6, 8)
    assert append_again(manager, space).context_lens.tolist() == [7, 10]


def test_max_sequence_tokens(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make(max_sequence_tokens=10)
    allocate(manager, space, 9, 10)
    before = snapshot(manager)
    for call, field in (
        (lambda: manager.append(space, [0, 1], [1, 1]), "token_ids[1]"),
        (lambda: manager.append(space, [0], [1, 1], [2]), "token_ids[0]"),
        (lambda: manager.append(space, [0], [1], lookahead=1), "lookahead[0]"),
        (lambda: manager.can_append(space, [1]), "token_ids[0]"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert caught.value.field == field
        assert "max_sequence_tokens = 10" in str(caught.value)
    assert snapshot(manager) == before
    assert manager.append(space, [0], [1]).context_lens.tolist() == [10]


def test_a_part_of_a_step(make: Make) -> None:
    """Slots, lengths and contexts of a part match its tokens, wherever the step is cut."""
    manager, space = make()
    for n, length in ((1, 5), (2, 7), (3, 1), (4, 6)):
        manager.allocate(space, [AllocationRequest(n, range(100 * n, 100 * n + length))])
    manager.mark_all_layers(space, manager.open_step(space, [1]).step_id)
    manager.append(space, [1], [7, 8, 9], [3])
    step = manager.open_step(space, [1, 2, 3, 4])
    positions = [(n, p) for n, first, end in ((1, 5, 8), (2, 0, 7), (3, 0, 1), (4, 0, 6)) for p in range(first, end)]
    assert len(positions) == len(step.slot_mapping) == 17
    for first in range(17):
        for stop in range(first + 1, 18):
            part = step.part(first, stop)
            assert part.slot_mapping.tolist() == step.slot_mapping[first:stop].tolist()
            found = [
                (sequence_id, position)
                for sequence_id, query, context in zip(
                    part.sequence_ids.tolist(), part.query_lens.tolist(), part.context_lens.tolist(), strict=True
                )
                for position in range(context - query, context)
            ]
            assert found == positions[first:stop]
            assert part.rows.tolist() == [space.rows[n] for n in part.sequence_ids.tolist()]


def test_a_layer_in_parts(make: Make) -> None:
    manager, space = make()
    manager.allocate(space, [AllocationRequest(1, range(10))])
    step = manager.open_step(space, [1])
    first = manager.check_part(space, step.step_id, 0, 0, 6)
    assert manager.check_part(space, step.step_id, 1, 0, 6) is first, "of all layers the same"
    assert not manager.mark_part(space, step.step_id, 0, first)
    for layer, begin, kind in (
        (0, 5, LayerWrittenError),
        (0, 7, FailedPreconditionError),
        (1, 6, FailedPreconditionError),
    ):
        with pytest.raises(kind):
            manager.check_part(space, step.step_id, layer, begin, 0)
    with pytest.raises(LayerWrittenError):
        manager.check_all_layers(space, step.step_id)
    assert space.in_progress(step.step_id)
    rest = manager.check_part(space, step.step_id, 0, 6, 0)
    assert not manager.mark_part(space, step.step_id, 0, rest)
    assert manager.check_part(space, step.step_id, 1, 0, 10) is step
    assert manager.mark_part(space, step.step_id, 1, step)
    manager.check_integrity()
    assert manager.match_prefix(range(10)) == 8


def test_advance_appends_and_opens_one_step_over_decodes_and_chunks(make: Make) -> None:
    manager, space = make()
    allocate(manager, space, 3, 4)
    manager.allocate(space, [AllocationRequest(2, np.arange(500, 510))])
    step = manager.advance(space, [0, 1, 2], [71, 72], [1, 1, 6])
    held = tables(manager, space)
    assert step.query_lens.tolist() == [1, 1, 6]
    assert step.context_lens.tolist() == [4, 5, 6]
    expected = [*slots_of(held[0], 3, 4), *slots_of(held[1], 4, 5), *slots_of(held[2], 0, 6)]
    assert step.slot_mapping.tolist() == expected
    manager.mark_all_layers(space, step.step_id)
    described = manager.describe(space, [0, 1, 2], include_tokens=True)
    assert [one.num_computed for one in described] == [4, 5, 6]
    assert [listed(one.token_ids)[-1] for one in described] == [71, 72, 509]
    rest = manager.advance(space, [0, 2], [73], [1, 4])
    assert rest.context_lens.tolist() == [5, 10]
    manager.check_integrity()


BAD_ADVANCES: list[tuple[Any, ...]] = [
    ([], [1, 1], "num_tokens[0]"),
    ([1, 2, 3], [1, 1], "token_ids"),
    ([-1], [1, 1], "token_ids[0]"),
    ([1], [1], "num_tokens"),
    ([1], [2, 1], "num_tokens[0]"),
    ([1], [1, 7], "num_tokens[1]"),
    ([1], [1, 0], "num_tokens[1]"),
]


def test_a_bad_advance_changes_nothing(make: Make, snapshot: Callable[[BlockManager], dict[str, Any]]) -> None:
    with each_row() as row:
        for tokens, num_tokens, field in BAD_ADVANCES:
            with row((tokens, num_tokens, field)):
                manager, space = make()
                allocate(manager, space, 3)
                manager.allocate(space, [AllocationRequest(1, np.arange(500, 506))])
                before = snapshot(manager)
                with pytest.raises(InvalidArgumentError) as refused:
                    manager.advance(space, [0, 1], tokens, num_tokens)
                assert refused.value.field == field
                assert snapshot(manager) == before


def test_an_advance_without_blocks_changes_nothing(
    make: Make, snapshot: Callable[[BlockManager], dict[str, Any]]
) -> None:
    manager, space = make(num_blocks=3)
    allocate(manager, space, 4)
    manager.allocate(space, [AllocationRequest(1, np.arange(500, 506))])
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError):
        manager.advance(space, [0, 1], [7], [1, 6])
    assert snapshot(manager) == before
    assert manager.device.num_available == 0
