"""The scheduler of one engine: add and abort requests, make a batch and open its step, report its tokens; and the
shares of several engines in one pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlockManager, SessionNamespace, StepPlan
from kvservice.blocks.arguments import whole_number
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.blocks.slices import Slices, finish
from kvservice.errors import (
    DuplicateSequenceError,
    FailedPreconditionError,
    KVServiceError,
    QuotaExceededError,
    UnknownSequenceError,
)
from kvservice.scheduler.admission import Admission, Preemptor
from kvservice.scheduler.batches import (
    NO_SEQUENCES,
    Draft,
    InFlight,
    QueueCounts,
    ScheduledBatch,
    tokens_with_proposals,
)
from kvservice.scheduler.config import BatchPolicy, QueueOrder, SchedulerConfig
from kvservice.scheduler.queues import EngineQueues, RequestSnapshot, describe_requests
from kvservice.scheduler.reporting import CheckedReport, Report, Reporter, Retrier, Samples, check_report
from kvservice.scheduler.requests import (
    PreparedRequest,
    Request,
    RequestGroup,
    RequestState,
    check_request,
    hashes_in_slices,
)
from kvservice.scheduler.stats import Latencies, SchedulerFigures


class EngineScheduler:
    """Decides what one engine computes in each step (vLLM's scheduler, adapted to a service).

    The engine calls `schedule`, computes the batch's step in all layers, and calls `update` with the sampled tokens.
    All methods are deterministic. The caller passes the time.
    """

    def __init__(
        self,
        manager: BlockManager,
        namespace: SessionNamespace,
        config: SchedulerConfig,
        shares: PoolShares,
        weight: float,
        latencies: Latencies,
    ) -> None:
        self.config = config
        self.queues = EngineQueues(manager, namespace, config, SchedulerFigures())
        self.share = shares.add(weight, None if namespace.quota is None else namespace.quota.tenant)
        self._shares, self._manager, self._namespace = shares, manager, namespace
        self._latencies, self._num_stalled = latencies, 0
        self._preemptor = Preemptor(self.queues)
        self._samples = Samples(self.queues)
        self._retrier = Retrier(self.queues, self._preemptor)
        self._opener = Opener(self.queues)
        self._reporter = Reporter(self.queues, self._samples, latencies)
        self._num_steps = self._num_arrived = 0
        # A step over a request of so many blocks, and over one token of each other sequence, is within the limits.
        others = config.max_running * (2 + manager.config.num_blocks_for(config.lookahead))
        self._max_blocks = manager.config.max_request_blocks - others
        self._admission = Admission(self.queues, self._preemptor, self._max_blocks)

    def __len__(self) -> int:
        """Number of requests that are not finished."""
        return len(self.queues.requests)

    @property
    def unreported(self) -> tuple[int, ...]:
        """The numbers of the batches that are not reported, the oldest first."""
        return tuple(flight.batch.number for flight in self.queues.flight)

    def add(self, request: Request, now_s: float = 0.0) -> None:
        """Queue a request.

        Raises InvalidArgumentError, DuplicateSequenceError, QuotaExceededError above max_requests, and
        OutOfBlocksError with `never` if the pool can never hold the request.
        """
        self.enqueue([finish(self.prepare(request))], now_s)

    def prepare(self, request: Request) -> Slices[PreparedRequest]:
        """Check a request and hash its prompt, in slices. Raises InvalidArgumentError and OutOfBlocksError as `add`."""
        blocks = self._manager.config
        try:
            max_width = min(self.config.max_running, blocks.max_sequences)
            if request.beams:
                max_width = min(max_width, self.config.max_step_tokens)
            checked = check_request(request, blocks, self.config.lookahead, max_width, self._max_blocks)
            if error := self._admission.refusal(request, len(checked.tokens), request.width):
                raise error
        except KVServiceError:
            self.queues.counters.refused += 1
            raise
        hashes = yield from hashes_in_slices(checked.tokens, checked.extra, blocks)
        return PreparedRequest(request, checked, hashes)

    def enqueue(self, prepared: Sequence[PreparedRequest], now_s: float, field: str = "request_id") -> None:
        """Queue all these requests, or none. `field` is a format string for the index of a request. Raises the other
        errors of `add`."""
        try:
            self._check_new(prepared, field)
        except KVServiceError:
            self.queues.counters.refused += len(prepared)
            raise
        for request, (tokens, extra, limits), hashes in prepared:
            delay = self.config.size_delay_steps * self._manager.config.num_blocks_for(len(tokens))
            place = self._num_steps + min(delay, self.config.max_size_delay_steps)
            priority = request.priority if self.config.order is QueueOrder.PRIORITY else 0
            number = self._num_arrived + 1
            self._num_arrived += len(limits)
            group = RequestGroup(request, number, len(tokens), limits)
            rank = (priority, place, number)
            self.queues.add(RequestState(group, request.request_id, limits[0], rank, tokens, hashes, extra, now_s))
        self.queues.counters.added += len(prepared)
        self.share.active = True

    def _check_new(self, prepared: Sequence[PreparedRequest], field: str) -> None:
        """Check that the ids of all samples are free, and that the queue has room."""
        queues, seen = self.queues, set[int]()
        for i, one in enumerate(prepared):
            for sequence_id in one.sequence_ids:
                known = sequence_id in queues.requests or sequence_id in queues.reserved or sequence_id in seen
                if known or sequence_id in self._namespace or sequence_id in self._namespace.on_disk:
                    raise DuplicateSequenceError(
                        f"sequence {sequence_id} is in use", field=field.format(i), sequence_id=sequence_id
                    )
            seen.update(one.sequence_ids)
        limit = self.config.max_requests
        if len(queues.requests) + len(prepared) > limit:
            raise QuotaExceededError(
                f"there would be {len(queues.requests) + len(prepared)} requests",
                field=field.format(len(prepared) - 1), limit="max_requests", value=limit,
            )  # fmt: skip

    def abort(self, request_id: int) -> None:
        """Drop a request with all its samples. Samples of a batch in flight end with its report. Raises
        InvalidArgumentError, and UnknownSequenceError for a request that is unknown or over."""
        group = self.queues.requests.get(whole_number(request_id, "request_id", 0, 2**63 - 1))
        if group is None or request_id in self.queues.aborted:
            raise UnknownSequenceError(
                f"request {request_id} is unknown or finished", field="request_id", sequence_id=request_id
            )
        self._abort(group)

    def _abort(self, group: RequestGroup) -> None:
        self.queues.counters.aborted += 1
        if self.queues.in_flight(group):
            self.queues.aborted.append(group.request_id)
            self._samples.withdraw_idle(group)
        else:
            self._samples.end([], [group.request_id])

    def schedule(
        self,
        now_s: float = 0.0,
        max_step_tokens: int | None = None,
        max_running: int | None = None,
        *,
        ahead: bool = False,
    ) -> ScheduledBatch:
        """Make the batch of the next step, and open its step. The budgets may be below those of the configuration.

        With `ahead` one batch may be in flight. The new one goes on after it, without the sequences whose next token
        depends on its report. It has no step if a running request would have to be preempted: then the engine reports
        the batch in flight first. Raises FailedPreconditionError if more batches are in flight than may be. Errors that
        come later are in the batch.
        """
        flight = self.queues.flight
        if len(flight) > (1 if ahead else 0):
            raise FailedPreconditionError(
                f"the tokens of batch {flight[0].batch.number} are not reported", field="batch"
            )
        config, shares = self.config, self._shares
        tokens, running = config.max_step_tokens, config.max_running
        if max_step_tokens is not None:
            tokens = whole_number(max_step_tokens, "max_step_tokens", 1, tokens)
        if max_running is not None:
            running = whole_number(max_running, "max_running", 1, running)
        if len(shares) > 1:
            self.share.held = self.queues.held_blocks()
        draft = Draft(tokens, running, shares.allowance(self.share), ahead=bool(flight))
        if flight:
            flight[0].advance(self.queues.decodes)
        try:
            self._plan(draft, now_s)
        except Exception as error:  # the batch has what was planned before it
            draft.error = error
        self._num_steps += 1
        batch = self._opener.open(draft, self._num_steps)
        for group in draft.failed:
            self._abort(group)
        self._num_stalled = batch.num_stalled
        self.queues.counters.count_batch(batch)
        if len(shares) > 1:
            self.share.held = self.queues.held_blocks()
            self.share.hungry = draft.short or next(self._admission.admissible(self.queues.waiting), None) is not None
        return batch

    def _plan(self, draft: Draft, now_s: float) -> None:
        """Preempt what must give way, then choose the sequences of the batch."""
        if draft.max_new_blocks < 0 and len(self.queues.running_by_rank()) > 1:
            self._preemptor.preempt_one(draft)
        self._admission.preempt_for_priority(draft)
        if not draft.blocked:
            self._fill(draft, now_s)

    def _fill(self, draft: Draft, now_s: float) -> None:
        """Choose decodes, go on with prefills, and admit requests, in the order of the policy."""
        chunked = self.config.batches is BatchPolicy.CHUNKED
        if chunked:
            self._preemptor.choose_decodes(draft)
        else:
            draft.needed = self.queues.needed_blocks()
        if draft.blocked:
            return
        for state in self.queues.prefilling.values():
            if not self.queues.aborted or state.group.request_id not in self.queues.aborted:
                draft.add_chunk(state, self.config.long_prefill_tokens)
        draft.limit_pending(self._max_blocks, self._manager.config.block_size)
        if not draft.short:
            self._admission.admit(draft, now_s)
        if not chunked and not draft.chunks:
            draft.needed = 0
            self._preemptor.choose_decodes(draft)

    def update(self, report: Report, now_s: float = 0.0) -> list[int]:
        """Accept the report of the oldest batch in flight. A request also finishes with its last of max_tokens.

        Returns the ids of all requests that finished or were aborted. Their blocks are freed. The blocks of a sequence
        that is also in the next batch in flight are freed with that batch's report, which has no token of it. Raises
        FailedPreconditionError if this is not the batch to report or a layer of it is not written, and
        InvalidArgumentError.
        """
        queues, flight = self.queues, self.queues.flight
        sampled, checked = self._checked(report, 0, ())
        oldest = flight[0]
        self._manager.commit_written(self._namespace, oldest.step.step_id)  # a lane may not have committed it yet
        del flight[0]
        over = self._reporter.apply(oldest, sampled, checked, now_s)
        queues.counters.generated_tokens += len(checked.tokens)
        ended = self._end(over) if over or queues.aborted else []
        if oldest.ended:
            self._manager.free(self._namespace, oldest.ended)
        self.share.active = bool(queues.requests)
        return ended

    def check(self, reports: Sequence[Report]) -> None:
        """Raise what `update` would raise for these reports, one after the other. The fields of errors begin with
        reports[i]. Changes nothing."""
        finished = np.zeros(0, np.int64)
        for i, report in enumerate(reports):
            try:
                _, checked = self._checked(report, i, finished)
            except KVServiceError as error:
                error.field = f"reports[{i}].{error.field}"
                raise
            finished = np.array(list(checked.finished), np.int64)

    def _checked(self, report: Report, place: int, finished: npt.ArrayLike) -> tuple[Int64Array, CheckedReport]:
        """Check the report of the batch at this place of those in flight. The report before it finds the sequences
        `finished` finished. Returns the sequences that got tokens, and the valid report."""
        flight = self.queues.flight
        if len(flight) <= place or flight[place].batch.number != report.batch:
            raise FailedPreconditionError(f"batch {report.batch} is not the one to report", field="batch")
        expected = self._reporter.expected(flight[place], finished)
        checked = check_report(self.queues, expected, report)
        written = self._manager.written_layers(self._namespace, flight[place].step.step_id)
        if written is None or 0 in written:
            raise FailedPreconditionError("not all layers of the step are written", field="batch")
        return expected.sampled, checked

    def _end(self, over: list[int]) -> list[int]:
        """End these sequences, and the aborted requests that are in no batch any more."""
        queues = self.queues
        aborted = [one for one in queues.aborted if not queues.in_flight(queues.requests[one])]
        ended = self._samples.end(over, aborted)
        queues.counters.finished += len(set(ended).difference(queues.aborted))
        queues.aborted[:] = [one for one in queues.aborted if one in queues.requests]
        return ended

    def retry(self) -> ScheduledBatch | None:
        """Open the oldest batch in flight again, as a new step and under a new number, for an engine that lost what it
        computed. The batch that was made after it is taken back. Returns None if no batch is in flight.

        The new batch has all sequences that sample, and chunks that are not computed. Nothing that is computed is
        computed again, except the last token of each sequence that samples. The old step is stale. If blocks are short,
        a sequence may be preempted; if nothing is left to compute, the batch has no step, and needs no report.
        """
        if not self.queues.flight:
            return None
        draft, ids, step = self._retrier.retry()
        self._num_steps += 1
        batch = self._opener.batch_of(draft, ids, step, self._num_steps)
        self.queues.counters.count_batch(batch)
        if step is None:
            self._end([])
        return batch

    def describe(
        self, request_ids: npt.ArrayLike | None = None, *, first: int = 0, limit: int | None = None
    ) -> list[RequestSnapshot]:
        """Describe requests that are not finished, in the order of request_ids int64[n]. Without ids it describes all
        in the order of their arrival, at most `limit` of them from index `first` on. Raises UnknownSequenceError."""
        return describe_requests(self.queues, request_ids, first, limit)

    def figures(self) -> SchedulerFigures:
        """Return the gauges of this moment and the counters."""
        queues = self.queues
        running = queues.num_running
        return replace(
            queues.counters,
            waiting=len(queues.waiting),
            running=running,
            swapped=len(queues.swapped),
            stalled=min(self._num_stalled, running),
        )

    def close(self) -> None:
        """Forget all requests, for an engine whose namespace is closed."""
        self._shares.remove(self.share)
        counters = self.queues.counters
        counters.aborted += len(self) - len(self.queues.aborted)
        self.queues = EngineQueues(self._manager, self._namespace, self.config, counters)


# ---- The step of a draft


class Opener:
    """Opens the steps of one engine's batches, and puts the batches in flight."""

    def __init__(self, queues: EngineQueues) -> None:
        self._queues, self._lookahead = queues, queues.config.lookahead
        self._manager, self._namespace = queues.manager, queues.namespace
        self._row_numbers = np.arange(queues.config.max_running, dtype=np.int32)
        self._row_numbers.flags.writeable = False

    def open(self, draft: Draft, number: int) -> ScheduledBatch:
        """Open the step of a draft. If a batch is in flight, its step follows that one's. If the step cannot be opened,
        the batch has none, and its sequences wait for the next one."""
        decodes, which = self._queues.decodes, draft.which
        ids = decodes.ids[which]
        tokens = decodes.tokens[which] if draft.counts is None else tokens_with_proposals(decodes, draft)
        unknown, step = self._unknown(draft), None
        ids = ids.copy()
        if draft.chunks:
            ids = np.concatenate([ids, np.array([state.sequence_id for state, _ in draft.chunks], np.int64)])
        if len(ids):
            try:
                step = self._step(draft, ids, tokens)
                decodes.blocks[which] += draft.growth
            except Exception as error:  # the block manager has changed nothing
                draft.error = draft.error or error
                draft.leave_out_step()
                ids = NO_SEQUENCES
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
            tuple((group.request_id, error) for group, error in draft.failed.items()),
            draft.error,
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


# ---- Shares of several engines in one pool: equal ones for their tenants, and by weight among the engines of one


# With weights in this range, and any number of them, no product or sum overflows or is 0.
MIN_WEIGHT: Final = 1e-6
MAX_WEIGHT: Final = 1e6


@dataclass(slots=True, eq=False)
class Share:
    """One engine's share. `tenant` is None if there are no tenants. `held` counts the blocks of its running sequences;
    `active` says that it has requests, and `hungry` that the last step wanted more blocks than it got."""

    weight: float
    tenant: str | None = None
    held: int = 0
    active: bool = False
    hungry: bool = False


class PoolShares:
    """Entitlements of the engines of one pool.

    An engine may hold any number of blocks until another one that holds less than its entitlement is hungry. Then it
    admits requests only within its own entitlement, and gives up what it holds beyond it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._shares: list[Share] = []

    def __len__(self) -> int:
        return len(self._shares)

    def add(self, weight: float, tenant: str | None = None) -> Share:
        share = Share(weight, tenant)
        self._shares.append(share)
        return share

    def remove(self, share: Share) -> None:
        self._shares.remove(share)

    def entitled(self, share: Share) -> int:
        """Return the blocks to which an engine is entitled, among the engines that have requests."""
        sharing = [one for one in self._shares if one.active or one is share]
        num_tenants = len({one.tenant for one in sharing})
        total = sum(one.weight for one in sharing if one.tenant == share.tenant)
        return int(self._num_blocks * share.weight / (total * num_tenants))

    def allowance(self, share: Share) -> int:
        """Return how many blocks an engine may still take for new requests; negative if it must give up blocks."""
        if len(self._shares) == 1 or not self._others_need(share):
            return self._num_blocks
        return self.entitled(share) - share.held

    def _others_need(self, share: Share) -> bool:
        return any(
            one is not share and one.active and one.hungry and one.held < self.entitled(one) for one in self._shares
        )
