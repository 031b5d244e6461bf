"""Session namespaces: the sequence ids, live steps and pins of one client, unknown in all other namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvservice.blocks.arguments import int64_array, whole_number
from kvservice.blocks.plans import Int64Array, StepPlan
from kvservice.errors import (
    DuplicateSequenceError,
    InvalidArgumentError,
    KVServiceError,
    SequenceLostError,
    SequenceSwappedError,
    StaleStepError,
    UnknownSequenceError,
    UnknownStepError,
)

# LiveStep.follows and LiveStep.follower of a step without the other one. Step ids begin at 1.
NO_STEP = 0
# Indices of the counters of a namespace.
COMPUTED_TOKENS, QUERY_TOKENS, HIT_TOKENS = range(3)
NUM_COUNTERS = 3
# Indices of the kept ids of a namespace.
LAST_STEP_ID, LAST_PIN_ID = range(2)
_NO_BATCH = (b"", np.zeros(0, np.int64), np.zeros(0, np.int64))


class DiskSequence(NamedTuple):
    """A sequence that is swapped out to a disk: its length and its computed tokens."""

    length: int
    num_computed: int


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


def _ignore(step_id: int) -> None:
    """The default `on_step_end`, which does nothing."""


@dataclass(eq=False, slots=True)
class SessionNamespace:
    """Namespace of one client, created by BlockManager.open_namespace. The manager owns its attributes except
    `on_step_end`. That callback gets the id of a step that is no longer live, before its blocks are reused.

    `lost` are the ids of sequences that did not survive a restart of the daemon, and `on_disk` sequences that have no
    row, because they are swapped out to a disk. Steps up to
    `last_step_before_restart` were opened before it. `kept_ids` int64[2] holds the last ids for the next restart."""

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
    last_step_before_restart: int = NO_STEP
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
            raise self.unknown_sequence(names, field) from None
        if len(set(names)) != len(names):
            raise _repeated(names, field)
        ids = ids.copy()
        ids.flags.writeable = rows.flags.writeable = False
        self._batch = (key, ids, rows)
        return ids, rows

    def check_new_ids(self, ids: list[int], field: str) -> None:
        """Check that these sequence ids are valid and unused. `field` is a format string for the index of an id.
        Raises InvalidArgumentError, DuplicateSequenceError."""
        known = self.rows.keys() | self.on_disk.keys() if self.on_disk else self.rows.keys()
        if all(map(_is_id, ids)) and len(set(ids)) == len(ids) and known.isdisjoint(ids):
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


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _repeated(names: list[int], field: str) -> KVServiceError:
    seen: set[int] = set()
    i = next(i for i, name in enumerate(names) if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    return InvalidArgumentError(f"sequence {names[i]} appears twice", field=f"{field}[{i}]")


def distinct_steps(steps: Int64Array) -> Iterator[int]:
    """Return the distinct step ids in steps int64[n]. A running batch usually has one."""
    first = int(steps[0])
    if not np.count_nonzero(steps != first):
        return iter((first,))
    return iter(set(steps.tolist()))
