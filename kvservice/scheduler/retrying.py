"""Retries: the batch of an engine that lost its step is opened again."""

from __future__ import annotations

import numpy as np

from kvservice.blocks import StepPlan
from kvservice.blocks.plans import Int64Array
from kvservice.errors import OutOfBlocksError
from kvservice.scheduler.drafts import Draft, InFlight
from kvservice.scheduler.preemption import Preemptor
from kvservice.scheduler.requests import RequestState
from kvservice.scheduler.speculation import cut_decodes
from kvservice.scheduler.state import EngineQueues


class Retrier:
    """Opens batches again. The tokens of a batch that was made are in the tables, and perhaps computed."""

    def __init__(self, queues: EngineQueues, preemptor: Preemptor) -> None:
        self._queues, self._config, self._preemptor = queues, queues.config, preemptor
        self._manager, self._namespace = queues.manager, queues.namespace

    def retry(self) -> tuple[Draft, Int64Array, StepPlan | None]:
        """Open a new step for the oldest batch in flight: its draft, its sequences, and the step if any are left. The
        batch after it is taken back.

        Chunks that are computed are done, unless an engine samples after them; then their last token is computed again.
        A block to write may be shared meanwhile, so that its copy needs a block. If there is none, a request is
        preempted.
        """
        queues = self._queues
        lost, later = queues.flight[0], queues.flight[1:]
        queues.flight.clear()
        again = Draft(0, lost.draft.max_running, 0)
        for batch in later:
            self._remove_tokens(batch)
        if lost.advanced:
            lost.count(queues.decodes, -1)
        if lost.ended:
            self._manager.free(self._namespace, lost.ended)
        self._drop_proposals(lost)
        starts = self._starts(lost, again)
        for batch in later:
            self._recount_chunks(batch, starts, again)
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

    def _remove_tokens(self, batch: InFlight) -> None:
        """Remove the tokens that a batch made ahead has appended. Tokens that were not known are in no sequence."""
        which = np.arange(len(self._queues.decodes))[batch.draft.which]
        appended = which if batch.unknown is None else which[~batch.unknown]
        cut_decodes(self._queues, appended)

    def _drop_proposals(self, lost: InFlight) -> None:
        """Remove the proposals of a lost batch. Its new step reserves their slots again."""
        decodes = self._queues.decodes
        rows = lost.draft.speculative(len(decodes))
        if len(rows):
            decodes.proposed[rows] = 0
            self._manager.truncate(self._namespace, decodes.ids[rows], decodes.lengths[rows] + 1)

    def _recount_chunks(self, batch: InFlight, starts: dict[int, int], again: Draft) -> None:
        """Count what is computed of the chunks of a batch made ahead. A prompt with all tokens computed goes back to
        the queue, because the token after them was not reported."""
        for state, _ in batch.draft.chunks:
            if state.sequence_id in starts:
                continue
            (described,) = self._manager.describe(self._namespace, [state.sequence_id])
            state.pending = described.length - described.num_computed
            if not state.pending:
                self._preempt(list(state.unit), starts, again)

    def _starts(self, lost: InFlight, again: Draft) -> dict[int, int]:
        """Return the first token to compute of each sequence in the new step, and put its chunks into the draft."""
        step, num_decodes = lost.step, lost.batch.num_decodes
        ids, stops = step.sequence_ids.tolist(), step.context_lens.tolist()
        begun = (step.context_lens - step.query_lens).tolist()
        starts = dict(zip(ids[:num_decodes], begun, strict=False))
        for sequence_id in lost.ended:
            del starts[sequence_id]
        for i, (state, count) in enumerate(lost.draft.chunks, start=num_decodes):
            start, left = begun[i], count
            (described,) = self._manager.describe(self._namespace, [state.sequence_id])
            if described.num_computed >= stops[i]:
                state.pending -= count
                if state.pending:
                    continue
                state.pending, start, left = 1, stops[i] - 1, 1
            starts[state.sequence_id] = start
            again.chunks.append((state, left))
        return starts

    def _preempt_last(self, starts: dict[int, int], again: Draft) -> None:
        """Preempt the last sequence of the order, with the other beams of its request."""
        last = max((self._queues.states[sequence_id] for sequence_id in starts), key=lambda one: one.rank)
        self._preempt(list(last.unit), starts, again)

    def _preempt(self, unit: list[RequestState], starts: dict[int, int], again: Draft) -> None:
        """Preempt these sequences, and leave them out of the batch."""
        for state in unit:
            starts.pop(state.sequence_id, None)
        again.chunks = [(state, count) for state, count in again.chunks if state not in unit]
        self._preemptor.recompute(unit, again)
