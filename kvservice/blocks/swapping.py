"""Sequences that leave the pool and come back: to the swap tier, or as values that outlive the daemon.

A swap moves a group of sequences between the device tier and the swap tier. Each shared block moves once. After a
swap-out, the device's copy of a computed full block stays cached until it is evicted, and a swap-in reuses it through
the prefix index instead of copying.

Saving and restoring makes values without block ids of the sequences of a namespace, and sequences of such values:

    save ─▶ SavedSequences, which outlive the daemon ─▶ restore: rows, tables, tokens ─▶ bytes ─▶ index

A restored sequence exists before the bytes of its blocks do. Therefore its namespace must not be in use: a restart
before the namespace is known to recovery frees what was restored. Blocks enter the prefix index when they have their
bytes. Blocks that the index finds already need none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice._ext import distinct_blocks
from kvservice.blocks.allocation import allocation_status
from kvservice.blocks.arguments import check_request_blocks, check_sequence_lengths, whole_number
from kvservice.blocks.events import EventJournal, StoredBlock
from kvservice.blocks.kept import extra_keys_bytes
from kvservice.blocks.plans import NO_STEP, AllocStatus, BoolArray, Int32Array, Int64Array, SwapPlan
from kvservice.blocks.pool import counted, token_bytes
from kvservice.blocks.slices import SLICE_BLOCKS, Slices, in_turn
from kvservice.blocks.state import (
    DROP,
    LENGTH,
    NAMESPACE,
    NUM_BLOCKS,
    NUM_COMPUTED,
    RESTORE,
    SWAPPED,
    BlockState,
    SessionNamespace,
    ragged,
)
from kvservice.chain_hash import block_hash
from kvservice.errors import OutOfBlocksError, SequenceNotSwappedError, UnknownSessionError

_MISSING = -1
_NO_BLOCKS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Group:
    """Table entries of a group of sequences.

    Entry i of m is at (rows[which[i]], entries[i]) and names block blocks[inverse[i]]. `holders` counts, per distinct
    block, the tables of the group that hold it.
    """

    ids: Int64Array
    rows: Int64Array
    states: Int64Array
    which: Int64Array
    entries: Int64Array
    blocks: Int64Array
    inverse: Int64Array
    holders: Int64Array


@dataclass(frozen=True, slots=True)
class _SwapIn:
    """Plan of a swap-in. `found` int64[distinct blocks] are the device blocks that the index still has, or _MISSING.
    `grown` int64[n] are the new blocks for lookahead, `num_grown` together."""

    group: _Group
    found: Int64Array
    grown: Int64Array
    num_grown: int
    status: AllocStatus
    required: int


def can_swap_out(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> bool:
    """Return whether the swap tier has room for the group. The answer is exact; the swap tier has no watermark."""
    state.enter(namespace)
    return len(_swap_out_group(state, namespace, sequence_ids).blocks) <= state.swap.num_free


def swap_out(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> SwapPlan:
    """Move a group of sequences to the swap tier (vLLM v0: swap_out).

    sequence_ids int64[n], distinct. Returns device blocks src int32[m] and swap blocks dst int32[m]; the device
    copies them before anything else is written to the device pool. A block that several sequences of the group
    share moves once and stays shared. The steps of the group become stale. Raises OutOfBlocksError with tier
    "swap".
    """
    state.enter(namespace)
    group = _swap_out_group(state, namespace, sequence_ids)
    src = group.blocks
    if len(src) > state.swap.num_free:
        needed = counted(len(src), "swap block")
        raise OutOfBlocksError(
            f"{needed} needed and {state.swap.num_free} of {state.swap.num_blocks} are free",
            tier="swap", required=len(src), free=state.swap.num_free, total=state.swap.num_blocks,
            never=len(src) > state.swap.num_blocks,
        )  # fmt: skip
    state.intents.begin(DROP, group.rows)
    listed = state.hide(namespace, group.ids, group.rows)
    dst = state.swap.allocate_shared(group.holders)
    state.swap.token_ids[dst] = state.device.token_ids[src]
    _take_hashes(state, group, dst)
    state.sequences.end_steps(namespace, group.rows)
    state.device.decref_entries(*state.sequences.table_entries(group.rows))
    state.sequences.block_tables[group.rows[group.which], group.entries] = dst[group.inverse]
    state.sequences.states[group.rows, SWAPPED] = 1
    state.sequences.num_swapped += len(group.rows)
    state.counters.swapped_out_sequences += len(group.rows)
    state.counters.swapped_out_blocks += len(src)
    plan = SwapPlan(src.astype(np.int32), dst.astype(np.int32))
    state.show(namespace, listed, group.rows)
    return plan


def can_swap_in(
    state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int = 0
) -> AllocStatus:
    """Return one of the three answers of can_allocate for a swapped-out group, with the device tier's watermark.

    The required blocks are the distinct blocks of the group and the lookahead blocks. A block that the index still
    finds on the device needs no new block. Raises SequenceNotSwappedError.
    """
    state.enter(namespace)
    return _plan_swap_in(state, namespace, sequence_ids, lookahead).status


def swap_in(
    state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int = 0
) -> SwapPlan:
    """Move a group of swapped-out sequences back to the device (vLLM v0: swap_in).

    sequence_ids int64[n], distinct. Returns swap blocks src int32[m] and device blocks dst int32[m], only for
    blocks that are no longer on the device. Raises SequenceNotSwappedError, OutOfBlocksError.
    """
    state.enter(namespace)
    plan = _plan_swap_in(state, namespace, sequence_ids, lookahead)
    if plan.status is not AllocStatus.OK:
        never = plan.status is AllocStatus.NEVER
        raise state.device.out_of_blocks(plan.required, never=never, num_kept=state.config.watermark_blocks)
    group, to = plan.group, plan.found.copy()
    state.intents.begin(DROP, group.rows)
    listed = state.hide(namespace, group.ids, group.rows)
    copied = to == _MISSING
    # Swap blocks with the same content may find the same block.
    state.device.incref(to[~copied].repeat(group.holders[~copied]))
    src, dst, findable = _NO_BLOCKS, _NO_BLOCKS, list[int]()
    if np.count_nonzero(copied):
        src = group.blocks[copied]
        dst = to[copied] = state.device.allocate_shared(group.holders[copied])
        findable = _copy_back(state, src, dst)
    state.sequences.block_tables[group.rows[group.which], group.entries] = to[group.inverse]
    if state.device.journal is not None and findable:
        _record_stored(state, state.device.journal, group, to, findable)
    if plan.num_grown:
        new = state.device.allocate(plan.num_grown)
        state.sequences.append_blocks(group.rows, group.states[:, NUM_BLOCKS], plan.grown, new)
    state.swap.decref(group.blocks.repeat(group.holders))
    state.sequences.states[group.rows, SWAPPED] = 0
    state.sequences.num_swapped -= len(group.rows)
    state.counters.swapped_in_sequences += len(group.rows)
    state.counters.swapped_in_blocks += len(src)
    swapped_in = SwapPlan(src.astype(np.int32), dst.astype(np.int32))
    state.show(namespace, listed, group.rows)
    return swapped_in


def submitted(state: BlockState, plan: SwapPlan) -> None:
    """Record that the device has got the copies of a `swap_in`, and counts its blocks as unfinished until they are
    copied. Before that, a restart drops these blocks."""
    state.unsubmitted[plan.dst] = False


def _record_stored(
    state: BlockState, journal: EventJournal, group: _Group, to: Int64Array, findable: list[int]
) -> None:
    """Record blocks that returned to the prefix index, each with its parent, the previous block of a table."""
    blocks, first = np.unique(to[group.inverse], return_index=True)
    rows, entries = group.rows[group.which[first]], group.entries[first]
    before = state.sequences.block_tables[rows, np.maximum(entries - 1, 0)]
    parents = {
        block: state.device.hashes[parent] if entry else None
        for block, entry, parent in zip(blocks.tolist(), entries.tolist(), before.tolist(), strict=True)
    }
    stored: list[StoredBlock] = []
    for block in findable:
        chain_hash = state.device.hashes[block]
        assert chain_hash is not None, "it is in the index"
        tokens = token_bytes(state.device.token_ids[block]) if journal.with_tokens else b""
        stored.append((chain_hash, parents[block], tokens))
    journal.stored(stored, state.device.domains_of(np.array(findable)))


def _swap_out_group(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> _Group:
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    return _group(state, ids, rows, states)


def _group(state: BlockState, ids: Int64Array, rows: Int64Array, states: Int64Array) -> _Group:
    check_request_blocks(state.config, int(np.add.reduce(states[:, NUM_BLOCKS])), "sequence_ids")
    which, entries = ragged(np.zeros(len(rows), np.int64), states[:, NUM_BLOCKS])
    held = state.sequences.block_tables[rows[which], entries].astype(np.int64)
    blocks, inverse, holders = distinct_blocks(held)
    return _Group(ids, rows, states, which, entries, blocks, inverse, holders)


def _take_hashes(state: BlockState, group: _Group, dst: Int64Array) -> None:
    """Give the swap blocks dst int64[distinct blocks] the chain hashes of those blocks of the group that are full and
    computed in one of its sequences."""
    full = np.zeros(len(dst), np.bool_)
    if state.config.enable_prefix_caching:
        num_full = group.states[group.which, NUM_COMPUTED] >> state.shift
        full[group.inverse[group.entries < num_full]] = True
    known, hashes = state.device.hashes, state.swap.hashes
    for block, to, has_hash in zip(group.blocks.tolist(), dst.tolist(), full.tolist(), strict=True):
        hashes[to] = known[block] if has_hash else None
    state.swap.keep_hashes_of(dst, state.device, group.blocks)
    state.swap.kept_hashes[dst[~full]] = 0


def _copy_back(state: BlockState, src: Int64Array, dst: Int64Array) -> list[int]:
    """Give blocks of the device the tokens and the hashes of swap blocks, before their bytes are copied. Returns those
    that the index finds from now on."""
    state.device.token_ids[dst] = state.swap.token_ids[src]
    state.unsubmitted[dst] = True
    hashed = [
        (block, chain_hash)
        for back, block in zip(src.tolist(), dst.tolist(), strict=True)
        if (chain_hash := state.swap.hashes[back]) is not None
    ]
    for block, chain_hash in hashed:
        state.device.hashes[block] = chain_hash
    state.device.keep_hashes_of(dst, state.swap, src)
    blocks = np.array([block for block, _ in hashed], np.int64)
    found = state.device.add_to_index(blocks, [chain_hash for _, chain_hash in hashed])
    findable: list[int] = blocks[found].tolist()
    return findable


def _plan_swap_in(
    state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int
) -> _SwapIn:
    ids, rows = namespace.lookup(sequence_ids)
    lookahead = whole_number(lookahead, "lookahead", 0, state.config.max_sequence_tokens)
    states = state.sequences.states.take(rows, axis=0)
    resident = states[:, SWAPPED] == 0
    if np.count_nonzero(resident):
        i = int(resident.argmax())
        raise SequenceNotSwappedError(
            f"sequence {ids[i]} is not swapped out", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
        )
    check_sequence_lengths(state.config, states[:, LENGTH], lookahead)
    group = _group(state, ids, rows, states)
    reach = (states[:, LENGTH] + (lookahead + state.mask)) >> state.shift
    grown = np.maximum(reach - states[:, NUM_BLOCKS], 0)
    num_grown = int(np.add.reduce(grown))
    find, hashes = state.device.index.blocks.get, state.swap.hashes
    found = np.array([find(hashes[block] or b"", _MISSING) for block in group.blocks.tolist()], np.int64)
    required = len(found) + num_grown
    status = allocation_status(state, 0, required, required)
    if status is not AllocStatus.OK:
        there = found[found != _MISSING]
        num_consumed = required - len(there) + state.device.num_evictable(np.unique(there))
        status = allocation_status(state, 0, required, num_consumed)
    return _SwapIn(group, found, grown, num_grown, status, required)


# ---- Saved and restored sequences


# The cost of a hash in a slice, in blocks.
_HASH_COST = 8


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """A sequence: token_ids int32[length], the encoded extra keys by block, and blocks
    int64[ceil(length / block_size)], numbers below SavedSequences.num_blocks. Sequences that share a block have the
    same number in it."""

    sequence_id: int
    token_ids: Int32Array
    extra: dict[int, bytes]
    num_computed: int
    swapped: bool
    blocks: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequences:
    """Sequences in the order of their creation, and the number of their distinct blocks."""

    sequences: list[SavedSequence]
    num_blocks: int

    def computed_blocks(self, block_size: int) -> BoolArray:
        """Return bool[num_blocks]: the blocks with a computed token, which are the ones with K/V."""
        computed = np.zeros(self.num_blocks, np.bool_)
        for one in self.sequences:
            computed[one.blocks[: -(-one.num_computed // block_size)]] = True
        return computed


@dataclass(frozen=True, slots=True, eq=False)
class SavedTables:
    """Saved sequences, and the place of each of their blocks: its id int64[n] in the swap tier, where in_swap bool[n]
    is true, or in the pool."""

    saved: SavedSequences
    block_ids: Int64Array
    in_swap: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class RestoredBlocks:
    """The places of restored blocks, as in SavedTables; the id of a block that no sequence has is -1. `found` bool[n]
    are those that have their K/V already.
    `hashes` and `parents` are the chain hashes of full computed blocks and of the blocks before them."""

    block_ids: Int64Array
    in_swap: BoolArray
    found: BoolArray
    hashes: list[bytes | None]
    parents: list[bytes | None]


def save_in_slices(
    state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike | None = None
) -> Slices[SavedTables]:
    """Return sequences of a namespace as values, and the places of their blocks. Lookahead blocks are left out.

    sequence_ids int64[n], distinct; None: all that have a row. The caller keeps others from changing the sequences
    between the slices.
    """
    state.enter(namespace)
    rows = list(namespace.rows.items())
    if sequence_ids is not None:
        ids, found = namespace.lookup(sequence_ids)
        rows = list(zip(ids.tolist(), found.tolist(), strict=True))
    sequences = yield from in_turn(_save(state, namespace, name, row) for name, row in rows)
    places = np.concatenate([one.blocks for one in sequences]) if sequences else np.zeros(0, np.int64)
    used = np.zeros(state.config.num_blocks + state.config.num_swap_blocks, np.bool_)
    used[places] = True
    numbers = np.cumsum(used) - 1
    for one in sequences:
        one.blocks[:] = numbers[one.blocks]
    block_ids = np.flatnonzero(used)
    in_swap = block_ids >= state.config.num_blocks
    block_ids[in_swap] -= state.config.num_blocks
    return SavedTables(SavedSequences(sequences, len(block_ids)), block_ids, in_swap)


def _save(state: BlockState, namespace: SessionNamespace, sequence_id: int, row: int) -> SavedSequence:
    """Return a sequence whose blocks are ids, those of the swap tier after those of the pool."""
    if namespace.closed or namespace.rows.get(sequence_id) != row:
        raise UnknownSessionError("the session was closed, or its sequences were changed, while it was saved")
    states = state.sequences.states[row].tolist()
    length, swapped = states[LENGTH], bool(states[SWAPPED])
    blocks = state.sequences.block_tables[row, : (length + state.mask) >> state.shift].astype(np.int64)
    pool = state.swap if swapped else state.device
    tokens = pool.token_ids[blocks].reshape(-1)[:length]
    extra = dict(state.sequences.extra_keys.by_row.get(row, {}))
    places = blocks + state.config.num_blocks if swapped else blocks
    return SavedSequence(sequence_id, tokens, extra, states[NUM_COMPUTED], swapped, places)


def restore_in_slices(state: BlockState, namespace: SessionNamespace, saved: SavedSequences) -> Slices[RestoredBlocks]:
    """Create saved sequences in an empty namespace, which nobody uses and no restart finds yet. Returns the places
    of their blocks, of which those that are not `found` get their K/V from the caller.

    Swapped sequences become swapped ones again, or resident ones if the swap tier has no room. If it fails, the
    caller closes the namespace. Raises InvalidArgumentError if a sequence is longer than max_sequence_tokens,
    QuotaExceededError, OutOfBlocksError.
    """
    state.enter(namespace)
    namespace.check_new_ids([one.sequence_id for one in saved.sequences], "sequences[{}].sequence_id")
    lengths = np.array([len(one.token_ids) for one in saved.sequences], np.int64)
    check_sequence_lengths(state.config, lengths, 0)
    made = RestoredBlocks(
        block_ids=np.full(saved.num_blocks, _MISSING, np.int64),
        in_swap=np.zeros(saved.num_blocks, np.bool_),
        found=np.zeros(saved.num_blocks, np.bool_),
        hashes=[None] * saved.num_blocks,
        parents=[None] * saved.num_blocks,
    )
    if state.config.enable_prefix_caching:
        yield from _hash(state, saved, made)
    state.enter(namespace)
    state.sequences.require_places(len(saved.sequences), "sequences", namespace)
    to_swap = _plan(state, saved, made)
    left = SLICE_BLOCKS
    for one in saved.sequences:
        if left <= 0:
            yield
            state.enter(namespace)
            left = SLICE_BLOCKS
        _create(state, namespace, one, made, swapped=one.swapped and to_swap)
        left -= len(one.blocks) + 1
    return made


def _hash(state: BlockState, saved: SavedSequences, made: RestoredBlocks) -> Slices[None]:
    """Compute the chain hashes of the full computed blocks, each once."""
    size, root = state.config.block_size, state.device.index.root
    left = SLICE_BLOCKS
    for one in saved.sequences:
        parent, data = root, token_bytes(one.token_ids)
        for entry, number in enumerate(one.blocks[: one.num_computed >> state.shift].tolist()):
            known = made.hashes[number]
            if known is None:
                tokens = data[4 * entry * size : 4 * (entry + 1) * size]
                known = made.hashes[number] = block_hash(parent, tokens, one.extra.get(entry, b""))
                made.parents[number] = None if parent is root else parent
                left -= _HASH_COST
            parent = known
            if left <= 0:
                yield
                left = SLICE_BLOCKS


def _plan(state: BlockState, saved: SavedSequences, made: RestoredBlocks) -> bool:
    """Return whether swapped sequences become swapped ones again: if the swap tier has room, or if the pool has
    none. Raises OutOfBlocksError unless the sequences fit now. Restored sequences leave the watermark free."""
    swapped, used = np.zeros(saved.num_blocks, np.bool_), np.zeros(saved.num_blocks, np.bool_)
    for one in saved.sequences:
        used[one.blocks] = True
        if one.swapped:
            swapped[one.blocks] = True
    num_swapped = int(np.count_nonzero(swapped))
    to_swap = num_swapped <= state.swap.num_free
    if not to_swap and _missing_blocks(state, used, made) > 0:
        raise OutOfBlocksError(
            f"{num_swapped} swap blocks needed and {state.swap.num_free} of {state.swap.num_blocks} are free",
            tier="swap", required=num_swapped, free=state.swap.num_free, total=state.swap.num_blocks,
            never=num_swapped > state.swap.num_blocks,
        )  # fmt: skip
    resident = used & ~swapped if to_swap else used
    if _missing_blocks(state, resident, made) > 0:
        required = int(np.count_nonzero(resident))
        kept = state.config.watermark_blocks
        never = state.config.num_blocks - required < kept
        raise state.device.out_of_blocks(required, never=never, num_kept=kept)
    made.in_swap[:] = swapped if to_swap else False
    return to_swap


def _missing_blocks(state: BlockState, resident: BoolArray, made: RestoredBlocks) -> int:
    """Return how many available blocks the pool lacks for these blocks, bool[n]."""
    find = state.device.index.blocks.get
    found = np.array([find(made.hashes[i] or b"", _MISSING) for i in np.flatnonzero(resident).tolist()], np.int64)
    there = found[found != _MISSING]
    num_consumed = len(found) - len(there) + state.device.num_evictable(np.unique(there))
    return num_consumed - state.device.room(state.config.watermark_blocks)


def _create(
    state: BlockState, namespace: SessionNamespace, one: SavedSequence, made: RestoredBlocks, *, swapped: bool
) -> None:
    """Create a sequence. Blocks that another one has got before are shared."""
    state.sequences.require_places(1, "sequences", namespace)  # others may have got them between two slices
    if one.extra:
        state.sequences.extra_keys.require(namespace.number, 1, extra_keys_bytes(one.extra), "sequences")
    new = one.blocks[made.block_ids[one.blocks] == _MISSING]
    shared = one.blocks[made.block_ids[one.blocks] != _MISSING]
    pool = state.swap if swapped else state.device
    if swapped:
        _allocate_swap(state, new, made)
    else:
        _allocate(state, new, made)
    if len(shared):
        pool.incref(made.block_ids[shared])
    blocks = made.block_ids[one.blocks]
    _fill_tokens(state, pool.token_ids, blocks, one.token_ids)
    slots, row = state.sequences, state.sequences.free_rows.pop()
    slots.block_tables[row, : len(blocks)] = blocks
    state.intents.begin_new([row])
    if one.extra:
        slots.extra_keys.set(row, namespace.number, one.extra)
    namespace.rows[one.sequence_id] = row
    length, made_as = len(one.token_ids), slots.new_flags(0)
    states = (length, one.num_computed, len(blocks), NO_STEP, int(swapped), namespace.number)
    slots.states[row] = (*states, one.sequence_id, made_as)
    slots.num_tokens += length
    slots.num_swapped += swapped
    state.end_operation()


def _allocate(state: BlockState, new: Int64Array, made: RestoredBlocks) -> None:
    """Give blocks of the pool to these numbers: those that the index finds, and others."""
    find = state.device.index.blocks.get
    hashes = [made.hashes[number] for number in new.tolist()]
    found = np.array([find(chain_hash or b"", _MISSING) for chain_hash in hashes], np.int64)
    there = found != _MISSING
    if there.any():
        state.device.incref(found[there])
    required = int(np.count_nonzero(~there))
    if required > state.device.num_available:  # others got them between two slices
        state.device.decref(found[there])
        raise state.device.out_of_blocks(required, never=False)
    found[~there] = state.device.allocate(required)
    made.block_ids[new], made.found[new] = found, there
    hashed = [
        (block, chain_hash)
        for block, chain_hash, known in zip(found.tolist(), hashes, there.tolist(), strict=True)
        if chain_hash is not None and not known
    ]
    for block, chain_hash in hashed:
        state.device.hashes[block] = chain_hash
    if hashed:
        state.device.keep_hashes(np.array([block for block, _ in hashed]), [known for _, known in hashed])


def _allocate_swap(state: BlockState, new: Int64Array, made: RestoredBlocks) -> None:
    """Give blocks of the swap tier to these numbers."""
    if len(new) > state.swap.num_free:  # others got them between two slices
        raise OutOfBlocksError(
            f"{len(new)} swap blocks needed and {state.swap.num_free} of {state.swap.num_blocks} are free",
            tier="swap", required=len(new), free=state.swap.num_free, total=state.swap.num_blocks,
        )  # fmt: skip
    blocks = state.swap.allocate(len(new))
    made.block_ids[new] = blocks
    hashes = [made.hashes[number] for number in new.tolist()]
    for block, chain_hash in zip(blocks.tolist(), hashes, strict=True):
        state.swap.hashes[block] = chain_hash
    state.swap.kept_hashes[blocks] = 0
    full = blocks[[chain_hash is not None for chain_hash in hashes]]
    if len(full):
        state.swap.keep_hashes(full, [known for known in hashes if known is not None])


def _fill_tokens(state: BlockState, token_ids: Int32Array, blocks: Int64Array, tokens: Int32Array) -> None:
    """Store the tokens of a sequence in its blocks. Tokens of the last block past its end stay: they may be those
    of a sequence that shares the block."""
    num_full = len(tokens) >> state.shift
    token_ids[blocks[:num_full]] = tokens[: num_full << state.shift].reshape(num_full, state.config.block_size)
    if rest := len(tokens) & state.mask:
        token_ids[blocks[num_full], :rest] = tokens[num_full << state.shift :]


def adopt(state: BlockState, namespace: SessionNamespace, other: SessionNamespace) -> None:
    """Move all sequences of another namespace, which were restored there from a disk, to this one."""
    state.enter(namespace)
    names, rows = list(other.rows), np.array(list(other.rows.values()), np.int64)
    state.sequences.num_on_disk -= sum(namespace.on_disk.pop(name, None) is not None for name in names)
    namespace.check_new_ids(names, "sequence_ids[{}]")
    state.intents.begin(RESTORE, rows)
    namespace.rows.update(other.rows)
    other.rows.clear()
    state.sequences.states[rows, NAMESPACE] = namespace.number
    if state.sequences.extra_keys.by_row:
        state.sequences.extra_keys.move(rows.tolist(), namespace.number)
    state.counters.swapped_in_sequences += len(names)


def index_restored_in_slices(state: BlockState, namespace: SessionNamespace, restored: RestoredBlocks) -> Slices[None]:
    """Add the full computed blocks of restored sequences to the prefix index. They have their K/V now."""
    state.enter(namespace)
    new = np.flatnonzero(~restored.in_swap & ~restored.found & (restored.block_ids != _MISSING)).tolist()
    full = [number for number in new if restored.hashes[number] is not None]
    for first in range(0, len(full), SLICE_BLOCKS):
        if first:
            yield
            state.enter(namespace)
        _index(state, full[first : first + SLICE_BLOCKS], restored)


def _index(state: BlockState, numbers: list[int], made: RestoredBlocks) -> None:
    device, journal = state.device, state.device.journal
    blocks = made.block_ids[numbers]
    hashes = [chain_hash for number in numbers if (chain_hash := made.hashes[number]) is not None]
    found = device.add_to_index(blocks, hashes)
    if journal is not None and any(found):
        stored = list(itertools.compress(_stored(state, numbers, made, with_tokens=journal.with_tokens), found))
        journal.stored(stored, device.domains_of(blocks, found))


def _stored(state: BlockState, numbers: list[int], made: RestoredBlocks, *, with_tokens: bool) -> Iterator[StoredBlock]:
    for number in numbers:
        chain_hash = made.hashes[number]
        assert chain_hash is not None, "only full blocks enter the index"
        block = int(made.block_ids[number])
        tokens = token_bytes(state.device.token_ids[block]) if with_tokens else b""
        yield chain_hash, made.parents[number], tokens
