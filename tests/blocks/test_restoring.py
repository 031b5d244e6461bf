"""Sequences that are saved as values, and restored in another manager or namespace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blocks_calls import mark_layer
from constants import set_constants
from crash_operations import Operations
from crash_rig import CONFIG
from crashes import KeptManager, Seen, torn, traced, views
from todays_part import ENTRIES

from kvservice.blocks import AllocationRequest, BlockManager, RestoredBlocks, SavedTables, SessionNamespace, finish
from kvservice.errors import InvalidArgumentError, OutOfBlocksError, QuotaExceededError, UnknownSessionError

SIZE = CONFIG.block_size


def save(rig: Operations, number: int) -> SavedTables:
    finish(rig.manager.end_steps_in_slices(rig.spaces[number]))
    return finish(rig.manager.save_in_slices(rig.spaces[number]))


def stored_kv(rig: Operations, tables: SavedTables) -> dict[int, list[int]]:
    """Return the simulated K/V of the blocks with computed tokens."""
    numbers = np.flatnonzero(tables.saved.computed_blocks(SIZE)).tolist()
    pools = [(rig.swap_pool if tables.in_swap[n] else rig.pool).reshape(-1, SIZE) for n in numbers]
    return {n: pool[tables.block_ids[n]].tolist() for n, pool in zip(numbers, pools, strict=True)}


def load(rig: Operations, restored: RestoredBlocks, kv: dict[int, list[int]]) -> None:
    """Let the device read the blocks that are not found."""
    for number, numbers in kv.items():
        if not restored.found[number]:
            pool = rig.swap_pool if restored.in_swap[number] else rig.pool
            pool.reshape(-1, SIZE)[restored.block_ids[number]] = numbers


def described(rig: Operations, number: int) -> list[Any]:
    found = [(key[1], one) for key, one in views(rig.manager).items() if key[0] == number]
    return [(name, one.tokens, one.num_computed, one.extra, one.swapped) for name, one in found]


def without_schedulers(rig: Operations, number: int) -> None:
    mine = {key[1] for key, one in views(rig.manager).items() if key[0] == number and one.scheduled}
    if mine:
        rig.manager.free(rig.spaces[number], list(mine))


def places(tables: SavedTables) -> list[int]:
    """Return the places of the blocks of all tables, one after the other."""
    numbers = np.concatenate([one.blocks for one in tables.saved.sequences] or [np.zeros(0, np.int64)])
    return (tables.block_ids + CONFIG.num_blocks * tables.in_swap)[numbers].tolist()


def come_back(seed: int, patch: pytest.MonkeyPatch) -> bool:
    """Save a session after random operations, and restore it. Until it is known to recovery, a restart frees what was
    restored, and the other session stays. Returns whether the session was open at the end of the operations."""
    set_constants(patch, "kvservice.blocks", SLICE_BLOCKS=4)
    rig = Operations(seed)
    for _ in range(25):
        rig.one()
    if 1 not in rig.open:
        return False
    without_schedulers(rig, 1)
    tables = save(rig, 1)
    kv, before, held = stored_kv(rig, tables), described(rig, 1), places(tables)
    rig.manager.close_namespace(rig.spaces[1])
    rig.open.discard(1)
    others = {key: one for key, one in views(rig.manager).items() if key[0] != 1 and not one.scheduled}
    space = rig.manager.open_namespace(3)
    seen = Seen()
    restored, states = traced(rig.manager, lambda: finish(rig.manager.restore_in_slices(space, tables.saved)), seen)
    rig.spaces[3] = space
    load(rig, restored, kv)
    _, more = traced(rig.manager, lambda: finish(rig.manager.index_restored_in_slices(space, restored)), seen)
    for state in (*states, *more, *torn(states + more, rig.manager.memory.items(), rig.rng)):
        made = rig.recover(state, rig.open)
        made.check_integrity()
        assert views(made) == others
        rig.check_content(made, views(made))
    rig.manager.check_integrity()
    rig.check_content(rig.manager, views(rig.manager))
    assert described(rig, 3) == before
    now = places(save(rig, 3))
    assert len(set(zip(held, now, strict=True))) == len(set(held)), "what was shared is not shared any more"
    known = rig.recover(rig.manager.kept_state(), rig.open | {3})
    assert {key: one for key, one in views(known).items() if key[0] == 3} == {
        key: one for key, one in views(rig.manager).items() if key[0] == 3
    }
    return True


@pytest.mark.brief
def test_random_sequences_come_back_wherever_a_restart_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """come_back fails if anything is not as it was."""
    assert sum(come_back(seed, monkeypatch) for seed in range(4)) > 1


@pytest.mark.slow
def test_sequences_of_many_seeds_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """come_back fails if anything is not as it was. A run tries a third of the seeds."""
    assert sum(come_back(seed, monkeypatch) for seed in range(24)[ENTRIES]) > 3


def manager(**options: Any) -> tuple[BlockManager, SessionNamespace]:
    made = KeptManager(dataclasses.replace(CONFIG, **options), lambda: 0.0)
    return made, made.open_namespace(1)


def computed(made: BlockManager, space: SessionNamespace, name: int, tokens: list[int]) -> None:
    made.allocate(space, [AllocationRequest(name, tokens)])
    step = made.open_step(space, [name])
    made.mark_all_layers(space, step.step_id)


def tables_of(build: Callable[[BlockManager, SessionNamespace], None]) -> SavedTables:
    made, space = manager()
    build(made, space)
    return finish(made.save_in_slices(space))


def test_full_blocks_are_found_in_the_prefix_cache_and_need_no_bytes() -> None:
    made, space = manager()
    computed(made, space, 1, [1, 2, 3, 4, 5])
    tables = finish(made.save_in_slices(space))
    made.close_namespace(space)
    again = made.open_namespace(2)
    restored = finish(made.restore_in_slices(again, tables.saved))
    assert restored.found.tolist() == [True, True, False]
    assert np.array_equal(restored.block_ids[:2], tables.block_ids[:2])
    finish(made.index_restored_in_slices(again, restored))
    made.check_integrity()


def test_restored_blocks_are_found_only_when_they_have_their_bytes() -> None:
    tables = tables_of(lambda made, space: computed(made, space, 1, [1, 2, 3, 4, 5]))
    made, space = manager()
    restored = finish(made.restore_in_slices(space, tables.saved))
    assert made.match_prefix([1, 2, 3, 4]) == 0
    made.check_integrity()
    finish(made.index_restored_in_slices(space, restored))
    assert made.match_prefix([1, 2, 3, 4]) == 4
    made.check_integrity()


def test_swapped_sequences_become_resident_if_the_swap_tier_has_no_room() -> None:
    def build(made: BlockManager, space: SessionNamespace) -> None:
        computed(made, space, 1, [1, 2, 3, 4, 5])
        computed(made, space, 2, [7, 8, 9])
        made.swap_out(space, [1])

    tables = tables_of(build)
    for num_swap_blocks, swapped in ((12, True), (3, True), (2, False), (0, False)):
        made, space = manager(num_swap_blocks=num_swap_blocks)
        restored = finish(made.restore_in_slices(space, tables.saved))
        found = {one.sequence_id: one.swapped for one in made.describe(space)}
        assert found == {1: swapped, 2: False}
        assert int(restored.in_swap.sum()) == (3 if swapped else 0)
        finish(made.index_restored_in_slices(space, restored))
        made.check_integrity()


def test_what_does_not_fit_is_refused_before_anything_is_made() -> None:
    def build(made: BlockManager, space: SessionNamespace) -> None:
        computed(made, space, 1, list(range(20)))
        computed(made, space, 2, list(range(30, 40)))
        made.swap_out(space, [2])

    tables = tables_of(build)
    for options, error in (
        ({"num_blocks": 9}, OutOfBlocksError),
        ({"num_blocks": 14, "num_swap_blocks": 4}, OutOfBlocksError),
        ({"max_sequences": 1}, QuotaExceededError),
        ({"max_sequence_tokens": 19}, InvalidArgumentError),
    ):
        made, space = manager(**options)
        with pytest.raises(error):
            finish(made.restore_in_slices(space, tables.saved))
        assert not len(space)
        assert made.stats().free_blocks == made.config.num_blocks
    made, space = manager(num_blocks=10)
    finish(made.restore_in_slices(space, tables.saved))
    assert space.sequence_ids() == [1, 2]


@pytest.mark.parametrize(
    ("options", "taken", "error"),
    [
        pytest.param({"num_blocks": 8}, [50, 51, 52, 53], OutOfBlocksError, id="blocks"),
        pytest.param({"max_sequences": 4}, [50], QuotaExceededError, id="rows"),
    ],
)
def test_others_may_take_blocks_and_rows_between_two_slices(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], taken: list[int], error: type[Exception]
) -> None:
    """Then the restoring fails, and closing the namespace frees what it has made."""
    set_constants(monkeypatch, "kvservice.blocks", SLICE_BLOCKS=2)

    def build(made: BlockManager, space: SessionNamespace) -> None:
        for name in range(4):
            computed(made, space, name, [name, name + 1, name + 2, name + 3])

    tables = tables_of(build)
    made, space = manager(**options)
    other = made.open_namespace(2)
    slices = made.restore_in_slices(space, tables.saved)
    while not len(space):
        next(slices)
    made.allocate(other, [AllocationRequest(1, taken)])
    with pytest.raises(error):
        finish(slices)
    made.check_integrity()
    made.close_namespace(space)
    made.check_integrity()
    assert made.stats().active_blocks == -(-len(taken) // SIZE)


def test_a_namespace_that_is_closed_between_two_slices_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.blocks", SLICE_SEQUENCES=1)
    made, space = manager()
    for name in range(3):
        computed(made, space, name, [name, 1])
    slices = made.save_in_slices(space)
    next(slices)
    made.close_namespace(space)
    with pytest.raises(UnknownSessionError):
        finish(slices)


def test_ended_steps_leave_their_tokens_pending() -> None:
    made, space = manager()
    made.allocate(space, [AllocationRequest(1, [1, 2, 3])])
    step = made.open_step(space, [1])
    mark_layer(made, space, step.step_id, 0)
    finish(made.end_steps_in_slices(space))
    assert not space.steps
    assert [(one.length, one.num_computed) for one in made.describe(space)] == [(3, 0)]
    made.mark_all_layers(space, made.open_step(space, [1]).step_id)
    made.check_integrity()
