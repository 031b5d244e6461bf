"""The scheduler of a session, shared by the sync and async API: the daemon decides what each step computes.

scheduler = kv.open_scheduler(max_step_tokens=8192)
scheduler.add([ScheduledRequest(1, prompt, max_tokens=64)])
batch = scheduler.schedule()
while batch.number:
    tokens = ...                         # compute batch.step in all layers, sample for batch.sampled
    batch = scheduler.schedule([BatchReport(batch.number, tokens)])
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np

from kvservice.client.connection import UNANSWERED
from kvservice.client.messages import (
    ExtraKeys,
    build,
    check_size,
    choice,
    extra_key_messages,
    flag,
    int_list,
    listed,
    step_info,
    whole,
)
from kvservice.client.step import SessionCalls
from kvservice.client.values import Sequence, StepInfo, from_message
from kvservice.errors import InvalidArgumentError, KVServiceError
from kvservice.v1 import scheduler_pb2
from kvservice.wire.status import from_status
from kvservice.wire.tensors import Array

StepT = TypeVar("StepT")
SchedulerT = TypeVar("SchedulerT")


class SchedulerArguments(TypedDict, total=False):
    """The settings of a scheduler. A setting that is left out has the daemon's default.

    `max_step_tokens` and `max_running` limit the tokens of a step and the running sequences. `policy`: "chunked"
    (decodes first, then chunks of prompts) or "prefill_first". `order`: "fcfs" or "priority". `preemption`:
    "recompute", "swap" or "auto". `lookahead`: the most proposals for a sequence, for which slots are reserved. A
    prompt longer than `long_prefill_tokens` gets at most so many tokens of a step, and at most `max_long_prefills` of
    them are in progress. `max_requests`: the most unfinished requests. `weight`: the share of the pool among all
    schedulers of the tenant, from 1e-6 to 1e6. `swap_block_s` and `compute_token_s`: seconds to copy a block to the
    swap tier and to recompute a token, which the daemon measures otherwise. The rest is explained in
    OpenSchedulerRequest in scheduler.proto.
    """

    max_step_tokens: int
    max_running: int
    policy: str
    order: str
    preemption: str
    lookahead: int
    long_prefill_tokens: int
    max_long_prefills: int
    max_requests: int
    reserve_steps: int
    max_stalled_fraction: float
    size_delay_steps: float
    max_size_delay_steps: float
    delay_factor: float
    share_prefixes: bool
    swap_block_s: float
    compute_token_s: float
    weight: float


@dataclass(frozen=True)
class SchedulerInfo:
    """The settings of a scheduler that limit its client."""

    max_step_tokens: int
    max_running: int
    lookahead: int
    max_requests: int


@dataclass(frozen=True)
class ScheduledRequest:
    """A request for `width` continuations of a prompt, of at most `max_tokens` tokens each.

    Its sequences have the ids from `request_id` to `request_id + width - 1`. `token_ids` is int[n], n >= 1. A lower
    `priority` is more urgent. `extra_keys` as in SessionCore.allocate. `stop_lengths`: empty, or int[width], the length
    with the prompt at which each sample ends. `beams`: the samples run in lock-step, and reports may rearrange them.
    """

    request_id: int
    token_ids: Iterable[int]
    max_tokens: int
    priority: int = 0
    extra_keys: ExtraKeys = ()
    width: int = 1
    stop_lengths: Iterable[int] = ()
    beams: bool = False


@dataclass(frozen=True)
class BatchReport:
    """The tokens that the engine sampled after the batch with the number `batch`.

    The m rows are the sequences of the batch's `sampled`, in their order, without the sequences that the report of the
    batch before named in `finished`. `token_ids` is int[t], their sampled tokens. `num_tokens` is int[m], or None for
    one each. `parents` is int[m], for beams the sequence that each row continues, or None. `finished` is int[f], the
    sequences that the engine found finished. `proposals` is int[p], draft tokens for the next step, with `num_proposed`
    int[m] of each row, or None for none.
    """

    batch: int
    token_ids: Iterable[int] = ()
    num_tokens: Iterable[int] | None = None
    parents: Iterable[int] | None = None
    finished: Iterable[int] = ()
    proposals: Iterable[int] = ()
    num_proposed: Iterable[int] | None = None


@dataclass(frozen=True)
class PreemptedSequence:
    """A sequence that was preempted with `num_tokens` computed tokens. `swapped` says that they are in
    the swap tier."""

    sequence_id: int
    num_tokens: int
    swapped: bool


@dataclass(frozen=True, eq=False)
class EngineBatch(Generic[StepT]):
    """The batch of one step.

    `number` is 0 if no sequence can run; then `step` is None, and there is nothing to report. `sequence_ids` is
    int64[n], the sequences of the step; the first `num_decodes` get their next token, with their proposals, and the
    others a chunk of their prompt. `sampled` is int64[m], the sequences for which the engine samples tokens, and
    `sampled_rows` int32[m] the row of the step that each of them samples from. `finished` are the requests that have
    ended. `failed` are requests that the scheduler had to abort, with their errors; they are also in `finished`, of
    this batch or a later one. `num_stalled` running sequences wait for a block. `waiting`, `running` and `swapped`
    count requests.
    """

    number: int
    step: StepT | None
    sequence_ids: Array
    num_decodes: int
    sampled: Array
    sampled_rows: Array
    finished: list[int]
    preempted: list[PreemptedSequence]
    num_stalled: int
    waiting: int
    running: int
    swapped: int
    failed: dict[int, KVServiceError]


@dataclass(frozen=True)
class SampleInfo:
    """The daemon's state of one sequence of a request. `length` counts its tokens with the prompt and the last reported
    token. `token_ids` is empty unless requested."""

    sequence_id: int
    finished: bool
    num_generated: int
    length: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RequestInfo:
    """The daemon's state of a request. `phase` is "waiting", "prefilling", "decoding" or "swapped"."""

    request_id: int
    phase: str
    sequences: tuple[SampleInfo, ...]
    extra_keys: tuple[tuple[int, bytes], ...]


def request_message(request: ScheduledRequest) -> scheduler_pb2.ScheduledRequest:
    if not isinstance(request, ScheduledRequest):
        raise InvalidArgumentError(f"has a {type(request).__name__}, not a ScheduledRequest", field="requests")
    return build(
        scheduler_pb2.ScheduledRequest,
        request_id=whole(request.request_id, "request_id"),
        token_ids=int_list(request.token_ids, "token_ids"),
        max_tokens=whole(request.max_tokens, "max_tokens"),
        priority=whole(request.priority, "priority"),
        extra_keys=extra_key_messages(request.extra_keys),
        width=whole(request.width, "width"),
        stop_lengths=int_list(request.stop_lengths, "stop_lengths"),
        beams=flag(request.beams, "beams"),
    )


def report_message(report: BatchReport) -> scheduler_pb2.StepReport:
    if not isinstance(report, BatchReport):
        raise InvalidArgumentError(f"has a {type(report).__name__}, not a BatchReport", field="reports")
    return build(
        scheduler_pb2.StepReport,
        batch=whole(report.batch, "batch"),
        token_ids=int_list(report.token_ids, "token_ids"),
        num_tokens=_optional_list(report.num_tokens, "num_tokens"),
        parent_ids=_optional_list(report.parents, "parent_ids"),
        finished_ids=int_list(report.finished, "finished_ids"),
        proposals=int_list(report.proposals, "proposals"),
        num_proposed=_optional_list(report.num_proposed, "num_proposed"),
    )


def _optional_list(values: Iterable[int] | None, field: str) -> list[int] | None:
    return None if values is None else int_list(values, field)


def request_info(message: scheduler_pb2.RequestDescription) -> RequestInfo:
    phase = scheduler_pb2.RequestPhase.Name(message.phase)
    return RequestInfo(
        message.request_id,
        str(phase).removeprefix("REQUEST_PHASE_").lower(),
        tuple(
            SampleInfo(one.sequence_id, one.finished, one.num_generated, one.length, tuple(one.token_ids))
            for one in message.sequences
        ),
        tuple((extra.position, extra.key) for extra in message.extra_keys),
    )


@dataclass(frozen=True)
class OpenedScheduler:
    """A scheduler as the daemon has opened it. `requests` are the unfinished requests that it had already."""

    settings: SchedulerInfo
    requests: tuple[RequestInfo, ...]


MakeStep = Callable[[SessionCalls, tuple[Sequence, ...], StepInfo], StepT]
MakeScheduler = Callable[[SessionCalls, MakeStep[StepT], OpenedScheduler], SchedulerT]


class SchedulerCore(Generic[StepT]):
    """The scheduler of a session. It lives in the daemon as long as the session; `SessionCore.open_scheduler` opens it.

    `settings` are the settings in effect. Methods raise the errors of SessionCore. A method that raises has changed
    nothing, also one whose answer was lost (CallTimeoutError, ConnectionLostError, or the caller was cancelled): the
    requests of `add` are aborted in the background, before the session's next call. `abort` is completed, and
    `schedule` may have been executed: made again with the same arguments, it returns the answer. Otherwise the next
    batch also has what that answer said of finished and preempted sequences, and `retry` opens its batch.
    """

    def __init__(self, calls: SessionCalls, make_step: MakeStep[StepT], opened: OpenedScheduler) -> None:
        self._calls, self._make_step = calls, make_step
        self._connection = calls.context.connection
        self.settings = opened.settings
        # The sequences of each unfinished request, by their ids, and the sequences of the last batch.
        self._sequences: dict[int, Sequence] = {}
        self._widths: dict[int, int] = {}
        self._last: tuple[bytes, tuple[Sequence, ...]] = (b"", ())
        # The calls of `schedule` that were cut short, with their answers.
        self._missed: list[tuple[Any, Any]] = []
        for info in opened.requests:
            self._widths[info.request_id] = len(info.sequences)
            for one in info.sequences:
                self._sequences[one.sequence_id] = Sequence(one.sequence_id, one.length, extra_keys=info.extra_keys)

    async def add(self, requests: Iterable[ScheduledRequest], *, timeout_s: float | None = None) -> None:
        """Queue all requests, or none. Raises DuplicateSequenceError; OutOfBlocksError with `never` for a request that
        the pool can never hold; QuotaExceededError."""
        messages = [request_message(request) for request in listed(requests, "requests")]
        check_size(sum(4 * len(message.token_ids) for message in messages), "requests", self._calls.context.info)
        request = build(
            scheduler_pb2.AddRequestsRequest,
            request_id=next(self._connection.request_ids),
            requests=messages,
        )
        new = [message for message in messages if message.request_id not in self._widths]
        new_ids = [message.request_id for message in new]

        def forget(_: object, aborted: Any) -> None:
            self._forget(new_ids if aborted is None else aborted.finished_ids)

        self._note(new)  # a batch may have them, also after a call without an answer
        try:
            await self._connection.send("add_requests", request, timeout_s, correct=forget)
        except KVServiceError as error:
            if not isinstance(error, UNANSWERED):
                self._forget(new_ids)
            raise
        self._note(message for message in messages if message.request_id not in new_ids)

    async def abort(self, request_ids: Iterable[int], *, timeout_s: float | None = None) -> list[int]:
        """Drop all these requests, or none. Returns those that have ended already. The others are in a batch that is
        not reported, and end with its report. Raises UnknownSequenceError."""
        request = build(
            scheduler_pb2.AbortRequestsRequest,
            request_id=next(self._connection.request_ids),
            request_ids=int_list(request_ids, "request_ids"),
        )

        def forget(answer: Any, _: object) -> None:
            self._forget(() if answer is None else answer.finished_ids)

        answer = await self._connection.send("abort_requests", request, timeout_s, correct=forget)
        forget(answer, None)
        return list(answer.finished_ids)

    async def schedule(
        self,
        reports: Iterable[BatchReport] = (),
        *,
        ahead: bool = False,
        retry: bool = False,
        max_step_tokens: int | None = None,
        max_running: int | None = None,
        timeout_s: float | None = None,
    ) -> EngineBatch[StepT]:
        """Report the tokens of unreported batches, then make the next batch and open its step.

        All layers of a batch's step must be written before its report. `ahead`: make the batch although one batch stays
        unreported. `retry`: open the oldest unreported batch again, after the engine has lost its step. The budgets may
        be below those of the scheduler. Raises InvalidArgumentError, and FailedPreconditionError if a reported batch is
        not in progress, a layer of it is not written, or too many batches are unreported.
        """
        request = build(
            scheduler_pb2.ScheduleRequest,
            request_id=next(self._connection.request_ids),
            reports=[report_message(report) for report in listed(reports, "reports")],
            max_step_tokens=_budget(max_step_tokens, "max_step_tokens"),
            max_running=_budget(max_running, "max_running"),
            ahead=flag(ahead, "ahead"),
            retry=flag(retry, "retry"),
        )
        if self._calls.context.cut.pending:
            await self._calls.context.cut.settled(self._connection.deadline(timeout_s))
        if self._missed and _is_same(request, self._missed[-1][0]):
            _, response = self._missed.pop()
        else:
            response = await self._connection.send(
                "schedule", request, timeout_s, correct=functools.partial(self._miss, request)
            )
        batch = self._batch(response)
        for _, missed in reversed(self._missed):
            batch.finished[:0] = missed.finished_ids
            batch.preempted[:0] = _preempted(missed)
            batch.failed.update(_failed(missed))
        self._missed.clear()
        self._forget(batch.finished)
        return batch

    def _miss(self, request: Any, response: Any, _: object) -> None:
        if response is not None:
            self._missed.append((request, response))

    async def describe(
        self, request_ids: Iterable[int] | None = None, *, token_ids: bool = False, timeout_s: float | None = None
    ) -> list[RequestInfo]:
        """Return the daemon's state of these requests, or of all unfinished requests if None. Raises
        UnknownSequenceError."""
        return await _describe(self._calls, request_ids, token_ids, timeout_s)

    def _note(self, messages: Iterable[scheduler_pb2.ScheduledRequest]) -> None:
        for message in messages:
            first, width, length = message.request_id, message.width, len(message.token_ids)
            keys = tuple((extra.position, extra.key) for extra in message.extra_keys)
            self._widths[first] = width
            for sequence_id in range(first, first + width):
                self._sequences[sequence_id] = Sequence(sequence_id, length, extra_keys=keys)

    def _forget(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            for sequence_id in range(request_id, request_id + self._widths.pop(request_id, 0)):
                self._sequences.pop(sequence_id, None)

    def _batch(self, response: Any) -> EngineBatch[StepT]:
        """Convert a response. The lengths of the sequences become the context lengths of the step."""
        ids, step = np.fromiter(response.sequence_ids, np.int64, len(response.sequence_ids)), None
        if response.batch:
            info = step_info(response.step, self._connection.num_restarts)
            step = self._make_step(self._calls, self._sequences_of(ids, info), info)
        return EngineBatch(
            number=response.batch,
            step=step,
            sequence_ids=ids,
            num_decodes=response.num_decodes,
            sampled=np.array(response.sampled_ids, np.int64),
            sampled_rows=np.array(response.sampled_rows, np.int32),
            finished=list(response.finished_ids),
            preempted=_preempted(response),
            num_stalled=response.num_stalled,
            waiting=response.num_waiting,
            running=response.num_running,
            swapped=response.num_swapped,
            failed=_failed(response),
        )

    def _sequences_of(self, ids: np.ndarray[Any, Any], info: StepInfo) -> tuple[Sequence, ...]:
        key, sequences = self._last
        if ids.tobytes() != key:
            sequences = tuple(self._sequences[sequence_id] for sequence_id in ids.tolist())
            self._last = ids.tobytes(), sequences
        for sequence, length in zip(sequences, info.context_lens.tolist(), strict=True):
            sequence.length = length
        return sequences


def _preempted(response: Any) -> list[PreemptedSequence]:
    rows = zip(response.preempted_ids, response.preempted_tokens, response.preempted_swapped, strict=True)
    return list(itertools.starmap(PreemptedSequence, rows))


def _failed(response: Any) -> dict[int, KVServiceError]:
    return {one.request_id: from_status(one.error) for one in response.failed}


def _is_same(request: scheduler_pb2.ScheduleRequest, other: scheduler_pb2.ScheduleRequest) -> bool:
    """Return whether a request is another one made again."""
    request_id = request.request_id
    request.request_id = other.request_id
    is_same = request == other
    request.request_id = request_id
    return is_same


def _budget(value: int | None, field: str) -> int | None:
    return None if value is None else whole(value, field)


async def open_scheduler(calls: SessionCalls, settings: SchedulerArguments, timeout_s: float | None) -> OpenedScheduler:
    """Open the scheduler of a session, and fetch the requests that it has already."""
    fields: dict[str, Any] = dict(settings)
    for name in fields.keys() - SchedulerArguments.__annotations__.keys():
        names = ", ".join(SchedulerArguments.__annotations__)
        raise InvalidArgumentError(f"is no setting of a scheduler, which are {names}", field=name)
    choices = (
        ("policy", scheduler_pb2.BatchPolicy, "BATCH_POLICY_"),
        ("order", scheduler_pb2.QueueOrder, "QUEUE_ORDER_"),
        ("preemption", scheduler_pb2.PreemptionMode, "PREEMPTION_MODE_"),
    )
    for name, kind, prefix in choices:
        if name in fields:
            values = {one.removeprefix(prefix).lower(): number for one, number in kind.items() if number}
            fields[name] = values[choice(fields[name], values, name)]
    request = build(scheduler_pb2.OpenSchedulerRequest, request_id=next(calls.context.connection.request_ids), **fields)
    opened = await calls.context.connection.send("open_scheduler", request, timeout_s)
    known = await _describe(calls, None, False, timeout_s) if opened.existed else []
    return OpenedScheduler(from_message(SchedulerInfo, opened), tuple(known))


async def _describe(
    calls: SessionCalls, request_ids: Iterable[int] | None, token_ids: bool, timeout_s: float | None
) -> list[RequestInfo]:
    """See SchedulerCore.describe."""
    kind = scheduler_pb2.DescribeRequestsRequest
    infos: list[RequestInfo] = []
    ids = None if request_ids is None else int_list(request_ids, "request_ids")
    limit = calls.context.info.max_request_sequences
    while ids is None or len(infos) < len(ids):
        page = None if ids is None else ids[len(infos) : len(infos) + limit]
        request = build(kind, request_ids=page, first=len(infos), return_token_ids=token_ids)
        response = await calls.context.connection.send("describe_requests", request, timeout_s)
        infos += map(request_info, response.requests)
        if ids is None and (not response.requests or len(infos) >= response.num_requests):
            break
    return infos
