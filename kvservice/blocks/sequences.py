"""Sequence slots and session namespaces.

A sequence slot is a row of `block_tables` and a row of `meta`, the sequence state; a fork copies both. A SequenceSpace
is the namespace of one client: its sequence ids, steps and pins. Each row belongs to one namespace and is unknown in
all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from kvservice.blocks.arguments import int64_array
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.plans import Int32Array, Int64Array, Step, Zeros
from kvservice.errors import InvalidArgumentError, KVServiceError, UnknownSequenceError

LENGTH, NUM_COMPUTED, NUM_BLOCKS, STEP, SWAPPED, SPACE, SEQUENCE_ID = range(7)
_META_COLUMNS = 8
_LINE_ENTRIES = 16
NO_STEP = 0
COMPUTED_TOKENS, QUERY_TOKENS, HIT_TOKENS = range(3)
NUM_COUNTERS = 3
_NO_BATCH = (b"", np.zeros(0, np.int64), np.zeros(0, np.int64))


class SequenceRows:
    """Block tables int32[max_sequences, >= max_blocks_per_sequence] and sequence states `meta` int64[max_sequences, 8].

    The width of a table is an odd number of cache lines, so that one column of many tables does not map to a few sets
    of the CPU caches.
    `lengths`, `num_computed`, `num_blocks` and `steps` are columns of `meta`. STEP is the newest step of the sequence,
    in its namespace, or NO_STEP. SWAPPED is 1 while the table names blocks of the swap tier. SPACE is the number of the
    sequence's namespace, or 0 if the row is free. SEQUENCE_ID is its id there.
    """

    def __init__(self, config: BlocksConfig, zeros: Zeros) -> None:
        lines = config.max_blocks_per_sequence // _LINE_ENTRIES + 1
        shape = (config.max_sequences, (lines | 1) * _LINE_ENTRIES)
        self.block_tables = cast(Int32Array, zeros("block_tables", shape, np.int32))
        self.meta = cast(Int64Array, zeros("meta", (config.max_sequences, _META_COLUMNS), np.int64))
        self.lengths = self.meta[:, LENGTH]
        self.num_computed = self.meta[:, NUM_COMPUTED]
        self.num_blocks = self.meta[:, NUM_BLOCKS]
        self.steps = self.meta[:, STEP]
        self.free_rows = list(range(config.max_sequences - 1, -1, -1))
        # Rows without a sequence id whose blocks are not released yet.
        self.ending: set[int] = set()
        self.extra_keys: dict[int, dict[int, bytes]] = {}
        self.num_tokens = 0
        self.num_swapped = 0


@dataclass(slots=True)
class OpenStep:
    """A live step: its plan, its written layers, and the arguments that a retry of its append must repeat.

    `written` has one byte per layer, 0 or 1. It stays the same object, and other code may set layers in it.
    `num_appended` is int64[n], or one number for all sequences; it is None for a step over existing tokens.
    `sent` maps a layer that is sent in parts to the number of its tokens that are written. `parts` holds the parts of
    all layers by (first token, last token + 1).
    """

    plan: Step
    written: bytearray
    num_appended: Int64Array | int | None
    committed: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    parts: dict[tuple[int, int], Step] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        return 1 in self.written or bool(self.sent)

    @property
    def complete(self) -> bool:
        return 0 not in self.written


def _ignore(step_id: int) -> None:
    """The default `on_step_end`, which does nothing."""


@dataclass(eq=False, slots=True)
class SequenceSpace:
    """Namespace of one client, created by BlockManager.open_space. The manager owns its attributes except
    `on_step_end`. That callback gets the id of a step that is no longer live, before its blocks are reused."""

    number: int
    # Counts of the client's tokens: computed, looked up in the prefix cache, found there.
    counters: MutableSequence[int]
    on_step_end: Callable[[int], object] = _ignore
    closed: bool = False
    rows: dict[int, int] = field(default_factory=dict)
    steps: dict[int, OpenStep] = field(default_factory=dict)
    pins: dict[int, Int64Array] = field(default_factory=dict)
    last_step_id: int = 0
    last_pin_id: int = 0
    _batch: tuple[bytes, Int64Array, Int64Array] = field(default_factory=lambda: _NO_BATCH, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self.rows

    def sequence_ids(self) -> list[int]:
        return list(self.rows)

    def lookup(self, sequence_ids: object, field: str = "sequence_ids") -> tuple[Int64Array, Int64Array]:
        """Return (ids int64[n], rows int64[n]) of distinct known sequences. The caller must not modify them. Raises
        InvalidArgumentError, UnknownSequenceError.

        The last batch is cached, because a running batch stays the same for many steps.
        """
        ids = int64_array(sequence_ids, field)  # type: ignore[arg-type]  # checked there
        key = ids.tobytes()
        if key == self._batch[0]:
            return self._batch[1], self._batch[2]
        names = ids.tolist()
        try:
            rows = np.array([self.rows[name] for name in names], np.int64)
        except KeyError:
            raise unknown_sequence(names, self.rows, field) from None
        if len(set(names)) != len(names):
            raise _repeated(names, field)
        ids = ids.copy()
        ids.flags.writeable = rows.flags.writeable = False
        self._batch = (key, ids, rows)
        return ids, rows

    def in_progress(self, step_id: int) -> bool:
        """Return whether some layers of the step are written and some are not."""
        step = self.steps.get(step_id)
        return step is not None and step.begun and not step.complete

    def layers_in_progress(self) -> int:
        """Return the number of written layers of all incomplete steps."""
        return sum(step.written.count(1) for step in self.steps.values() if not step.complete)

    def remove(self, sequence_id: int) -> int:
        self._batch = _NO_BATCH
        return self.rows.pop(sequence_id)

    def supersede(self, step_ids: Iterable[int]) -> None:
        """Make these steps stale. A step is live exactly while it is in `steps`."""
        for step_id in step_ids:
            if self.steps.pop(step_id, None) is not None:
                self.on_step_end(step_id)


def unknown_sequence(names: list[int], known: dict[int, int], field: str) -> KVServiceError:
    """Return the error for the first of these ids that is unknown."""
    i = next(i for i, name in enumerate(names) if name not in known)
    if names[i] < 0:
        return InvalidArgumentError("must not be negative", field=f"{field}[{i}]")
    return UnknownSequenceError(f"sequence {names[i]} is not known", field=f"{field}[{i}]", sequence_id=names[i])


def _repeated(names: list[int], field: str) -> KVServiceError:
    seen: set[int] = set()
    i = next(i for i, name in enumerate(names) if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    return InvalidArgumentError(f"sequence {names[i]} appears twice", field=f"{field}[{i}]")
