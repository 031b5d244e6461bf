"""Values of the block manager: frozen plans and results, which are the interface between bookkeeping and the device,
and the live step, which changes while its layers are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


# Allocates a zeroed array, given name, shape and dtype. The name identifies the array to its readers.
Zeros = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]


def numpy_zeros(_name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a zeroed array in private memory of this process."""
    return np.zeros(shape, dtype)


class ArrayMemory(Protocol):
    """Allocates arrays by name. The name identifies an array to its readers, and to a later process of the daemon."""

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array that is zero at every start of the daemon. Raises MemoryError."""

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, private: bool = False
    ) -> npt.NDArray[Any]:
        """Return an array that keeps its content over restarts of the daemon, and is zero at first. A `private` one has
        no other readers. Raises MemoryError."""


class NumpyMemory:
    """Private memory of this process, which ends with it."""

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return numpy_zeros(name, shape, dtype)

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, private: bool = False
    ) -> npt.NDArray[Any]:
        del private
        return numpy_zeros(name, shape, dtype)


numpy_memory: ArrayMemory = NumpyMemory()


def item_view(array: Int64Array) -> memoryview[int]:
    """Return the elements of a contiguous array as a flat view, where access to one of them is cheaper than NumPy's. An
    element is stored in one piece."""
    return memoryview(array.reshape(-1).data).cast("B").cast("q")


# LiveStep.follows and LiveStep.follower of a step without the other one. Step ids begin at 1.
NO_STEP = 0
PADDING_BLOCK = 0
"""Padding of gathered block tables past a sequence's last block. No attention kernel reads it."""


class AllocStatus(Enum):
    """The three answers of vLLM's v0 block manager: it fits now, later, or never in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class AllocationRequest(NamedTuple):
    """A sequence to allocate: its id within the namespace, its prompt, and the extra keys of its block hashes.

    token_ids: int32[n], n >= 1. extra_keys: (token position, bytes) pairs. A key belongs to the block that contains its
    position, so a tenant's salt or an adapter id is at position 0, and an image hash at its placeholder.
    lookahead: slots past the prompt that must also fit; the steps reserve them.
    """

    sequence_id: int
    token_ids: npt.ArrayLike
    extra_keys: Sequence[tuple[int, bytes]] = ()
    lookahead: int = 0


class Allocation(NamedTuple):
    """Result of an allocation. The first `num_cached_tokens` tokens are already computed; steps cover the rest."""

    sequence_id: int
    num_tokens: int
    num_cached_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Copies of whole blocks within the device tier (copy-on-write): src int32[c] to dst int32[c]. No dst is a src."""

    src: Int32Array
    dst: Int32Array

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True, eq=False)
class SwapPlan:
    """Whole blocks to move between the tiers: src int32[m] in the source tier, dst int32[m] in the destination tier."""

    src: Int32Array
    dst: Int32Array

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One engine iteration over a batch of n sequences.

    The step covers the tokens [context_lens[i] - query_lens[i], context_lens[i]) of sequence i. slot_mapping holds
    their slots, sequence after sequence. The device performs `copies` before it writes any layer of the step.

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

    @cached_property
    def num_scores(self) -> int:
        """The pairs of a token of this step and a token of its context, at most."""
        return int(np.dot(self.query_lens.astype(np.int64), self.context_lens))

    def part(self, first: int, stop: int) -> StepPlan:
        """Return the tokens first <= token < stop of this step, counted over all its sequences, as a step of the
        sequences concerned. They attend to the earlier tokens of this step, which must be written before."""
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


@dataclass(slots=True)
class LiveStep:
    """A live step: its plan, its written layers, and the arguments that a retry of its append must repeat.

    `written` has one byte per layer, 0 or 1. It stays the same object, and other code may set layers in it.
    `num_appended` is int64[n], or one number for all sequences; it is None for a step over existing tokens.
    `sent` maps a layer that is sent in parts to the number of its tokens that are written. `parts` holds the parts of
    all layers by (first token, last token + 1).

    `follows` is the step after whose tokens this one goes on in some sequences, while that step is live, else NO_STEP.
    `follower` is the step that goes on after this one. `unknown` int64[u] are the indices of the sequences whose last
    token in this step is not known yet, because the followed step samples it; it is None if all tokens are known.
    A step `ahead` covers tokens that nobody knows here before its client has written them; it has no layers to send.
    """

    plan: StepPlan
    written: bytearray
    num_appended: Int64Array | int | None
    committed: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    parts: dict[tuple[int, int], StepPlan] = field(default_factory=dict)
    follows: int = NO_STEP
    follower: int = NO_STEP
    unknown: Int64Array | None = None
    ahead: bool = False

    @property
    def tokens_known(self) -> bool:
        return self.unknown is None and not self.ahead

    @property
    def begun(self) -> bool:
        return 1 in self.written or bool(self.sent)

    @property
    def complete(self) -> bool:
        return 0 not in self.written


def gather_block_tables(
    tables: Int32Array, rows: Int64Array, context_lens: Int32Array | Int64Array, block_size: int
) -> Int32Array:
    """Gather the leading entries of some rows: int32[n, ceil(max(context_lens) / block_size)], padded with
    PADDING_BLOCK."""
    num_blocks = -(-context_lens // block_size)
    width = int(num_blocks.max(initial=0))
    gathered = tables[rows, :width]  # `take` would copy this part of all rows first
    gathered[np.arange(width) >= num_blocks[:, None]] = PADDING_BLOCK
    return gathered


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pin, which keeps the leading blocks of a prompt cached."""

    pin_id: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSnapshot:
    """Description of a sequence. `token_ids` int32[length] and `block_ids` int32[num_blocks] are None unless
    requested."""

    sequence_id: int
    length: int
    num_computed: int
    num_blocks: int
    swapped: bool
    token_ids: Int32Array | None = None
    block_ids: Int32Array | None = None


@dataclass(slots=True)
class BlocksStats:
    """All gauges, followed by the counters since the start, in blocks, sequences and tokens.

    This is their one list, and its names are those of the contract: the server answers GetStats from it, the daemon
    shares it with its observer as an array in this order, and metrics and snapshots are made from it. Operations count
    in one object, in which the gauges and `evicted_blocks`, which the device pool counts, stay 0.

    num_blocks = free + active + shared + cached + pinned. An active block is in one table or being loaded, a shared
    block in several. A cached block is in no table but in the prefix index; a pinned block is cached, and protected
    from eviction. A quarantine counts as a table, and `quarantined_blocks` are those that are in one.
    """

    num_blocks: int = 0
    free_blocks: int = 0
    active_blocks: int = 0
    shared_blocks: int = 0
    cached_blocks: int = 0
    pinned_blocks: int = 0
    quarantined_blocks: int = 0
    num_swap_blocks: int = 0
    used_swap_blocks: int = 0
    sequences: int = 0
    swapped_sequences: int = 0
    tokens: int = 0

    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    computed_tokens: int = 0
    cow_copies: int = 0
    evicted_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_sequences: int = 0
    swapped_in_sequences: int = 0
