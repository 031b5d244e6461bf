"""The state of a block manager: session namespaces, rows of sequences, and the intent of the operation in progress.

`BlockState` at the end has all of it, and the pools. Operations are functions of their own modules over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvservice._ext import StepTables, rows_of, shared_entries, slot_mapping
from kvservice.blocks.arguments import BlocksConfig, int64_array, whole_number
from kvservice.blocks.events import EventJournal
from kvservice.blocks.kept import ExtraKeyTable, KeptMaps, PinTable, pack_ids
from kvservice.blocks.plans import (
    NO_STEP,
    ArrayMemory,
    BlocksStats,
    BoolArray,
    Int32Array,
    Int64Array,
    LiveStep,
    item_view,
    numpy_memory,
)
from kvservice.blocks.pool import BlockPool, CachingBlockPool
from kvservice.blocks.quarantine import BlockQuarantine
from kvservice.blocks.quotas import BlockOwners, TenantQuota
from kvservice.errors import (
    DuplicateSequenceError,
    InvalidArgumentError,
    KVServiceError,
    QuotaExceededError,
    SequenceLostError,
    SequenceSwappedError,
    StaleStepError,
    UnknownSequenceError,
    UnknownSessionError,
    UnknownStepError,
)

# Indices of the counters of a namespace.
COMPUTED_TOKENS, QUERY_TOKENS, HIT_TOKENS = range(3)
NUM_COUNTERS = 3
# Indices of the kept ids of a namespace.
LAST_STEP_ID, LAST_PIN_ID = range(2)
_INT64 = np.dtype(np.int64)
_NO_BATCH = (b"", np.zeros(0, np.int64), np.zeros(0, np.int64))
LENGTH, NUM_COMPUTED, NUM_BLOCKS, STEP, SWAPPED, NAMESPACE, SEQUENCE_ID, FLAGS = range(8)
STATE_COLUMNS = 8
# Bit of FLAGS: a scheduler made the sequence. The other bits number the sequences in the order of their creation.
SCHEDULED: Final = 1
_ORDER_BITS: Final = 1
_LINE_ENTRIES = 16
# Kinds of an intent. The states of before are valid, because the content up to their lengths and the tables up to their
# sizes are whole.
RESTORE: Final = 1
# The operation overwrites tables or content of its sequences, so that they are lost.
DROP: Final = 2
# The rows are those of new sequences, and become free.
CREATE: Final = 3
_KIND_BITS: Final = 2
# The steps that the lanes of a session may finish before the event loop commits them. If there are more, a process that
# takes over does not know of the first ones.
NUM_FINISHED: Final = 64

_ID_BYTES: Final = 8


# ---- Session namespaces


class DiskSequence(NamedTuple):
    """A sequence that is swapped out to a disk: its length and its computed tokens."""

    length: int
    num_computed: int


def _ignore(step_id: int) -> None:
    """The default `on_step_end`, which does nothing."""


@dataclass(eq=False, slots=True)
class SessionNamespace:
    """Namespace of one client, created by BlockManager.open_namespace. The manager owns its attributes except
    `on_step_end`. That callback gets the id of a step that is no longer live, before its blocks are reused.

    `quota` is None if its tenant has none.
    `lost` are the ids of sequences that did not survive a restart of the daemon, and `on_disk` sequences that have no
    row, because they are swapped out to a disk. Steps up to `last_step_before_restart` were opened before it.
    `kept_ids` int64[2] holds the last ids for the next restart."""

    number: int
    # Counts of the client's tokens: computed, looked up in the prefix cache, found there.
    counters: MutableSequence[int]
    on_step_end: Callable[[int], object] = _ignore
    closed: bool = False
    rows: dict[int, int] = field(default_factory=dict)
    steps: dict[int, LiveStep] = field(default_factory=dict)
    pins: dict[int, Int64Array] = field(default_factory=dict)
    last_step_id: int = 0
    last_pin_id: int = 0
    kept_ids: MutableSequence[int] | memoryview[int] = field(default_factory=lambda: [0, 0])
    lost: set[int] = field(default_factory=set)
    on_disk: dict[int, DiskSequence] = field(default_factory=dict)
    # Whether its sequences are on a disk, too, and count there, until another namespace adopts them.
    counts_elsewhere: bool = False
    last_step_before_restart: int = NO_STEP
    quota: TenantQuota | None = None
    _batch: tuple[bytes, Int64Array, Int64Array] = field(default_factory=lambda: _NO_BATCH, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self.rows

    def sequence_ids(self) -> list[int]:
        return list(self.rows)

    def lookup(self, sequence_ids: npt.ArrayLike, field: str = "sequence_ids") -> tuple[Int64Array, Int64Array]:
        """Return (ids int64[n], rows int64[n]) of distinct known sequences. The caller must not modify them. Raises
        InvalidArgumentError, UnknownSequenceError.

        The last batch of several is cached, because a running batch stays the same for many steps.
        """
        ids = id_array(sequence_ids, field)
        key = ids.tobytes()
        if key == self._batch[0]:
            return self._batch[1], self._batch[2]
        rows: Int64Array | None = rows_of(self.rows, ids)
        if rows is None:
            raise self._wrong_batch(ids.tolist(), field)
        ids = ids.copy()
        if len(ids) == 1:
            return ids, rows
        ids.setflags(write=False)
        rows.setflags(write=False)
        self._batch = (key, ids, rows)
        return ids, rows

    def check_new_ids(self, ids: list[int], field: str) -> None:
        """Check that these sequence ids are valid and unused. `field` is a format string for the index of an id.
        Raises InvalidArgumentError, DuplicateSequenceError."""
        known = self.rows.keys() | self.on_disk.keys() if self.on_disk else self.rows.keys()
        for sequence_id in ids:
            if type(sequence_id) is not int or not 0 <= sequence_id < 2**63:
                break
        else:
            if len(set(ids)) == len(ids) and known.isdisjoint(ids):
                return
        seen: set[int] = set()
        for i, sequence_id in enumerate(ids):
            whole_number(sequence_id, field.format(i), 0, 2**63 - 1)
            if sequence_id in known or sequence_id in seen:
                where = "is in use" if sequence_id in known else "appears twice"
                raise DuplicateSequenceError(
                    f"sequence {sequence_id} {where}", field=field.format(i), sequence_id=sequence_id
                )
            seen.add(sequence_id)

    def in_progress(self, step_id: int) -> bool:
        """Return whether some layers of the step are written and some are not."""
        step = self.steps.get(step_id)
        return step is not None and step.begun and not step.complete

    def layers_in_progress(self) -> int:
        """Return the number of written layers of all incomplete steps."""
        return sum(step.written.count(1) for step in self.steps.values() if not step.complete)

    def live_step(self, step_id: int, field: str = "step_id") -> LiveStep:
        """Return a live step. Raises UnknownStepError if it was never opened, and StaleStepError if it ended."""
        step = self.steps.get(step_id)
        if step is not None:
            return step
        step_id = whole_number(step_id, field, 0, 2**63 - 1)
        if 0 < step_id <= self.last_step_before_restart:
            raise StaleStepError(
                f"the daemon was restarted after it opened step {step_id}", field=field, step_id=step_id
            )
        if 0 < step_id <= self.last_step_id:
            raise StaleStepError(
                f"a newer operation on one of its sequences replaced step {step_id}", field=field, step_id=step_id
            )
        raise UnknownStepError(f"step {step_id} was never opened", field=field, step_id=step_id)

    def next_step_id(self) -> int:
        self.last_step_id += 1
        self.kept_ids[LAST_STEP_ID] = self.last_step_id
        return self.last_step_id

    def next_pin_id(self) -> int:
        self.last_pin_id += 1
        self.kept_ids[LAST_PIN_ID] = self.last_pin_id
        return self.last_pin_id

    def unknown_sequence(self, names: list[int], field: str) -> KVServiceError:
        """Return the error for the first of these ids that is unknown, or that is on the disk."""
        without_row = [i for i, name in enumerate(names) if name not in self.rows]
        i = next((i for i in without_row if names[i] not in self.on_disk), without_row[0])
        where, name = f"{field}[{i}]", names[i]
        if name < 0:
            return InvalidArgumentError("must not be negative", field=where)
        if name in self.on_disk:
            return SequenceSwappedError(
                f"sequence {name} is swapped out to the disk", field=where, sequence_id=name, tier="disk"
            )
        if name in self.lost:
            return SequenceLostError(f"sequence {name} did not survive a restart", field=where, sequence_id=name)
        return UnknownSequenceError(f"sequence {name} is not known", field=where, sequence_id=name)

    def _wrong_batch(self, names: list[int], field: str) -> KVServiceError:
        """Return the error for ids of which one is unknown or occurs twice."""
        if not self.rows.keys() >= set(names):
            return self.unknown_sequence(names, field)
        first = {name: i for i, name in reversed(list(enumerate(names)))}
        i = next(i for i, name in enumerate(names) if first[name] != i)
        return InvalidArgumentError(f"sequence {names[i]} appears twice", field=f"{field}[{i}]")

    def remove(self, sequence_id: int) -> int:
        self._batch = _NO_BATCH
        return self.rows.pop(sequence_id)

    def supersede(self, step_ids: Iterable[int]) -> None:
        """Make these steps stale. A step is live exactly while it is in `steps`.

        A step ends with the step that it follows, and the other way round, because they share sequences. Only a step
        that is committed can end before its follower, which does not need it any more.
        """
        for step_id in step_ids:
            step = self.steps.pop(step_id, None)
            if step is None:
                continue
            self.on_step_end(step_id)
            if step.follows:
                self.supersede((step.follows,))
            if step.follower and (follower := self.steps.get(step.follower)):
                follower.follows = NO_STEP
                if not step.committed:
                    self.supersede((step.follower,))


def id_array(value: npt.ArrayLike, field: str) -> Int64Array:
    """Return sequence ids as int64[n], n >= 1, as most callers pass them. Raises InvalidArgumentError."""
    if type(value) is np.ndarray and value.dtype is _INT64 and value.ndim == 1 and value.size:
        return value
    return int64_array(value, field)


def distinct_steps(steps: Int64Array) -> Iterator[int]:
    """Return the distinct step ids in steps int64[n]. A running batch usually has one."""
    first = int(steps[0])
    if len(steps) == 1 or not np.count_nonzero(steps != first):
        return iter((first,))
    return iter(set(steps.tolist()))


# ---- Sequence slots


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


class SequenceTable:
    """One row of block tables and one row of sequence states per sequence. A fork copies both.

    Block tables int32[max_sequences, >= max_blocks_per_sequence] and sequence states int64[max_sequences, 8].

    The width of a table is an odd number of cache lines, so that one column of many tables does not map to a few sets
    of the CPU caches.
    `lengths`, `num_computed`, `num_blocks` and `steps` are columns of `states`, and `items` is a flat view of it. STEP
    is the newest step of the sequence, in its namespace, or NO_STEP. SWAPPED is 1 while the table names blocks of the
    swap tier. NAMESPACE is the number of the sequence's namespace, or 0 if the row is free or about to be. SEQUENCE_ID
    is its id there. FLAGS says how and when the sequence was created.
    """

    def __init__(self, config: BlocksConfig, memory: ArrayMemory, kept: KeptMaps) -> None:
        lines = config.max_blocks_per_sequence // _LINE_ENTRIES + 1
        shape = (config.max_sequences, (lines | 1) * _LINE_ENTRIES)
        self.block_tables = cast(Int32Array, memory.kept("block_tables", shape, np.int32))
        if not self.block_tables.flags.c_contiguous:
            raise ValueError("memory gave an array that is not contiguous: a view of it would be a copy")
        self.states = cast(Int64Array, memory.kept("sequence_states", (config.max_sequences, STATE_COLUMNS), np.int64))
        self.items = item_view(self.states)
        self.lengths = self.states[:, LENGTH]
        self.num_computed = self.states[:, NUM_COMPUTED]
        self.num_blocks = self.states[:, NUM_BLOCKS]
        self.steps = self.states[:, STEP]
        self.swapped = self.states[:, SWAPPED]
        self.free_rows = list(range(config.max_sequences - 1, -1, -1))
        # Rows without a sequence id whose blocks are not released yet.
        self.ending: set[int] = set()
        self.extra_keys = ExtraKeyTable(kept)
        self._num_created = 0
        # That of the tenant of the current operation.
        self.quota: TenantQuota | None = None
        # Sequences of all namespaces that have no row, because they are on a disk.
        self.num_on_disk = 0
        self.num_tokens = 0
        self.num_swapped = 0
        self._config = config
        self._shift = config.block_shift

    @property
    def num_places(self) -> int:
        """Number of sequences that there is room for. Those on a disk count as those with a row: each of them must
        find a row when it comes back."""
        return max(0, len(self.free_rows) - self.num_on_disk)

    @property
    def withheld(self) -> int:
        """How many of `num_places` the current operation may not take, because of its tenant's quota."""
        if self.quota is None or self.quota.max_sequences is None:
            return 0
        return max(0, self.num_places - max(0, self.quota.max_sequences - self.quota.num_sequences))

    @property
    def num_free(self) -> int:
        """Number of sequences that the current operation may create."""
        if self.quota is None:
            return max(0, len(self.free_rows) - self.num_on_disk)
        return self.num_places - self.withheld

    def require_places(self, count: int, field: str, namespace: SessionNamespace) -> None:
        """Raise QuotaExceededError if there is no room for `count` more sequences of a namespace."""
        num_places = len(self.free_rows) if namespace.counts_elsewhere else self.num_places
        withheld = 0 if namespace.counts_elsewhere else self.withheld
        if count > num_places - withheld:
            if namespace.quota is not None and withheld:
                raise namespace.quota.sequences_exceeded(count, field)
            raise QuotaExceededError(
                f"there is room for {num_places} more sequences, not {count}",
                field=field, limit="max_sequences", value=self._config.max_sequences,
            )  # fmt: skip

    def resident_states(self, ids: Int64Array, rows: Int64Array, field: str = "sequence_ids") -> Int64Array:
        """Return a copy of the states int64[n, 8] of these rows. Raises SequenceSwappedError."""
        states = self.states.take(rows, axis=0)
        if self.num_swapped:
            swapped = states[:, SWAPPED] != 0
            if np.count_nonzero(swapped):
                i = int(swapped.argmax())
                raise SequenceSwappedError(
                    f"sequence {ids[i]} is swapped out", field=f"{field}[{i}]", sequence_id=int(ids[i])
                )
        return states

    def new_flags(self, flags: int) -> int:
        """Return the FLAGS of the next sequence, with these bits."""
        self._num_created += 1
        return self._num_created << _ORDER_BITS | flags

    def recover(self) -> None:
        """Derive the totals, the free rows and the extra keys from valid states, in which free rows are zero."""
        used = self.states[:, NAMESPACE] != 0
        self.free_rows = np.flatnonzero(~used)[::-1].tolist()
        self.num_tokens = int(self.states[used, LENGTH].sum())
        self.num_swapped = int(self.states[used, SWAPPED].sum())
        self._num_created = int(self.states[:, FLAGS].max(initial=0)) >> _ORDER_BITS
        self.extra_keys.recover(self.states[:, NAMESPACE].tolist())

    def end_steps(self, namespace: SessionNamespace, rows: Int64Array) -> None:
        """Make the newest steps of these rows stale."""
        if len(rows) == 1:
            at = rows.item() * STATE_COLUMNS + STEP
            namespace.supersede((self.items[at],))
            self.items[at] = NO_STEP
            return
        namespace.supersede(distinct_steps(self.steps[rows]))
        self.steps[rows] = NO_STEP

    def table_entries(self, rows: Int64Array, first: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        """Return all table entries of these rows from entry `first` on: (entry number int64[m], block int64[m])."""
        if len(rows) == 1:
            row, begin = int(rows[0]), 0 if first is None else int(first[0])
            end = self.states.item(row, NUM_BLOCKS)
            return np.arange(begin, end), self.block_tables[row, begin:end].astype(np.int64)
        num_blocks = self.num_blocks[rows]
        start = np.zeros(len(rows), np.int64) if first is None else first
        which, entry = ragged(start, num_blocks - start)
        return entry, self.block_tables[rows[which], entry].astype(np.int64)

    def append_blocks(self, rows: Int64Array, num_blocks: Int64Array, grown: Int64Array, blocks: Int64Array) -> None:
        """Append grown[i] of these blocks to the table of each row, which has num_blocks[i] blocks."""
        which, entries = ragged(num_blocks, grown)
        self.block_tables[rows[which], entries] = blocks
        self.num_blocks[rows] += grown

    def slots(self, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
        """Return the slots of the tokens starts[i], ..., starts[i] + counts[i] - 1 of each row: int64[sum(counts)]."""
        slots: Int64Array = slot_mapping(self.block_tables, rows, starts, counts, self._shift)
        return slots

    def shared_entries(
        self, rows: Int64Array, first: Int64Array, counts: Int64Array, ref_count: Int32Array, indexed: BoolArray
    ) -> Int64Array:
        """Return which of the table entries first[i], ..., first[i] + counts[i] - 1 of each row, concatenated, have a
        block that several tables hold or that is in the prefix index."""
        shared: Int64Array = shared_entries(self.block_tables, rows, first, counts, ref_count, indexed)
        return shared


# ---- The intent


class Intents:
    """The intent of the operation in progress, in kept memory: what recovery does with the operation's rows if the
    daemon's process does not survive it.

    An operation writes its intent before it changes the state of a row, and the intent stays until the daemon has
    remembered the operation's reply, or until the next operation begins. It names the rows and holds their states of
    before, unless their sequences are new.

    Stores that no intent covers count alone: NAMESPACE of a row that becomes free; a chain hash, the computed length
    and the index flag, in this order, when a step commits; the index flag of a block that is evicted, before its
    content changes.

    The header is one integer, number of rows << 2 | kind, or 0 without an intent. It is stored last and cleared first.
    """

    def __init__(self, states: Int64Array, memory: ArrayMemory) -> None:
        """`states` int64[max_sequences, 8] are the live states of all rows."""
        self.pending = False
        self._states, self._num_columns = states, states.shape[1]
        self._state_items = item_view(states)
        header: Int64Array = memory.kept("intent", (1,), np.int64, private=True)
        self._header = item_view(header)
        self._rows: Int64Array = memory.kept("intent_rows", (len(states),), np.int64, private=True)
        self._saved: Int64Array = memory.kept("intent_states", states.shape, np.int64, private=True)
        self._row_items, self._saved_items = item_view(self._rows), item_view(self._saved)
        # The rows that `_rows` holds, and the part of `_saved` for them. A running batch is the same array every time.
        self._batch = self._rows[:0]
        self._saved_batch = self._saved[:0]

    def begin(self, kind: int, rows: Int64Array) -> None:
        """Write down distinct rows int64[n] that an operation is about to change. The caller must not modify the array
        later."""
        assert not self.pending, "an operation has one intent"
        count = len(rows)
        if count == 1:
            self._save_row(rows.item())
        else:
            if rows is not self._batch:
                self._rows[:count] = rows
                self._batch, self._saved_batch = rows, self._saved[:count]
            self._states.take(rows, 0, self._saved_batch, "clip")
        self._header[0] = count << _KIND_BITS | kind
        self.pending = True

    def _save_row(self, row: int) -> None:
        """Do as `begin` for a single row, without NumPy."""
        columns = self._num_columns
        self._batch, self._row_items[0] = _NO_BATCH[1], row
        self._saved_items[:columns] = self._state_items[row * columns : (row + 1) * columns]

    def begin_new(self, rows: list[int]) -> None:
        """Write down distinct free rows that an operation is about to give to new sequences."""
        assert not self.pending, "an operation has one intent"
        items, self._batch = self._row_items, _NO_BATCH[1]
        for i, row in enumerate(rows):
            items[i] = row
        self._header[0] = len(rows) << _KIND_BITS | CREATE
        self.pending = True

    def end(self) -> None:
        """Declare that the operation counts, or that recovery is done with it."""
        self._header[0] = 0
        self.pending = False

    def read(self) -> tuple[int, Int64Array, Int64Array]:
        """Return the intent of an earlier process: (kind, or 0 without one; rows int64[n]; their states of before
        int64[n, 8])."""
        header: int = self._header[0]
        count = header >> _KIND_BITS
        return header & (1 << _KIND_BITS) - 1, self._rows[:count].copy(), self._saved[:count].copy()


# ---- All of it


class BlockState:
    """Block pools of both tiers, rows of sequences, pins, namespaces and counters. One thread uses it, the daemon's
    event loop. Operations begin with `enter`.

    `generation` is incremented by each slice of an operation that may change the state.
    `last_ids` int64[max_namespaces, 2] are the last step id and the last pin id of each namespace, by its number - 1.
    `lane_finished_ids` int64[max_namespaces, NUM_FINISHED] are steps that lanes have finished, see
    BlockManager.finished_ids. `lane_lens` int32[max_sequences] is the context length of each row after the newest of
    its steps that a lane got.
    `unsubmitted` bool[num_blocks] are the blocks that a swap-in fills and whose copies the device has not got yet.
    `step_tables` are the native loops over tables, tokens and states; those of the mapped pool are others.
    `unfinished_device` int32[num_blocks] and `unfinished_swap` int32[num_swap_blocks] are the device's counts of
    writes in progress to each block.
    """

    def __init__(
        self,
        config: BlocksConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        journal: EventJournal | None = None,
        memory: ArrayMemory = numpy_memory,
        kept: KeptMaps | None = None,
    ) -> None:
        """`memory` and `kept` hold what outlives the process. If an earlier process wrote them, `recover` comes before
        any other operation. `clock` returns seconds, the same in every process; pins and ages use it. `journal` records
        the changes of the prefix index."""
        self.config = config
        self.kept = kept = kept or KeptMaps()
        self.device = CachingBlockPool(config.num_blocks, config.block_size, clock, journal, memory)
        self.swap = BlockPool(config.num_swap_blocks, config.block_size, "swap", memory)
        self.sequences = SequenceTable(config, memory, kept)
        self.intents = Intents(self.sequences.states, memory)
        self.last_ids: Int64Array = memory.kept("last_ids", (config.max_namespaces, 2), np.int64, private=True)
        self.lane_finished_ids: Int64Array = memory.kept(
            "finished_ids", (config.max_namespaces, NUM_FINISHED), np.int64, private=True
        )
        self.lane_lens: Int32Array = memory.kept("lane_lens", (config.max_sequences,), np.int32, private=True)
        self.unsubmitted: BoolArray = memory.kept("unsubmitted", (config.num_blocks,), np.bool_, private=True)
        self.unfinished_device: Int32Array = memory.kept(
            "unfinished_device", (config.num_blocks,), np.int32, private=True
        )
        self.unfinished_swap: Int32Array = memory.kept(
            "unfinished_swap", (config.num_swap_blocks,), np.int32, private=True
        )
        self.pins = PinTable(self.device, clock, kept.pins)
        self.quarantine = BlockQuarantine(self.device, kept.writers, kept.quarantine)
        self.namespaces: set[SessionNamespace] = set()
        self.counters = BlocksStats()
        self.generation = 0
        self.shift, self.mask = config.block_shift, config.block_mask
        self.step_tables = StepTables(
            self.sequences.block_tables, self.sequences.states, self.device.ref_count, self.device.indexed,
            self.device.token_ids, config.max_sequence_tokens,
        )  # fmt: skip
        # Query lengths of decode steps.
        self.ones = np.ones(config.max_sequences, np.int32)
        self.ones.flags.writeable = False
        # Scratch: the context lengths of a followed step, by row.
        self.followed_lens = np.zeros(config.max_sequences, np.int64)
        self._last_number = 0
        # Namespaces whose kept lost sequences change when the last operation counts.
        self._lost_changed: list[SessionNamespace] = []

    def open_namespace(
        self, number: int | None = None, counters: MutableSequence[int] | None = None
    ) -> SessionNamespace:
        """Open a namespace for one client's sequences, steps and pins. `number` identifies it in sequence states, from
        1 to max_namespaces; None means the next one that no open namespace has. `counters` has NUM_COUNTERS elements,
        see SessionNamespace."""
        if number is None:
            number = self._unused_number()
        self.last_ids[number - 1] = 0
        self.lane_finished_ids[number - 1] = 0
        return self.add_namespace(number, [0] * NUM_COUNTERS if counters is None else counters)

    def _unused_number(self) -> int:
        used, limit = {namespace.number for namespace in self.namespaces}, self.config.max_namespaces
        following = (1 + (self._last_number + i) % limit for i in range(limit))
        self._last_number = next(number for number in following if number not in used)
        return self._last_number

    def add_namespace(self, number: int, counters: MutableSequence[int]) -> SessionNamespace:
        """Add an open namespace, with the last ids of its number."""
        kept_ids = self.last_ids[number - 1]
        namespace = SessionNamespace(number, counters, kept_ids=item_view(kept_ids))
        namespace.last_step_id, namespace.last_pin_id = kept_ids.tolist()
        self.namespaces.add(namespace)
        return namespace

    def hide(self, namespace: SessionNamespace, ids: Int64Array, rows: Int64Array) -> dict[int, int]:
        """Take sequences out of their namespace while they are changed in several steps, after the intent is written.
        Returns all sequences of the namespace, for `show`. If an exception comes between, because memory is short for
        example, these sequences are gone, and their blocks and rows are lost until the next restart. Nobody can use a
        sequence of which only a part was changed, or a block that others got meanwhile."""
        listed = namespace.rows
        self.sequences.states[rows, NAMESPACE] = 0
        namespace.rows = listed.copy()
        for name in ids.tolist():
            namespace.remove(name)
        return listed

    def show(self, namespace: SessionNamespace, listed: dict[int, int], rows: Int64Array) -> None:
        """End `hide`. The order of the sequences stays."""
        namespace.rows = listed
        self.sequences.states[rows, NAMESPACE] = namespace.number

    def enter(self, namespace: SessionNamespace | None) -> None:
        """Start an operation, of the daemon itself if there is no namespace: check that the namespace is open, and
        expire pins. The operation before counts from now on. Raises UnknownSessionError."""
        if namespace is not None and namespace.closed:
            raise UnknownSessionError("the session of the sequences is closed")
        self.enter_for(None if namespace is None else namespace.quota)

    def enter_for(self, quota: TenantQuota | None) -> None:
        """Start an operation of the daemon for the tenant with this quota, or for itself, as `enter` does."""
        if self.intents.pending:
            self.end_operation()
        self.generation += 1
        if self.pins.deadlines:
            self.pins.expire()
        if (owners := self.device.owners) is not None:
            self.device.quota = self.sequences.quota = quota
            self.device.withheld = self.device.reserved = owners.enter(quota)
            if quota is not None:
                quota.withhold(self.device, owners.num_held(quota.tenant))

    def set_tenants(self, guaranteed: Mapping[str, int], domains: Mapping[str, str] | None = None) -> None:
        """Tell the blocks of these tenants apart, and let each have the number of blocks that it has guaranteed. Called
        again when the tenants change, and after a recovery: then the cached blocks are nobody's, and those that
        several tenants hold are the first one's by name. `domains`: see BlockOwners."""
        self.generation += 1
        owners = BlockOwners(self.config.num_blocks, guaranteed, domains)
        if self.device.owners is not None:
            owners.inherit(self.device.owners)
        quotas = {namespace.quota for namespace in self.namespaces if namespace.quota is not None}
        for quota in sorted(quotas, key=lambda quota: quota.tenant):
            owners.claim(quota.blocks(self.sequences), quota.tenant)
        for held in self.quarantine:
            owners.claim(held.blocks, held.tenant)
        self.device.set_owners(owners)

    def end_operation(self) -> None:
        """Declare that the last operation counts, because its reply is remembered. Before that, or before the next
        operation, a restart undoes it, or loses its sequences."""
        self.intents.end()
        while self._lost_changed:
            namespace = self._lost_changed.pop()
            if not namespace.closed:
                self.keep_lost(namespace.number, namespace.lost)

    def create_lost(self, namespace: SessionNamespace, sequence_ids: Iterable[int]) -> None:
        """Record that an operation creates sequences, of which some were lost. That is kept when the operation
        counts."""
        namespace.lost.difference_update(sequence_ids)
        self.keep_lost_later(namespace)

    def keep_lost_later(self, namespace: SessionNamespace) -> None:
        """Keep the ids of the lost sequences of a namespace as they are now, when the operation counts."""
        self._lost_changed.append(namespace)

    def forget_lost(self, namespace: SessionNamespace, sequence_ids: Iterable[int]) -> None:
        """Forget that these sequences of a namespace were lost."""
        namespace.lost.difference_update(sequence_ids)
        self.keep_lost(namespace.number, namespace.lost)

    def require_lost(self, namespace: SessionNamespace, num_more: int = 0) -> None:
        """Make room for the ids of the lost sequences of a namespace, and for so many more, each of which an operation
        may then keep twice. Raises ResourceExhaustedError."""
        if namespace.lost or num_more:
            self.kept.reserve(2 * _ID_BYTES * (len(namespace.lost) + num_more), 2)

    def keep_lost(self, number: int, lost: set[int]) -> None:
        """Store the ids of the lost sequences of a namespace."""
        if lost:
            self.kept.lost[number] = pack_ids(lost)
        else:
            self.kept.lost.pop(number, None)

    def add_writer(self, namespace: SessionNamespace, writer: int) -> None:
        """Note a process that is about to fetch the pool for writing in a session, by its name."""
        tenant = "" if namespace.quota is None else namespace.quota.tenant
        self.quarantine.add_writer(namespace.number, tenant, writer)

    def writer_ended(self, writer: int) -> int:
        """Note that a process has ended. Returns how many blocks waited for it only, and do not wait any more."""
        self.enter(None)
        before = self.quarantine.num_blocks
        self.quarantine.ended(writer)
        return before - self.quarantine.num_blocks

    def expire_pins(self) -> None:
        """Remove expired pins before an operation without a namespace."""
        if self.pins.deadlines and self.pins.expire():
            self.generation += 1
