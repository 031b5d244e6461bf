"""The scheduler of one engine: add and abort requests, make a batch and open its step, report its tokens; and the
shares of several engines in one pool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvservice.blocks import (
    AllocStatus,
    BlockManager,
    FoundPrompt,
    SequenceSnapshot,
    SessionNamespace,
    StepPlan,
)
from kvservice.blocks.allocation import NewSequence
from kvservice.blocks.arguments import whole_number
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.blocks.slices import Slices, finish
from kvservice.errors import (
    DuplicateSequenceError,
    FailedPreconditionError,
    KVServiceError,
    OutOfBlocksError,
    QuotaExceededError,
    UnknownSequenceError,
)
from kvservice.scheduler.batches import (
    NO_SEQUENCES,
    Draft,
    InFlight,
    QueueCounts,
    ScheduledBatch,
    checked_blocks,
    tokens_with_proposals,
)
from kvservice.scheduler.config import BatchPolicy, QueueOrder, SchedulerConfig
from kvservice.scheduler.preemption import Preemptor
from kvservice.scheduler.queues import (
    UNLIMITED,
    EngineQueues,
    Needs,
    RequestSnapshot,
    WaitingQueue,
    describe_requests,
)
from kvservice.scheduler.reporting import CheckedReport, Report, Reporter, Retrier, Samples, check_report
from kvservice.scheduler.requests import (
    Phase,
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


# ---- admission chooses the swapped and waiting requests that join the batch


# Waiting requests that one step looks at, so that requests held back cannot make a step slow.
_MAX_LOOKED_AT: Final = 64
# Requests that one step admits, or a few more, so that no step takes long.
_MAX_ADMITTED: Final = 256


class Admission:
    """Brings swapped and waiting requests into a draft, in their order, while the budgets and the blocks last."""

    def __init__(self, queues: EngineQueues, preemptor: Preemptor, max_blocks: int) -> None:
        self._queues, self._config, self._preemptor = queues, queues.config, preemptor
        # The most blocks that the prompts of one step may have.
        self._max_blocks = max_blocks
        self._manager, self._namespace = queues.manager, queues.namespace
        self._blocks_config = queues.manager.config
        self._last_prefill_at_s: float | None = None
        self._last_prefill_s = 0.0

    def refusal(self, request: Request, num_tokens: int, num_sequences: int) -> KVServiceError | None:
        """Return the error if the engine's tenant may never have what a request with a prompt of `num_tokens` needs, of
        which so many samples run at one time."""
        quota, blocks, owners = self._namespace.quota, self._blocks_config, self._manager.device.owners
        if quota is None:
            return None
        required = int(self._queues.needs(request, num_tokens, num_sequences).blocks)
        available = blocks.num_blocks - (0 if owners is None else owners.guaranteed_to_others(quota))
        if (error := quota.never(required, num_sequences)) or required <= available:
            return error
        return OutOfBlocksError(
            f"prompt and max_tokens need {required} blocks, and all but {available} are guaranteed to other tenants",
            tier="device", required=required, free=available, total=blocks.num_blocks, never=True, field="max_tokens",
        )  # fmt: skip

    def admissible(self, queue: WaitingQueue) -> Iterator[RequestState]:
        """Yield the requests of a queue in their order, without those that would be refused if they came now, because
        quotas are lower or guarantees higher than when they came. They wait until that changes, or they are
        aborted."""
        queue.limit(self._limits())
        return iter(queue)

    def _limits(self) -> Needs:
        """Return the most that the engine's tenant may ever have. A request that needs more has a `refusal`."""
        quota, owners = self._namespace.quota, self._manager.device.owners
        if quota is None:
            return UNLIMITED
        available = self._blocks_config.num_blocks - (0 if owners is None else owners.guaranteed_to_others(quota))
        return Needs(
            available if quota.max_blocks is None else min(available, quota.max_blocks),
            math.inf if quota.max_sequences is None else quota.max_sequences,
        )

    def preempt_for_priority(self, draft: Draft) -> None:
        """Preempt requests of lower priority if the first waiting request lacks blocks or a place."""
        if self._config.order is not QueueOrder.PRIORITY:
            return
        first = next(self.admissible(self._queues.waiting), None)
        if first is None:
            return
        missing = sum(self._find(state).num_consumed for state in first.unit)
        missing -= self._room(self._queues.needed_blocks(), 0)
        if self._queues.num_running + _places(first.unit) > draft.max_running:
            missing = max(missing, 1)
        if missing > 0:
            self._preemptor.make_room(draft, missing, first.rank)

    def admit(self, draft: Draft, now_s: float) -> None:
        """Bring in swapped requests, then waiting ones. Waiting ones wait for swapped ones of the same priority."""
        self._resume(draft)
        if next(self.admissible(self._queues.waiting), None) is None or self._delayed(now_s):
            return
        before = len(draft.chunks)
        while (
            draft.tokens_left > 0
            and len(draft.chunks) - before < _MAX_ADMITTED
            and len(self._queues.waiting)
            and (picked := self._pick(draft))
        ):
            self._start(picked, draft)
        if len(draft.chunks) > before:
            self._last_prefill_at_s = now_s

    def _resume(self, draft: Draft) -> None:
        """Swap in what fits and is not less urgent than a waiting request. The sequences decode from the next step
        on."""
        queues = self._queues
        first = next(self.admissible(queues.waiting), None)
        for state in list(itertools.islice(self.admissible(queues.swapped), _MAX_LOOKED_AT)):
            if first is not None and state.rank[0] > first.rank[0]:
                return
            unit = state.unit
            ids = [one.sequence_id for one in unit]
            required = sum(map(self._blocks_to_decode, self._manager.describe(self._namespace, ids)))
            room = self._room(draft.needed, len(queues.decodes))
            if queues.num_running + len(unit) > draft.max_running or room < required:
                return
            try:
                if self._manager.can_swap_in(self._namespace, ids) is not AllocStatus.OK:
                    return
                draft.swapped_in.append(self._manager.swap_in(self._namespace, ids))
            except Exception as error:  # it stays swapped out
                draft.failed[state.group] = error
                continue
            queues.swapped.remove(state)
            queues.decodes.sharing |= len(unit) > 1
            for one, snapshot in zip(unit, self._manager.describe(self._namespace, ids), strict=True):
                one.phase, one.blocks = Phase.DECODING, snapshot.num_blocks
                queues.decodes.add(one, snapshot.length, one.next_token)

    def _blocks_to_decode(self, swapped: SequenceSnapshot) -> int:
        """Return how many blocks a sequence needs to go on: those of its table, and of its next token and the lookahead
        past it."""
        length = swapped.length + 1 + self._config.lookahead
        return max(swapped.num_blocks, self._blocks_config.num_blocks_for(length))

    def _room(self, needed: int, num_running: int) -> int:
        """Return how many blocks new requests may take beside `needed` ones: above the watermark, and above what the
        running sequences need soon. With nothing running, only the watermark counts."""
        kept = self._blocks_config.watermark_blocks
        if num_running:
            kept = max(kept, self._queues.decodes.needs_within(self._config.reserve_steps))
        return self._manager.device.room(kept) - needed

    def _find(self, state: RequestState) -> FoundPrompt:
        """Look a waiting request up in the prefix cache."""
        return self._manager.find_prompt(
            state.sequence_id, state.tokens, state.extra, state.hashes, self._config.lookahead
        )

    def _pick(self, draft: Draft) -> list[tuple[RequestState, FoundPrompt]]:
        """Remove the requests from the queue that fit now, and return them with their prefix-cache hits."""
        queues, config = self._queues, self._config
        size, picked = self._blocks_config.block_size, list[tuple[RequestState, FoundPrompt]]()
        room = self._room(draft.needed, queues.num_running)
        places = min(draft.max_running - queues.num_running, self._manager.sequences.num_free - queues.num_promised)
        tokens_left, num_long = draft.tokens_left, self._num_long()
        checked = sum(checked_blocks(state.pending, size) for state, _ in draft.chunks)
        swapped = next(self.admissible(queues.swapped), None)
        for state in itertools.islice(self.admissible(queues.waiting), _MAX_LOOKED_AT):
            waits_for_swapped = swapped is not None and state.rank[0] >= swapped.rank[0]
            unit = state.unit
            if tokens_left < len(unit) or _places(unit) > places or waits_for_swapped:
                break
            prompts = [(one, self._find(one)) for one in unit]
            consumed = sum(prompt.num_consumed for _, prompt in prompts)
            pending = sum(len(one.tokens) - prompt.num_found * size for one, prompt in prompts)
            if any(self._is_held_back(one, prompt, num_long) for one, prompt in prompts):
                continue
            started = picked or draft.chunks
            if consumed > room or (config.batches is BatchPolicy.PREFILL_FIRST and pending > tokens_left and started):
                break
            checked += sum(checked_blocks(len(one.tokens) - prompt.num_found * size, size) for one, prompt in prompts)
            if checked > self._max_blocks and started:
                break  # a chunk of each is in this step, which then reserves its lookahead
            if consumed > draft.max_new_blocks and (picked or queues.num_running):
                break  # a request above the engine's share runs there alone
            picked += prompts
            places -= _places(unit)
            draft.max_new_blocks -= consumed
            room -= consumed
            for one, prompt in prompts:
                queues.computing.update(one.hashes[prompt.num_found :])
                room -= one.num_places * (-len(one.tokens) % size < config.reserve_steps)
                tokens_left -= self._chunk(len(one.tokens) - prompt.num_found * size)
                num_long += self._is_long(len(one.tokens) - prompt.num_found * size)
        for state, _ in picked:
            queues.waiting.discard(state)
        return picked

    def _start(self, picked: list[tuple[RequestState, FoundPrompt]], draft: Draft) -> None:
        """Allocate the sequences of picked requests, and give them their first chunks."""
        shift = self._blocks_config.block_shift
        started = self._allocate(picked, draft)
        for i, (state, new) in enumerate(started, start=1):
            num_cached = len(new.found) << shift
            self._queues.counters.count_admission(state, num_cached)
            state.preempted = False
            state.pending = len(state.tokens) - num_cached
            state.blocks = new.required
            draft.needed += new.required - new.num_blocks
            self._queues.start_prefill(state)
            others = sum(other.group is state.group for other, _ in started[i:])  # each of the beams gets a token
            draft.add_chunk(state, self._config.long_prefill_tokens, others)

    def _allocate(
        self, picked: list[tuple[RequestState, FoundPrompt]], draft: Draft
    ) -> list[tuple[RequestState, NewSequence]]:
        """Allocate the sequences of picked requests. A request for which that fails, fails alone."""
        states, prompts = [state for state, _ in picked], [prompt for _, prompt in picked]
        try:
            return list(zip(states, self._manager.allocate_found(self._namespace, prompts), strict=True))
        except Exception as error:  # nothing was allocated
            if len(states) == len(states[0].unit):
                draft.failed[states[0].group] = error
                for state, prompt in picked:
                    self._queues.computing.difference_update(state.hashes[prompt.num_found :])
                return []
        units = itertools.groupby(picked, lambda one: one[0].unit[0])
        return [one for _, unit in units for one in self._allocate(list(unit), draft)]

    def _is_held_back(self, state: RequestState, prompt: FoundPrompt, num_long: int) -> bool:
        """Return whether others may pass this request, because its next block is being computed or loaded, or because
        it is one long prompt too many."""
        limit, found = self._config.max_long_prefills, prompt.num_found
        pending = len(state.tokens) - found * self._blocks_config.block_size
        if limit and num_long >= limit and self._is_long(pending):
            return True
        if self._queues.loading and found < len(state.hashes) and state.hashes[found] in self._queues.loading:
            return True
        shares = self._config.share_prefixes and found < len(state.hashes)
        return shares and state.hashes[found] in self._queues.computing

    def _is_long(self, pending: int) -> bool:
        return 0 < self._config.long_prefill_tokens < pending

    def _num_long(self) -> int:
        if not self._config.max_long_prefills:
            return 0
        return sum(self._is_long(state.pending) for state in self._queues.prefilling.values())

    def _chunk(self, pending: int) -> int:
        limit = self._config.long_prefill_tokens
        return min(pending, limit) if limit else pending

    def _delayed(self, now_s: float) -> bool:
        """Apply the delay factor: while others run, collect prompts before the next prefill (vLLM v0)."""
        if not self._config.delay_factor:
            return False
        if self._last_prefill_at_s is not None:
            self._last_prefill_s, self._last_prefill_at_s = now_s - self._last_prefill_at_s, None
        if not self._queues.num_running:
            return False
        waited_s = now_s - self._queues.waiting.oldest_arrival_s()
        return waited_s <= self._config.delay_factor * self._last_prefill_s


def _places(unit: list[RequestState]) -> int:
    """Return how many sequences these samples are, or become when their prompt is computed."""
    return sum(state.num_places for state in unit)
