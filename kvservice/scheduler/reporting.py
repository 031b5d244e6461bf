"""Reports: the tokens that an engine sampled after a batch are checked and applied, samples are forked and end, and the
batch of an engine that lost its step is opened again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks import StepPlan
from kvservice.blocks.arguments import counts_for, int32_array, int64_array, refuse
from kvservice.blocks.plans import Int32Array, Int64Array
from kvservice.errors import InvalidArgumentError, OutOfBlocksError, QuotaExceededError
from kvservice.scheduler.admission import Preemptor
from kvservice.scheduler.batches import Draft, InFlight
from kvservice.scheduler.queues import EngineQueues
from kvservice.scheduler.requests import RUNNING, Phase, RequestGroup, RequestState
from kvservice.scheduler.stats import Latencies

_NO_TOKENS = np.zeros(0, np.int32)
_NO_TOKENS.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The tokens that an engine sampled after a batch.

    `batch` is the number of the batch. `token_ids` is int32[t], the tokens of the batch's m `sampled` sequences in
    their order (may be empty if m is 0). `finished` int64[f] are sequences of them that the engine found finished.
    `parents` int64[m] says of each which sequence it continues with its token: a beam another beam of its request in
    this batch, or itself, and other sequences themselves. None means that each continues itself.

    `num_tokens` int32[m] are the tokens of each sampled sequence, or None for one each. A sequence with k proposals in
    the batch has from 1 to k + 1: the proposals that are right, then the token sampled after them. `proposals` int32[p]
    are proposed to follow these tokens, `num_proposed` int32[m] for each sampled sequence, at most the scheduler's
    lookahead. They are forgotten where a sequence cannot use them in its next step.
    """

    batch: int
    token_ids: npt.ArrayLike = field(default_factory=lambda: _NO_TOKENS)
    num_tokens: npt.ArrayLike | None = None
    parents: npt.ArrayLike | None = None
    finished: Sequence[int] | npt.NDArray[np.int64] = ()
    proposals: npt.ArrayLike | None = None
    num_proposed: npt.ArrayLike | None = None


class Expected(NamedTuple):
    """Limits of the report of a batch, whose tokens are of the sequences `sampled` int64[m]. If the batch has
    proposals, `most` int64[m] are the most tokens of each sequence, and row i of `proposals` int32[d, lookahead] has
    the proposals of decode i."""

    sampled: Int64Array
    lookahead: int
    most: Int64Array | None = None
    proposals: Int32Array | None = None


class CheckedReport(NamedTuple):
    """A valid report: the tokens int32[t], `counts` int64[m] for each sampled sequence (None: one each), the ids of
    those that are finished, `parents` by the ids of the beams that continue others, and `proposals` int32[p] with their
    number for each sampled sequence, `proposed` int64[m], or None if there are none."""

    tokens: Int32Array
    counts: Int64Array | None
    finished: set[int]
    parents: dict[int, int]
    proposals: Int32Array = _NO_TOKENS
    proposed: Int64Array | None = None


def check_report(queues: EngineQueues, expected: Expected, report: Report) -> CheckedReport:
    """Validate a report. Raises InvalidArgumentError naming the field."""
    num_sampled, tokens = len(expected.sampled), _NO_TOKENS
    if num_sampled or np.size(report.token_ids):
        tokens = int32_array(report.token_ids, "token_ids")
    counts: Int64Array | None = None
    if report.num_tokens is not None and num_sampled:
        counts = _checked_counts(expected, report.num_tokens)
    num_tokens = num_sampled if counts is None else int(counts.sum())
    if len(tokens) != num_tokens:
        raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {num_tokens}", field="token_ids")
    if counts is not None and num_tokens > num_sampled:
        _check_accepted(expected, tokens, counts)
    parents = dict[int, int]()
    if report.parents is not None:
        parents = _check_parents(queues, expected.sampled.tolist(), report.parents)
    finished = set[int]()
    if len(report.finished):
        finished = set(int64_array(report.finished, "finished").tolist())
        unknown = finished.difference(expected.sampled.tolist())
        if unknown:
            raise InvalidArgumentError(f"sequence {min(unknown)} got no token in this batch", field="finished")
    if report.proposals is None and report.num_proposed is None:
        return CheckedReport(tokens, counts, finished, parents)
    return CheckedReport(tokens, counts, finished, parents, *_checked_proposals(expected, report))


def _checked_counts(expected: Expected, num_tokens: npt.ArrayLike) -> Int64Array:
    counts = counts_for(num_tokens, "num_tokens", len(expected.sampled))
    outside = (counts < 1) | (counts > (1 if expected.most is None else expected.most))
    if np.count_nonzero(outside):
        refuse("num_tokens", outside, "must be from 1 to 1 more than the proposals of the sequence in this batch")
    return counts


def _check_accepted(expected: Expected, tokens: Int32Array, counts: Int64Array) -> None:
    """Check that all tokens of a sequence except the last are its proposals, whose K/V are computed."""
    assert expected.proposals is not None, "only proposals allow more than one token"
    ends = np.cumsum(counts)
    for i in np.flatnonzero(counts > 1).tolist():
        count, first = int(counts[i]), int(ends[i] - counts[i])
        differ = tokens[first : first + count - 1] != expected.proposals[i, : count - 1]
        if np.count_nonzero(differ):
            at = first + int(differ.argmax())
            raise InvalidArgumentError("is not the token that was proposed and computed", field=f"token_ids[{at}]")


def _checked_proposals(expected: Expected, report: Report) -> tuple[Int32Array, Int64Array | None]:
    """Return (proposals int32[p], how many of them each sampled sequence has, int64[m])."""
    proposals = _NO_TOKENS
    if report.proposals is not None and np.size(report.proposals):
        proposals = int32_array(report.proposals, "proposals")
    if not len(expected.sampled) and (report.num_proposed is None or not np.size(report.num_proposed)):
        proposed: Int64Array | None = None
    else:
        none = np.zeros(len(expected.sampled), np.int64)
        proposed = none if report.num_proposed is None else counts_for(report.num_proposed, "num_proposed", len(none))
        if np.count_nonzero(proposed > expected.lookahead):
            limit = f"must be at most lookahead = {expected.lookahead}"
            refuse("num_proposed", proposed > expected.lookahead, limit)
    total = 0 if proposed is None else int(proposed.sum())
    if len(proposals) != total:
        raise InvalidArgumentError(f"has {len(proposals)} tokens, expected {total}", field="proposals")
    return proposals, proposed


def _check_parents(queues: EngineQueues, sampled: list[int], value: npt.ArrayLike) -> dict[int, int]:
    """Return the parents of the beams that continue others. Raises InvalidArgumentError."""
    parents = int64_array(value, "parents").tolist() if np.size(value) else []
    if len(parents) != len(sampled):
        raise InvalidArgumentError(f"has {len(parents)} elements for {len(sampled)} sequences", field="parents")
    known, moved = set(sampled), dict[int, int]()
    for i, (sequence_id, parent) in enumerate(zip(sampled, parents, strict=True)):
        if parent == sequence_id:
            continue
        group = queues.owner(sequence_id)
        if not group.request.beams or parent not in known or queues.owner(parent) is not group:
            raise InvalidArgumentError(
                f"sequence {sequence_id} cannot continue sequence {parent}", field=f"parents[{i}]"
            )
        if group.forked:  # before, all beams continue the prompt
            moved[sequence_id] = parent
    return moved


# ---- Applied reports


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


# ---- Proposals: tokens that an engine proposes are computed with the next token, and verified by its report


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


# ---- Samples: forked from the first one of their request when its prompt is computed, and ended one by one


# Preempted requests at the head of the queue whose cached blocks are kept longest.
_MAX_TOUCHED: Final = 8


class Samples:
    """Starts and ends the samples of an engine's requests."""

    def __init__(self, queues: EngineQueues) -> None:
        self._queues, self._config = queues, queues.config
        self._manager, self._namespace = queues.manager, queues.namespace

    def start(self, first: RequestState, tokens: list[int], finished: set[int]) -> list[int]:
        """Let a sequence decode whose prefill has ended. Before the fork, the other samples of its request start with
        it, and `tokens` has a token for each sample. A beam that resumes gets none. Returns the sequences that are
        over already."""
        first.phase = Phase.DECODING
        if first.resumes:
            first.resumes = False
            self._queues.decodes.add(first, len(first.tokens), first.next_token)
            return []
        first.generated += 1
        forks = len(tokens) > 1
        if forks and self._config.lookahead:  # the samples do not share the blocks that are reserved for the first
            self._manager.truncate(self._namespace, [first.sequence_id], [len(first.tokens)])
            first.blocks = self._manager.config.num_blocks_for(len(first.tokens))
        self._queues.decodes.add(first, len(first.tokens), tokens[0])
        over = first.generated >= first.limit or first.sequence_id in finished
        others = self._others(first, tokens[1:], finished) if forks else []
        first.group.forked = True
        if forks:
            self._fork(first, others, over)
        return [first.sequence_id] if over else []

    def _others(self, first: RequestState, tokens: list[int], finished: set[int]) -> list[RequestState]:
        """Make the other samples, except those that this token ends."""
        group, others = first.group, list[RequestState]()
        for i, token in enumerate(tokens, start=1):
            sample = first.sibling(i)
            if sample.limit <= 1 or sample.sequence_id in finished:
                group.ended[sample.sequence_id] = np.append(first.tokens, np.int32(token))
                continue
            sample.next_token = token
            group.members.append(sample)
            self._queues.states[sample.sequence_id] = sample
            others.append(sample)
        return others

    def _fork(self, first: RequestState, others: list[RequestState], over: bool) -> None:
        """Fork the other samples. If there is no room for a sequence, its sample waits, and with beams all do."""
        beams, room = first.group.request.beams, self._manager.sequences.num_free
        num_forked = 0 if beams and room < len(others) else self._fork_first(first, others[:room])
        if beams and num_forked < len(others):
            self._park(others if over else [first, *others])
            return
        for sample in others[num_forked:]:
            tokens = np.append(first.tokens, np.int32(sample.next_token))
            sample.continue_with(tokens, self._manager.config)
            sample.phase, sample.preempted, sample.lost = Phase.WAITING, True, len(first.tokens)
            self._queues.wait([sample])

    def _fork_first(self, first: RequestState, others: list[RequestState]) -> int:
        """Fork these samples until one cannot be. Returns how many were forked."""
        decodes = self._queues.decodes
        for i, sample in enumerate(others):
            try:
                self._manager.fork(self._namespace, [first.sequence_id], [sample.sequence_id])
            except Exception:  # if the error comes again when the sample is admitted, it is reported there
                return i
            decodes.add(sample, len(first.tokens), sample.next_token)
            decodes.sharing = True
        return len(others)

    def _park(self, beams: list[RequestState]) -> None:
        """Let beams wait together, which have a computed prompt and their first token."""
        for beam in beams:
            if beam.sequence_id in self._namespace:
                beam.next_token = self._queues.leave_decodes(beam)
                self._manager.free(self._namespace, [beam.sequence_id])
            beam.phase, beam.blocks, beam.resumes = Phase.WAITING, 0, True
            beam.preempted, beam.lost, beam.looked_up = True, len(beam.tokens), False
        self._queues.wait(beams)

    def rearrange(self, parents: dict[int, int]) -> None:
        """Let beams continue their `parents`, which are beams of the same request after the same step."""
        queues, decodes = self._queues, self._queues.decodes
        by_request: dict[int, list[int]] = {}
        for sequence_id in parents:
            by_request.setdefault(queues.states[sequence_id].group.request_id, []).append(sequence_id)
        for ids in by_request.values():
            self._manager.rearrange(self._namespace, ids, [parents[sequence_id] for sequence_id in ids])
            for sequence_id, one in zip(ids, self._manager.describe(self._namespace, ids), strict=True):
                decodes.blocks[decodes.index(sequence_id)] = one.num_blocks
        decodes.sharing = True

    def end(self, over: Iterable[int], aborted: list[int]) -> list[int]:
        """Remove running sequences, and all samples of aborted requests. Returns the ids of the requests that are
        over."""
        queues = self._queues
        states = [queues.states[sequence_id] for sequence_id in over]
        groups = [queues.requests[request_id] for request_id in aborted]
        for state in itertools.chain.from_iterable(group.members for group in groups):
            if state.phase in RUNNING:
                states.append(state)
            else:
                queues.withdraw(state)
        states = list(dict.fromkeys(states))
        for state in states:
            del queues.states[state.sequence_id]
            if state.phase is Phase.PREFILLING:
                queues.end_prefill(state)
            state.group.members.remove(state)
            if state.group.members:
                state.group.ended[state.sequence_id] = queues.tokens_of(state)
        if states:
            self._free([state.sequence_id for state in states])
        ended = dict.fromkeys([*(state.group for state in states if not state.group.members), *groups])
        for group in ended:
            queues.forget(group)
        return [group.request_id for group in ended]

    def withdraw_idle(self, group: RequestGroup) -> None:
        """Remove the samples of an aborted request that are in no batch in flight."""
        for state in [state for state in group.members if not self._queues.has_in_flight([state.sequence_id])]:
            group.ended[state.sequence_id] = self._queues.tokens_of(state)
            group.members.remove(state)
            self._queues.withdraw(state)

    def _free(self, sequence_ids: list[int]) -> None:
        """Remove decodes, and free their sequences. A sequence of a batch in flight is freed with its report."""
        queues = self._queues
        queues.keep_decodes(~np.isin(queues.decodes.ids, sequence_ids))
        for flight in queues.flight:
            computed = set(sequence_ids).intersection(flight.step.sequence_ids.tolist())
            flight.ended += computed
            sequence_ids = [name for name in sequence_ids if name not in computed]
        if sequence_ids:
            self._manager.free(self._namespace, sequence_ids)
        for state in itertools.islice(self._queues.waiting, _MAX_TOUCHED):
            if state.preempted:  # it runs again soon, so blocks of the finished requests are evicted before its own
                self._manager.touch(state.hashes)


# ---- Retries


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
            except (OutOfBlocksError, QuotaExceededError):
                self._preempt_last(starts, again)
            except Exception as error:  # the sequences without those that are at fault go on
                again.error = error
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
