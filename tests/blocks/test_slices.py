"""Operations in slices: between slices the state is consistent, and other operations may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from each_row import each_row

from kvservice.blocks import (
    SLICE_SEQUENCES,
    AllocationRequest,
    AllocStatus,
    BlockManager,
    BlocksConfig,
    Cleared,
    EventJournal,
    RemovedBlocks,
    SessionNamespace,
    Waits,
    finish,
    in_turn,
)
from kvservice.errors import (
    DuplicateSequenceError,
    InvalidArgumentError,
    QuotaExceededError,
    UnknownSequenceError,
    UnknownSessionError,
)

# Blocks of a sequence. Three such sequences need more than two slices.
LONG = 14_000
Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def large(max_sequences: int = 16, num_blocks: int = 60_000, **changes: Any) -> BlockManager:
    sizes = {"num_blocks": num_blocks, "block_size": 1, "num_swap_blocks": 30_000, "watermark": 0.0}
    limits = {"max_sequences": max_sequences, "max_sequence_tokens": 20_000}
    return BlockManager(BlocksConfig(**sizes | limits), **changes)  # type: ignore[arg-type]


def add(
    manager: BlockManager, space: SessionNamespace, sequence_id: int, first_token: int = 0, count: int = LONG
) -> None:
    """A sequence whose tokens are computed."""
    tokens = np.arange(first_token, first_token + count, dtype=np.int32)
    manager.allocate(space, [AllocationRequest(sequence_id, tokens)])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def run(slices: Waits[Any], between: Callable[[int], object]) -> tuple[int, Any]:
    """Return the number of slices and the result. `between` is called with the slice number after each but the last."""
    count = 1
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return count, end.value
        between(count)
        count += 1


def test_free_while_others_work() -> None:
    manager = large()
    space, other = manager.open_namespace(), manager.open_namespace(2)
    for n in range(3):
        add(manager, space, n, n * LONG)
    manager.fork(space, [0], [9])
    manager.swap_out(space, [2])

    def between(count: int) -> None:
        manager.check_integrity()
        assert space.sequence_ids() == [9, *range(count - 1)]
        add(manager, other, count, 100_000 + count * 10, 10)
        add(manager, space, count - 1, 200_000 + count * 10, 10)  # the id of a sequence that is being freed

    slices, _ = run(manager.free_in_slices(space, [0, 1, 2]), between)
    assert slices > 2
    manager.check_integrity()
    assert not manager.sequences.ending
    assert manager.match_prefix(range(LONG)) == LONG
    assert manager.match_prefix(range(LONG, 2 * LONG)) == LONG, "they stay cached"
    assert manager.stats().used_swap_blocks == 0
    assert sorted(space.sequence_ids()) == [*range(slices - 1), 9]


def test_free_refuses_before_the_first_slice() -> None:
    manager = large()
    space = manager.open_namespace()
    add(manager, space, 1)
    slices = manager.free_in_slices(space, [1, 2])
    with pytest.raises(UnknownSequenceError):
        next(slices)
    assert space.sequence_ids() == [1]
    manager.check_integrity()


def test_close_a_space_while_others_work() -> None:
    clock = [0.0]
    manager = large(clock=lambda: clock[0])
    space, other = manager.open_namespace(), manager.open_namespace(2)
    ended: list[int] = []
    space.on_step_end = ended.append
    for n in range(3):
        add(manager, space, n, n * LONG)
    for ttl_s in (10, 20, 1000):
        manager.pin(space, np.arange(LONG), ttl_s=ttl_s)
    steps = [manager.append(space, [n], [7]).step_id for n in range(3)]

    def between(count: int) -> None:
        manager.check_integrity()
        clock[0] += 8  # pins expire in the meantime
        with pytest.raises(UnknownSessionError):
            manager.free(space, [0])
        add(manager, other, count, 100_000 + count * 10, 10)

    slices, freed = run(manager.close_namespace_in_slices(space), between)
    assert (slices > 3, freed) == (True, 3)
    assert set(steps) <= set(ended)
    manager.check_integrity()
    assert (manager.pins.num_pins, manager.pins.num_pinned, len(other)) == (0, 0, slices - 1)
    assert not manager.sequences.ending
    assert manager.close_namespace(space) == 0


def test_reset_while_others_work() -> None:
    journal = EventJournal(window=1 << 20)
    manager = large(journal=journal)
    space, other = manager.open_namespace(), manager.open_namespace(2)
    for n in range(3):
        add(manager, space, n, n * LONG)
    manager.free(space, [0, 1])
    manager.pin(space, [0, 1, 2], ttl_s=1000)
    first = journal.newest + 1

    def between(count: int) -> None:
        manager.check_integrity()
        add(manager, other, count, 100_000 + count * 10, 10)

    slices, freed = run(manager.reset_prefix_cache_in_slices(), between)
    assert slices == 3
    assert freed >= 2 * LONG - 3 - 20, "but what is pinned, and what the others took"
    manager.check_integrity()
    assert manager.match_prefix(range(LONG)) == 3
    assert manager.match_prefix(range(2 * LONG, 3 * LONG)) == 0
    assert manager.match_prefix(range(100_010, 100_020)) == 10, "what came later stays"
    changes = [batch.change for batch in journal.since(first, 100)]
    removed = [block for change in changes if isinstance(change, RemovedBlocks) for block in change.block_hashes]
    assert len(removed) == len(set(removed)) == 3 * LONG - 3
    assert not any(isinstance(change, Cleared) for change in changes)


def test_a_small_cache_is_cleared_at_once() -> None:
    journal = EventJournal(window=1 << 20)
    manager = large(journal=journal)
    space = manager.open_namespace()
    add(manager, space, 1, count=100)
    assert finish(manager.reset_prefix_cache_in_slices()) == 0
    assert isinstance(journal.since(journal.newest, 1)[0].change, Cleared)


def test_pins_that_end_at_one_time_end_one_slice_after_the_other() -> None:
    clock = [0.0]
    manager = large(clock=lambda: clock[0])
    space = manager.open_namespace()
    add(manager, space, 1)
    for _ in range(5):
        manager.pin(space, np.arange(LONG), ttl_s=1.0)
    clock[0] = 2.0
    left = []
    while manager.pins.num_pins:
        manager.can_append(space, [1])
        left.append(manager.pins.num_pins)
        manager.check_integrity()
    assert left == [3, 1, 0]


LIMITED = {"max_request_tokens": 12, "max_request_blocks": 4}


def limited(make: Make) -> tuple[BlockManager, SessionNamespace]:
    """Sequences 1 and 2 have 10 computed tokens in 3 blocks; 3 and 4 have 8 pending tokens; 5 is as 1, swapped out."""
    manager, space = make(**LIMITED)
    for n, length in ((1, 10), (2, 10), (3, 8), (4, 8), (5, 10)):
        manager.allocate(space, [AllocationRequest(n, range(100 * n, 100 * n + length))])
        if length == 10:
            manager.mark_all_layers(space, manager.open_step(space, [n]).step_id)
    manager.swap_out(space, [5])
    return manager, space


ABOVE: dict[str, tuple[Callable[[BlockManager, SessionNamespace], object], str, str]] = {
    "a step's tokens": (lambda m, s: m.open_step(s, [3, 4]), "sequence_ids", "max_request_tokens"),
    "an append's tokens": (lambda m, s: m.append(s, [1], [5] * 13, [13]), "sequence_ids", "max_request_tokens"),
    "and those that wait": (lambda m, s: m.append(s, [3], [5] * 5, [5]), "sequence_ids", "max_request_tokens"),
    "whether that could": (lambda m, s: m.can_append(s, [3], [5]), "sequence_ids", "max_request_tokens"),
    "blocks for lookahead": (lambda m, s: m.append(s, [1], [5], [1], None, 20), "sequence_ids", "max_request_blocks"),
    "forks": (lambda m, s: m.fork(s, [1, 2], [8, 9]), "parent_ids", "max_request_blocks"),
    "forks of one": (lambda m, s: m.fork(s, [1, 1], [8, 9]), "parent_ids", "max_request_blocks"),
    "rearranged": (lambda m, s: m.rearrange(s, [1, 2], [2, 1]), "sequence_ids", "max_request_blocks"),
    "truncated": (lambda m, s: m.truncate(s, [1, 2], [0, 0]), "sequence_ids", "max_request_blocks"),
    "swapped out": (lambda m, s: m.swap_out(s, [1, 2]), "sequence_ids", "max_request_blocks"),
    "told tokens": (
        lambda m, s: m.describe(s, [1, 2], include_tokens=True),
        "sequence_ids",
        "max_request_tokens",
    ),
    "told blocks": (
        lambda m, s: m.describe(s, include_blocks=True, limit=2),
        "sequence_ids",
        "max_request_blocks",
    ),
}


def test_what_goes_through_too_much_is_refused(make: Make, snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for case in ABOVE:
            with row(case):
                call, field, option = ABOVE[case]
                manager, space = limited(make)
                before = snapshot(manager)
                with pytest.raises(QuotaExceededError) as caught:
                    call(manager, space)
                assert caught.value.field == field
                assert caught.value.metadata == {"limit": option, "value": str(LIMITED[option])}
                assert snapshot(manager) == before


def test_what_is_within_is_done(make: Make) -> None:
    manager, space = limited(make)
    manager.open_step(space, [3, 4], [4, 8])
    manager.append(space, [1], [5] * 12, [12])
    manager.fork(space, [2], [8])
    manager.truncate(space, [1, 2], [14, 4])
    assert manager.can_swap_in(space, [5]) is AllocStatus.OK
    manager.swap_in(space, [5])
    assert len(manager.describe(space, include_tokens=True, first=5, limit=1)) == 1
    manager.check_integrity()


def test_describe_tells_a_part(make: Make) -> None:
    manager, space = limited(make)
    told = [[info.sequence_id for info in manager.describe(space, first=n, limit=2)] for n in range(7)]
    assert told == [[1, 2], [2, 3], [3, 4], [4, 5], [5], [], []]
    assert manager.describe(space, first=2**63 - 1, limit=2) == []


def test_items_are_made_in_their_turns() -> None:
    made: list[int] = []

    def items(count: int) -> Iterator[int]:
        for n in range(count):
            made.append(n)
            yield n

    for count, slices in ((0, 1), (1, 1), (SLICE_SEQUENCES, 1), (SLICE_SEQUENCES + 1, 2), (5 * SLICE_SEQUENCES, 5)):
        made.clear()
        found, result = run(
            in_turn(items(count)), lambda n: len(made) == n * SLICE_SEQUENCES + 1 or pytest.fail("many")
        )
        assert (found, result) == (slices, list(range(count)))


def many_requests(count: int = 3 * SLICE_SEQUENCES, length: int = 4) -> list[AllocationRequest]:
    """Return requests with different prompts."""
    return [AllocationRequest(n, np.arange(n * length, (n + 1) * length)) for n in range(count)]


Batch = tuple[BlockManager, SessionNamespace, list[AllocationRequest]]


def cached_batch() -> Batch:
    """Return a manager that has computed and cached the prompts of all requests."""
    requests = many_requests()
    manager = large(max_sequences=1024, num_blocks=4 * len(requests) + 100)
    space = manager.open_namespace()
    manager.allocate(space, requests)
    manager.mark_all_layers(space, manager.open_step(space, space.sequence_ids()).step_id)
    manager.free(space, space.sequence_ids())
    return manager, space, requests


@pytest.fixture
def batch() -> Batch:
    return cached_batch()


def test_a_large_batch_is_allocated_in_slices(batch: Batch) -> None:
    manager, space, requests = batch
    assert run(manager.can_allocate_in_slices(space, requests), lambda _: None) == (3, AllocStatus.OK)
    slices, made = run(manager.allocate_in_slices(space, requests), lambda _: len(space) == 0 or pytest.fail("early"))
    assert slices == 3
    assert [one.num_cached_tokens for one in made] == [3] * len(requests)
    assert (
        run(manager.allocate_in_slices(space, [AllocationRequest(5000, [1])]), lambda _: pytest.fail("a slice"))[0] == 1
    )
    manager.check_integrity()


def test_what_was_found_may_be_gone_when_a_large_batch_is_allocated() -> None:
    """Its blocks were evicted in the meantime and hold content of other sequences."""
    for when in (1, 2):
        check_found_blocks_that_are_gone(cached_batch(), when)


def check_found_blocks_that_are_gone(batch: Batch, when: int) -> None:
    manager, space, requests = batch
    other = manager.open_namespace(2)

    def between(count: int) -> None:
        if count == when:
            add(manager, other, 1, 1_000_000, 4 * len(requests))
            manager.free(other, [1])

    slices, made = run(manager.allocate_in_slices(space, requests), between)
    assert slices == 3
    # A hundred blocks were never used. The remaining blocks of the others may still be found.
    assert sum(one.num_cached_tokens for one in made) <= 100
    manager.check_integrity()
    described = manager.describe(space, space.sequence_ids(), include_tokens=True)
    tokens = [info.token_ids.tolist() for info in described if info.token_ids is not None]
    assert tokens == [np.asarray(request.token_ids).tolist() for request in requests]


def test_a_batch_finds_as_much_of_a_chain_as_is_left(batch: Batch) -> None:
    manager, space, _ = batch
    longest = AllocationRequest(7000, np.arange(4))
    slices = manager.allocate_in_slices(space, [longest, *many_requests(2 * SLICE_SEQUENCES)[1:]])
    next(slices)
    block = manager.device.index.match(np.arange(4, dtype=np.int32), {})[1]
    manager.device.evictable.remove(np.array([block]))
    manager.device.remove_from_index(np.array([block]))
    manager.device.free_unused(np.array([block]))
    assert finish(slices)[0].num_cached_tokens == 1
    manager.check_integrity()


def test_a_large_batch_is_refused_with_nothing_changed(batch: Batch) -> None:
    manager, space, requests = batch
    before = manager.stats()
    slices = manager.allocate_in_slices(space, [*requests, AllocationRequest(9999, [-1])])
    with pytest.raises(InvalidArgumentError) as caught:
        finish(slices)
    assert caught.value.field == f"requests[{len(requests)}].token_ids[0]"
    assert manager.stats() == before

    slices = manager.allocate_in_slices(space, requests)
    next(slices)
    manager.allocate(space, requests[:1])
    with pytest.raises(DuplicateSequenceError):
        finish(slices)

    slices = manager.allocate_in_slices(space, requests)
    next(slices)
    manager.close_namespace(space)
    with pytest.raises(UnknownSessionError):
        finish(slices)
    manager.check_integrity()


def test_many_sequences_are_described_in_slices(batch: Batch) -> None:
    manager, space, requests = batch
    manager.allocate(space, requests)
    expected = manager.describe(space, include_tokens=True)
    slices, found = run(manager.describe_in_slices(space, include_tokens=True), lambda _: None)
    assert slices == 3
    assert [info.sequence_id for info in found] == [info.sequence_id for info in expected] == space.sequence_ids()
    assert all(
        info.token_ids is not None and info.token_ids.tolist() == np.asarray(r.token_ids).tolist()
        for info, r in zip(found, requests, strict=True)
    )


def test_a_sequence_that_is_freed_while_many_are_described_is_unknown() -> None:
    """Another sequence may already use its row."""
    for closes in (False, True):
        check_freed_while_described(cached_batch(), closes)


def check_freed_while_described(batch: Batch, closes: bool) -> None:
    manager, space, requests = batch
    manager.allocate(space, requests)
    slices = manager.describe_in_slices(space, include_tokens=True)
    next(slices)
    if closes:
        manager.close_namespace(space)
    else:
        manager.free(space, [2 * SLICE_SEQUENCES])
        manager.allocate(manager.open_namespace(2), [AllocationRequest(1, [1, 2, 3])])
    with pytest.raises(UnknownSequenceError):
        finish(slices)
