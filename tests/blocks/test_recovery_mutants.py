"""Block managers that store in the wrong order, or recover wrongly. The tests of recovery must detect each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from crash_operations import Operations

from kvservice.blocks.allocation import Allocator
from kvservice.blocks.block_pool import BlockPool, CachingBlockPool
from kvservice.blocks.intents import RESTORE, Intents
from kvservice.blocks.layers import LayerTracker
from kvservice.blocks.loading import Loader, MissingBlocks, PoolLoad
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.pins import PinTable
from kvservice.blocks.recovery import Recoverer
from kvservice.blocks.sequences import SequenceSlots
from kvservice.blocks.state import BlockState
from kvservice.errors import KVServiceError

NUM_SEEDS = 40


def tokens_computed_before_their_hashes(patch: pytest.MonkeyPatch) -> None:
    commit, keep = LayerTracker.commit_rows, BlockPool.keep_hashes

    def commit_first(self: LayerTracker, *step: Any) -> None:
        late: list[Any] = []
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "keep_hashes", lambda *arguments: late.append(arguments))
            commit(self, *step)
        for arguments in late:
            keep(*arguments)

    patch.setattr(LayerTracker, "commit_rows", commit_first)


def no_intent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intents, "begin", lambda *_: None)


def no_intent_of_new_sequences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intents, "begin_new", lambda *_: None)


def an_intent_that_counts_before_its_rows(patch: pytest.MonkeyPatch) -> None:
    begin = Intents.begin

    def header_first(self: Intents, kind: int, rows: Any) -> None:
        self._header[0] = len(rows) << 2 | kind
        begin(self, kind, rows)

    patch.setattr(Intents, "begin", header_first)


def copied_sequences_that_are_restored(patch: pytest.MonkeyPatch) -> None:
    begin = Intents.begin
    patch.setattr(Intents, "begin", lambda self, _, rows: begin(self, RESTORE, rows))


def an_evicted_block_that_is_still_indexed(patch: pytest.MonkeyPatch) -> None:
    take = CachingBlockPool._take

    def late(self: CachingBlockPool, count: int) -> Any:
        before = self.indexed.copy()
        blocks = take(self, count)
        self.indexed[:] = before
        return blocks

    patch.setattr(CachingBlockPool, "_take", late)


def unfinished_blocks_that_can_be_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recoverer, "_unfinished_blocks", lambda self: np.zeros(self._device.num_blocks, np.bool_))


def swapped_in_blocks_that_nobody_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recoverer, "_unfinished_blocks", lambda self: self._state.unfinished_device != 0)


def an_operation_that_is_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recoverer, "_end_operation", lambda *_: None)


def lost_sequences_that_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockState, "keep_lost", lambda *_: None)


def unfinished_blocks_forgotten_first(patch: pytest.MonkeyPatch) -> None:
    tables = Recoverer._tables

    def forget(self: Recoverer) -> Any:
        self._torn = self._unfinished_blocks()  # type: ignore[attr-defined]
        self._state.unfinished_device[:] = 0
        self._state.unsubmitted[:] = False
        return tables(self)

    patch.setattr(Recoverer, "_tables", forget)
    unfinished = Recoverer._unfinished_blocks
    patch.setattr(Recoverer, "_unfinished_blocks", lambda self: getattr(self, "_torn", unfinished(self)))


def extra_keys_that_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceSlots, "set_extra_keys", lambda self, row, keys: self.extra_keys.__setitem__(row, keys))
    patch.setattr(SequenceSlots, "drop_extra_keys", lambda self, rows: [self.extra_keys.pop(row, None) for row in rows])


def sequences_that_outlive_their_scheduler(patch: pytest.MonkeyPatch) -> None:
    execute = Allocator._execute
    patch.setattr(Allocator, "_execute", lambda self, namespace, plan, _=0: execute(self, namespace, plan))


def step_ids_that_are_used_again(patch: pytest.MonkeyPatch) -> None:
    def next_step_id(self: SessionNamespace) -> int:
        self.last_step_id += 1
        return self.last_step_id

    patch.setattr(SessionNamespace, "next_step_id", next_step_id)


def pins_that_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinTable, "recover", lambda *_: None)


def blocks_that_were_not_loaded(patch: pytest.MonkeyPatch) -> None:
    end = Loader.end_load
    patch.setattr(Loader, "end_load", lambda self, load, _: end(self, load, len(load)))


def loaded_blocks_whose_tokens_come_last(patch: pytest.MonkeyPatch) -> None:
    end = Loader.end_load

    def late(self: Loader, load: PoolLoad, num_loaded: int) -> int:
        before = self._device.token_ids.copy()
        missing = load.missing
        blank = MissingBlocks(missing.prefix, missing.parent, missing.chain_hashes, before[load.blocks])
        count = end(self, PoolLoad(load.blocks, blank), num_loaded)
        self._device.token_ids[load.blocks[:num_loaded]] = missing.tokens[:num_loaded]
        return count

    patch.setattr(Loader, "end_load", late)


MUTANTS = [
    blocks_that_were_not_loaded,
    loaded_blocks_whose_tokens_come_last,
    tokens_computed_before_their_hashes,
    no_intent,
    no_intent_of_new_sequences,
    an_intent_that_counts_before_its_rows,
    copied_sequences_that_are_restored,
    an_evicted_block_that_is_still_indexed,
    unfinished_blocks_that_can_be_found,
    swapped_in_blocks_that_nobody_copies,
    unfinished_blocks_forgotten_first,
    an_operation_that_is_not_undone,
    lost_sequences_that_are_forgotten,
    extra_keys_that_are_not_kept,
    sequences_that_outlive_their_scheduler,
    step_ids_that_are_used_again,
    pins_that_are_forgotten,
]


def operate(num_seeds: int) -> None:
    for seed in range(num_seeds):
        rig = Operations(seed, crash=seed % 3 * 0.15)
        for _ in range(40):
            rig.one()


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_the_rig_detects(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KVServiceError, KeyError, ValueError)):
        operate(NUM_SEEDS)


def test_the_rig_passes_what_is_no_mutant() -> None:
    """The unmodified manager passes some of the seeds that detect the mutants."""
    operate(6)
