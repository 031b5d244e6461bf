"""The scheduler of one engine: add and abort requests, make a batch, report its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlockManager, SessionNamespace, StepPlan
from kvservice.blocks.arguments import whole_number
from kvservice.blocks.plans import Int32Array, Int64Array
from kvservice.blocks.slices import Slices, finish
from kvservice.errors import (
    DuplicateSequenceError,
    FailedPreconditionError,
    KVServiceError,
    QuotaExceededError,
    UnknownSequenceError,
)
from kvservice.scheduler.admission import Admission
from kvservice.scheduler.batches import QueueCounts, ScheduledBatch
from kvservice.scheduler.config import BatchPolicy, QueueOrder, SchedulerConfig
from kvservice.scheduler.preemption import Preemptor
from kvservice.scheduler.reports import Report, check_report
from kvservice.scheduler.requests import (
    RUNNING,
    PreparedRequest,
    Request,
    RequestGroup,
    RequestState,
    check_request,
    hashes_in_slices,
)
from kvservice.scheduler.retrying import Retrier
from kvservice.scheduler.samples import Samples
from kvservice.scheduler.shares import PoolShares
from kvservice.scheduler.snapshots import RequestSnapshot, describe_requests
from kvservice.scheduler.state import Draft, EngineQueues
from kvservice.scheduler.stats import Latencies, SchedulerCounters, SchedulerFigures


class EngineScheduler:
    """Decides what one engine computes in each step (vLLM's scheduler, adapted to a service).

    The engine calls `schedule`, computes the batch's step in all layers, and calls `update` with the sampled tokens.
    All methods are deterministic. Time is what the caller says it is.
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
        self.queues = EngineQueues(manager, namespace, config, SchedulerCounters())
        self.share = shares.add(weight)
        self._shares, self._manager, self._namespace = shares, manager, namespace
        self._latencies, self._num_stalled = latencies, 0
        self._preemptor = Preemptor(self.queues)
        self._admission = Admission(self.queues, self._preemptor)
        self._samples = Samples(self.queues)
        self._retrier = Retrier(self.queues, self._preemptor)
        self._num_steps = self._num_arrived = 0
        self._row_numbers = np.arange(config.max_running, dtype=np.int32)
        self._row_numbers.flags.writeable = False
        self._batch: ScheduledBatch | None = None
        self._draft: Draft | None = None
        self._aborted: list[int] = []

    def __len__(self) -> int:
        """Number of requests that are not finished."""
        return len(self.queues.requests)

    @property
    def unreported(self) -> tuple[int, ...]:
        """The numbers of the batches that are not reported, the oldest first."""
        return () if self._batch is None else (self._batch.number,)

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
            checked = check_request(request, blocks, self.config.lookahead, max_width)
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
            rank = (priority, place, self._num_arrived)
            self._num_arrived += len(limits)
            group = RequestGroup(request, len(tokens), limits)
            self.queues.add(RequestState(group, request.request_id, limits[0], rank, tokens, hashes, extra, now_s))
        self.queues.counters.added += len(prepared)
        self.share.active = True

    def _check_new(self, prepared: Sequence[PreparedRequest], field: str) -> None:
        """Check that the ids of all samples are free, and that the queue has room."""
        queues, seen = self.queues, set[int]()
        for i, one in enumerate(prepared):
            for sequence_id in one.sequence_ids:
                known = sequence_id in queues.requests or sequence_id in queues.reserved or sequence_id in seen
                if known or sequence_id in self._namespace:
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
        """Drop a request with all its samples. While a batch is not reported, a request that runs ends with it. Raises
        UnknownSequenceError."""
        group = self.queues.requests.get(whole_number(request_id, "request_id", 0, 2**63 - 1))
        if group is None or request_id in self._aborted:
            raise UnknownSequenceError(
                f"request {request_id} is unknown or finished", field="request_id", sequence_id=request_id
            )
        self.queues.counters.aborted += 1
        if self._batch is not None and any(state.phase in RUNNING for state in group.members):
            self._aborted.append(request_id)
        else:
            self._samples.end([], [request_id])

    def schedule(
        self, now_s: float = 0.0, max_step_tokens: int | None = None, max_running: int | None = None
    ) -> ScheduledBatch:
        """Make the batch of the next step, and open its step. The budgets may be below those of the configuration.

        Raises FailedPreconditionError if the tokens of the last batch are not reported yet.
        """
        if self._batch is not None:
            raise FailedPreconditionError(f"the tokens of batch {self._batch.number} are not reported", field="batch")
        config, shares = self.config, self._shares
        tokens, running = config.max_step_tokens, config.max_running
        if max_step_tokens is not None:
            tokens = whole_number(max_step_tokens, "max_step_tokens", 1, tokens)
        if max_running is not None:
            running = whole_number(max_running, "max_running", 1, running)
        if len(shares) > 1:
            self.share.held = self.queues.held_blocks()
        draft = Draft(tokens, running, shares.allowance(self.share))
        if draft.max_new_blocks < 0 and self.queues.num_running > 1:
            self._preemptor.preempt_one(draft)
        self._admission.preempt_for_priority(draft)
        self._fill(draft, now_s)
        self._num_steps += 1
        batch = self._open(draft)
        self._num_stalled = batch.num_stalled
        self.queues.counters.count_batch(batch)
        if batch.step is not None:
            self._batch, self._draft = batch, draft
        if len(shares) > 1:
            self.share.held = self.queues.held_blocks()
            self.share.hungry = draft.short or len(self.queues.waiting) > 0
        return batch

    def _fill(self, draft: Draft, now_s: float) -> None:
        """Choose decodes, go on with prefills, and admit requests, in the order of the policy."""
        chunked = self.config.batches is BatchPolicy.CHUNKED
        if chunked:
            self._preemptor.choose_decodes(draft)
        else:
            draft.needed = self.queues.needed_blocks()
        for state in self.queues.prefilling.values():
            draft.add_chunk(state, self.config.long_prefill_tokens)
        if not draft.short:
            self._admission.admit(draft, now_s)
        if not chunked and not draft.chunks:
            draft.needed = 0
            self._preemptor.choose_decodes(draft)

    def _open(self, draft: Draft) -> ScheduledBatch:
        """Open the step of a draft."""
        decodes, chunks, lookahead = self.queues.decodes, draft.chunks, self.config.lookahead
        num_decodes = len(draft.decodes)
        if draft.all_decodes:
            ids, tokens = decodes.ids[:num_decodes], decodes.tokens[:num_decodes]
            decodes.blocks[:num_decodes] += draft.growth
        else:
            ids, tokens = decodes.ids[draft.decodes], decodes.tokens[draft.decodes]
            decodes.blocks[draft.decodes] += draft.growth
        step: StepPlan | None = None
        ids = ids.copy()
        if chunks:
            chunk_ids = np.array([state.sequence_id for state, _ in chunks], np.int64)
            counts = np.concatenate([np.ones(num_decodes, np.int64), [count for _, count in chunks]])
            ids = np.concatenate([ids, chunk_ids])
            if num_decodes:
                step = self._manager.advance(self._namespace, ids, tokens, counts, lookahead)
            else:
                step = self._manager.open_step(self._namespace, ids, counts, lookahead)
        elif num_decodes:
            step = self._manager.append(self._namespace, ids, tokens, lookahead=lookahead)
        return self._batch_of(draft, ids, step)

    def _batch_of(self, draft: Draft, ids: Int64Array, step: StepPlan | None) -> ScheduledBatch:
        """Return the batch of a step over the sequences `ids` int64[n]."""
        num_decodes = len(draft.decodes)
        sampled, rows = ids[:num_decodes], self._row_numbers[:num_decodes]
        if draft.chunks:
            first, samples = self._samples_of_chunks(draft.chunks)
            sampled = np.concatenate([sampled, samples])
            rows = np.concatenate([rows, num_decodes + first])
        return ScheduledBatch(
            self._num_steps,
            step,
            num_decodes,
            sampled,
            rows,
            QueueCounts(len(self.queues.waiting), self.queues.num_running, len(self.queues.swapped)),
            tuple(draft.preempted),
            tuple(draft.swapped_out),
            tuple(draft.swapped_in),
            draft.num_stalled,
        )

    def _samples_of_chunks(self, chunks: list[tuple[RequestState, int]]) -> tuple[Int32Array, Int64Array]:
        """Return the samples that get a token after these chunks: int32[m], which chunk, and int64[m], its sequence."""
        which, ids = list[int](), list[int]()
        for i, (state, count) in enumerate(chunks):
            if count == state.pending:
                ids += range(state.sequence_id, state.sequence_id + state.num_places)
                which += [i] * state.num_places
        return np.array(which, np.int32), np.array(ids, np.int64)

    def update(self, report: Report, now_s: float = 0.0) -> list[int]:
        """Accept the report of a batch. A request also finishes with its last of max_tokens.

        Returns the ids of all requests that finished or were aborted; their blocks are given back. Raises
        FailedPreconditionError if this is not the current batch or a layer of it is not written, and
        InvalidArgumentError.
        """
        batch, draft = self._batch, self._draft
        if batch is None or draft is None or batch.step is None or batch.number != report.batch:
            raise FailedPreconditionError(f"batch {report.batch} is not in progress", field="batch")
        tokens, finished = check_report(batch, report)
        written = self._manager.written_layers(self._namespace, batch.step.step_id)
        if written is None or 0 in written:
            raise FailedPreconditionError("not all layers of the step are written", field="batch")
        self._batch = self._draft = None
        over = self._update_decodes(batch, draft, tokens[: batch.num_decodes], finished, now_s)
        over += self._update_chunks(draft, tokens[batch.num_decodes :].tolist(), finished, now_s)
        self.queues.counters.generated_tokens += len(tokens)
        ended = self._samples.end(over, self._aborted) if over or self._aborted else []
        self.queues.counters.finished += len(ended) - len(self._aborted)
        self._aborted.clear()
        self.share.active = bool(self.queues.requests)
        return ended

    def _update_decodes(
        self, batch: ScheduledBatch, draft: Draft, tokens: Int32Array, finished: set[int], now_s: float
    ) -> list[int]:
        """Advance the decodes. Returns the ids of those that are over."""
        if not batch.num_decodes:
            return []
        decodes, which = self.queues.decodes, slice(0, batch.num_decodes) if draft.all_decodes else draft.decodes
        decodes.tokens[which] = tokens
        decodes.lengths[which] += 1
        decodes.generated[which] += 1
        self._latencies.between_tokens.observe(decodes.times.advance(which, len(tokens), now_s), len(tokens))
        over = decodes.generated[which] >= decodes.limits[which]
        if finished:
            over |= np.isin(batch.sampled[: batch.num_decodes], list(finished))
        return batch.sampled[: batch.num_decodes][over].tolist() if np.count_nonzero(over) else []

    def _update_chunks(self, draft: Draft, tokens: list[int], finished: set[int], now_s: float) -> list[int]:
        """Advance the prefills; those with all tokens computed decode from now on. Returns the ids of those over."""
        over, sampled = list[int](), iter(tokens)
        for state, count in draft.chunks:
            state.pending -= count
            if state.pending:
                continue
            self.queues.end_prefill(state)
            self._latencies.observe_token(state, now_s)
            over += self._samples.start(state, [next(sampled) for _ in range(state.num_places)], finished)
        return over

    def retry(self) -> ScheduledBatch | None:
        """Open the batch in progress again, as a new step and under a new number, for an engine that lost what it
        computed. Returns None if there is none.

        The new batch has all sequences that sample, and chunks that are not computed. Nothing that is computed is
        computed again, except the last token of each sequence that samples. The old step is stale. If blocks are short,
        a sequence may be preempted; if nothing is left to compute, the batch has no step, and needs no report.
        """
        if self._batch is None or self._draft is None:
            return None
        draft, ids, step = self._retrier.retry(self._batch, self._draft)
        self._num_steps += 1
        batch = self._batch_of(draft, ids, step)
        self.queues.counters.count_batch(batch)
        self._batch, self._draft = (batch, draft) if step else (None, None)
        if step is None and self._aborted:
            self._samples.end([], self._aborted)
            self._aborted.clear()
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
        gauges = len(queues.waiting), running, len(queues.swapped), min(self._num_stalled, running)
        return SchedulerFigures.of(*gauges, queues.counters)

    def close(self) -> None:
        """Forget all requests, for an engine whose namespace is closed."""
        self._shares.remove(self.share)
        counters = self.queues.counters
        counters.aborted += len(self) - len(self._aborted)
        self.queues = EngineQueues(self._manager, self._namespace, self.config, counters)
        self._batch = self._draft = None
