"""Frozen results of the scheduler: the batch of a step and what was preempted for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvservice.blocks import StepPlan, SwapPlan
from kvservice.blocks.plans import Int32Array, Int64Array

NO_SEQUENCES = np.zeros(0, np.int64)
NO_SEQUENCES.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence that lost its blocks: its `computed` tokens, of which the prefix cache may still find some, or
    its place on the device if it was `swapped`."""

    sequence_id: int
    computed: int
    swapped: bool


class QueueCounts(NamedTuple):
    """Requests of an engine by their place, after a batch was made."""

    waiting: int
    running: int
    swapped: int


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """The batch of one step.

    `step` covers its sequences: the first `num_decodes` get one token each, the others a chunk of their prompt of
    `step.query_lens` tokens. It is None if no sequence can run. `sampled` int64[m] are the sequences for which the
    engine samples a token: the decodes, then the prompts whose last chunk this is; `sampled_rows` int32[m] are their
    rows in the step. Before the step the device executes `swapped_out`, then `swapped_in`, then the copies of the step.
    `num_stalled` running sequences wait for a block.
    """

    number: int
    step: StepPlan | None
    num_decodes: int
    sampled: Int64Array
    sampled_rows: Int32Array
    counts: QueueCounts
    preempted: tuple[Preemption, ...] = ()
    swapped_out: tuple[SwapPlan, ...] = ()
    swapped_in: tuple[SwapPlan, ...] = ()
    num_stalled: int = 0

    @property
    def num_tokens(self) -> int:
        return 0 if self.step is None else len(self.step.slot_mapping)
