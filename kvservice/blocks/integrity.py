"""Integrity checks: invariants recomputed from the block tables, at once for tests or in slices for a daemon.

An invariant of one block, one table entry or one part of a step is checked within one slice, so changes between slices
do not matter. The checks of sums over the whole state are in sums.py.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvservice.blocks.invariants import pieces, require, require_range, windows
from kvservice.blocks.namespaces import LiveStep, SessionNamespace
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.prefix import token_bytes
from kvservice.blocks.sequences import NAMESPACE, NUM_COMPUTED, SEQUENCE_ID, SWAPPED
from kvservice.blocks.slices import Slices
from kvservice.blocks.state import BlockState
from kvservice.blocks.sums import check_sums
from kvservice.chain_hash import block_hash

# Table entries, rows or blocks that NumPy processes in one slice. It takes a fraction of a millisecond.
SLICE_ENTRIES: Final = 8192
# Cost of the work in Python for one block, in units of NumPy's work for one entry: an index lookup, and a hash.
_LOOKUP_COST: Final = 8
_HASH_COST: Final = 32
# How often one pass tries to check the sums.
MAX_TRIES: Final = 4


def check_in_slices(state: BlockState, size: int) -> Slices[bool]:
    """Check all invariants in slices of `size` entries; other operations may run in between. Returns False if the sums
    could not be checked because the state changed too often. Raises InternalError naming the first invariant that is
    violated."""
    complete = yield from check_sums(state, size, MAX_TRIES)
    yield from _check_index(state, max(size // _LOOKUP_COST, 1))
    for namespace in tuple(state.namespaces):
        yield from _check_names(state, namespace, size)
        for step_id in tuple(namespace.steps):
            yield from _check_step(state, namespace, step_id, size)
    if state.config.enable_prefix_caching:
        yield from _check_chains(state, max(size // _HASH_COST, 1))
    return complete


def _check_index(state: BlockState, size: int) -> Slices[None]:
    device = state.device
    for window in windows(device.num_blocks, size):
        indexed = np.flatnonzero(device.indexed[window]) + window.start
        for block in indexed.tolist():
            found = device.index.blocks.get(device.hashes[block] or b"")
            require(found == block, f"block {block} is not found by its hash")
        kept = device.kept_hashes[indexed].tobytes()
        require(kept == b"".join(device.hashes[block] or b"" for block in indexed.tolist()), "a hash is not kept")
        yield


def _check_names(state: BlockState, namespace: SessionNamespace, size: int) -> Slices[None]:
    """Check that the states of a namespace's rows name it and its sequences, so that a restart finds them."""
    names = np.array(list(namespace.rows), np.int64)
    for window in windows(len(names), size):
        if namespace.closed:
            return
        part = names[window].tolist()
        rows = [(name, row) for name in part if (row := namespace.rows.get(name)) is not None]
        states = state.sequences.states[[row for _, row in rows]]
        require((states[:, NAMESPACE] == namespace.number).all(), "a row does not name its namespace")
        require(states[:, SEQUENCE_ID].tolist() == [name for name, _ in rows], "a row does not name its sequence")
        yield


def _check_step(state: BlockState, namespace: SessionNamespace, step_id: int, size: int) -> Slices[None]:
    """Check that a live step is the newest step of its sequences, apart from its follower, and that until it commits no
    other sequence can write or find its slots."""
    entry = namespace.steps.get(step_id)
    if entry is None:
        return  # the step ended after this pass listed the live steps
    step = entry.plan
    newest = state.sequences.steps[step.rows]
    replaced = newest != step_id
    require((newest[replaced] == entry.follower).all(), f"live step {step_id} is not its sequences' newest")
    require(replaced.any() == bool(entry.follower), f"step {step_id} has a follower that shares no sequence")
    _check_links(namespace, step_id, entry)
    names = [namespace.rows.get(sequence_id) for sequence_id in step.sequence_ids.tolist()]
    require(names == step.rows.tolist(), f"step {step_id} names the wrong rows")
    if not entry.committed:
        yield from _check_slots(state, namespace, entry, size)
    yield


def _check_links(namespace: SessionNamespace, step_id: int, entry: LiveStep) -> None:
    """Check that the steps that follow one another are at most two, and that each knows the other."""
    if entry.follows:
        followed = namespace.steps.get(entry.follows)
        require(followed is not None and followed.follower == step_id, f"the step that {step_id} follows is not live")
        require(followed is not None and not followed.follows, f"step {step_id} is the third in a row")
    if entry.follower:
        follower = namespace.steps.get(entry.follower)
        require(follower is not None and follower.follows == step_id, f"the follower of step {step_id} is not live")
    require(entry.tokens_known or not entry.committed, f"step {step_id} committed without its tokens")


def _check_slots(state: BlockState, namespace: SessionNamespace, entry: LiveStep, size: int) -> Slices[None]:
    """Check that the slots of a step are exclusive. The sequences of a live step get no tokens except the step's own,
    so the check may take any number of slices."""
    step, device = entry.plan, state.device
    starts = (step.context_lens - step.query_lens).astype(np.int64)
    computed, stops = state.sequences.num_computed[step.rows], step.context_lens.astype(np.int64)
    begins = computed <= starts if entry.follows else computed == starts
    require(begins.all(), f"step {step.step_id} covers computed tokens")
    first = starts // state.config.block_size
    counts = -(-np.maximum(stops, state.sequences.lengths[step.rows]) // state.config.block_size) - first
    for rows, entries in pieces(step.rows, first, counts, size):
        if namespace.steps.get(step.step_id) is not entry or entry.committed:
            return
        blocks = state.sequences.block_tables[rows, entries].astype(np.int64)
        require_range(blocks, device.num_blocks, "a block in a table")
        require((device.ref_count[blocks] == 1).all(), f"a slot of step {step.step_id} is shared")
        require(not device.indexed[blocks].any(), f"a block that step {step.step_id} writes can be found by its hash")
        yield


def _check_chains(state: BlockState, size: int) -> Slices[None]:
    """Check that the chain hashes along the tables match the tokens, so that the index finds the right content."""
    for window in windows(state.config.max_sequences, size * _HASH_COST):
        rows = np.arange(window.start, window.stop)
        counts = _num_hashed(state, rows)
        for which, entries in pieces(rows, np.zeros_like(counts), counts, size):
            still = entries < _num_hashed(state, which)
            _check_hashes(state, which[still], entries[still])
            yield


def _num_hashed(state: BlockState, rows: Int64Array) -> Int64Array:
    """Return int64[n]: how many blocks of each row's table have a hash on the device."""
    states = state.sequences.states
    num_full: Int64Array = states[rows, NUM_COMPUTED] // state.config.block_size * (states[rows, SWAPPED] == 0)
    return num_full


def _check_hashes(state: BlockState, rows: Int64Array, entries: Int64Array) -> None:
    """Check that each block's hash is computed from its tokens and the hash of the previous block in its table."""
    device, size = state.device, 4 * state.config.block_size
    blocks = state.sequences.block_tables[rows, entries].astype(np.int64)
    before = state.sequences.block_tables[rows, np.maximum(entries - 1, 0)].astype(np.int64)
    require_range(np.concatenate([blocks, before]), device.num_blocks, "a block in a table")
    data = token_bytes(device.token_ids[blocks])
    extra_keys = state.sequences.extra_keys
    for i, (row, entry, block, previous) in enumerate(
        zip(rows.tolist(), entries.tolist(), blocks.tolist(), before.tolist(), strict=True)
    ):
        parent = device.hashes[previous] if entry else device.index.root
        extra = extra_keys[row].get(entry, b"") if row in extra_keys else b""
        expected = block_hash(parent or b"", data[i * size : (i + 1) * size], extra)
        require(device.hashes[block] == expected, f"the hash of block {block} is not its content's")
