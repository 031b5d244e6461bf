"""Retries: the batch of an engine that lost its step is opened again."""

from __future__ import annotations

import numpy as np

from kvservice.blocks import StepPlan
from kvservice.blocks.plans import Int64Array
from kvservice.errors import OutOfBlocksError
from kvservice.scheduler.batches import ScheduledBatch
from kvservice.scheduler.preemption import Preemptor
from kvservice.scheduler.state import Draft, EngineQueues


class Retrier:
    """Opens batches again. The tokens of a batch that was made are in the tables, and perhaps computed."""

    def __init__(self, queues: EngineQueues, preemptor: Preemptor) -> None:
        self._queues, self._config, self._preemptor = queues, queues.config, preemptor
        self._manager, self._namespace = queues.manager, queues.namespace

    def retry(self, batch: ScheduledBatch, draft: Draft) -> tuple[Draft, Int64Array, StepPlan | None]:
        """Open a new step for a batch: the draft of it, its sequences, and the step if any are left.

        Chunks that are computed are done, unless an engine samples after them; then their last token is computed again.
        A block to write may be shared meanwhile, so that its copy needs a block. If there is none, a request is
        preempted.
        """
        again = Draft(0, draft.max_running, 0)
        starts = self._starts(batch, draft, again)
        while starts:
            ids = np.array(list(starts), np.int64)
            again.decodes = np.flatnonzero(np.isin(self._queues.decodes.ids, ids))
            again.growth = np.zeros(len(again.decodes), np.int64)
            counts = np.ones(len(ids), np.int64)
            counts[len(again.decodes) :] = [count for _, count in again.chunks]
            first = np.array(list(starts.values()), np.int64)
            try:
                return again, ids, self._manager.reopen(self._namespace, ids, first, counts, self._config.lookahead)
            except OutOfBlocksError:
                self._preempt_last(starts, again)
        again.decodes = again.growth = np.zeros(0, np.int64)
        return again, again.decodes, None

    def _starts(self, batch: ScheduledBatch, draft: Draft, again: Draft) -> dict[int, int]:
        """Return the first token to compute of each sequence in the new step, and put its chunks into the draft."""
        step = batch.step
        assert step is not None, "a batch in progress has a step"
        ids, stops = step.sequence_ids.tolist(), step.context_lens.tolist()
        begun = (step.context_lens - step.query_lens).tolist()
        starts = dict(zip(ids[: batch.num_decodes], begun, strict=False))
        described = self._manager.describe(self._namespace, ids)
        for i, (state, count) in enumerate(draft.chunks, start=batch.num_decodes):
            start, left = begun[i], count
            if described[i].num_computed >= stops[i]:
                state.pending -= count
                if state.pending:
                    continue
                state.pending, start, left = 1, stops[i] - 1, 1
            starts[state.sequence_id] = start
            again.chunks.append((state, left))
        return starts

    def _preempt_last(self, starts: dict[int, int], again: Draft) -> None:
        """Preempt the last sequence of the order, and leave it out of the batch."""
        state = max((self._queues.states[sequence_id] for sequence_id in starts), key=lambda one: one.rank)
        del starts[state.sequence_id]
        again.chunks = [(one, count) for one, count in again.chunks if one is not state]
        self._preemptor.recompute(state, again)
