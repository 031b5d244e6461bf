"""Blocks that come into the pool from outside, and copies of blocks that leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from spill_churn import run_churn

from kvservice.blocks import AllocationRequest, BlockManager, EventJournal, MissingBlocks, SessionNamespace
from kvservice.errors import OutOfBlocksError

Make = Callable[..., tuple[BlockManager, SessionNamespace]]
SIZE = 4


def add(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any) -> None:
    manager.allocate(space, [AllocationRequest(sequence_id, list(tokens))])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def missing_of(manager: BlockManager, tokens: Any, most: int = 100) -> MissingBlocks:
    prompt = np.array(tokens, np.int32)
    found = manager.device.index.match(prompt[:-1], {})
    missing = manager.loader.missing(prompt, {}, found, most)
    assert missing is not None
    return missing


def test_a_loaded_run_is_found_after_its_end_and_not_before(make: Make) -> None:
    manager, space = make(num_blocks=8)
    add(manager, space, 1, range(9))
    load = manager.loader.begin_load(missing_of(manager, range(21)))
    assert load is not None
    assert len(load) == 3, "the block of the last token is computed"
    assert manager.match_prefix(range(21)) == 8
    assert manager.stats().active_blocks == 3 + 3
    manager.check_integrity()
    assert manager.loader.end_load(load, 3) == 3
    assert manager.match_prefix(range(21)) == 20
    assert manager.stats().cached_blocks == 3
    (made,) = manager.allocate(space, [AllocationRequest(2, range(21))])
    assert made.num_cached_tokens == 20
    (snapshot,) = manager.describe(space, [2], include_tokens=True)
    assert snapshot.token_ids is not None
    assert snapshot.token_ids.tolist() == list(range(21))
    manager.check_integrity()


def test_blocks_that_did_not_come_are_free_again(make: Make) -> None:
    manager, _ = make(num_blocks=8)
    load = manager.loader.begin_load(missing_of(manager, range(21)))
    assert load is not None
    assert manager.loader.end_load(load, 2) == 2
    assert manager.match_prefix(range(21)) == 8
    assert manager.stats().free_blocks == 6
    again = manager.loader.begin_load(missing_of(manager, range(21)))
    assert again is not None
    assert manager.loader.end_load(again, 0) == 0
    assert manager.stats().free_blocks == 6
    manager.check_integrity()


def test_a_load_leaves_the_watermark_and_what_is_to_be_kept(make: Make) -> None:
    manager, space = make(num_blocks=10, watermark=0.2)
    load = manager.loader.begin_load(missing_of(manager, range(61)))
    assert load is not None
    assert len(load) == 8
    assert manager.device.num_available == 2
    manager.loader.end_load(load, 0)
    load = manager.loader.begin_load(missing_of(manager, range(61)), 7)
    assert load is not None
    assert len(load) == 3
    manager.loader.end_load(load, 0)
    assert manager.loader.begin_load(missing_of(manager, range(61)), 10) is None
    manager.allocate(space, [AllocationRequest(1, range(100, 132))])
    assert manager.loader.begin_load(missing_of(manager, range(61))) is None
    manager.check_integrity()


def test_a_load_never_evicts_its_own_prefix(make: Make) -> None:
    manager, space = make(num_blocks=8, watermark=0.0)
    add(manager, space, 1, range(9))
    manager.free(space, [1])
    add(manager, space, 2, range(100, 116))
    manager.free(space, [2])
    load = manager.loader.begin_load(missing_of(manager, range(61)))
    assert load is not None
    assert len(load) == 6, "everything but the prefix"
    assert manager.loader.end_load(load, 6) == 6
    assert manager.match_prefix(range(61)) == 32
    assert manager.match_prefix(range(100, 116)) == 0
    manager.check_integrity()


def test_a_prefix_that_is_evicted_meanwhile_ends_the_load(make: Make) -> None:
    manager, space = make(num_blocks=8)
    add(manager, space, 1, range(9))
    manager.free(space, [1])
    missing = missing_of(manager, range(21))
    manager.reset_prefix_cache()
    assert manager.loader.begin_load(missing) is None


def test_a_block_that_is_computed_meanwhile_is_not_there_twice(make: Make) -> None:
    manager, space = make(num_blocks=10)
    load = manager.loader.begin_load(missing_of(manager, range(13)))
    assert load is not None
    add(manager, space, 1, range(9))
    assert manager.loader.end_load(load, 3) == 1
    assert manager.match_prefix(range(13)) == 12
    manager.check_integrity()
    missing = missing_of(manager, range(21))
    add(manager, space, 2, range(17))
    load = manager.loader.begin_load(missing)
    assert load is None, "the first of them is there"


def test_what_is_being_loaded_cannot_be_used_by_others(make: Make) -> None:
    manager, space = make(num_blocks=8, watermark=0.0)
    load = manager.loader.begin_load(missing_of(manager, range(21)))
    assert load is not None
    with pytest.raises(OutOfBlocksError):
        manager.allocate(space, [AllocationRequest(1, range(100, 113))])
    manager.reset_prefix_cache()
    manager.loader.end_load(load, 5)
    manager.allocate(space, [AllocationRequest(1, range(100, 113))])
    manager.check_integrity()


def test_without_a_prefix_cache_nothing_is_missing(make: Make) -> None:
    manager, _ = make(enable_prefix_caching=False)
    assert manager.loader.missing(np.arange(30, dtype=np.int32), {}, np.zeros(0, np.int64), 100) is None


def test_missing_blocks_by_hash_are_those_by_tokens(make: Make) -> None:
    manager, space = make(num_blocks=10)
    add(manager, space, 1, range(9))
    by_tokens = missing_of(manager, range(21))
    everything = [*manager.loader.chain_hashes(by_tokens.prefix), *by_tokens.chain_hashes]
    prompt = np.arange(21, dtype=np.int32)
    by_hash = manager.loader.missing_of(prompt, everything, 100)
    assert by_hash is not None
    assert by_hash.chain_hashes == by_tokens.chain_hashes
    assert by_hash.parent == by_tokens.parent
    np.testing.assert_array_equal(by_hash.tokens, by_tokens.tokens)
    assert manager.loader.missing_of(prompt[:9], everything, 100) is None


def test_loaded_blocks_are_in_the_journal(make: Make) -> None:
    manager, _ = make(num_blocks=8)
    journal = manager.device.journal = EventJournal(1000, with_tokens=True)
    load = manager.loader.begin_load(missing_of(manager, range(13)))
    assert load is not None
    manager.loader.end_load(load, 3)
    (batch,) = journal.since(1, 9)
    stored: Any = batch.change
    assert [one[0] for one in stored] == load.missing.chain_hashes
    assert [one[1] for one in stored] == [None, *load.missing.chain_hashes[:2]]
    assert [np.frombuffer(one[2], np.int32).tolist() for one in stored] == load.missing.tokens.tolist()


# ---- copies


def cached(make: Make, num_tokens: int = 16, **changes: Any) -> tuple[BlockManager, SessionNamespace]:
    manager, space = make(**({"num_blocks": 8, "watermark": 0.0} | changes))
    add(manager, space, 1, range(num_tokens))
    manager.free(space, [1])
    return manager, space


def test_the_coldest_blocks_are_those_that_are_evicted_first(make: Make) -> None:
    manager, space = cached(make)
    add(manager, space, 2, range(100, 108))
    manager.free(space, [2])
    order = manager.device.evictable.blocks()
    for count in (0, 1, 3, 6, 60):
        assert manager.loader.coldest(count).tolist() == order[:count].tolist()


def test_a_copy_of_a_block_that_leaves_the_index_is_not_whole(make: Make) -> None:
    manager, space = cached(make)
    copy = manager.loader.begin_copy(manager.loader.coldest(8))
    assert len(copy) == 4
    assert copy.chain_hashes == manager.loader.chain_hashes(copy.blocks)
    assert len(manager.loader.begin_copy(copy.blocks)) == 0, "they are being copied"
    manager.allocate(space, [AllocationRequest(2, range(100, 122))])
    assert manager.loader.end_copy(copy, np.ones(4, np.bool_)).tolist() == [False, False, True, True]
    manager.check_integrity()
    assert len(manager.loader.coldest(8)) == 0, "copies of them are known"
    manager.loader.forget_copied()
    assert len(manager.loader.coldest(8)) == 2
    manager.check_integrity()


def test_a_block_that_returns_to_the_index_meanwhile_has_lost_its_copy(make: Make) -> None:
    manager, space = cached(make, num_blocks=4)
    copy = manager.loader.begin_copy(manager.loader.coldest(4))
    manager.reset_prefix_cache()
    add(manager, space, 2, range(16))
    manager.free(space, [2])
    again = manager.loader.begin_copy(manager.loader.coldest(4))
    assert set(again.blocks.tolist()) == set(copy.blocks.tolist())
    assert not manager.loader.end_copy(copy, np.ones(4, np.bool_)).any()
    assert manager.loader.end_copy(again, np.array([True, True, False, True])).all()
    assert manager.loader.coldest(4).tolist() == [again.blocks[2]]


def test_a_block_that_is_written_again_has_lost_its_copy(make: Make) -> None:
    manager, space = make(num_blocks=8)
    add(manager, space, 1, range(8))
    copy = manager.loader.begin_copy(manager.loader.find(manager.loader.chain_hashes(missing_free(manager, range(8)))))
    assert len(copy) == 2
    manager.truncate(space, [1], [6])
    manager.append(space, [1], [7])
    assert manager.loader.end_copy(copy, np.ones(2, np.bool_)).tolist() == [True, False]


def missing_free(manager: BlockManager, tokens: Any) -> Any:
    return manager.device.index.match(np.array(tokens, np.int32), {})


def test_blocks_that_are_known_to_have_copies_are_not_copied(make: Make) -> None:
    manager, _ = cached(make)
    first, second, *_ = manager.loader.coldest(8).tolist()
    manager.loader.mark_copied(np.array([first, second]))
    assert first not in manager.loader.coldest(8)
    assert len(manager.loader.uncopied(np.array([first, second]))) == 0
    manager.loader.forget_copied()
    assert manager.loader.coldest(8).tolist()[:2] == [first, second]


# ---- both, with bytes, against the model


def test_content_is_right_with_blocks_that_leave_and_return() -> None:
    churns = run_churn(range(8))
    assert sum(one.num_loaded for one in churns) > 30
    assert sum(one.num_torn for one in churns) > 10
