"""The handlers of SchedulerService: an engine's requests, its reports, and the batches of its steps."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from kvservice.blocks.slices import Slices, Waits
from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.server import codec, scheduler_codec
from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.loop import After, Finished
from kvservice.server.sessions.scheduler import PageLimits, QueueTotals, SessionScheduler
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tiering.pool_tier import PoolTier
from kvservice.v1 import scheduler_pb2


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
        self._max_response_bytes = codec.max_response_bytes(config)
        self._totals = QueueTotals(config.max_queued_requests, config.max_queued_tokens)

    def handlers(self) -> tuple[Handler, ...]:
        refused, kinds = WhileDraining.REFUSED, scheduler_pb2
        return (
            SessionHandler("open_scheduler", kinds.OpenSchedulerRequest, self.open, refused),
            SessionHandler("add_requests", kinds.AddRequestsRequest, self.add, refused),
            SessionHandler("abort_requests", kinds.AbortRequestsRequest, self.abort),
            SessionHandler("schedule", kinds.ScheduleRequest, self.schedule, refused),
            SessionHandler("describe_requests", kinds.DescribeRequestsRequest, self.describe),
        )

    def open(
        self, session: ServerSession, request: scheduler_pb2.OpenSchedulerRequest
    ) -> scheduler_pb2.OpenSchedulerResponse:
        settings = scheduler_codec.settings_of(request, self._config)
        existed = session.scheduler is not None
        if session.scheduler is None:
            session.scheduler = SessionScheduler(self._engine, session.namespace, settings, self._totals)
        elif session.scheduler.settings != settings:
            raise FailedPreconditionError("the session has a scheduler with other settings")
        return scheduler_codec.opened_response(settings, existed=existed)

    def add(
        self, session: ServerSession, request: scheduler_pb2.AddRequestsRequest
    ) -> Slices[scheduler_pb2.AddRequestsResponse]:
        scheduler = scheduler_of(session)
        requests = yield from scheduler_codec.requests_of(request)
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
    ) -> Finished[scheduler_pb2.ScheduleResponse] | Waits[Finished[scheduler_pb2.ScheduleResponse]]:
        if self._tier is not None and (event := scheduler_of(session).load_ahead(self._tier)) is not None:
            return self._schedule_after(event, session, request)
        return self._schedule(session, request)

    def _schedule_after(
        self, event: Awaitable[object], session: ServerSession, request: scheduler_pb2.ScheduleRequest
    ) -> Waits[Finished[scheduler_pb2.ScheduleResponse]]:
        yield event
        return self._schedule(session, request)

    def _schedule(
        self, session: ServerSession, request: scheduler_pb2.ScheduleRequest
    ) -> Finished[scheduler_pb2.ScheduleResponse]:
        ended, batch = scheduler_of(session).step(scheduler_codec.step_request(request), self._clock())
        mapped, published = (None, None) if batch.step is None else session.access.publish(batch.step)
        response = scheduler_codec.schedule_response(batch, ended, mapped)
        return response if published is None else After(response, published)

    def describe(
        self, session: ServerSession, request: scheduler_pb2.DescribeRequestsRequest
    ) -> Slices[scheduler_pb2.DescribeRequestsResponse]:
        if request.first < 0:
            raise InvalidArgumentError("must not be negative", field="first")
        scheduler = scheduler_of(session)
        page = yield from scheduler.describe(list(request.request_ids) or None, request.first, self._limits)
        if request.return_token_ids:
            num_tokens = sum(len(sample.token_ids) for snapshot in page for sample in snapshot.samples)
            codec.check_response_size(4 * num_tokens, self._max_response_bytes, "return_token_ids")
        descriptions = [
            scheduler_codec.description(snapshot, return_token_ids=request.return_token_ids) for snapshot in page
        ]
        return scheduler_pb2.DescribeRequestsResponse(
            requests=descriptions, num_requests=len(scheduler), unreported_batches=scheduler.scheduler.unreported
        )


def scheduler_of(session: ServerSession) -> SessionScheduler:
    """Return the scheduler of a session. Raises FailedPreconditionError if it has none."""
    if session.scheduler is None:
        raise FailedPreconditionError("the session has no scheduler: OpenScheduler opens it")
    return session.scheduler
