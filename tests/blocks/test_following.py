"""Steps that follow a step that is not complete: where they begin, when they commit, and what ends them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from event_replica import EventReplica
from listed import listed

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig, EventJournal, SessionNamespace, StepPlan
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    NotComputedError,
    OutOfBlocksError,
    StaleStepError,
    UnknownStepError,
)

Make = Callable[..., tuple[BlockManager, SessionNamespace]]
SAMPLED = 91
# Sequences of `pair`: 0 is in both steps, 1 only in the first, 2 only in the second, 3 a prompt in chunks.
BOTH, FIRST, SECOND, CHUNKED = range(4)


def start(manager: BlockManager, space: SessionNamespace) -> None:
    """Make three computed sequences of 7 tokens, and a prompt of 10 tokens that is not computed."""
    for i in (BOTH, FIRST, SECOND):
        manager.allocate(space, [AllocationRequest(i, np.arange(7) + 100 * i)])
    manager.mark_all_layers(space, manager.open_step(space, [BOTH, FIRST, SECOND]).step_id)
    manager.allocate(space, [AllocationRequest(CHUNKED, np.arange(10) + 300)])


def pair(manager: BlockManager, space: SessionNamespace) -> tuple[StepPlan, StepPlan]:
    """Open a step and one that follows it."""
    start(manager, space)
    first = manager.advance(space, [BOTH, FIRST, CHUNKED], [7, 8], [1, 1, 6])
    second = manager.advance(space, [BOTH, SECOND, CHUNKED], [0, 9], [1, 1, 4], follows=first.step_id)
    return first, second


def tokens_of(manager: BlockManager, space: SessionNamespace, sequence_id: int) -> list[int]:
    return listed(manager.describe(space, [sequence_id], include_tokens=True)[0].token_ids)


def progress(manager: BlockManager, space: SessionNamespace) -> list[tuple[int, int]]:
    return [(one.length, one.num_computed) for one in manager.describe(space, [BOTH, FIRST, SECOND, CHUNKED])]


def is_live(space: SessionNamespace, step: StepPlan) -> bool:
    try:
        space.live_step(step.step_id)
    except StaleStepError:
        return False
    return True


def test_it_begins_where_the_followed_step_ends(make: Make) -> None:
    manager, space = make()
    first, second = pair(manager, space)
    assert second.query_lens.tolist() == [1, 1, 4]
    assert second.context_lens.tolist() == [9, 8, 10]
    assert is_live(space, first)
    assert space.steps[second.step_id].follows == first.step_id
    tables = manager.describe(space, [BOTH, CHUNKED], include_blocks=True)
    last, prompt = (listed(one.block_ids) for one in tables)
    assert second.slot_mapping.tolist()[0] == last[2] * 4
    assert second.slot_mapping.tolist()[2:] == [prompt[1] * 4 + 2, prompt[1] * 4 + 3, prompt[2] * 4, prompt[2] * 4 + 1]
    manager.check_integrity()


def test_a_token_that_is_not_known_is_no_token_of_its_sequence(make: Make) -> None:
    manager, space = make()
    _, second = pair(manager, space)
    assert not space.steps[second.step_id].tokens_known
    assert tokens_of(manager, space, BOTH) == [*range(7), 7]
    assert manager.stats().tokens == 8 + 8 + 8 + 10
    manager.set_tokens(space, second.step_id, [SAMPLED])
    assert space.steps[second.step_id].tokens_known
    assert tokens_of(manager, space, BOTH) == [*range(7), 7, SAMPLED]
    assert manager.stats().tokens == 9 + 8 + 8 + 10
    manager.check_integrity()


def test_it_commits_after_the_followed_step_and_with_its_tokens(make: Make) -> None:
    """In any order of: the layers of the first step, those of the second, and the tokens."""
    with each_row() as row:
        for order in ("fst", "fts", "sft", "stf", "tfs", "tsf"):
            with row(order):
                manager, space = make()
                first, second = pair(manager, space)
                before, after_first = [(8, 7), (8, 7), (8, 7), (10, 0)], [(8, 8), (8, 8), (8, 7), (10, 6)]
                done: set[str] = set()
                for event in order:
                    done.add(event)
                    if event == "t":
                        assert manager.set_tokens(space, second.step_id, [SAMPLED]) == (done == set("fst"))
                    else:
                        manager.mark_all_layers(space, (first if event == "f" else second).step_id)
                    expected = after_first if "f" in done else before
                    if done == set("fst"):
                        expected = [(9, 9), (8, 8), (8, 8), (10, 10)]
                    elif "t" in done:
                        expected = [(9, expected[0][1]), *expected[1:]]
                    assert progress(manager, space) == expected
                    manager.check_integrity()
                assert manager.stats().computed_tokens == 21 + 8 + 6


def test_layers_that_a_lane_marks_commit_in_order(make: Make) -> None:
    manager, space = make()
    first, second = pair(manager, space)
    manager.set_tokens(space, second.step_id, [SAMPLED])
    for step in (second, first):
        written = manager.written_layers(space, step.step_id)
        assert written is not None
        written[:] = b"\1\1"
    assert not manager.commit_written(space, second.step_id)
    assert progress(manager, space)[BOTH] == (9, 7)
    assert manager.commit_written(space, first.step_id)
    assert progress(manager, space)[BOTH] == (9, 9)
    assert not manager.commit_written(space, second.step_id)


def test_only_known_tokens_are_in_the_prefix_index_and_in_events() -> None:
    journal = EventJournal(window=100, with_tokens=True)
    manager = BlockManager(BlocksConfig(num_blocks=16, block_size=4, num_layers=1, watermark=0.0), journal=journal)
    space, replica = manager.open_namespace(), EventReplica(journal)
    manager.allocate(space, [AllocationRequest(0, [1, 2, 3])])
    first = manager.open_step(space, [0])
    second = manager.advance(space, [0], [0], [1], follows=first.step_id)
    manager.mark_all_layers(space, second.step_id)
    manager.mark_all_layers(space, first.step_id)
    assert manager.match_prefix([1, 2, 3, 0]) == 0
    with pytest.raises(NotComputedError):
        manager.pin(space, [1, 2, 3, 0], ttl_s=1.0)
    manager.set_tokens(space, second.step_id, [SAMPLED])
    assert manager.match_prefix([1, 2, 3, SAMPLED]) == 4
    replica.follow()
    assert [list(np.frombuffer(tokens, "<i4")) for _, tokens in replica.blocks.values()] == [[1, 2, 3, SAMPLED]]


def test_a_row_of_steps_each_one_ahead_of_the_one_before(make: Make) -> None:
    """The engine's loop: step n + 1 is opened, then step n is complete and gives the tokens of step n + 1."""
    manager, space = make()
    manager.allocate(space, [AllocationRequest(0, [1, 2])])
    step = manager.open_step(space, [0])
    for token in range(10, 30):
        ahead = manager.advance(space, [0], [0], [1], follows=step.step_id)
        manager.mark_all_layers(space, step.step_id)
        manager.set_tokens(space, ahead.step_id, [token])
        assert set(space.steps) == {step.step_id, ahead.step_id}
        manager.check_integrity()
        step = ahead
    manager.mark_all_layers(space, step.step_id)
    assert tokens_of(manager, space, 0) == [1, 2, *range(10, 30)]
    assert manager.match_prefix([1, 2, *range(10, 30)]) == 20


def test_steps_without_common_sequences_are_independent(make: Make) -> None:
    manager, space = make()
    start(manager, space)
    first = manager.append(space, [FIRST], [8])
    second = manager.advance(space, [SECOND, CHUNKED], [9], [1, 10], follows=first.step_id)
    assert space.steps[second.step_id].follows == 0
    manager.mark_all_layers(space, second.step_id)
    assert progress(manager, space)[CHUNKED] == (10, 10)
    manager.free(space, [FIRST])
    assert is_live(space, second)


def test_proposals_use_the_lookahead(make: Make) -> None:
    manager, space = make()
    start(manager, space)
    step = manager.advance(space, [FIRST, SECOND], [1, 2, 3, 4, 5], [4, 1], lookahead=3, num_appended=[4, 1])
    assert step.query_lens.tolist() == [4, 1]
    assert step.context_lens.tolist() == [11, 8]
    assert [one.num_blocks for one in manager.describe(space, [FIRST, SECOND])] == [3, 3]
    manager.mark_all_layers(space, step.step_id)
    manager.truncate(space, [FIRST], [9])
    assert tokens_of(manager, space, FIRST) == [*range(100, 107), 1, 2]
    assert manager.match_prefix([*range(100, 107), 1, 2, 3, 4]) == 8
    manager.check_integrity()


# ---- operations that end the two steps

Operation = Callable[[BlockManager, SessionNamespace, int], object]


def append(manager: BlockManager, space: SessionNamespace, name: int) -> None:
    length = manager.describe(space, [name])[0].length
    manager.append(space, [name], [55], expected_lengths=[length])


OPERATIONS: dict[str, Operation] = {
    "append": append,
    "truncate": lambda manager, space, name: manager.truncate(space, [name], [5]),
    "free": lambda manager, space, name: manager.free(space, [name]),
    "fork": lambda manager, space, name: manager.fork(space, [name], [9]),
    "swap": lambda manager, space, name: manager.swap_out(space, [name]),
}


def test_an_operation_on_a_sequence_of_one_step_ends_both(make: Make) -> None:
    with each_row() as row:
        for how, operation in OPERATIONS.items():
            for name in (BOTH, FIRST, SECOND, CHUNKED):
                with row((how, name)):
                    manager, space = make()
                    ended: list[int] = []
                    space.on_step_end = ended.append
                    first, second = pair(manager, space)
                    ended.clear()
                    operation(manager, space, name)
                    assert sorted(ended) == [first.step_id, second.step_id]
                    for step in (first, second):
                        with pytest.raises(StaleStepError):
                            manager.mark_all_layers(space, step.step_id)
                    with pytest.raises(StaleStepError):
                        manager.set_tokens(space, second.step_id, [SAMPLED])
                    if name != BOTH or how != "free":
                        kept = 5 if how == "truncate" and name == BOTH else 8
                        resident = name != BOTH or how != "swap"
                        tokens = tokens_of(manager, space, BOTH)
                        assert tokens[:kept] == [*range(7), 7][:kept]
                        if resident and how != "truncate":
                            again = manager.open_step(space, [BOTH])
                            assert again.context_lens[0] - again.query_lens[0] == 7
                    manager.check_integrity()


def test_a_complete_step_ends_alone_where_its_follower_goes_on_without_the_sequence(make: Make) -> None:
    """A request that ends, or is forked, with the report of the followed step."""
    with each_row() as row:
        for how, operation in OPERATIONS.items():
            with row(how):
                manager, space = make()
                first, second = pair(manager, space)
                manager.mark_all_layers(space, first.step_id)
                operation(manager, space, FIRST)
                assert not is_live(space, first)
                manager.mark_all_layers(space, second.step_id)
                manager.set_tokens(space, second.step_id, [SAMPLED])
                assert tokens_of(manager, space, BOTH) == [*range(7), 7, SAMPLED]
                assert manager.describe(space, [BOTH])[0].num_computed == 9
                manager.check_integrity()


def test_a_retry_computes_the_first_step_again(make: Make) -> None:
    manager, space = make()
    first, second = pair(manager, space)
    again = manager.open_step(space, [BOTH, FIRST, CHUNKED], [1, 1, 6])
    assert again.slot_mapping.tolist() == first.slot_mapping.tolist()
    ahead = manager.advance(space, [BOTH, SECOND, CHUNKED], [0, 9], [1, 1, 4], follows=again.step_id)
    assert ahead.slot_mapping.tolist()[0] == second.slot_mapping.tolist()[0]
    manager.check_integrity()


def test_closing_a_namespace_ends_both(make: Make) -> None:
    manager, space = make()
    pair(manager, space)
    assert manager.close_namespace(space) == 4
    assert not space.steps
    assert manager.stats().active_blocks == 0


# Refusals


def refused(
    manager: BlockManager, error: type[KVServiceError], field: str, call: Callable[[], object], snapshot: Any
) -> None:
    before = snapshot(manager)
    with pytest.raises(error) as caught:
        call()
    assert caught.value.field == field
    assert snapshot(manager) == before


def test_bad_arguments_change_nothing(make: Make, snapshot: Any) -> None:
    """Each is refused with the error that names its field."""
    manager, space = make()
    first, second = pair(manager, space)
    ids, follows = [BOTH], {"follows": second.step_id}
    manager.set_tokens(space, second.step_id, [SAMPLED])
    manager.mark_all_layers(space, first.step_id)
    for error, field, call in (
        (UnknownStepError, "follows", lambda: manager.advance(space, ids, [0], [1], follows=99)),
        (StaleStepError, "follows", lambda: manager.advance(space, ids, [0], [1], follows=1)),
        (InvalidArgumentError, "follows", lambda: manager.advance(space, ids, [0], [1], follows=-1)),
        (FailedPreconditionError, "follows", lambda: manager.advance(space, ids, [0], [1], follows=first.step_id)),
        (InvalidArgumentError, "num_tokens[0]", lambda: manager.advance(space, ids, [0], [2], **follows)),
        (InvalidArgumentError, "num_tokens[0]", lambda: manager.advance(space, ids, [], [1], **follows)),
        (
            InvalidArgumentError,
            "num_appended[0]",
            lambda: manager.advance(space, ids, [0, 1], [2], num_appended=[2], **follows),
        ),
        (InvalidArgumentError, "num_appended", lambda: manager.advance(space, ids, [0], [1], num_appended=[1, 1])),
        (InvalidArgumentError, "num_appended[0]", lambda: manager.advance(space, ids, [0], [1], num_appended=[0])),
        (InvalidArgumentError, "token_ids", lambda: manager.advance(space, ids, [0], [1], num_appended=[2])),
        (FailedPreconditionError, "step_id", lambda: manager.set_tokens(space, second.step_id, [1])),
        (UnknownStepError, "step_id", lambda: manager.set_tokens(space, 99, [1])),
    ):
        refused(manager, error, field, call, snapshot)


def test_tokens_are_checked(make: Make, snapshot: Any) -> None:
    """A wrong number of tokens or a negative one is refused."""
    manager, space = make()
    _, second = pair(manager, space)
    for tokens, field in (([], "token_ids"), ([1, 2], "token_ids"), ([-1], "token_ids[0]")):
        refused(
            manager, InvalidArgumentError, field,
            functools.partial(manager.set_tokens, space, second.step_id, tokens), snapshot,
        )  # fmt: skip


def test_a_chunk_that_is_not_the_last_samples_no_token(make: Make, snapshot: Any) -> None:
    """A following step that appends to such a prompt is refused."""
    manager, space = make()
    start(manager, space)
    first = manager.open_step(space, [CHUNKED], [6])
    refused(
        manager, FailedPreconditionError, "sequence_ids[0]",
        lambda: manager.advance(space, [CHUNKED], [0], [5], follows=first.step_id), snapshot,
    )  # fmt: skip


def test_at_most_two_steps_are_in_progress(make: Make, snapshot: Any) -> None:
    manager, space = make()
    first, second = pair(manager, space)

    def third() -> StepPlan:
        return manager.advance(space, [BOTH], [0], [1], follows=second.step_id)

    refused(manager, FailedPreconditionError, "follows", third, snapshot)
    manager.set_tokens(space, second.step_id, [SAMPLED])
    refused(manager, FailedPreconditionError, "follows", third, snapshot)
    manager.mark_all_layers(space, first.step_id)
    step = third()
    assert not is_live(space, first)
    assert step.context_lens.tolist() == [10]
    manager.check_integrity()


def test_without_blocks_nothing_changes(make: Make, snapshot: Any) -> None:
    manager, space = make(num_blocks=2)
    manager.allocate(space, [AllocationRequest(0, range(7))])
    first = manager.open_step(space, [0])
    second = manager.advance(space, [0], [0], [1], follows=first.step_id)
    manager.mark_all_layers(space, first.step_id)
    manager.set_tokens(space, second.step_id, [SAMPLED])
    with pytest.raises(OutOfBlocksError):
        manager.advance(space, [0], [0], [1], follows=second.step_id)
    assert is_live(space, second)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError):
        manager.advance(space, [0], [0], [1], 2, follows=second.step_id)
    assert snapshot(manager) == before
