"""Integrity checks: invariants recomputed from the block tables, at once for tests or in slices for a daemon.

An invariant of one block, one table entry or one part of a step is checked within one slice, so changes between slices
do not matter. The checks of sums over the whole state are in sums.py.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvservice.blocks.core import Core
from kvservice.blocks.invariants import hold, hold_range, pieces, windows
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.prefix import block_hash, token_bytes
from kvservice.blocks.sequences import LENGTH, NUM_COMPUTED, STEP, SWAPPED, OpenStep, SequenceSpace
from kvservice.blocks.slices import Slices, finish
from kvservice.blocks.sums import check_sums

# Table entries, rows or blocks that NumPy processes in one slice. It takes a fraction of a millisecond.
SLICE_ENTRIES: Final = 8192
# Cost of the work in Python for one block, in units of NumPy's work for one entry: an index lookup, and a hash.
_LOOKUP_COST: Final = 8
_HASH_COST: Final = 32
# How often one pass tries to check the sums.
MAX_TRIES: Final = 4


def check_integrity(core: Core) -> None:
    """Check all invariants. Raises InternalError naming the first one that is violated."""
    finish(check_in_slices(core))


def check_in_slices(core: Core, size: int = SLICE_ENTRIES) -> Slices[bool]:
    """`check_integrity` in slices of `size` entries; other operations may run in between. Returns False if the sums
    could not be checked because the state changed too often. Raises InternalError."""
    complete = yield from check_sums(core, size, MAX_TRIES)
    yield from _check_index(core, max(size // _LOOKUP_COST, 1))
    for space in tuple(core.spaces):
        for step_id in tuple(space.steps):
            yield from _check_step(core, space, step_id, size)
    if core.config.enable_prefix_caching:
        yield from _check_chains(core, max(size // _HASH_COST, 1))
    return complete


def _check_index(core: Core, size: int) -> Slices[None]:
    device = core.device
    for window in windows(device.num_blocks, size):
        for block in (np.flatnonzero(device.indexed[window]) + window.start).tolist():
            found = device.index.blocks.get(device.hashes[block] or b"")
            hold(found == block, f"block {block} is not found by its hash")
        yield


def _check_step(core: Core, space: SequenceSpace, step_id: int, size: int) -> Slices[None]:
    """Check that a live step is the newest step of its sequences, and that until it commits no other sequence can write
    or find its slots."""
    entry = space.steps.get(step_id)
    if entry is None:
        return  # the step ended after this pass listed the live steps
    step = entry.plan
    hold((core.meta[step.rows, STEP] == step_id).all(), f"live step {step_id} is not its sequences' newest")
    names = [space.rows.get(sequence_id) for sequence_id in step.sequence_ids.tolist()]
    hold(names == step.rows.tolist(), f"step {step_id} names the wrong rows")
    if not entry.committed:
        yield from _check_slots(core, space, entry, size)
    yield


def _check_slots(core: Core, space: SequenceSpace, entry: OpenStep, size: int) -> Slices[None]:
    """Check that the slots of a step are exclusive. The sequences of a live step get no new tokens, so the check may
    take any number of slices."""
    step, device = entry.plan, core.device
    starts = (step.context_lens - step.query_lens).astype(np.int64)
    hold((core.meta[step.rows, NUM_COMPUTED] == starts).all(), f"step {step.step_id} covers computed tokens")
    first = starts // core.config.block_size
    counts = -(-core.meta[step.rows, LENGTH] // core.config.block_size) - first
    for rows, entries in pieces(step.rows, first, counts, size):
        if space.steps.get(step.step_id) is not entry or entry.committed:
            return
        blocks = core.block_tables[rows, entries].astype(np.int64)
        hold_range(blocks, device.num_blocks, "a block in a table")
        hold((device.ref_count[blocks] == 1).all(), f"a slot of step {step.step_id} is shared")
        hold(not device.indexed[blocks].any(), f"a block that step {step.step_id} writes can be found by its hash")
        yield


def _check_chains(core: Core, size: int) -> Slices[None]:
    """Check that the chain hashes along the tables match the tokens, so that the index finds the right content."""
    for window in windows(core.config.max_sequences, size * _HASH_COST):
        rows = np.arange(window.start, window.stop)
        counts = _num_hashed(core, rows)
        for which, entries in pieces(rows, np.zeros_like(counts), counts, size):
            still = entries < _num_hashed(core, which)
            _check_hashes(core, which[still], entries[still])
            yield


def _num_hashed(core: Core, rows: Int64Array) -> Int64Array:
    """Return int64[n]: how many blocks of each row's table have a hash on the device."""
    counts: Int64Array = core.meta[rows, NUM_COMPUTED] // core.config.block_size * (core.meta[rows, SWAPPED] == 0)
    return counts


def _check_hashes(core: Core, rows: Int64Array, entries: Int64Array) -> None:
    """Check that each block's hash is computed from its tokens and the hash of the previous block in its table."""
    device, size = core.device, 4 * core.config.block_size
    blocks = core.block_tables[rows, entries].astype(np.int64)
    before = core.block_tables[rows, np.maximum(entries - 1, 0)].astype(np.int64)
    hold_range(np.concatenate([blocks, before]), device.num_blocks, "a block in a table")
    data = token_bytes(device.token_ids[blocks])
    extra_keys = core.sequences.extra_keys
    for i, (row, entry, block, previous) in enumerate(
        zip(rows.tolist(), entries.tolist(), blocks.tolist(), before.tolist(), strict=True)
    ):
        parent = device.hashes[previous] if entry else device.index.root
        extra = extra_keys[row].get(entry, b"") if row in extra_keys else b""
        expected = block_hash(parent or b"", data[i * size : (i + 1) * size], extra)
        hold(device.hashes[block] == expected, f"the hash of block {block} is not its content's")
