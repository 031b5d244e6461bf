"""Native loops over block tables, against their definitions, with random shapes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from each_row import each_row

from kvservice import _ext
from kvservice.errors import InvalidArgumentError

NUM_BLOCKS = 50


def random_tables(rng: np.random.Generator, width: int) -> Any:
    return rng.integers(0, NUM_BLOCKS, (9, width), dtype=np.int32)


def random_ranges(rng: np.random.Generator, stop: int) -> tuple[Any, Any, Any]:
    """Return rows, starts and counts of ragged ranges; some are empty, some end with the table."""
    num = int(rng.integers(1, 9))
    rows = rng.permutation(9)[:num]
    starts = rng.integers(0, stop + 1, num)
    counts = np.array(
        [rng.choice([0, min(1, rest), rest, rng.integers(0, rest + 1)]) for rest in stop - starts], np.int64
    )
    return rows, starts, counts


def test_slots_and_shared_entries() -> None:
    with each_row() as row:
        for seed in range(40):
            with row(seed):
                rng = np.random.default_rng(seed)
                shift = int(rng.integers(0, 6))
                size, width = 1 << shift, int(rng.integers(1, 40))
                tables = random_tables(rng, width)
                rows, starts, counts = random_ranges(rng, width * size)
                expected = [
                    int(tables[row, position // size]) * size + position % size
                    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
                    for position in range(start, start + count)
                ]
                slots = _ext.slot_mapping(tables, rows, starts, counts, shift)
                assert slots.dtype == np.int64
                assert slots.tolist() == expected

                rows, starts, counts = random_ranges(rng, width)
                ref_count, indexed = rng.integers(0, 4, NUM_BLOCKS, dtype=np.int32), rng.random(NUM_BLOCKS) < 0.2
                held = [
                    tables[row, entry]
                    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
                    for entry in range(start, start + count)
                ]
                shared = [i for i, block in enumerate(held) if ref_count[block] > 1 or indexed[block]]
                # A column of a state array is not contiguous.
                columns = np.stack([starts, counts], axis=1)
                assert (
                    _ext.shared_entries(tables, rows, columns[:, 0], columns[:, 1], ref_count, indexed).tolist()
                    == shared
                )


def test_new_sequences_and_references() -> None:
    with each_row() as row:
        for seed in range(20):
            with row(seed):
                rng = np.random.default_rng(seed)
                size = 1 << int(rng.integers(0, 5))
                tables, token_ids = random_tables(rng, 12), rng.integers(0, 9, (200, size), dtype=np.int32)
                num = int(rng.integers(1, 6))
                rows = rng.permutation(9)[:num].tolist()
                tokens = [rng.integers(0, 99, int(rng.integers(1, 12 * size + 1)), dtype=np.int32) for _ in rows]
                found = [
                    rng.integers(0, NUM_BLOCKS, int(rng.integers(0, (len(one) - 1) // size + 1))) for one in tokens
                ]
                counts = [-(-len(one) // size) - len(hits) for one, hits in zip(tokens, found, strict=True)]
                blocks = NUM_BLOCKS + rng.permutation(150)[: sum(counts)]
                expected_tables, expected_tokens = tables.copy(), token_ids.copy()
                states, counted = rng.integers(0, 9, (9, 7)), np.zeros(200, np.int32)
                expected_states = states.copy()
                left = iter(blocks.tolist())
                for number, prompt, hits in zip(rows, tokens, found, strict=True):
                    expected_states[number, :5] = len(prompt), len(hits) * size, -(-len(prompt) // size), 0, 0
                    for entry in range(-(-len(prompt) // size)):
                        block = hits[entry] if entry < len(hits) else next(left)
                        expected_tables[number, entry] = block
                        if entry >= len(hits):
                            part = prompt[entry * size : (entry + 1) * size]
                            expected_tokens[block, : len(part)] = part
                steps = _ext.StepTables(tables, states, counted, np.zeros(200, np.bool_), token_ids, 999)
                steps.create(rows, found, tokens, blocks)
                assert np.array_equal(states, expected_states)
                assert np.array_equal(tables, expected_tables)
                assert np.array_equal(token_ids, expected_tokens)

                ref_count = rng.integers(0, 3, NUM_BLOCKS, dtype=np.int32)
                named = rng.integers(0, NUM_BLOCKS, int(rng.integers(0, 60)))
                after = ref_count + np.bincount(named, minlength=NUM_BLOCKS)
                first = [block for block in dict.fromkeys(named.tolist()) if ref_count[block] == 0]
                num_shared = int(np.count_nonzero((after > 1) & (ref_count < 2)))
                added, newly_shared = _ext.add_references(ref_count, named)
                assert (added.tolist(), newly_shared) == (first, num_shared)
                assert np.array_equal(ref_count, after)

                dropped = rng.permutation(np.repeat(np.arange(NUM_BLOCKS), rng.integers(0, ref_count + 1)))
                left = ref_count - np.bincount(dropped, minlength=NUM_BLOCKS)
                last = [block for block in dict.fromkeys(dropped[::-1].tolist()) if left[block] == 0][::-1]
                num_unshared = int(np.count_nonzero((ref_count > 1) & (left < 2)))
                unreferenced, no_longer_shared = _ext.drop_references(ref_count, dropped)
                assert (unreferenced.tolist(), no_longer_shared) == (last, num_unshared)
                assert np.array_equal(ref_count, left)

                distinct, inverse, counts = _ext.distinct_blocks(named)
                expected = np.unique(named, return_inverse=True, return_counts=True)
                assert all(map(np.array_equal, (distinct, inverse, counts), expected))


def test_forks_and_full_blocks() -> None:
    with each_row() as row:
        for seed in range(20):
            with row(seed):
                rng = np.random.default_rng(seed)
                shift, width = int(rng.integers(0, 4)), 8
                tables = np.stack([rng.permutation(NUM_BLOCKS)[:width] for _ in range(9)]).astype(np.int32)
                states = rng.integers(0, 99, (9, 6))
                states[:, 1], states[:, 2] = rng.integers(0, (width << shift) + 1, 9), rng.integers(0, width + 1, 9)
                ref_count = rng.integers(1, 4, NUM_BLOCKS, dtype=np.int32)
                token_ids = np.zeros((NUM_BLOCKS, 1 << shift), np.int32)
                steps = _ext.StepTables(tables, states, ref_count, np.zeros(NUM_BLOCKS, np.bool_), token_ids, 99)

                rows = rng.permutation(9)[: int(rng.integers(1, 9))]
                context_lens = rng.integers(states[rows, 1], (width << shift) + 1).astype(np.int32)
                expected = [
                    (number, entry, tables[number, entry], tables[number, entry - 1] if entry else -1)
                    for number, length in zip(rows.tolist(), context_lens.tolist(), strict=True)
                    for entry in range(states[number, 1] >> shift, length >> shift)
                ]
                full = steps.full_blocks(rows, context_lens)
                assert ([] if full is None else list(zip(*full, strict=True))) == expected

                parent, child = rng.permutation(9)[:2].tolist()
                held = tables[parent, : states[parent, 2]].tolist()
                after, more, forked = tables.copy(), ref_count.copy(), states.copy()
                after[child, : len(held)], forked[child, :5] = held, states[parent, :5]
                more[held] += 1
                assert steps.fork(parent, child) == sum(ref_count[block] == 2 for block in held)
                assert np.array_equal(tables, after)
                assert np.array_equal(states, forked)
                assert np.array_equal(ref_count, more)


def test_decode_steps() -> None:
    with each_row() as row:
        num_refused = 0
        for seed in range(60):
            with row(seed):
                rng = np.random.default_rng(seed)
                shift, num = int(rng.integers(0, 4)), int(rng.integers(1, 6))
                size, max_length = 1 << shift, (8 << shift) - 1
                tables, states = random_tables(rng, 8), np.zeros((9, 6), np.int64)
                states[:, 0] = states[:, 1] = rng.integers(0, max_length + (rng.random() < 0.2), 9)
                states[:, 2] = -(-states[:, 0] // size)
                states[:, 4] = rng.random(9) < 0.02
                ref_count = 1 + (rng.random(NUM_BLOCKS) < 0.02).astype(np.int32)
                indexed = rng.random(NUM_BLOCKS) < 0.02
                rows, tokens = rng.permutation(9)[:num], rng.integers(0, 99, num, dtype=np.int32)
                states[rows[0], 1] -= states[rows[0], 0] > 0 and rng.random() < 0.1
                tokens[0] -= 100 * (rng.random() < 0.1)
                expected = None if rng.random() < 0.5 else states[rows, 0] + (rng.random(num) < 0.05)
                stored = np.full((NUM_BLOCKS, size), -1, np.int32)
                steps = _ext.StepTables(tables, states, ref_count, indexed, stored, max_length)
                plan = steps.plan_decode(rows, tokens, expected)
                # With states of its own it is the same plan.
                given, moved = states[rows], states.copy()
                states[rows, 1] -= 1
                other = steps.plan_decode(rows, tokens, expected, given)
                states[:] = moved
                assert (other is None) == (plan is None)

                lengths, entries = states[rows, 0].copy(), states[rows, 0] // size
                there = entries < states[rows, 2]
                blocks = np.where(there, tables[rows, np.minimum(entries, 7)], 0).astype(np.int64)
                refused = (
                    (tokens < 0).any()
                    or (expected is not None and (expected != lengths).any())
                    or states[rows, 4].any()
                    or (states[rows, 1] != lengths).any()
                    or (lengths >= max_length).any()
                    or (there & ((ref_count[blocks] > 1) | indexed[blocks])).any()
                )
                assert (plan is None) == refused
                num_refused += bool(refused)
                if plan is None or other is None:
                    continue
                after, context_lens, slots, fresh = plan
                assert after.tolist() == context_lens.tolist() == (lengths + 1).tolist()
                assert slots.tolist() == other[2].tolist() == (blocks * size + lengths % size).tolist()
                assert ([] if fresh is None else fresh.tolist()) == np.flatnonzero(~there).tolist()
                new, expected_tables, num_blocks = None, tables.copy(), states[:, 2].copy()
                if fresh is not None:
                    new = rng.permutation(NUM_BLOCKS)[: len(fresh)]
                    expected_tables[rows[fresh], entries[fresh]] = new
                    num_blocks[rows[fresh]] += 1
                    blocks[fresh] = new
                steps.append(rows, slots, tokens, fresh, new)
                assert np.array_equal(tables, expected_tables)
                assert np.array_equal(states[:, 2], num_blocks)
                assert slots.tolist() == (blocks * size + lengths % size).tolist()
                last = dict(zip(slots.tolist(), tokens.tolist(), strict=True))  # random tables may share slots
                assert np.flatnonzero(stored.reshape(-1) != -1).tolist() == sorted(last)
                assert stored.reshape(-1)[list(last)].tolist() == list(last.values())
        assert 10 < num_refused < 50


def test_a_step_replaces_others() -> None:
    rng = np.random.default_rng(0)
    states = rng.integers(0, 4, (9, 5))
    steps = _ext.StepTables(
        np.zeros((9, 3), np.int32), states, np.ones(4, np.int32), np.zeros(4, np.bool_), np.zeros((4, 2), np.int32), 6
    )
    rows, lengths, expected = rng.permutation(9)[:6], rng.integers(0, 9, 6), states.copy()
    before = states[rows, 3].tolist()
    expected[rows, 0], expected[rows, 3] = lengths, 77
    assert steps.start(rows, lengths, 77) == sorted(set(before))
    assert np.array_equal(states, expected)


def test_decode_steps_with_other_arrays() -> None:
    """Wrong tokens and expected lengths are left to the general plan, which names them. Others are refused, before
    anything changes."""
    tables, states, stored = np.zeros((2, 3), np.int32), np.zeros((2, 5), np.int64), np.zeros((4, 2), np.int32)
    steps = _ext.StepTables(tables, states, np.ones(4, np.int32), np.zeros(4, np.bool_), stored, 6)
    token, none = np.zeros(1, np.int32), np.zeros(0, np.int64)
    for tokens, expected in (
        ([0], None), (ROW, None), (np.zeros(2, np.int32), None), (token.reshape(1, 1), None), (token, token),
        (token, np.zeros(2, np.int64)), (token, 0),
    ):  # fmt: skip
        assert steps.plan_decode(ROW, tokens, expected) is None
    for rows, state, field in (
        (ROW + 2, None, "rows"), (ROW - 1, states[:1], "rows"), (ROW, states, "states"),
        (ROW, states[:1, :4].copy(), "states"), (ROW, np.array([[-1, -1, 0, 0, 0]]), "states"), ([0], None, "rows"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError) as caught:
            steps.plan_decode(rows, token, None, state)
        assert caught.value.field == field
    assert steps.plan_decode(ROW, token, None, np.array([[6, 6, 9, 0, 0]])) is None  # as long as it may be
    states[1, 2] = 3
    two = np.zeros(2, np.int64)
    for rows, slots, fresh, blocks, field in (
        (ROW + 1, ROW, ROW, ROW, "states"), (ROW + 2, ROW, ROW, ROW, "rows"), (ROW, ROW, ROW + 1, ROW, "fresh"),
        (ROW, ROW, ROW, ROW - 1, "blocks"), (ROW, ROW, ROW, ROW + 4, "blocks"), (ROW, ROW, ROW, none, "blocks"),
        (ROW, none, ROW, ROW, "slots"), (ROW, ROW + 8, None, None, "slots"), (ROW, ROW - 1, None, None, "slots"),
        (ROW, ROW + 2, ROW, ROW, "slots"), (ROW, ROW, two, two, "fresh"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError) as caught:
            steps.append(rows, slots, token, fresh, blocks)
        assert caught.value.field == field
    with pytest.raises(InvalidArgumentError) as caught:
        steps.append(ROW, ROW, np.zeros(2, np.int32), None, None)
    assert caught.value.field == "tokens"
    for rows, lengths, field in ((ROW + 2, ROW, "rows"), (ROW - 1, ROW, "rows"), (ROW, two, "lengths")):
        with pytest.raises(InvalidArgumentError) as caught:
            steps.start(rows, lengths, 1)
        assert caught.value.field == field
    assert not tables.any()
    assert not stored.any()
    assert states.tolist() == [[0] * 5, [0, 0, 3, 0, 0]]


def test_hashes_are_matched_up_to_the_first_miss() -> None:
    with each_row() as row:
        for seed in range(10):
            with row(seed):
                rng = np.random.default_rng(seed)
                hashes = [rng.bytes(32) for _ in range(int(rng.integers(1, 30)))]
                blocks = rng.permutation(NUM_BLOCKS)[: len(hashes)].tolist()
                known = {
                    chain_hash: block for chain_hash, block in zip(hashes, blocks, strict=True) if rng.random() < 0.9
                }
                ref_count = rng.integers(0, 2, NUM_BLOCKS, dtype=np.int32)
                for limit in range(len(hashes) + 2):
                    expected = list(
                        itertools.takewhile(lambda block: block is not None, map(known.get, hashes[:limit]))
                    )
                    found, num_held = _ext.match_hashes(known, hashes, limit, ref_count)
                    assert found.dtype == np.int64
                    assert found.tolist() == expected
                    assert num_held == sum(ref_count[block] > 0 for block in expected)
                with pytest.raises(InvalidArgumentError, match="index"):
                    _ext.match_hashes({b"1": NUM_BLOCKS}, [b"1"], 1, ref_count)


ROW = np.zeros(1, np.int64)


RANGES_OUTSIDE: list[tuple[Any, ...]] = [
    (ROW + 2, ROW, ROW, "rows"),
    (ROW - 1, ROW, ROW, "rows"),
    (ROW, ROW - 1, ROW, "starts"),
    (ROW, ROW + 13, ROW, "starts"),
    (ROW, ROW + 4, ROW + 9, "counts"),
    (ROW, ROW, ROW - 1, "counts"),
    (ROW, ROW, ROW + 2**62, "counts"),
    (ROW, np.zeros(2, np.int64), ROW, "starts"),
    (ROW.astype(np.int32), ROW, ROW, "rows"),
    (ROW.reshape(1, 1), ROW, ROW, "rows"),
    ([0], ROW, ROW, "rows"),
]


def test_ranges_outside_the_tables_are_refused() -> None:
    with each_row() as row:
        for rows, starts, counts, field in RANGES_OUTSIDE:
            with row((rows, starts, counts, field)):
                tables = np.zeros((2, 3), np.int32)
                with pytest.raises(InvalidArgumentError) as caught:
                    _ext.slot_mapping(tables, rows, starts, counts, 2)
                assert caught.value.field == field


def test_blocks_outside_the_pool_are_refused_before_anything_changes() -> None:
    ref_count, tables, token_ids = np.zeros(4, np.int32), np.zeros((2, 3), np.int32), np.zeros((4, 2), np.int32)
    prompt, none, states = np.ones(3, np.int32), np.zeros(0, np.int64), np.zeros((2, 5), np.int64)
    steps = _ext.StepTables(tables, states, ref_count, np.zeros(4, np.bool_), token_ids, 6)
    for bad in (4, -1):
        with pytest.raises(InvalidArgumentError, match="blocks"):
            _ext.add_references(ref_count, np.array([1, bad]))
        with pytest.raises(InvalidArgumentError, match="blocks"):
            _ext.drop_references(np.ones(4, np.int32), np.array([1, bad]))
        with pytest.raises(InvalidArgumentError, match="blocks"):
            steps.create([1], [none], [prompt], np.array([1, bad]))
        tables[0, 0] = bad
        with pytest.raises(InvalidArgumentError, match="tables"):
            _ext.shared_entries(tables, ROW, ROW, ROW + 1, ref_count, np.zeros(4, np.bool_))
        tables[0, 0] = 0
    for row, found, tokens, blocks in (
        (2, none, prompt, np.arange(2)),
        (1, none, prompt, np.arange(3)),
        (1, np.arange(3), prompt, none),
        (1, none, np.ones(7, np.int32), np.arange(4)),
    ):
        with pytest.raises(InvalidArgumentError):
            steps.create([row], [found], [tokens], blocks)
    for array in (states, tables, token_ids):
        assert not array.any()
    once = np.ones(4, np.int32)
    with pytest.raises(InvalidArgumentError, match="fewer references"):
        _ext.drop_references(once, np.array([3, 1, 2, 1]))
    assert once.all()
    for outside in (-1, 2**31):
        with pytest.raises(InvalidArgumentError, match="blocks"):
            _ext.distinct_blocks(np.array([1, outside]))
    assert not ref_count.any()
    assert not tables.any()
    assert not token_ids.any()


def test_forks_and_full_blocks_outside_the_tables_are_refused() -> None:
    tables, states, ref_count = np.zeros((3, 3), np.int32), np.zeros((3, 5), np.int64), np.ones(4, np.int32)
    steps = _ext.StepTables(tables, states, ref_count, np.zeros(4, np.bool_), np.zeros((4, 2), np.int32), 6)
    tables[1, 2] = 4
    states[:, 2] = 0, 3, 4
    for parent, child, field in ((3, 0, "parent"), (-1, 0, "parent"), (0, 3, "child"), (0, 0, "child")):
        with pytest.raises(InvalidArgumentError) as caught:
            steps.fork(parent, child)
        assert caught.value.field == field
    for parent, field in ((1, "tables"), (2, "states")):
        with pytest.raises(InvalidArgumentError) as caught:
            steps.fork(parent, 0)
        assert caught.value.field == field
    six, two = np.full(1, 6, np.int32), np.zeros(2, np.int32)
    for rows, lengths, field in (
        (ROW + 3, six, "rows"), (ROW - 1, six, "rows"), (ROW, six + 2, "context_lens"), (ROW + 1, six, "tables"),
        (ROW, two, "context_lens"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError) as caught:
            steps.full_blocks(rows, lengths)
        assert caught.value.field == field
    assert not tables[0].any()
    assert not states[0].any()
    assert ref_count.all()


def test_rows_of_ids() -> None:
    rows = {5: 3, 2**62: 0, -1: 8}
    with each_row() as row:
        for ids, expected in (([2**62, 5], [0, 3]), ([-1], [8]), ([5, 6], None), ([5, -1, 5], None)):
            with row(ids):
                found = _ext.rows_of(rows, np.array(ids))
                assert (found if found is None else found.tolist()) == expected
    with pytest.raises(InvalidArgumentError, match="ids"):
        _ext.rows_of(rows, np.array([5], np.int32))


def test_the_first_negative_number() -> None:
    with each_row() as row:
        for numbers, expected in (([], -1), ([0, 2**31 - 1], -1), ([1] * 100 + [-1, -(2**31)], 100), ([-5], 0)):
            with row((numbers, expected)):
                assert _ext.first_negative(np.array(numbers, np.int32)) == expected
                assert _ext.first_negative(np.repeat(np.array(numbers, np.int32), 2)[::2]) == expected
