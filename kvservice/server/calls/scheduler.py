"""The handlers of SchedulerService, and their codec: requests of an engine, its reports, the batches of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvservice.blocks.slices import Slices, Waits, in_turn
from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    KVServiceError,
    QuotaExceededError,
)
from kvservice.scheduler import (
    BatchPolicy,
    Phase,
    PreemptionMode,
    QueueOrder,
    Report,
    Request,
    RequestSnapshot,
    ScheduledBatch,
    SchedulerConfig,
)
from kvservice.server.calls.blocks import extra_keys, optional_ints, step_response, to_ints
from kvservice.server.calls.handlers import (
    AnyHandler,
    Published,
    WhileDraining,
    in_session,
    max_response_bytes,
    response_too_large,
)
from kvservice.server.sessions.scheduler import (
    PageLimits,
    QueueTotals,
    SchedulerSettings,
    SessionScheduler,
    StepRequest,
)
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tiering.pool_tier import PoolTier
from kvservice.v1 import blocks_pb2, scheduler_pb2
from kvservice.wire.status import to_status
from kvservice.wire.tensors import token_array


class SchedulerCalls:
    """Handles the calls of SchedulerService for all sessions."""

    def __init__(
        self,
        config: ServeConfig,
        engine: CacheEngine,
        tier: PoolTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tier` loads missing blocks, if there is one. `clock` returns the time of the policies, in seconds."""
        self._config, self._engine, self._tier, self._clock = config, engine, tier, clock
        self._limits = PageLimits(config.max_request_sequences, config.request_limits.max_request_tokens)
        self._max_response_bytes = max_response_bytes(config)
        self._totals = QueueTotals(config.max_queued_requests, config.max_queued_tokens)

    def handlers(self) -> tuple[AnyHandler, ...]:
        refused, kinds = WhileDraining.REFUSED, scheduler_pb2
        return (
            in_session("open_scheduler", kinds.OpenSchedulerRequest, self.open, refused),
            in_session("add_requests", kinds.AddRequestsRequest, self.add, refused),
            in_session("abort_requests", kinds.AbortRequestsRequest, self.abort),
            in_session("schedule", kinds.ScheduleRequest, self.schedule, refused, publishes=True),
            in_session("describe_requests", kinds.DescribeRequestsRequest, self.describe),
        )

    def open(
        self, session: ServerSession, request: scheduler_pb2.OpenSchedulerRequest
    ) -> scheduler_pb2.OpenSchedulerResponse:
        settings = settings_of(request, self._config)
        existed = session.scheduler is not None
        if session.scheduler is None:
            session.scheduler = SessionScheduler(self._engine, session.namespace, settings, self._totals)
        elif session.scheduler.settings != settings:
            raise FailedPreconditionError("the session has a scheduler with other settings")
        return opened_response(settings, existed=existed)

    def add(
        self, session: ServerSession, request: scheduler_pb2.AddRequestsRequest
    ) -> Slices[scheduler_pb2.AddRequestsResponse]:
        scheduler = scheduler_of(session)
        requests = yield from requests_of(session, request)
        yield from scheduler.add(requests, self._clock(), session.allocated_soon)
        return scheduler_pb2.AddRequestsResponse()

    def abort(
        self, session: ServerSession, request: scheduler_pb2.AbortRequestsRequest
    ) -> scheduler_pb2.AbortRequestsResponse:
        if not request.request_ids:
            raise InvalidArgumentError("must not be empty", field="request_ids")
        ended = scheduler_of(session).abort(list(request.request_ids))
        return scheduler_pb2.AbortRequestsResponse(finished_ids=ended)

    def schedule(
        self, session: ServerSession, request: scheduler_pb2.ScheduleRequest
    ) -> Waits[Published[scheduler_pb2.ScheduleResponse]]:
        if self._tier is not None and (event := scheduler_of(session).load_ahead(self._tier)) is not None:
            yield event
        if session.namespace.quota is not None:  # the scheduler plans with what its tenant may take
            self._engine.manager.enter(session.namespace)
        ended, batch = scheduler_of(session).step(step_request(request), self._clock())
        mapped = published = None
        if batch.step is not None and session.shared.shares_steps:
            mapped, published = session.shared.publish(batch.step)
        response = schedule_response(batch, ended, mapped)
        return response, published

    def describe(
        self, session: ServerSession, request: scheduler_pb2.DescribeRequestsRequest
    ) -> Slices[scheduler_pb2.DescribeRequestsResponse]:
        if request.first < 0:
            raise InvalidArgumentError("must not be negative", field="first")
        scheduler = scheduler_of(session)
        page = yield from scheduler.describe(list(request.request_ids) or None, request.first, self._limits)
        if request.return_token_ids:
            num_tokens = sum(len(sample.token_ids) for snapshot in page for sample in snapshot.samples)
            if 4 * num_tokens > self._max_response_bytes:
                raise response_too_large(4 * num_tokens, self._max_response_bytes, "return_token_ids")
        descriptions = [request_description(snapshot, return_token_ids=request.return_token_ids) for snapshot in page]
        return scheduler_pb2.DescribeRequestsResponse(
            requests=descriptions, num_requests=len(scheduler), unreported_batches=scheduler.scheduler.unreported
        )


def scheduler_of(session: ServerSession) -> SessionScheduler:
    """Return the scheduler of a session. Raises FailedPreconditionError if it has none."""
    if session.scheduler is None:
        raise FailedPreconditionError("the session has no scheduler: OpenScheduler opens it")
    return session.scheduler


# ---- codec

_POLICIES: Final = {
    scheduler_pb2.BATCH_POLICY_UNSPECIFIED: BatchPolicy.CHUNKED,
    scheduler_pb2.BATCH_POLICY_CHUNKED: BatchPolicy.CHUNKED,
    scheduler_pb2.BATCH_POLICY_PREFILL_FIRST: BatchPolicy.PREFILL_FIRST,
}
_ORDERS: Final = {
    scheduler_pb2.QUEUE_ORDER_UNSPECIFIED: QueueOrder.FCFS,
    scheduler_pb2.QUEUE_ORDER_FCFS: QueueOrder.FCFS,
    scheduler_pb2.QUEUE_ORDER_PRIORITY: QueueOrder.PRIORITY,
}
_PREEMPTIONS: Final = {
    scheduler_pb2.PREEMPTION_MODE_UNSPECIFIED: PreemptionMode.AUTO,
    scheduler_pb2.PREEMPTION_MODE_RECOMPUTE: PreemptionMode.RECOMPUTE,
    scheduler_pb2.PREEMPTION_MODE_SWAP: PreemptionMode.SWAP,
    scheduler_pb2.PREEMPTION_MODE_AUTO: PreemptionMode.AUTO,
}
_PHASES: Final = {
    Phase.WAITING: scheduler_pb2.REQUEST_PHASE_WAITING,
    Phase.PREFILLING: scheduler_pb2.REQUEST_PHASE_PREFILLING,
    Phase.DECODING: scheduler_pb2.REQUEST_PHASE_DECODING,
    Phase.SWAPPED: scheduler_pb2.REQUEST_PHASE_SWAPPED,
}
# A request that leaves one of these settings unset gets the default of SchedulerConfig.
_OPTIONAL: Final = (
    "lookahead", "long_prefill_tokens", "max_long_prefills", "reserve_steps", "max_stalled_fraction",
    "size_delay_steps", "max_size_delay_steps", "delay_factor", "share_prefixes", "swap_block_s", "compute_token_s",
)  # fmt: skip


def settings_of(request: scheduler_pb2.OpenSchedulerRequest, config: ServeConfig) -> SchedulerSettings:
    """Return the settings of a request. Raises InvalidArgumentError, and QuotaExceededError for a setting above a limit
    of the daemon."""
    limits = config.request_limits
    highest = {
        "max_step_tokens": ("max_request_tokens", limits.max_request_tokens),
        "max_running": min(
            ("max_request_sequences", limits.max_request_sequences),
            ("max_sequences", config.max_sequences),
            key=lambda limit: limit[1],
        ),
        "max_requests": ("max_queued_requests", config.max_queued_requests),
    }
    values: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    for name, (limit, value) in highest.items():
        values[name] = getattr(request, name) if request.HasField(name) else min(getattr(SchedulerConfig, name), value)
        if values[name] > value:
            raise QuotaExceededError(f"is above {limit} = {value}", field=name, limit=limit, value=value)
    settings = SchedulerConfig(
        batches=_choice(_POLICIES, request.policy, "policy"),
        order=_choice(_ORDERS, request.order, "order"),
        preemption=_choice(_PREEMPTIONS, request.preemption, "preemption"),
        **values,
    )
    weight = request.weight if request.HasField("weight") else 1.0
    fixed = [request.HasField(name) for name in ("swap_block_s", "compute_token_s")]
    return SchedulerSettings(settings, weight, *fixed)


def _choice(choices: dict[Any, Any], value: int, field: str) -> Any:
    if value not in choices:
        raise InvalidArgumentError(f"{value} is unknown", field=field)
    return choices[value]


def opened_response(settings: SchedulerSettings, *, existed: bool) -> scheduler_pb2.OpenSchedulerResponse:
    config = settings.config
    return scheduler_pb2.OpenSchedulerResponse(
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        lookahead=config.lookahead,
        max_requests=config.max_requests,
        existed=existed,
    )


def requests_of(session: ServerSession, request: scheduler_pb2.AddRequestsRequest) -> Slices[list[Request]]:
    if not request.requests:
        raise InvalidArgumentError("must not be empty", field="requests")
    return in_turn(_request(session, i, one) for i, one in enumerate(request.requests))


def _request(session: ServerSession, number: int, message: scheduler_pb2.ScheduledRequest) -> Request:
    return Request(
        message.request_id,
        token_array(message),
        message.max_tokens,
        message.priority,
        extra_keys(session, message.extra_keys, f"requests[{number}].extra_keys"),
        message.width,
        to_ints(message.stop_lengths),
        message.beams,
    )


def step_request(request: scheduler_pb2.ScheduleRequest) -> StepRequest:
    return StepRequest(
        [_report(one) for one in request.reports],
        request.max_step_tokens or None,
        request.max_running or None,
        request.ahead,
        request.retry,
    )


def _report(message: scheduler_pb2.StepReport) -> Report:
    return Report(
        batch=message.batch,
        token_ids=token_array(message),
        num_tokens=optional_ints(message.num_tokens, np.int32),
        parents=optional_ints(message.parent_ids),
        finished=to_ints(message.finished_ids),
        proposals=optional_ints(message.proposals, np.int32),
        num_proposed=optional_ints(message.num_proposed, np.int32),
    )


def request_description(snapshot: RequestSnapshot, *, return_token_ids: bool) -> scheduler_pb2.RequestDescription:
    return scheduler_pb2.RequestDescription(
        request_id=snapshot.request_id,
        phase=_PHASES[snapshot.phase],
        sequences=[
            scheduler_pb2.RequestSequence(
                sequence_id=sample.sequence_id,
                finished=sample.finished,
                num_generated=sample.num_generated,
                length=len(sample.token_ids),
                token_ids=sample.token_ids.tolist() if return_token_ids else (),
            )
            for sample in snapshot.samples
        ],
        extra_keys=[blocks_pb2.ExtraKey(position=position, key=key) for position, key in snapshot.extra_keys],
    )


def _told(error: Exception) -> KVServiceError:
    """Return what a client is told of an error."""
    if isinstance(error, KVServiceError):
        return error
    return InternalError("the request failed; the daemon's log says why")


def schedule_response(
    batch: ScheduledBatch, ended: list[int], mapped: tuple[int, int] | None
) -> scheduler_pb2.ScheduleResponse:
    """Encode a batch. `ended` are the requests that the reports have ended; `mapped` is as in `step_response`."""
    response = scheduler_pb2.ScheduleResponse(
        finished_ids=ended,
        preempted_ids=[one.sequence_id for one in batch.preempted],
        preempted_tokens=[one.computed for one in batch.preempted],
        preempted_swapped=[one.swapped for one in batch.preempted],
        num_stalled=batch.num_stalled,
        num_waiting=batch.counts.waiting,
        num_running=batch.counts.running,
        num_swapped=batch.counts.swapped,
        failed=[
            scheduler_pb2.FailedRequest(request_id=request_id, error=to_status(_told(error)))
            for request_id, error in batch.failed
        ],
    )
    if batch.step is not None:
        response.batch = batch.number
        response.step.CopyFrom(step_response(batch.step, return_slot_mapping=False, mapped=mapped))
        response.sequence_ids.extend(batch.step.sequence_ids.tolist())
        response.num_decodes = batch.num_decodes
        response.sampled_ids.extend(batch.sampled.tolist())
        response.sampled_rows.extend(batch.sampled_rows.tolist())
    return response
