"""The scheduler of a session, shared by the sync and async API: the daemon decides what each step computes.

scheduler = kv.open_scheduler(max_step_tokens=8192)
scheduler.add([ScheduledRequest(1, prompt, max_tokens=64)])
batch = scheduler.schedule()
while batch.number:
    tokens = ...                         # compute batch.step in all layers, sample for batch.sampled
    batch = scheduler.schedule([BatchReport(batch.number, tokens)])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from kvservice.client.batches import check_size
from kvservice.client.requests import build, int_list, whole
from kvservice.client.scheduler_values import (
    BatchReport,
    EngineBatch,
    PreemptedSequence,
    RequestInfo,
    ScheduledRequest,
    SchedulerArguments,
    SchedulerInfo,
    SchedulerT,
    StepT,
    report_message,
    request_info,
    request_message,
)
from kvservice.client.sequences import step_info
from kvservice.client.session_calls import SessionCalls
from kvservice.client.values import Sequence, StepInfo, from_message
from kvservice.errors import CallTimeoutError, ConnectionLostError, InvalidArgumentError
from kvservice.v1 import scheduler_pb2
from kvservice.wire.tensors import to_ints


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
    nothing, except that ConnectionLostError and CallTimeoutError leave open whether the daemon has executed the call.
    """

    def __init__(self, calls: SessionCalls, make_step: MakeStep[StepT], opened: OpenedScheduler) -> None:
        self._calls, self._make_step = calls, make_step
        self.settings = opened.settings
        # The sequences of each unfinished request, by their ids, and the sequences of the last batch.
        self._sequences: dict[int, Sequence] = {}
        self._widths: dict[int, int] = {}
        self._last: tuple[bytes, tuple[Sequence, ...]] = (b"", ())
        for info in opened.requests:
            self._widths[info.request_id] = len(info.sequences)
            for one in info.sequences:
                self._sequences[one.sequence_id] = Sequence(one.sequence_id, one.length, extra_keys=info.extra_keys)

    async def add(self, requests: Iterable[ScheduledRequest], *, timeout_s: float | None = None) -> None:
        """Queue all requests, or none. Raises DuplicateSequenceError; OutOfBlocksError with `never` for a request that
        the pool can never hold; QuotaExceededError."""
        messages = [request_message(request) for request in requests]
        check_size(sum(4 * len(message.token_ids) for message in messages), "requests", self._calls.context.info)
        request = build(scheduler_pb2.AddRequestsRequest, request_id=self._calls.next_request_id(), requests=messages)
        try:
            await self._calls.send("add_requests", request, timeout_s)
        except (ConnectionLostError, CallTimeoutError):  # the daemon may have them
            self._note(messages)
            raise
        self._note(messages)

    async def abort(self, request_ids: Iterable[int], *, timeout_s: float | None = None) -> list[int]:
        """Drop all these requests, or none. Returns those that have ended already. The others are in a batch that is
        not reported, and end with its report. Raises UnknownSequenceError."""
        request = build(
            scheduler_pb2.AbortRequestsRequest,
            request_id=self._calls.next_request_id(),
            request_ids=int_list(request_ids, "request_ids"),
        )
        ended = list((await self._calls.send("abort_requests", request, timeout_s)).finished_ids)
        self._forget(ended)
        return ended

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
            request_id=self._calls.next_request_id(),
            reports=[report_message(report) for report in reports],
            max_step_tokens=_budget(max_step_tokens, "max_step_tokens"),
            max_running=_budget(max_running, "max_running"),
            ahead=bool(ahead),
            retry=bool(retry),
        )
        response = await self._calls.send("schedule", request, timeout_s)
        batch = self._batch(response)
        self._forget(batch.finished)
        return batch

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
        ids, step = to_ints(response.sequence_ids), None
        if response.batch:
            info = step_info(response.step, self._calls.context.connection.num_restarts)
            step = self._make_step(self._calls, self._sequences_of(ids, info), info)
        preempted = zip(response.preempted_ids, response.preempted_tokens, response.preempted_swapped, strict=True)
        return EngineBatch(
            number=response.batch,
            step=step,
            sequence_ids=ids,
            num_decodes=response.num_decodes,
            sampled=to_ints(response.sampled_ids),
            sampled_rows=to_ints(response.sampled_rows, np.int32),
            finished=list(response.finished_ids),
            preempted=list(itertools.starmap(PreemptedSequence, preempted)),
            num_stalled=response.num_stalled,
            waiting=response.num_waiting,
            running=response.num_running,
            swapped=response.num_swapped,
        )

    def _sequences_of(self, ids: np.ndarray[Any, Any], info: StepInfo) -> tuple[Sequence, ...]:
        key, sequences = self._last
        if ids.tobytes() != key:
            sequences = tuple(self._sequences[sequence_id] for sequence_id in ids.tolist())
            self._last = ids.tobytes(), sequences
        for sequence, length in zip(sequences, info.context_lens.tolist(), strict=True):
            sequence.length = length
        return sequences


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
            if fields[name] not in list(values):
                raise InvalidArgumentError(f"{fields[name]!r} is none of {', '.join(values)}", field=name)
            fields[name] = values[fields[name]]
    request = build(scheduler_pb2.OpenSchedulerRequest, request_id=calls.next_request_id(), **fields)
    opened = await calls.send("open_scheduler", request, timeout_s)
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
        response = await calls.send("describe_requests", request, timeout_s)
        infos += map(request_info, response.requests)
        if ids is None and (not response.requests or len(infos) >= response.num_requests):
            break
    return infos
