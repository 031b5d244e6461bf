"""State and helpers that all operations of the block manager share: tiers, sequence slots, counters, entry checks."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvservice.blocks.arguments import refuse
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.events import EventJournal
from kvservice.blocks.plans import Int64Array, Zeros, numpy_zeros
from kvservice.blocks.sequences import NO_STEP, NUM_BLOCKS, SWAPPED, SequenceRows, SequenceSpace
from kvservice.blocks.slices import SLICE_BLOCKS
from kvservice.blocks.tier import ONE, DeviceTier, Tier
from kvservice.errors import OutOfBlocksError, QuotaExceededError, SequenceSwappedError, UnknownSessionError


def ragged(starts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Concatenate the ranges starts[i], ..., starts[i] + counts[i] - 1.

    Returns (index i int64[sum(counts)], number int64[sum(counts)]).
    """
    if not np.count_nonzero(counts > 1):
        which = counts.nonzero()[0]
        return which, starts[which]
    ends = np.cumsum(counts)
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)


class Core:
    """State of a block manager. It is used by one thread only, the daemon's event loop."""

    def __init__(
        self,
        config: BlocksConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        journal: EventJournal | None = None,
        zeros: Zeros = numpy_zeros,
    ) -> None:
        """`zeros` allocates the arrays that other processes may read, for example in shared memory: reference counts,
        block tables, sequence states. `clock` returns seconds; pins and ages use it. `journal` records the changes of
        the prefix index."""
        self.config = config
        self.device = DeviceTier(config.num_blocks, config.block_size, clock, journal, zeros)
        self.swap = Tier(config.num_swap_blocks, config.block_size, "swap", zeros)
        self.sequences = SequenceRows(config, zeros)
        self.block_tables = self.sequences.block_tables
        self.meta = self.sequences.meta
        if not self.block_tables.flags.c_contiguous:
            raise ValueError("zeros gave an array that is not contiguous: a view of it would be a copy")
        self._flat_tables = self.block_tables.reshape(-1)
        self.spaces: set[SequenceSpace] = set()
        self.clock = clock
        # Incremented by each slice of an operation that may change the state.
        self.generation = 0
        # Pins of each block, and the number of blocks with at least one pin.
        self.pin_counts = np.zeros(config.num_blocks, np.int32)
        self.num_pinned = 0
        self.pin_deadlines: list[tuple[float, int, int, SequenceSpace]] = []
        self.num_pins = 0
        self.prefix_query_tokens = self.prefix_hit_tokens = self.computed_tokens = 0
        self.swapped_out_sequences = self.swapped_in_sequences = 0
        self.cow_copies = self.swapped_out_blocks = self.swapped_in_blocks = 0
        self._ones = np.ones(config.max_sequences, np.int32)
        self._ones.flags.writeable = False
        self._shift = config.block_size.bit_length() - 1
        self._mask = config.block_size - 1
        # Zero-dimensional arrays for the hot path; see ONE in tier.py.
        self._shift_array, self._mask_array = np.array(self._shift), np.array(self._mask)
        self._max_length_array = np.array(config.max_sequence_tokens)
        self._table_width_array = np.array(self.block_tables.shape[1])

    def _enter(self, space: SequenceSpace) -> None:
        """Start an operation: check that the namespace is open, and expire pins."""
        if space.closed:
            raise UnknownSessionError("the session of the sequences is closed")
        self.generation += 1
        if self.pin_deadlines:
            self._expire_pins()

    def _expire_pins(self) -> None:
        """Remove expired pins, at most one slice of them. Later operations remove the rest."""
        now, left = self.clock(), SLICE_BLOCKS
        while left > 0 and self.pin_deadlines and self.pin_deadlines[0][0] <= now:
            _, _, pin_id, space = heapq.heappop(self.pin_deadlines)
            if pin_id in space.pins:
                left -= self._end_pin(space, pin_id)

    def _end_pin(self, space: SequenceSpace, pin_id: int) -> int:
        """Remove a pin. Returns the number of blocks that it pinned."""
        self.generation += 1
        blocks = space.pins.pop(pin_id)
        self.pin_counts[blocks] -= ONE
        ended = blocks[self.pin_counts[blocks] == 0]
        self.num_pinned -= len(ended)
        self.device.unpin(ended[::-1])
        self.num_pins -= 1
        return len(blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self._mask) >> self._shift

    def _resident(self, ids: Int64Array, rows: Int64Array, field: str = "sequence_ids") -> Int64Array:
        """Return a copy of the sequence states int64[n, 8] of these rows. Raises SequenceSwappedError."""
        meta = self.meta.take(rows, axis=0)
        if self.sequences.num_swapped:
            swapped = meta[:, SWAPPED] != 0
            if np.count_nonzero(swapped):
                i = int(swapped.argmax())
                raise SequenceSwappedError(
                    f"sequence {ids[i]} is swapped out", field=f"{field}[{i}]", sequence_id=int(ids[i])
                )
        return meta

    def _supersede(self, space: SequenceSpace, rows: Int64Array) -> None:
        """Make the newest steps of these rows stale."""
        space.supersede(distinct_steps(self.sequences.steps[rows]))
        self.sequences.steps[rows] = NO_STEP

    def _table_entries(self, rows: Int64Array, first: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        """Return all table entries of these rows from entry `first` on: (entry number int64[m], block int64[m])."""
        if len(rows) == 1:
            row, begin = int(rows[0]), 0 if first is None else int(first[0])
            end = self.meta.item(row, NUM_BLOCKS)
            return np.arange(begin, end), self.block_tables[row, begin:end].astype(np.int64)
        num_blocks = self.sequences.num_blocks[rows]
        start = np.zeros(len(rows), np.int64) if first is None else first
        which, entry = ragged(start, num_blocks - start)
        return entry, self.block_tables[rows[which], entry].astype(np.int64)

    def _slots(self, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
        """Return the slots of the tokens starts[i], ..., starts[i] + counts[i] - 1 of each row: int64[sum(counts)]."""
        which, positions = ragged(starts, counts)
        blocks: Int64Array = self.block_tables[rows[which], positions >> self._shift].astype(np.int64)
        return (blocks << self._shift) | (positions & self._mask)

    def _release_entries(self, tier: Tier, entries: Int64Array, blocks: Int64Array) -> None:
        """Drop the references of table entries to their blocks. The deepest blocks become the first to be evicted.

        A block that several tables share is at the same entry in all of them.
        """
        if not np.count_nonzero(entries[1:] <= entries[:-1]):  # one table only
            tier.release(blocks[::-1])
            return
        order = np.argsort(-entries, kind="stable")
        blocks = blocks[order]
        distinct, first, counts = np.unique(blocks, return_index=True, return_counts=True)
        order = np.argsort(first, kind="stable")
        tier.release(distinct[order], counts[order])

    def _taken(self, tier: Tier, holders: Int64Array) -> Int64Array:
        """Allocate one block per element of `holders` int64[n], which is the block's reference count."""
        blocks = tier.take(len(holders))
        tier.hold(blocks, holders - 1)
        return blocks

    def _reserve(self, rows: Int64Array, grown: Int64Array) -> None:
        """Append grown[i] new blocks to the table of each row."""
        which, entries = ragged(self.meta[rows, NUM_BLOCKS], grown)
        self.block_tables[rows[which], entries] = self.device.take(len(which))
        self.meta[rows, NUM_BLOCKS] += grown

    def _require_rows(self, count: int, field: str) -> None:
        if count > len(self.sequences.free_rows):
            raise QuotaExceededError(
                f"there is room for {len(self.sequences.free_rows)} more sequences, not {count}",
                field=field, limit="max_sequences", value=self.config.max_sequences,
            )  # fmt: skip

    def _require_device_blocks(self, required: int) -> None:
        if required > self.device.num_available:
            raise self._out_of_device_blocks(required, never=required > self.config.num_blocks)

    def _out_of_device_blocks(self, required: int, *, never: bool) -> OutOfBlocksError:
        free = self.device.num_available
        return OutOfBlocksError(
            f"{required} blocks are needed and {free} of {self.config.num_blocks} are available",
            tier="device", required=required, free=free, total=self.config.num_blocks, never=never,
        )  # fmt: skip

    def _check_request_tokens(self, count: int, field: str) -> None:
        limit = self.config.max_request_tokens
        if count > limit:
            raise QuotaExceededError(
                f"covers {count} tokens, a request may cover at most max_request_tokens = {limit}",
                field=field, limit="max_request_tokens", value=limit,
            )  # fmt: skip

    def _check_request_blocks(self, count: int, field: str) -> None:
        limit = self.config.max_request_blocks
        if count > limit:
            raise QuotaExceededError(
                f"covers {count} blocks, a request may cover at most max_request_blocks = {limit}",
                field=field, limit="max_request_blocks", value=limit,
            )  # fmt: skip

    def _check_reach(self, lengths: Int64Array, lookahead: int) -> None:
        """Check that no sequence, including its lookahead slots, exceeds max_sequence_tokens."""
        limit = self.config.max_sequence_tokens
        if int(np.maximum.reduce(lengths)) + lookahead <= limit:
            return
        if np.count_nonzero(lengths > limit):
            refuse("token_ids", lengths > limit, f"makes a sequence longer than max_sequence_tokens = {limit}")
        refuse("lookahead", lengths + lookahead > limit, f"reaches past max_sequence_tokens = {limit}")


def distinct_steps(steps: Int64Array) -> Iterator[int]:
    """Return the distinct step ids of a column. A running batch usually has one."""
    first = int(steps[0])
    if not np.count_nonzero(steps != first):
        return iter((first,))
    return iter(set(steps.tolist()))
