"""Steps in shared memory: a client reads either the step or the information that it has ended."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
from each_row import each_row

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig
from kvservice.kept import KeptState
from kvservice.server.memory.step_tables import ALIGNMENT, NUM_SLOTS, SharedStepTables

WORD_BYTES = 16 * NUM_SLOTS


def in_memory(num_bytes: int) -> SharedStepTables:
    return SharedStepTables(KeptState.fresh().memory("test", num_bytes, read_only=True))


def step(step_id: int, num_seqs: int, num_blocks: int) -> Any:
    rng = np.random.default_rng(step_id)
    query_lens = rng.integers(1, 4, num_seqs, np.int32)
    return SimpleNamespace(
        step_id=step_id,
        slot_mapping=rng.integers(0, 1 << 40, int(query_lens.sum())),
        query_lens=query_lens,
        context_lens=rng.integers(4, 1 << 20, num_seqs, np.int32),
        block_tables=rng.integers(0, 1 << 30, (num_seqs, num_blocks), np.int32),
    )


def read(tables: SharedStepTables, found: tuple[int, int], wanted: Any) -> list[np.ndarray]:
    """Read a step as the contract specifies for clients."""
    offset, parts = found[1], []
    for part in (wanted.slot_mapping, wanted.query_lens, wanted.context_lens, wanted.block_tables):
        assert offset % ALIGNMENT == 0
        parts.append(np.ndarray(part.shape, part.dtype, tables.memory.map, offset))
        offset += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return parts


def word(tables: SharedStepTables, slot: int) -> int:
    return int(np.frombuffer(tables.memory.map, np.int64, 1, 8 * slot)[0])


def check(tables: SharedStepTables, live: dict[int, tuple[tuple[int, int], Any]]) -> None:
    for step_id, (found, one) in live.items():
        assert word(tables, found[0]) == step_id
        parts = read(tables, found, one)
        for got, name in zip(parts, ("slot_mapping", "query_lens", "context_lens", "block_tables"), strict=True):
            np.testing.assert_array_equal(got, getattr(one, name))
    words = np.frombuffer(tables.memory.map, np.int64, NUM_SLOTS)
    assert sorted(words[words != 0].tolist()) == sorted(live)


def test_steps_come_and_go() -> None:
    """After each change the tables have all live steps, and no other."""
    with each_row() as row:
        for seed in range(5):
            with row(seed):
                let_steps_come_and_go(seed)


def let_steps_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    tables = in_memory(WORD_BYTES + 12_000)
    live: dict[int, tuple[tuple[int, int], Any]] = {}
    refused, most_live = 0, 0
    for step_id in range(1, 400):
        one = step(step_id, rng.randint(1, 20), rng.randint(1, 40))
        found = tables.publish(one)
        if found is None:
            refused += 1
        else:
            live[step_id] = (found, one)
            assert tables.publish(one) == found
        check(tables, live)
        most_live = max(most_live, len(live))
        for old in rng.sample(sorted(live), min(len(live), rng.choice((0, 1, 1, 2)))):
            tables.retire(old)
            found, _ = live.pop(old)
            assert word(tables, found[0]) != old
    assert refused > 5
    assert most_live > 3
    tables.close()
    check(tables, {})


def test_all_slots_are_taken() -> None:
    tables = in_memory(WORD_BYTES + NUM_SLOTS * 4 * ALIGNMENT)
    ones = [step(step_id, 1, 1) for step_id in range(1, NUM_SLOTS + 2)]
    found = [tables.publish(one) for one in ones[:-1]]
    assert None not in found
    assert tables.publish(ones[-1]) is None
    tables.retire(17)
    tables.retire(17)
    assert tables.publish(ones[-1]) == found[16]
    tables.close()


def test_steps_that_follow_one_another_have_one_slot() -> None:
    tables = in_memory(WORD_BYTES + 4096)
    other, first = tables.publish(step(1, 1, 1)), tables.publish(step(2, 1, 1))
    assert other is not None
    assert first is not None
    slot = first[0]

    def words(of: int) -> tuple[int, int]:
        """The step and its run."""
        return word(tables, of), word(tables, NUM_SLOTS + of)

    for step_id in range(3, 6):
        with tables.following(step_id - 1) as run:
            tables.retire(step_id - 1)
            assert words(slot) == (step_id - 1, 2)  # as long as the next one is not there
            found = tables.publish(step(step_id, 1, 1), run)
        assert found is not None
        assert found[0] == slot
        assert words(slot) == (step_id, 2)
    with tables.following(5) as run:
        pass  # the commit failed
    assert words(slot) == (5, 2)
    with tables.following(2) as unknown:
        assert unknown is None
    with tables.following(5):
        tables.retire(5)  # without one that follows
    assert word(tables, slot) == 0
    with tables.following(1) as run:
        tables.retire(1)
        assert tables.publish(step(6, 20, 1000), run) is None
    assert word(tables, other[0]) == 0
    for step_id in (7, 8):  # other steps take the slots: their runs begin with them
        found = tables.publish(step(step_id, 1, 1))
        assert found is not None
        assert words(found[0]) == (step_id, step_id)
    tables.close()
    assert word(tables, slot) == 0 == word(tables, other[0])


def test_a_step_larger_than_all() -> None:
    tables = in_memory(WORD_BYTES + 4096)
    assert tables.publish(step(1, 20, 1000)) is None
    assert tables.publish(step(2, 2, 2)) is not None
    tables.close()


def test_two_steps_of_the_same_sequence_are_live_at_once() -> None:
    """A step and the one that follows it; an operation on the sequence ends both."""
    manager = BlockManager(BlocksConfig(num_blocks=8, block_size=4, num_layers=1, watermark=0.0))
    tables, space = in_memory(1 << 16), manager.open_namespace()
    space.on_step_end = tables.retire
    manager.allocate(space, [AllocationRequest(1, range(8))])
    first = manager.open_step(space, [1])
    live: dict[int, Any] = {first.step_id: (tables.publish(first), first)}
    second = manager.advance(space, [1], [0], [1], follows=first.step_id)
    live[second.step_id] = (tables.publish(second), second)
    check(tables, live)
    manager.mark_all_layers(space, first.step_id)
    check(tables, live)
    manager.truncate(space, [1], [8])
    check(tables, {})


def test_a_step_that_follows_one_as_large_as_the_tables() -> None:
    """Without room for both, the one before is over first."""
    tables = in_memory(WORD_BYTES + 16 * ALIGNMENT)
    first = tables.publish(step(1, 16, 4))
    assert first is not None
    with tables.following(1) as run:
        tables.retire(1)
        found = tables.publish(step(2, 16, 4), run)
    assert found == first
    assert (word(tables, found[0]), word(tables, NUM_SLOTS + found[0])) == (2, 2)
    tables.retire(2)
    assert word(tables, found[0]) == 0
    assert tables.publish(step(3, 16, 4)) == first
    tables.close()
