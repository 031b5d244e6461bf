"""Steps ahead: slots for tokens that are not known yet, and their commit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from listed import listed

from kvservice.blocks import COMPUTED_TOKENS, AllocationRequest, BlockManager, SessionNamespace
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfBlocksError,
    QuotaExceededError,
    StaleStepError,
    UnknownSequenceError,
    UnknownStepError,
)

Make = Callable[..., tuple[BlockManager, SessionNamespace]]
Snapshot = Callable[[BlockManager], dict[str, Any]]


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any) -> None:
    """Allocate and compute a sequence."""
    manager.allocate(space, [AllocationRequest(sequence_id, list(tokens))])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def described(manager: BlockManager, space: SessionNamespace, sequence_id: int) -> tuple[list[int], int, list[int]]:
    (found,) = manager.describe(space, [sequence_id], include_tokens=True, include_blocks=True)
    return listed(found.token_ids), found.num_computed, listed(found.block_ids)


def test_committed_tokens_are_computed_and_the_next_step_begins_after_them(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    add(manager, space, 2, range(50, 53))
    step = manager.open_ahead(space, [1, 2], 4)
    assert (step.query_lens.tolist(), step.context_lens.tolist()) == ([4, 4], [10, 7])
    tables = step.block_tables.tolist()
    starts = zip(tables, (6, 3), strict=True)
    slots = [table[at // 4] * 4 + at % 4 for table, start in starts for at in range(start, start + 4)]
    assert step.slot_mapping.tolist() == slots
    assert described(manager, space, 1)[:2] == ([0, 1, 2, 3, 4, 5], 6), "nothing is known yet"

    following = manager.commit_ahead(space, step.step_id, [6, 7, 8, 53], [3, 1], 4)
    assert following is not None
    assert following.context_lens.tolist() == [13, 8]
    assert following.slot_mapping.tolist()[0] == slots[3], "the slots that are left come first"
    assert following.slot_mapping.tolist()[4:7] == slots[5:]
    assert described(manager, space, 1)[:2] == (list(range(9)), 9)
    assert described(manager, space, 2)[:2] == ([50, 51, 52, 53], 4)
    assert manager.match_prefix(range(9)) == 8
    assert manager.match_prefix([50, 51, 52, 53]) == 4
    assert space.counters[COMPUTED_TOKENS] == 6 + 3 + 4
    with pytest.raises(StaleStepError):
        manager.commit_ahead(space, step.step_id, [1, 2], None)
    assert manager.commit_ahead(space, following.step_id, [9, 10, 54, 55]) is None
    assert described(manager, space, 1)[:2] == (list(range(11)), 11)
    assert described(manager, space, 2)[:2] == (list(range(50, 56)), 6)
    with pytest.raises(StaleStepError):
        space.live_step(following.step_id)
    manager.check_integrity()


def test_the_sequences_are_as_after_appends(make: Make) -> None:
    """Random batches, steps and counts: tokens, computed lengths, and what the prefix cache finds."""
    for seed in range(20):
        choice = random.Random(seed)
        block_size = choice.choice([1, 2, 4, 16])
        ahead, ahead_space = make(num_blocks=300, block_size=block_size)
        plain, plain_space = make(num_blocks=300, block_size=block_size)
        ids = list(range(choice.randint(1, 5)))
        for name in ids:
            prompt = [choice.randint(0, 3) for _ in range(choice.randint(1, 20))]
            for manager, space in ((ahead, ahead_space), (plain, plain_space)):
                add(manager, space, name, prompt)
        step = ahead.open_ahead(ahead_space, ids, num_steps := choice.randint(1, 9))
        for last in (False, False, False, True):
            counts = [choice.randint(0, num_steps) for _ in ids]
            tokens = [[choice.randint(0, 3) for _ in range(count)] for count in counts]
            num_steps = 0 if last else choice.randint(1, 9)
            flat = list(itertools.chain(*tokens))
            next_step = ahead.commit_ahead(ahead_space, step.step_id, flat, counts, num_steps)
            for name, added in zip(ids, tokens, strict=True):
                if added:
                    opened = plain.append(plain_space, [name], added, [len(added)])
                    plain.mark_all_layers(plain_space, opened.step_id)
            for name in ids:
                assert described(ahead, ahead_space, name)[:2] == described(plain, plain_space, name)[:2]
            everything = [described(plain, plain_space, name)[0] for name in ids]
            assert [ahead.match_prefix(one) for one in everything] == [plain.match_prefix(one) for one in everything]
            assert ahead.stats().computed_tokens == plain.stats().computed_tokens
            ahead.check_integrity()
            if next_step is not None:
                step = next_step


def test_a_shared_last_block_is_copied_first(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    manager.fork(space, [1], [2])
    step = manager.open_ahead(space, [1], 3)
    assert len(step.copies) == 1
    assert described(manager, space, 1)[2][1] != described(manager, space, 2)[2][1]
    manager.check_integrity()


def test_reserved_blocks_that_a_fork_shares_are_replaced(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(4))
    manager.mark_all_layers(space, manager.append(space, [1], [4], lookahead=11).step_id)
    manager.fork(space, [1], [2])
    step = manager.open_ahead(space, [1], 2)
    following = manager.commit_ahead(space, step.step_id, [5, 6], None, 8)
    assert following is not None
    others = set(described(manager, space, 2)[2][1:])
    assert others.isdisjoint((following.slot_mapping // 4).tolist())
    manager.check_integrity()


ENDING_OPERATIONS: dict[str, Callable[[BlockManager, SessionNamespace], Any]] = {
    "append": lambda manager, space: manager.append(space, [1], [9]),
    "fork": lambda manager, space: manager.fork(space, [2], [3]),
    "truncate": lambda manager, space: manager.truncate(space, [1], [2]),
    "swap_out": lambda manager, space: manager.swap_out(space, [2]),
    "free": lambda manager, space: manager.free(space, [1]),
    "rearrange": lambda manager, space: manager.rearrange(space, [1, 2], [2, 1]),
    "open_ahead": lambda manager, space: manager.open_ahead(space, [2], 1),
    "reopen": lambda manager, space: manager.reopen(space, [1], [0], [1]),
}


def test_another_operation_ends_it(make: Make) -> None:
    with each_row() as row:
        for name, operation in ENDING_OPERATIONS.items():
            with row(name):
                manager, space = make()
                add(manager, space, 1, range(6))
                add(manager, space, 2, range(50, 53))
                step = manager.open_ahead(space, [1, 2], 4)
                ended: list[int] = []
                space.on_step_end = ended.append
                operation(manager, space)
                assert ended == [step.step_id]
                with pytest.raises(StaleStepError):
                    manager.commit_ahead(space, step.step_id, [1, 2])
                manager.check_integrity()


def test_it_has_no_layers(make: Make, snapshot: Snapshot) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    step_id = manager.open_ahead(space, [1], 4).step_id
    before = snapshot(manager)
    for call in (
        lambda: manager.check_part(space, step_id, 0, 0, 0),
        lambda: manager.mark_layers(space, step_id, [0]),
        lambda: manager.mark_all_layers(space, step_id),
        lambda: manager.check_part(space, step_id, 0, 0, 2),
        lambda: manager.set_tokens(space, step_id, [1, 2, 3, 4]),
        lambda: manager.advance(space, [1], [0], [1], follows=step_id),
    ):
        with pytest.raises(FailedPreconditionError):
            call()
    assert not manager.commit_written(space, step_id)
    assert snapshot(manager) == before


def test_it_is_not_saved_for_the_next_process(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    manager.open_ahead(space, [1], 4)
    assert manager.save_steps() == 0


BAD_STEPS: list[tuple[Any, ...]] = [
    ([1], 0, InvalidArgumentError, "num_steps"),
    ([1], -1, InvalidArgumentError, "num_steps"),
    ([1], 251, InvalidArgumentError, "num_steps"),
    ([1], 257, InvalidArgumentError, "num_steps"),
    ([1], 1 << 62, InvalidArgumentError, "num_steps"),
    ([1], 2.5, InvalidArgumentError, "num_steps"),
    ([1, 2], 33, QuotaExceededError, "num_steps"),
    ([1, 3], 1, FailedPreconditionError, "sequence_ids[1]"),
    ([1, 1], 1, InvalidArgumentError, "sequence_ids[1]"),
    ([4], 1, UnknownSequenceError, "sequence_ids[0]"),
    ([], 1, InvalidArgumentError, "sequence_ids"),
]


def test_what_cannot_be_opened_changes_nothing(make: Make, snapshot: Snapshot) -> None:
    with each_row() as row:
        for ids, num_steps, error, field in BAD_STEPS:
            with row((ids, num_steps, error, field)):
                manager, space = make(max_request_tokens=64, num_blocks=128)
                add(manager, space, 1, range(6))
                add(manager, space, 2, range(50, 53))
                manager.allocate(space, [AllocationRequest(3, [1, 2])])
                before = snapshot(manager)
                with pytest.raises(error) as raised:
                    manager.open_ahead(space, ids, num_steps)
                assert raised.value.field == field
                assert snapshot(manager) == before


def test_the_largest_step(make: Make) -> None:
    manager, space = make(num_blocks=64)
    add(manager, space, 1, range(6))
    step = manager.open_ahead(space, [1], 250)
    assert step.context_lens.tolist() == [256]
    assert manager.commit_ahead(space, step.step_id, np.arange(250)) is None
    assert described(manager, space, 1)[1] == 256
    with pytest.raises(InvalidArgumentError):
        manager.open_ahead(space, [1], 1)


BAD_COMMITS: list[tuple[Any, ...]] = [
    ([1, 2, 3], None, 0, InvalidArgumentError, "token_ids"),
    ([1] * 10, None, 0, InvalidArgumentError, "token_ids"),
    ([1, 2], [1, 2], 0, InvalidArgumentError, "token_ids"),
    ([1] * 6, [5, 1], 0, InvalidArgumentError, "num_tokens[0]"),
    ([1], [2, -1], 0, InvalidArgumentError, "num_tokens[1]"),
    ([1], [1], 0, InvalidArgumentError, "num_tokens"),
    ([1, 2], None, -1, InvalidArgumentError, "num_steps"),
    ([1, 2], None, 250, InvalidArgumentError, "num_steps"),
    ([1, 2], None, 40, OutOfBlocksError, ""),
]


def test_what_cannot_be_committed_changes_nothing(make: Make, snapshot: Snapshot) -> None:
    with each_row() as row:
        for tokens, counts, num_steps, error, field in BAD_COMMITS:
            with row((tokens, counts, num_steps, error, field)):
                manager, space = make(num_blocks=12)
                add(manager, space, 1, range(6))
                add(manager, space, 2, range(50, 53))
                step = manager.open_ahead(space, [1, 2], 4)
                before = snapshot(manager)
                with pytest.raises(error) as raised:
                    manager.commit_ahead(space, step.step_id, tokens, counts, num_steps)
                assert raised.value.field == field
                assert snapshot(manager) == before
                assert manager.commit_ahead(space, step.step_id, [1, 2]) is None, "it goes on"


def test_other_steps_are_not_committed_so(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    step = manager.append(space, [1], [9])
    with pytest.raises(FailedPreconditionError) as raised:
        manager.commit_ahead(space, step.step_id, [1])
    assert raised.value.field == "step_id"
    with pytest.raises(UnknownStepError):
        manager.commit_ahead(space, 99, [1])


def test_no_tokens_at_all(make: Make) -> None:
    manager, space = make()
    add(manager, space, 1, range(6))
    step = manager.open_ahead(space, [1], 4)
    following = manager.commit_ahead(space, step.step_id, [], None, 2)
    assert following is not None
    assert following.slot_mapping.tolist() == step.slot_mapping.tolist()[:2]
    assert described(manager, space, 1)[:2] == (list(range(6)), 6)
    manager.check_integrity()
