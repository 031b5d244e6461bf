"""Speculative decoding: tokens that an engine proposes are computed with the next token, and verified by its report."""

from __future__ import annotations

import numpy as np

from kvservice.blocks.plans import Int32Array, Int64Array
from kvservice.scheduler.decoding import DecodeSet
from kvservice.scheduler.drafts import Draft, InFlight
from kvservice.scheduler.reports import CheckedReport
from kvservice.scheduler.state import EngineQueues


def add_proposals(decodes: DecodeSet, draft: Draft) -> None:
    """Add the proposals of a draft's decodes that the token budget and their limits allow."""
    which = draft.which
    left = decodes.limits[which] - decodes.generated[which] - 1
    wanted = np.minimum(decodes.proposed[which], left)
    allowed: Int64Array = np.clip(draft.tokens_left - (np.cumsum(wanted) - wanted), 0, wanted)
    decodes.proposed[which] = allowed
    if np.count_nonzero(allowed):
        draft.counts = allowed + 1
        draft.tokens_left -= int(allowed.sum())


def tokens_with_proposals(decodes: DecodeSet, draft: Draft) -> Int32Array:
    """Return the next token of each decode and its proposals: int32[sum(draft.counts)]."""
    assert draft.counts is not None, "the draft has proposals"
    which = draft.which
    tokens = np.concatenate([decodes.tokens[which][:, None], decodes.proposals[which]], axis=1)
    chosen: Int32Array = tokens[np.arange(tokens.shape[1]) < draft.counts[:, None]]
    return chosen


def accept(queues: EngineQueues, flight: InFlight, report: CheckedReport) -> Int32Array:
    """Keep the accepted proposals of a batch. Returns the last token of each decode: int32[n]."""
    decodes, counts = queues.decodes, flight.draft.counts
    assert counts is not None, "the batch has proposals"
    accepted = np.ones(len(counts), np.int64) if report.counts is None else report.counts[: len(counts)]
    rows = flight.draft.speculative(len(decodes))
    counts, more = counts[counts > 1], accepted[counts > 1]
    decodes.lengths[rows] += more
    decodes.generated[rows] += more
    queues.counters.proposed_tokens += int(counts.sum()) - len(rows)
    queues.counters.accepted_tokens += int(more.sum()) - len(rows)
    cut_decodes(queues, rows[more < counts])
    last: Int32Array = report.tokens[np.cumsum(accepted) - 1]
    return last


def cut_decodes(queues: EngineQueues, rows: Int64Array) -> None:
    """Remove the tokens after the computed ones from these decodes, indices int64[n]."""
    if not len(rows):
        return
    decodes, config = queues.decodes, queues.manager.config
    lengths = decodes.lengths[rows]
    queues.manager.truncate(queues.namespace, decodes.ids[rows], lengths, unindex=True)
    decodes.blocks[rows] = (lengths + config.block_mask) >> config.block_shift
    decodes.sharing = True


def set_proposals(queues: EngineQueues, sampled: Int64Array, report: CheckedReport) -> None:
    """Note the proposals of a report for the `sampled` sequences int64[m] that decode and are in no batch in flight.
    Beams use none."""
    if report.proposed is None:
        return
    decodes, ends = queues.decodes, np.cumsum(report.proposed)
    at = {sequence_id: i for i, sequence_id in enumerate(decodes.ids.tolist())}
    for flight in queues.flight:
        for sequence_id in decodes.ids[flight.draft.which].tolist():
            del at[sequence_id]
    for sequence_id, end, count in zip(sampled.tolist(), ends.tolist(), report.proposed.tolist(), strict=True):
        if count and sequence_id in at and not decodes.beams[at[sequence_id]]:
            decodes.proposals[at[sequence_id], :count] = report.proposals[end - count : end]
            decodes.proposed[at[sequence_id]] = count
            decodes.speculating = True
