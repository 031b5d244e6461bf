"""Allocation: capacity, watermark, prefix hits, extra keys, atomicity."""

from __future__ import annotations

import functools
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from blocks_calls import can_allocate, mark_layer
from each_row import each_row
from listed import listed

from kvservice.blocks import AllocationRequest, AllocStatus, BlockManager, SessionNamespace, chain_hashes
from kvservice.errors import DuplicateSequenceError, OutOfBlocksError, QuotaExceededError

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def request(sequence_id: int, tokens: Any, **more: Any) -> AllocationRequest:
    return AllocationRequest(sequence_id, np.array(tokens, np.int32), **more)


def compute(manager: BlockManager, space: SessionNamespace, *ids: int) -> None:
    manager.mark_all_layers(space, manager.open_step(space, list(ids)).step_id)


def test_a_table_has_just_enough_blocks(make: Make) -> None:
    manager, space = make()
    made = manager.allocate(space, [request(7, range(9)), request(8, [1, 2, 3, 4])])
    assert [(new.sequence_id, new.num_tokens, new.num_blocks) for new in made] == [(7, 9, 3), (8, 4, 1)]
    assert manager.stats().active_blocks == 4
    manager.check_integrity()


MESSAGES: list[tuple[Any, ...]] = [
    (0.0, 4 * 29, "29 blocks are needed and 28 of 32 are available; it may fit later"),
    (0.125, 4 * 25, "25 blocks are needed and 28 of 32 are available; the watermark keeps 4 free; it may fit later"),
    (0.875, 4, "1 block is needed and 28 of 32 are available; the watermark keeps 28 free; it may fit later"),
    (0.0, 4 * 33, "33 blocks are needed and 28 of 32 are available; it can never fit"),
]


def test_the_error_says_how_many_blocks_the_watermark_keeps(make: Make) -> None:
    with each_row() as row:
        for watermark, num_tokens, said in MESSAGES:
            with row((watermark, num_tokens, said)):
                manager, space = make(watermark=watermark)
                manager.allocate(space, [request(1, range(16))])
                with pytest.raises(OutOfBlocksError) as caught:
                    manager.allocate(space, [request(2, range(100, 100 + num_tokens))])
                assert str(caught.value) == said


WATERMARKS: list[tuple[Any, ...]] = [
    (4 * 24, 0, AllocStatus.OK),
    (4 * 24, 1, AllocStatus.LATER),
    (4 * 24 + 1, 0, AllocStatus.LATER),
    (4 * 28, 0, AllocStatus.LATER),
    (4 * 28 + 1, 0, AllocStatus.NEVER),
    (4 * 28, 1, AllocStatus.NEVER),
]


def test_the_watermark(make: Make) -> None:
    """Return a manager with 32 blocks, 4 of them in use, and a watermark of 4."""
    with each_row() as row:
        for num_tokens, lookahead, status in WATERMARKS:
            with row((num_tokens, lookahead, status)):
                manager, space = make(watermark=0.125)
                manager.allocate(space, [request(1, range(16))])
                batch = [request(2, range(100, 100 + num_tokens), lookahead=lookahead)]
                assert can_allocate(manager, space, batch) is status
                if status is AllocStatus.OK:
                    manager.allocate(space, batch)
                else:
                    with pytest.raises(OutOfBlocksError) as caught:
                        manager.allocate(space, batch)
                    assert caught.value.never == (status is AllocStatus.NEVER)
                    assert caught.value.tier == "device"
                    assert (caught.value.required, caught.value.free, caught.value.total) == (
                        -(-(num_tokens + lookahead) // 4),
                        28,
                        32,
                    )


def test_a_batch_is_all_or_nothing(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make()
    batch = [request(i, range(i * 100, i * 100 + 40)) for i in range(4)]
    assert can_allocate(manager, space, batch) is AllocStatus.NEVER
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError):
        manager.allocate(space, batch)
    assert snapshot(manager) == before
    assert can_allocate(manager, space, batch[:3]) is AllocStatus.OK
    assert len(manager.allocate(space, batch[:3])) == 3


def test_computed_blocks_are_shared_and_the_last_token_is_left(make: Make) -> None:
    manager, space = make()
    manager.allocate(space, [request(1, range(12))])
    compute(manager, space, 1)
    exact, longer, other = manager.allocate(
        space, [request(2, range(12)), request(3, [*range(12), 99]), request(4, [0, 1, 2, 3, 9, 9, 9, 9, 9])]
    )
    assert [new.num_cached_tokens for new in (exact, longer, other)] == [8, 12, 4]
    tables = {i.sequence_id: listed(i.block_ids) for i in manager.describe(space, include_blocks=True)}
    assert tables[2][:2] == tables[3][:2] == tables[1][:2]
    assert tables[3][2] == tables[1][2] != tables[2][2]
    assert tables[4][0] == tables[1][0]
    assert manager.stats().prefix_cache_hit_tokens == 24
    assert manager.stats().prefix_cache_query_tokens == 12 + 12 + 13 + 9
    assert manager.stats().shared_blocks == 3
    manager.check_integrity()


def test_what_is_not_computed_is_not_shared(make: Make) -> None:
    """Uncomputed blocks are not shared within a batch, nor later, nor while a layer of the step is missing."""
    manager, space = make()
    first, second = manager.allocate(space, [request(1, range(12)), request(2, range(12))])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    step = manager.open_step(space, [1])
    mark_layer(manager, space, step.step_id, 1)
    assert manager.match_prefix(range(12)) == 0
    mark_layer(manager, space, step.step_id, 0)
    assert manager.match_prefix(range(12)) == 12


def test_a_chunk_makes_its_full_blocks_findable(make: Make) -> None:
    manager, space = make()
    manager.allocate(space, [request(1, range(12))])
    manager.mark_all_layers(space, manager.open_step(space, [1], [6]).step_id)
    assert manager.match_prefix(range(12)) == 4
    manager.mark_all_layers(space, manager.open_step(space, [1], [2]).step_id)
    assert manager.match_prefix(range(12)) == 8
    manager.check_integrity()


def describe_blocks(manager: BlockManager, space: SessionNamespace, sequence_id: int) -> Any:
    return manager.describe(space, [sequence_id], include_blocks=True)[0].block_ids


def test_touched_blocks_are_evicted_last_and_the_deepest_of_them_first(make: Make) -> None:
    manager, space = make(num_blocks=6)
    for sequence_id, start in ((1, 0), (2, 100)):
        manager.allocate(space, [request(sequence_id, range(start, start + 8))])
        compute(manager, space, sequence_id)
        manager.free(space, [sequence_id])
    older = chain_hashes(np.arange(8, dtype=np.int32), {}, 4)
    assert manager.touch(older) == 2
    manager.allocate(space, [request(3, range(200, 216))])
    assert manager.match_prefix(range(100, 108)) == 0
    assert manager.match_prefix(range(8)) == 8
    manager.allocate(space, [request(4, range(300, 304))])
    assert manager.match_prefix(range(8)) == 4
    assert manager.touch(older) == 1
    manager.check_integrity()


OTHER_KEYS: list[tuple[Any, ...]] = [
    ((), 0),
    (((0, b"tenant"),), 8),
    (((0, b"tenanT"),), 0),
    (((1, b"tenant"),), 0),
    (((0, b"tenant"), (5, b"image")), 4),
    (((0, b"tenant"), (9, b"image")), 8),
    (((0, b"ten"), (0, b"ant")), 0),
]


def test_extra_keys_separate_from_their_block_on(make: Make) -> None:
    with each_row() as row:
        for theirs, hit in OTHER_KEYS:
            with row((theirs, hit)):
                manager, space = make()
                manager.allocate(space, [request(1, range(10), extra_keys=((0, b"tenant"),))])
                compute(manager, space, 1)
                (made,) = manager.allocate(space, [request(2, range(10), extra_keys=theirs)])
                assert made.num_cached_tokens == hit
                assert manager.match_prefix(range(10), theirs) == hit


def test_hashes_are_chains_of_sha256(make: Make) -> None:
    """The hash covers the parent's hash, the tokens as little-endian int32, and the extra keys."""
    manager, space = make()
    manager.allocate(space, [request(1, [1, 2, 3, 4, 5, 6, 7, 8], extra_keys=((5, b"image"),))])
    compute(manager, space, 1)
    root = sha256(b"kvservice chain root, block size 4").digest()
    first = sha256(root + np.array([1, 2, 3, 4], "<i4").tobytes()).digest()
    key = (1).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"image"
    second = sha256(first + np.array([5, 6, 7, 8], "<i4").tobytes() + key).digest()
    assert set(manager.device.index.blocks) == {first, second}


def test_a_hit_on_a_cached_block_is_counted_exactly(make: Make) -> None:
    """A cached block counts as free until it is hit. Here the free blocks are just enough, or one too few."""
    manager, space = make(num_blocks=6)
    manager.allocate(space, [request(1, range(8))])
    compute(manager, space, 1)
    manager.free(space, [1])
    manager.allocate(space, [request(2, range(100, 112))])
    assert manager.stats().free_blocks == 1
    assert can_allocate(manager, space, [request(3, range(13))]) is AllocStatus.LATER
    assert can_allocate(manager, space, [request(3, range(12))]) is AllocStatus.OK
    (made,) = manager.allocate(space, [request(3, range(12))])
    assert made.num_cached_tokens == 8
    assert manager.stats().free_blocks == manager.stats().cached_blocks == 0
    manager.check_integrity()


def test_two_requests_that_hit_the_same_cached_block_count_it_once(make: Make) -> None:
    manager, space = make(num_blocks=4)
    manager.allocate(space, [request(1, range(8))])
    compute(manager, space, 1)
    manager.free(space, [1])
    batch = [request(2, range(9)), request(3, range(9))]
    assert can_allocate(manager, space, batch) is AllocStatus.OK
    manager.allocate(space, batch)
    assert manager.stats().shared_blocks == 2
    manager.check_integrity()


def test_a_sequence_of_another_space_is_neither_known_nor_a_duplicate(make: Make) -> None:
    manager, space = make()
    other = manager.open_namespace()
    manager.allocate(space, [request(1, range(5))])
    manager.allocate(other, [request(1, range(5, 10))])
    assert listed(manager.describe(space, [1], include_tokens=True)[0].token_ids) == [0, 1, 2, 3, 4]
    assert listed(manager.describe(other, [1], include_tokens=True)[0].token_ids) == [5, 6, 7, 8, 9]


def test_duplicate_ids(make: Make, snapshot: Callable[..., Any]) -> None:
    with each_row() as row:
        for ids in ((1, 9), (9, 9)):
            with row(ids):
                manager, space = make()
                manager.allocate(space, [request(1, range(5))])
                before = snapshot(manager)
                for call in (functools.partial(can_allocate, manager), manager.allocate):
                    with pytest.raises(DuplicateSequenceError) as caught:
                        call(space, [request(ids[1], range(3)), request(ids[0], range(3))])
                    assert caught.value.field == "requests[1].sequence_id"
                assert snapshot(manager) == before


def test_no_more_sequences_than_max_sequences(make: Make, snapshot: Callable[..., Any]) -> None:
    manager, space = make(max_sequences=3)
    manager.allocate(space, [request(1, [1]), request(2, [1])])
    batch = [request(3, [1]), request(4, [1])]
    assert can_allocate(manager, space, batch) is AllocStatus.LATER
    before = snapshot(manager)
    with pytest.raises(QuotaExceededError) as caught:
        manager.allocate(space, batch)
    assert caught.value.metadata == {"limit": "max_sequences", "value": "3"}
    with pytest.raises(QuotaExceededError):
        manager.fork(space, [1, 1], [3, 4])
    assert snapshot(manager) == before
    assert can_allocate(manager, space, [*batch, request(5, [1]), request(6, [1])]) is AllocStatus.NEVER


def test_without_prefix_caching_nothing_is_hashed_or_kept(make: Make) -> None:
    manager, space = make(enable_prefix_caching=False)
    manager.allocate(space, [request(1, range(12))])
    compute(manager, space, 1)
    assert manager.allocate(space, [request(2, range(12))])[0].num_cached_tokens == 0
    manager.free(space, [1, 2])
    assert manager.stats().free_blocks == 32
    assert not any(manager.device.hashes)
