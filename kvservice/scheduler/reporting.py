"""What a report changes: the tokens of the batch, the progress of its sequences, and which of them are over."""

from __future__ import annotations

import numpy as np

from kvservice.blocks.plans import Int64Array
from kvservice.scheduler.reports import CheckedReport
from kvservice.scheduler.samples import Samples
from kvservice.scheduler.state import EngineQueues, InFlight
from kvservice.scheduler.stats import Latencies


class Reporter:
    """Applies checked reports to the queues of one engine."""

    def __init__(self, queues: EngineQueues, samples: Samples, latencies: Latencies) -> None:
        self._queues, self._samples, self._latencies = queues, samples, latencies
        self._manager, self._namespace = queues.manager, queues.namespace

    def sampled(self, flight: InFlight) -> Int64Array:
        """Return the sequences whose tokens the report of a batch has: those of the batch that have not ended since."""
        batch = flight.batch
        if len(flight.draft.decodes) == batch.num_decodes:
            return batch.sampled
        return np.concatenate([self._queues.decodes.ids[flight.draft.which], batch.sampled[batch.num_decodes :]])

    def apply(self, flight: InFlight, sampled: Int64Array, report: CheckedReport, now_s: float) -> list[int]:
        """Apply the report of the oldest batch, which is in flight no more. Returns the sequences that are over."""
        num_decodes = len(flight.draft.decodes)
        flight.advance(self._queues.decodes)
        over = self._update_decodes(flight, sampled[:num_decodes], report, now_s) if num_decodes else []
        self._tell_follower()
        if report.parents:
            self._samples.rearrange(report.parents)
        over += self._update_chunks(flight, report.tokens[num_decodes:].tolist(), report.finished, now_s)
        return over

    def _update_decodes(self, flight: InFlight, ids: Int64Array, report: CheckedReport, now_s: float) -> list[int]:
        decodes, which = self._queues.decodes, flight.draft.which
        decodes.tokens[which] = report.tokens[: len(ids)]
        self._latencies.between_tokens.observe(decodes.times.advance(which, len(ids), now_s), len(ids))
        over = decodes.generated[which] >= decodes.limits[which]
        if report.finished:
            over |= np.isin(ids, list(report.finished))
        return ids[over].tolist() if np.count_nonzero(over) else []

    def _tell_follower(self) -> None:
        """Give the batch that is in flight still the tokens that it appends after those of the reported batch."""
        for flight in self._queues.flight:
            if flight.unknown is not None and self._manager.written_layers(self._namespace, flight.step.step_id):
                tokens = self._queues.decodes.tokens[flight.draft.which][flight.unknown]
                self._manager.set_tokens(self._namespace, flight.step.step_id, tokens)
                flight.unknown = None

    def _update_chunks(self, flight: InFlight, tokens: list[int], finished: set[int], now_s: float) -> list[int]:
        """Let the prefills decode from now on of which all tokens are computed. Returns the ids of those over."""
        over, sampled = list[int](), iter(tokens)
        for state, _ in flight.draft.chunks:
            if state.pending:
                continue
            self._queues.end_prefill(state)
            if state.num_sampled:
                self._latencies.observe_token(state, now_s)
            over += self._samples.start(state, [next(sampled) for _ in range(state.num_sampled)], finished)
        return over
