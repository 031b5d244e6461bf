"""The reporter applies reports: the tokens of a batch, the progress of its sequences, and the ends of some."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Int64Array
from kvservice.scheduler.drafts import InFlight
from kvservice.scheduler.reports import CheckedReport, Expected
from kvservice.scheduler.samples import Samples
from kvservice.scheduler.speculation import accept, set_proposals
from kvservice.scheduler.state import EngineQueues
from kvservice.scheduler.stats import Latencies


class Reporter:
    """Applies checked reports to the queues of one engine."""

    def __init__(self, queues: EngineQueues, samples: Samples, latencies: Latencies) -> None:
        self._queues, self._samples, self._latencies = queues, samples, latencies
        self._manager, self._namespace = queues.manager, queues.namespace

    def expected(self, flight: InFlight, finished: npt.ArrayLike = ()) -> Expected:
        """Return the limits of a batch's report. It covers the sequences that have not ended since, without the ones
        that the report before it finds `finished`."""
        batch, draft, decodes = flight.batch, flight.draft, self._queues.decodes
        sampled, lookahead = batch.sampled, self._queues.config.lookahead
        if len(draft.decodes) < batch.num_decodes:
            sampled = np.concatenate([decodes.ids[draft.which], sampled[batch.num_decodes :]])
        kept = ~np.isin(sampled, finished) if np.size(finished) else None
        if draft.counts is None:
            return Expected(sampled if kept is None else sampled[kept], lookahead)
        most, proposals = np.ones(len(sampled), np.int64), decodes.proposals[draft.which]
        most[: len(draft.counts)] = draft.counts
        if kept is not None:
            sampled, most, proposals = sampled[kept], most[kept], proposals[kept[: len(proposals)]]
        return Expected(sampled, lookahead, most, proposals)

    def apply(self, flight: InFlight, sampled: Int64Array, report: CheckedReport, now_s: float) -> list[int]:
        """Apply the report of the oldest batch, which is in flight no more. Returns the sequences that are over."""
        num_decodes = len(flight.draft.decodes)
        flight.advance(self._queues.decodes)
        over = self._update_decodes(flight, sampled[:num_decodes], report, now_s) if num_decodes else []
        self._tell_follower()
        if report.parents:
            self._samples.rearrange(report.parents)
        tokens = report.tokens[len(report.tokens) - (len(sampled) - num_decodes) :].tolist()
        over += self._update_chunks(flight, tokens, report.finished, now_s)
        set_proposals(self._queues, sampled, report)
        return over

    def _update_decodes(self, flight: InFlight, ids: Int64Array, report: CheckedReport, now_s: float) -> list[int]:
        """Note the tokens of the decodes `ids` int64[n]. Returns the ids of the sequences that are over."""
        decodes, which = self._queues.decodes, flight.draft.which
        if flight.draft.counts is None:
            decodes.tokens[which] = report.tokens[: len(ids)]
        else:
            decodes.tokens[which] = accept(self._queues, flight, report)
        if decodes.speculating:
            self._forget_proposals(flight)
        self._latencies.between_tokens.observe(decodes.times.advance(which, len(ids), now_s), len(ids))
        over = decodes.generated[which] >= decodes.limits[which]
        if report.finished:
            over |= np.isin(ids, list(report.finished))
        return ids[over].tolist() if np.count_nonzero(over) else []

    def _forget_proposals(self, flight: InFlight) -> None:
        """Forget the proposals of a reported batch."""
        decodes = self._queues.decodes
        decodes.proposed[flight.draft.which] = 0
        decodes.speculating = bool(np.count_nonzero(decodes.proposed))

    def _tell_follower(self) -> None:
        """Set the tokens of the batch that is still in flight, where the reported batch has sampled them."""
        for flight in self._queues.flight:
            if flight.unknown is not None and self._manager.written_layers(self._namespace, flight.step.step_id):
                tokens = self._queues.decodes.tokens[flight.draft.which][flight.unknown]
                self._manager.set_tokens(self._namespace, flight.step.step_id, tokens)
                flight.unknown = None

    def _update_chunks(self, flight: InFlight, tokens: list[int], finished: set[int], now_s: float) -> list[int]:
        """Let prefills decode from now on whose tokens are all computed. Returns the ids of the sequences that are
        over."""
        over, sampled = list[int](), iter(tokens)
        for state, _ in flight.draft.chunks:
            if state.pending:
                continue
            self._queues.end_prefill(state)
            if state.num_sampled:
                self._latencies.observe_token(state, now_s)
            over += self._samples.start(state, [next(sampled) for _ in range(state.num_sampled)], finished)
        return over
