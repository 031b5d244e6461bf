"""Prompts that are looked up first and allocated later, as a scheduler does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from listed import listed

from kvservice.blocks import (
    AllocationRequest,
    BlockManager,
    FoundPrompt,
    SessionNamespace,
    chain_hashes,
    extra_keys_by_block,
)
from kvservice.errors import DuplicateSequenceError, OutOfBlocksError, QuotaExceededError, UnknownSessionError

Make = Callable[..., tuple[BlockManager, SessionNamespace]]


def find(manager: BlockManager, sequence_id: int, tokens: Any, keys: Any = (), lookahead: int = 0) -> FoundPrompt:
    """Look up a prompt in blocks of 4 tokens."""
    prompt = np.array(tokens, np.int32)
    extra = extra_keys_by_block(keys, "extra_keys", 4, 256)
    return manager.find_prompt(sequence_id, prompt, extra, chain_hashes(prompt, extra, 4), lookahead)


def compute(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any, keys: Any = ()) -> None:
    """Allocate a sequence and compute its tokens."""
    manager.allocate(space, [AllocationRequest(sequence_id, np.array(tokens, np.int32), keys)])
    manager.mark_all_layers(space, manager.open_step(space, [sequence_id]).step_id)


def cache(manager: BlockManager, space: SessionNamespace, sequence_id: int, tokens: Any) -> None:
    compute(manager, space, sequence_id, tokens)
    manager.free(space, [sequence_id])


def tables(manager: BlockManager, space: SessionNamespace) -> list[list[int]]:
    described = manager.describe(space, include_blocks=True)
    return [one.block_ids.tolist() for one in described if one.block_ids is not None]


def test_it_shares_what_allocate_shares(make: Make) -> None:
    keys = ((0, b"tenant"),)
    for tokens in (range(8), range(9), range(13), range(100, 113), [0, 1, 2, 3, 9, 9, 9, 9, 9]):
        described, stats = [], []
        for found_first in (False, True):
            manager, space = make()
            compute(manager, space, 1, range(10), keys)
            if found_first:
                prompt = find(manager, 2, tokens, keys)
                (new,) = manager.allocate_found(space, [prompt])
                assert len(new.found) == prompt.num_found
                assert prompt.num_consumed == new.num_blocks - prompt.num_found  # sequence 1 holds the hits
            else:
                manager.allocate(space, [AllocationRequest(2, np.array(tokens, np.int32), keys)])
            manager.check_integrity()
            sequences = manager.describe(space, include_tokens=True, include_blocks=True)
            described.append([(one.num_computed, listed(one.token_ids), listed(one.block_ids)) for one in sequences])
            stats.append(manager.stats())
        assert described[0] == described[1]
        assert stats[0] == stats[1]


def test_hits_that_were_evicted_in_the_meantime_do_not_count(make: Make) -> None:
    manager, space = make(num_blocks=8)
    cache(manager, space, 1, range(16))
    prompt = find(manager, 2, range(17))
    assert prompt.num_found == 4
    manager.allocate(space, [AllocationRequest(3, np.arange(100, 124, dtype=np.int32))])  # evicts the two deepest
    with pytest.raises(OutOfBlocksError):
        manager.allocate_found(space, [prompt])
    manager.free(space, [3])
    (new,) = manager.allocate_found(space, [prompt])
    assert len(new.found) == 2
    assert manager.describe(space, [2])[0].num_computed == 8
    manager.check_integrity()


def test_blocks_that_were_computed_in_the_meantime_are_shared(make: Make) -> None:
    manager, space = make()
    prompt = find(manager, 2, range(17))
    assert prompt.num_found == 0
    compute(manager, space, 1, range(16))
    (new,) = manager.allocate_found(space, [prompt])
    assert len(new.found) == 4
    manager.check_integrity()


def test_the_hits_are_not_evicted_for_the_new_blocks_of_the_same_call(make: Make) -> None:
    manager, space = make(num_blocks=8)
    cache(manager, space, 1, range(16))
    cache(manager, space, 2, range(100, 116))
    prompts = [find(manager, 3, range(12)), find(manager, 4, range(12)), find(manager, 5, range(200, 216))]
    assert [prompt.num_found for prompt in prompts] == [2, 2, 0]
    manager.allocate_found(space, prompts)
    third, fourth, _ = tables(manager, space)
    assert third[:2] == fourth[:2]
    assert [one.num_computed for one in manager.describe(space)] == [8, 8, 0]
    assert manager.stats().shared_blocks == 2
    manager.check_integrity()


def test_it_fits_where_only_the_exact_count_fits(make: Make) -> None:
    """Both prompts find the same cached blocks, which become unavailable once."""
    manager, space = make(num_blocks=6)
    cache(manager, space, 1, range(16))
    prompts = [find(manager, 2, range(17)), find(manager, 3, range(17))]
    assert sum(prompt.num_consumed for prompt in prompts) > manager.device.num_available
    manager.allocate_found(space, prompts)
    manager.check_integrity()
    assert manager.device.num_available == 0


def test_pinned_hits_are_shared_and_their_pin_may_end_in_between(make: Make) -> None:
    """check_pinned_hits fails if they are lost."""
    for expired in (False, True):
        check_pinned_hits(make, expired)


def check_pinned_hits(make: Make, expired: bool) -> None:
    now = [0.0]
    manager, space = make(clock=lambda: now[0])
    cache(manager, space, 1, range(8))
    manager.pin(space, np.arange(8, dtype=np.int32), ttl_s=10.0)
    prompt = find(manager, 2, range(9))
    now[0] += 20.0 if expired else 0.0
    manager.allocate_found(space, [prompt])
    manager.check_integrity()
    assert manager.describe(space, [2])[0].num_computed == 8
    manager.free(space, [2])
    manager.check_integrity()
    assert manager.stats().pinned_blocks == (0 if expired else 2)


def test_what_it_refuses_changes_nothing(make: Make, snapshot: Callable[[BlockManager], Any]) -> None:
    manager, space = make(num_blocks=8, max_sequences=2, watermark=0.25)
    cache(manager, space, 1, range(8))
    compute(manager, space, 7, range(50, 54))
    fits, large = find(manager, 8, range(9)), find(manager, 9, range(200, 220))
    before = snapshot(manager)
    for prompts, error in (
        ([find(manager, 7, range(9))], DuplicateSequenceError),
        ([find(manager, 8, range(9))] * 2, DuplicateSequenceError),
        ([fits, find(manager, 9, range(4))], (OutOfBlocksError, QuotaExceededError)),
        ([large, fits], (OutOfBlocksError, QuotaExceededError)),
        ([find(manager, 9, range(200, 224))], OutOfBlocksError),
    ):
        with pytest.raises(error):
            manager.allocate_found(space, prompts)
        assert snapshot(manager) == before
    manager.close_namespace(space)
    with pytest.raises(UnknownSessionError):
        manager.allocate_found(space, [fits])


def test_nothing_is_found_without_the_prefix_cache(make: Make) -> None:
    manager, space = make(enable_prefix_caching=False)
    compute(manager, space, 1, range(8))
    prompt = manager.find_prompt(2, np.arange(9, dtype=np.int32), {}, [], 3)
    assert (prompt.num_found, prompt.num_consumed) == (0, 3)
    manager.allocate_found(space, [prompt])
    manager.check_integrity()
