"""The opener opens the step of a draft, which makes the draft a batch."""

from __future__ import annotations

import numpy as np

from kvservice.blocks import StepPlan
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.scheduler.batches import QueueCounts, ScheduledBatch
from kvservice.scheduler.drafts import Draft, InFlight
from kvservice.scheduler.requests import RequestState
from kvservice.scheduler.speculation import tokens_with_proposals
from kvservice.scheduler.state import EngineQueues


class Opener:
    """Opens the steps of one engine's batches, and puts the batches in flight."""

    def __init__(self, queues: EngineQueues) -> None:
        self._queues, self._lookahead = queues, queues.config.lookahead
        self._manager, self._namespace = queues.manager, queues.namespace
        self._row_numbers = np.arange(queues.config.max_running, dtype=np.int32)
        self._row_numbers.flags.writeable = False

    def open(self, draft: Draft, number: int) -> ScheduledBatch:
        """Open the step of a draft. If a batch is in flight, its step follows that one's."""
        decodes, which = self._queues.decodes, draft.which
        ids = decodes.ids[which]
        tokens = decodes.tokens[which] if draft.counts is None else tokens_with_proposals(decodes, draft)
        unknown, step = self._unknown(draft), None
        decodes.blocks[which] += draft.growth
        ids = ids.copy()
        if draft.chunks:
            ids = np.concatenate([ids, np.array([state.sequence_id for state, _ in draft.chunks], np.int64)])
        if len(ids):
            step = self._step(draft, ids, tokens)
        return self.batch_of(draft, ids, step, number, unknown)

    def batch_of(
        self, draft: Draft, ids: Int64Array, step: StepPlan | None, number: int, unknown: BoolArray | None = None
    ) -> ScheduledBatch:
        """Return the batch of a step over the sequences `ids` int64[n], which is in flight from now on."""
        queues, num_decodes = self._queues, len(draft.decodes)
        sampled, rows = ids[:num_decodes], self._row_numbers[:num_decodes]
        if draft.chunks:
            first, samples = _samples_of_chunks(draft.chunks)
            sampled = np.concatenate([sampled, samples])
            rows = np.concatenate([rows, num_decodes + first])
        batch = ScheduledBatch(
            number,
            step,
            num_decodes,
            sampled,
            rows,
            QueueCounts(len(queues.waiting), queues.num_running, len(queues.swapped)),
            tuple(draft.preempted),
            tuple(draft.swapped_out),
            tuple(draft.swapped_in),
            draft.num_stalled,
        )
        if step is not None:
            queues.flight.append(InFlight(batch, step, draft, unknown))
        return batch

    def _step(self, draft: Draft, ids: Int64Array, tokens: Int32Array) -> StepPlan:
        manager, namespace, lookahead = self._manager, self._namespace, self._lookahead
        flight, num_decodes = self._queues.flight, len(draft.decodes)
        if not flight and not draft.chunks and draft.counts is None:
            return manager.append(namespace, ids, tokens, lookahead=lookahead)
        counts = np.ones(len(ids), np.int64)
        if draft.counts is not None:
            counts[:num_decodes] = draft.counts
        if draft.chunks:
            counts[num_decodes:] = [count for _, count in draft.chunks]
        if not flight and not num_decodes:
            return manager.open_step(namespace, ids, counts, lookahead)
        follows = flight[0].step.step_id if flight else None
        return manager.advance(namespace, ids, tokens, counts, lookahead, num_appended=draft.counts, follows=follows)

    def _unknown(self, draft: Draft) -> BoolArray | None:
        """Return which decodes of a draft get the token of the batch in flight: bool[n], or None if none of them."""
        queues = self._queues
        if not queues.flight or not len(draft.decodes):
            return None
        sampled = np.zeros(len(queues.decodes), np.bool_)
        sampled[queues.flight[0].draft.which] = True
        unknown = sampled[draft.which]
        return unknown if np.count_nonzero(unknown) else None


def _samples_of_chunks(chunks: list[tuple[RequestState, int]]) -> tuple[Int32Array, Int64Array]:
    """Return the samples that get a token after these chunks: int32[m], which chunk, and int64[m], its sequence."""
    which, ids = list[int](), list[int]()
    for i, (state, count) in enumerate(chunks):
        if count == state.pending:
            ids += range(state.sequence_id, state.sequence_id + state.num_sampled)
            which += [i] * state.num_sampled
    return np.array(which, np.int32), np.array(ids, np.int64)
