"""What the block manager hands out: frozen values, the joint between bookkeeping and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


# Makes a zeroed array, given name, shape and dtype. The name says what it is to those who read it.
Zeros = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]


def numpy_zeros(_name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Of this process alone."""
    return np.zeros(shape, dtype)


PADDING_BLOCK = 0
"""Fills a gathered block table past a sequence's last block; no attention reads there."""


class AllocStatus(Enum):
    """The three answers of vLLM's v0 block manager: now, not yet, not in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """A sequence to be made: its own id within the space, its prompt, and what its hashes depend on besides tokens.

    token_ids: int32[n], n >= 1. extra_keys: (token position, bytes) pairs; a key belongs to the block that contains
    its position, so a tenant's salt or an adapter's id stands at 0 and an image's hash at its placeholder.
    lookahead: slots past the prompt that must fit too; the steps reserve them.
    """

    sequence_id: int
    token_ids: npt.ArrayLike
    extra_keys: Sequence[tuple[int, bytes]] = ()
    lookahead: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """`num_cached_tokens` leading tokens are computed already; the rest is to be covered by steps."""

    sequence_id: int
    num_tokens: int
    num_cached_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Copy-on-write within the device tier: whole blocks, src int32[c] to dst int32[c], no dst is a src."""

    src: Int32Array
    dst: Int32Array

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True, eq=False)
class SwapPlan:
    """Whole blocks to move between the tiers: src int32[m] in the one, dst int32[m] in the other."""

    src: Int32Array
    dst: Int32Array

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTables:
    """block_tables int32[n, m], padded with PADDING_BLOCK; context_lens int32[n], the computed tokens of each."""

    block_tables: Int32Array
    context_lens: Int32Array


@dataclass(frozen=True, eq=False)
class Step:
    """One engine iteration over a batch of n sequences.

    Sequence i takes part with its tokens [context_lens[i] - query_lens[i], context_lens[i]), whose slots lie in
    slot_mapping, sequence after sequence. `copies` are made before anything of the step is written.

    sequence_ids int64[n], rows int64[n] (rows of the manager's block_tables), query_lens int32[n],
    context_lens int32[n], slot_mapping int64[sum(query_lens)].
    """

    step_id: int
    sequence_ids: Int64Array
    rows: Int64Array
    query_lens: Int32Array
    context_lens: Int32Array
    slot_mapping: Int64Array
    copies: BlockCopies
    tables: Int32Array = field(repr=False)
    block_size: int

    @cached_property
    def block_tables(self) -> Int32Array:
        """int32[n, blocks of the longest context], padded with PADDING_BLOCK. Valid while the step is live."""
        return gather_block_tables(self.tables, self.rows, self.context_lens, self.block_size)

    def part(self, first: int, stop: int) -> Step:
        """The step's tokens first <= token < stop, counted over its sequences, as a step of those that have any. Its
        tokens see those of the step before them, which must be written by then."""
        ends = np.cumsum(self.query_lens, dtype=np.int64)
        cut_ends = np.minimum(ends, stop)
        query_lens = cut_ends - np.maximum(ends - self.query_lens, first)
        there = np.flatnonzero(query_lens > 0)
        return dataclasses.replace(
            self,
            sequence_ids=self.sequence_ids[there],
            rows=self.rows[there],
            query_lens=query_lens[there].astype(np.int32),
            context_lens=(self.context_lens - (ends - cut_ends))[there].astype(np.int32),
            slot_mapping=self.slot_mapping[first:stop],
        )


def gather_block_tables(
    tables: Int32Array, rows: Int64Array, context_lens: Int32Array | Int64Array, block_size: int
) -> Int32Array:
    """The leading entries of some rows as one rectangle: int32[n, ceil(max(context_lens) / block_size)]."""
    num_blocks = -(-context_lens // block_size)
    width = int(num_blocks.max(initial=0))
    gathered = tables[rows, :width]  # not `take`, which would copy this part of all rows first
    gathered[np.arange(width) >= num_blocks[:, None]] = PADDING_BLOCK
    return gathered


@dataclass(frozen=True, slots=True)
class Pin:
    """Leading blocks of a prompt that stay cached until the pin ends."""

    pin_id: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class SequenceInfo:
    """`token_ids` int32[length] and `block_ids` int32[num_blocks] are None unless asked for."""

    sequence_id: int
    length: int
    num_computed: int
    num_blocks: int
    swapped: bool
    token_ids: Int32Array | None = None
    block_ids: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class BlocksStats:
    """Gauges, then counters since the start.

    active (some table holds it) + cached (none does, but its hash finds it) + free = num_blocks. shared blocks are
    active ones that two tables or more hold, pinned blocks are cached ones that a pin keeps from eviction.
    """

    num_blocks: int
    num_free_blocks: int
    num_active_blocks: int
    num_shared_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    num_swap_blocks: int
    num_used_swap_blocks: int
    num_sequences: int
    num_swapped_sequences: int
    num_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    computed_tokens: int
    cow_copies: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    swapped_out_sequences: int
    swapped_in_sequences: int
    evictions: int
