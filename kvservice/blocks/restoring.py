"""Saving and restoring: the sequences of a namespace as values without block ids, and sequences made from such values.

    save ─▶ SavedSequences, which outlive the daemon ─▶ restore: rows, tables, tokens ─▶ bytes ─▶ index

A restored sequence exists before the bytes of its blocks do. Therefore its namespace must not be in use: a restart
before the namespace is known to recovery frees what was restored. Blocks enter the prefix index when they have their
bytes. Blocks that the index finds already need none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.blocks.events import StoredBlock
from kvservice.blocks.intents import RESTORE
from kvservice.blocks.limits import check_sequence_lengths
from kvservice.blocks.namespaces import NO_STEP, SessionNamespace
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.blocks.prefix import token_bytes
from kvservice.blocks.sequences import LENGTH, NAMESPACE, NUM_COMPUTED, SWAPPED
from kvservice.blocks.slices import SLICE_BLOCKS, Slices, in_turn
from kvservice.blocks.state import BlockState
from kvservice.chain_hash import block_hash
from kvservice.errors import OutOfBlocksError, UnknownSessionError

_MISSING = -1
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


class Restorer:
    """Saves the sequences of a namespace, and restores them in another one."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._swap, self._sequences = state.device, state.swap, state.sequences
        self._shift, self._mask = state.config.block_shift, state.config.block_mask

    def save(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike | None) -> Slices[SavedTables]:
        """See BlockManager.save_in_slices."""
        self._state.enter(namespace)
        rows = list(namespace.rows.items())
        if sequence_ids is not None:
            ids, found = namespace.lookup(sequence_ids)
            rows = list(zip(ids.tolist(), found.tolist(), strict=True))
        sequences = yield from in_turn(self._save(namespace, name, row) for name, row in rows)
        places = np.concatenate([one.blocks for one in sequences]) if sequences else np.zeros(0, np.int64)
        used = np.zeros(self._config.num_blocks + self._config.num_swap_blocks, np.bool_)
        used[places] = True
        numbers = np.cumsum(used) - 1
        for one in sequences:
            one.blocks[:] = numbers[one.blocks]
        block_ids = np.flatnonzero(used)
        in_swap = block_ids >= self._config.num_blocks
        block_ids[in_swap] -= self._config.num_blocks
        return SavedTables(SavedSequences(sequences, len(block_ids)), block_ids, in_swap)

    def _save(self, namespace: SessionNamespace, sequence_id: int, row: int) -> SavedSequence:
        """Return a sequence whose blocks are ids, those of the swap tier after those of the pool."""
        if namespace.closed or namespace.rows.get(sequence_id) != row:
            raise UnknownSessionError("the session was closed, or its sequences were changed, while it was saved")
        states = self._sequences.states[row].tolist()
        length, swapped = states[LENGTH], bool(states[SWAPPED])
        blocks = self._sequences.block_tables[row, : (length + self._mask) >> self._shift].astype(np.int64)
        pool = self._swap if swapped else self._device
        tokens = pool.token_ids[blocks].reshape(-1)[:length]
        extra = dict(self._sequences.extra_keys.get(row, {}))
        places = blocks + self._config.num_blocks if swapped else blocks
        return SavedSequence(sequence_id, tokens, extra, states[NUM_COMPUTED], swapped, places)

    def restore(self, namespace: SessionNamespace, saved: SavedSequences) -> Slices[RestoredBlocks]:
        """See BlockManager.restore_in_slices."""
        self._state.enter(namespace)
        namespace.check_new_ids([one.sequence_id for one in saved.sequences], "sequences[{}].sequence_id")
        lengths = np.array([len(one.token_ids) for one in saved.sequences], np.int64)
        check_sequence_lengths(self._config, lengths, 0)
        made = RestoredBlocks(
            block_ids=np.full(saved.num_blocks, _MISSING, np.int64),
            in_swap=np.zeros(saved.num_blocks, np.bool_),
            found=np.zeros(saved.num_blocks, np.bool_),
            hashes=[None] * saved.num_blocks,
            parents=[None] * saved.num_blocks,
        )
        if self._config.enable_prefix_caching:
            yield from self._hash(saved, made)
        self._state.enter(namespace)
        self._sequences.require_free_rows(len(saved.sequences), "sequences")
        to_swap = self._plan(saved, made)
        left = SLICE_BLOCKS
        for one in saved.sequences:
            if left <= 0:
                yield
                self._state.enter(namespace)
                left = SLICE_BLOCKS
            self._create(namespace, one, made, swapped=one.swapped and to_swap)
            left -= len(one.blocks) + 1
        return made

    def _hash(self, saved: SavedSequences, made: RestoredBlocks) -> Slices[None]:
        """Compute the chain hashes of the full computed blocks, each once."""
        size, root = self._config.block_size, self._device.index.root
        left = SLICE_BLOCKS
        for one in saved.sequences:
            parent, data = root, token_bytes(one.token_ids)
            for entry, number in enumerate(one.blocks[: one.num_computed >> self._shift].tolist()):
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

    def _plan(self, saved: SavedSequences, made: RestoredBlocks) -> bool:
        """Return whether swapped sequences become swapped ones again: if the swap tier has room, or if the pool has
        none. Raises OutOfBlocksError unless the sequences fit now. Restored sequences leave the watermark free."""
        swapped, used = np.zeros(saved.num_blocks, np.bool_), np.zeros(saved.num_blocks, np.bool_)
        for one in saved.sequences:
            used[one.blocks] = True
            if one.swapped:
                swapped[one.blocks] = True
        num_swapped = int(np.count_nonzero(swapped))
        to_swap = num_swapped <= self._swap.num_free
        if not to_swap and self._missing_blocks(used, made) > 0:
            raise OutOfBlocksError(
                f"{num_swapped} swap blocks needed and {self._swap.num_free} of {self._swap.num_blocks} are free",
                tier="swap", required=num_swapped, free=self._swap.num_free, total=self._swap.num_blocks,
                never=num_swapped > self._swap.num_blocks,
            )  # fmt: skip
        resident = used & ~swapped if to_swap else used
        if self._missing_blocks(resident, made) > 0:
            required = int(np.count_nonzero(resident))
            kept = self._config.watermark_blocks
            never = self._config.num_blocks - required < kept
            raise self._device.out_of_blocks(required, never=never, num_kept=kept)
        made.in_swap[:] = swapped if to_swap else False
        return to_swap

    def _missing_blocks(self, resident: BoolArray, made: RestoredBlocks) -> int:
        """Return how many available blocks the pool lacks for these blocks, bool[n]."""
        find = self._device.index.blocks.get
        found = np.array([find(made.hashes[i] or b"", _MISSING) for i in np.flatnonzero(resident).tolist()], np.int64)
        there = found[found != _MISSING]
        num_consumed = len(found) - len(there) + self._device.num_evictable(np.unique(there))
        return num_consumed + self._config.watermark_blocks - self._device.num_available

    def _create(self, namespace: SessionNamespace, one: SavedSequence, made: RestoredBlocks, *, swapped: bool) -> None:
        """Create a sequence. Blocks that another one has got before are shared."""
        new = one.blocks[made.block_ids[one.blocks] == _MISSING]
        shared = one.blocks[made.block_ids[one.blocks] != _MISSING]
        pool = self._swap if swapped else self._device
        if swapped:
            self._allocate_swap(new, made)
        else:
            self._allocate(new, made)
        if len(shared):
            pool.incref(made.block_ids[shared])
        blocks = made.block_ids[one.blocks]
        self._fill_tokens(pool.token_ids, blocks, one.token_ids)
        slots, row = self._sequences, self._sequences.free_rows.pop()
        slots.block_tables[row, : len(blocks)] = blocks
        self._state.intents.begin_new([row])
        if one.extra:
            slots.set_extra_keys(row, one.extra)
        namespace.rows[one.sequence_id] = row
        length, made_as = len(one.token_ids), slots.new_flags(0)
        states = (length, one.num_computed, len(blocks), NO_STEP, int(swapped), namespace.number)
        slots.states[row] = (*states, one.sequence_id, made_as)
        slots.num_tokens += length
        slots.num_swapped += swapped
        self._state.end_operation()

    def _allocate(self, new: Int64Array, made: RestoredBlocks) -> None:
        """Give blocks of the pool to these numbers: those that the index finds, and others."""
        find = self._device.index.blocks.get
        hashes = [made.hashes[number] for number in new.tolist()]
        found = np.array([find(chain_hash or b"", _MISSING) for chain_hash in hashes], np.int64)
        there = found != _MISSING
        if there.any():
            self._device.incref_found(found[there])
        required = int(np.count_nonzero(~there))
        if required > self._device.num_available:  # others got them between two slices
            self._device.decref(found[there])
            raise self._device.out_of_blocks(required, never=False)
        found[~there] = self._device.allocate(required)
        made.block_ids[new], made.found[new] = found, there
        hashed = [
            (block, chain_hash)
            for block, chain_hash, known in zip(found.tolist(), hashes, there.tolist(), strict=True)
            if chain_hash is not None and not known
        ]
        for block, chain_hash in hashed:
            self._device.hashes[block] = chain_hash
        if hashed:
            self._device.keep_hashes(np.array([block for block, _ in hashed]), [known for _, known in hashed])

    def _allocate_swap(self, new: Int64Array, made: RestoredBlocks) -> None:
        """Give blocks of the swap tier to these numbers."""
        if len(new) > self._swap.num_free:  # others got them between two slices
            raise OutOfBlocksError(
                f"{len(new)} swap blocks needed and {self._swap.num_free} of {self._swap.num_blocks} are free",
                tier="swap", required=len(new), free=self._swap.num_free, total=self._swap.num_blocks,
            )  # fmt: skip
        blocks = self._swap.allocate(len(new))
        made.block_ids[new] = blocks
        hashes = [made.hashes[number] for number in new.tolist()]
        for block, chain_hash in zip(blocks.tolist(), hashes, strict=True):
            self._swap.hashes[block] = chain_hash
        self._swap.kept_hashes[blocks] = 0
        full = blocks[[chain_hash is not None for chain_hash in hashes]]
        if len(full):
            self._swap.keep_hashes(full, [known for known in hashes if known is not None])

    def _fill_tokens(self, token_ids: Int32Array, blocks: Int64Array, tokens: Int32Array) -> None:
        """Store the tokens of a sequence in its blocks. Tokens of the last block past its end stay: they may be those
        of a sequence that shares the block."""
        num_full = len(tokens) >> self._shift
        token_ids[blocks[:num_full]] = tokens[: num_full << self._shift].reshape(num_full, self._config.block_size)
        if rest := len(tokens) & self._mask:
            token_ids[blocks[num_full], :rest] = tokens[num_full << self._shift :]

    def adopt(self, namespace: SessionNamespace, other: SessionNamespace) -> None:
        """See BlockManager.adopt."""
        self._state.enter(namespace)
        names, rows = list(other.rows), np.array(list(other.rows.values()), np.int64)
        for name in names:
            namespace.on_disk.pop(name, None)
        namespace.check_new_ids(names, "sequence_ids[{}]")
        self._state.intents.begin(RESTORE, rows)
        namespace.rows.update(other.rows)
        other.rows.clear()
        self._sequences.states[rows, NAMESPACE] = namespace.number
        self._state.counters.swapped_in_sequences += len(names)

    def index(self, namespace: SessionNamespace, made: RestoredBlocks) -> Slices[None]:
        """See BlockManager.index_restored_in_slices."""
        self._state.enter(namespace)
        new = np.flatnonzero(~made.in_swap & ~made.found & (made.block_ids != _MISSING)).tolist()
        full = [number for number in new if made.hashes[number] is not None]
        for first in range(0, len(full), SLICE_BLOCKS):
            if first:
                yield
                self._state.enter(namespace)
            self._index(full[first : first + SLICE_BLOCKS], made)

    def _index(self, numbers: list[int], made: RestoredBlocks) -> None:
        device, journal = self._device, self._device.journal
        blocks = made.block_ids[numbers]
        hashes = [chain_hash for number in numbers if (chain_hash := made.hashes[number]) is not None]
        found = device.add_to_index(blocks, hashes)
        if journal is not None and any(found):
            journal.stored(
                list(itertools.compress(self._stored(numbers, made, with_tokens=journal.with_tokens), found))
            )

    def _stored(self, numbers: list[int], made: RestoredBlocks, *, with_tokens: bool) -> Iterator[StoredBlock]:
        for number in numbers:
            chain_hash = made.hashes[number]
            assert chain_hash is not None, "only full blocks enter the index"
            block = int(made.block_ids[number])
            tokens = token_bytes(self._device.token_ids[block]) if with_tokens else b""
            yield chain_hash, made.parents[number], tokens
