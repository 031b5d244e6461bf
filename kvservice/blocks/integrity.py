"""The invariants of the bookkeeping, recomputed from the block tables alone. For tests and for an idle daemon in
debug mode."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from kvservice.blocks.core import Core, ragged
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.prefix import block_hash, token_bytes
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, STEP, SWAPPED, SequenceSpace
from kvservice.blocks.tier import DeviceTier, Tier
from kvservice.errors import InternalError


def check_integrity(core: Core) -> None:
    """Raises InternalError naming the first invariant that does not hold."""
    rows = _live_rows(core)
    _check_lengths(core, rows)
    named = np.array([row for space in core.spaces for row in space.rows.values()] + [*core.sequences.ending], np.int64)
    _hold(np.array_equal(np.sort(named), rows), "the spaces' names are not the rows in use, once each")
    for space in core.spaces:
        for step_id in space.steps:
            _check_step(core, space, step_id)
    swapped = core.meta[rows, SWAPPED] == 1
    _check_holders(core, core.device, rows[~swapped])
    _check_holders(core, core.swap, rows[swapped])
    _check_free(core.swap, cached=np.zeros(0, np.int64))
    _check_free(core.device, cached=np.flatnonzero(core.device.indexed & (core.device.ref_count == 0)))
    _check_cached(core.device)
    _check_pins(core)
    _check_index(core.device)
    if core.config.enable_prefix_caching:
        for row in rows[~swapped].tolist():
            _check_chain(core, row)


def _check_step(core: Core, space: SequenceSpace, step_id: int) -> None:
    """A live step is the newest of all its sequences, and until it commits nobody else can write or find its slots."""
    entry = space.steps[step_id]
    step = entry.plan
    _hold(bool((core.meta[step.rows, STEP] == step_id).all()), f"live step {step_id} is not its sequences' newest")
    names = [space.rows.get(sequence_id) for sequence_id in step.sequence_ids.tolist()]
    _hold(names == step.rows.tolist(), f"step {step_id} names the wrong rows")
    if entry.committed:
        return
    starts = (step.context_lens - step.query_lens).astype(np.int64)
    _hold(bool((core.meta[step.rows, NUM_COMPUTED] == starts).all()), f"step {step_id} covers computed tokens")
    first = starts // core.config.block_size
    which, entries = ragged(first, -(-core.meta[step.rows, LENGTH] // core.config.block_size) - first)
    blocks = core.block_tables[step.rows[which], entries]
    _hold(bool((core.device.ref_count[blocks] == 1).all()), f"a slot of step {step_id} is another's too")
    _hold(not core.device.indexed[blocks].any(), f"a block that step {step_id} writes can be found by its hash")


def _live_rows(core: Core) -> Int64Array:
    free = core.sequences.free_rows
    _hold(len(set(free)) == len(free), "a row is free twice")
    rows = np.setdiff1d(np.arange(core.config.max_sequences), np.array(free, np.int64))
    _hold(not set(core.sequences.extra_keys) & set(free), "a free row has extra keys")
    return rows


def _check_lengths(core: Core, rows: Int64Array) -> None:
    length, computed = core.meta[rows, LENGTH], core.meta[rows, NUM_COMPUTED]
    _hold(bool(((computed >= 0) & (computed <= length)).all()), "more tokens are computed than there are")
    _hold(bool((core.meta[rows, NUM_BLOCKS] * core.config.block_size >= length).all()), "a table is too short")
    _hold(int(length.sum()) == core.sequences.num_tokens, "the token count is wrong")
    _hold(int(core.meta[rows, SWAPPED].sum()) == core.sequences.num_swapped, "the count of swapped sequences is wrong")


def _check_holders(core: Core, tier: Tier, rows: Int64Array) -> None:
    """ref_count is the number of tables that hold a block, always at one and the same entry."""
    which, entries = ragged(np.zeros(len(rows), np.int64), core.meta[rows, NUM_BLOCKS]) if len(rows) else (rows, rows)
    blocks = core.block_tables[rows[which], entries]
    holders = np.bincount(blocks, minlength=tier.num_blocks)
    _hold(np.array_equal(holders, tier.ref_count), "a block's ref count is not the number of tables that hold it")
    _hold(tier.num_active == np.count_nonzero(holders), "the count of active blocks is wrong")
    _hold(tier.num_shared == np.count_nonzero(holders > 1), "the count of shared blocks is wrong")
    entry_of = np.zeros(tier.num_blocks, np.int64)
    entry_of[blocks] = entries
    _hold(np.array_equal(entry_of[blocks], entries), "a block stands at two places of tables")


def _check_free(tier: Tier, cached: Int64Array) -> None:
    free = tier.free_blocks()
    parts = np.concatenate([free, np.flatnonzero(tier.ref_count > 0), cached])
    _hold(
        np.array_equal(np.sort(parts), np.arange(tier.num_blocks)), "free + held + cached are not all blocks, once each"
    )


def _check_cached(device: DeviceTier) -> None:
    queued = device.evictable.blocks()
    _hold(len(queued) == len(device.evictable), "the eviction queue's length is wrong")
    unheld = device.indexed & (device.ref_count == 0)
    expected = np.flatnonzero(unheld & ~device.pinned)
    _hold(np.array_equal(np.sort(queued), expected), "the eviction queue is not the unpinned cached blocks, once each")
    pinned = int(np.count_nonzero(unheld & device.pinned))
    _hold(pinned == device.num_pinned_unheld, "the count of pinned cached blocks is wrong")
    _hold(not (device.pinned & ~device.indexed).any(), "a pinned block cannot be found")


def _check_pins(core: Core) -> None:
    _hold(np.array_equal(core.pin_counts > 0, core.device.pinned), "the pins' blocks are not the pinned blocks")
    _hold(core.num_pinned == np.count_nonzero(core.pin_counts), "the count of pinned blocks is wrong")
    _hold(core.num_pinned <= core.config.max_pinned_blocks, "more blocks are pinned than may be")


def _check_index(device: DeviceTier) -> None:
    found = np.array(list(device.index.blocks.values()), np.int64)
    _hold(np.array_equal(np.sort(found), np.flatnonzero(device.indexed)), "the index does not name the indexed blocks")
    for chain_hash, block in device.index.blocks.items():
        _hold(device.hashes[block] == chain_hash, f"block {block} is found by a hash that is not its own")


def _check_chain(core: Core, row: int) -> None:
    """The hashes along a table are those of its tokens, so what the index finds holds what the hash says."""
    device, size = core.device, 4 * core.config.block_size
    blocks = core.block_tables[row, : core.meta[row, NUM_COMPUTED] // core.config.block_size]
    extra = core.sequences.extra_keys.get(row, {})
    data = token_bytes(device.token_ids[blocks])
    chain_hash = device.index.root
    for entry, block in enumerate(blocks.tolist()):
        chain_hash = block_hash(chain_hash, data[entry * size : (entry + 1) * size], extra.get(entry, b""))
        _hold(device.hashes[block] == chain_hash, f"the hash of block {block} is not its content's")


def _hold(invariant: bool, broken: str) -> None:
    if not invariant:
        _fail(broken)


def _fail(broken: str) -> NoReturn:
    raise InternalError(f"integrity: {broken}")
