"""The dispatcher of all calls, unary or over a stream: admission, repeated requests, errors and latency.

Stream, Services ─▶ Dispatcher.call ─▶ handler.start(session, request) ─▶ block manager, engine
                      │  ▲
                      │  └── a task or coroutine of the handler is awaited
                      └── a repeated request gets the remembered reply

An operation and the reply to its request survive the process together or not at all: when the operation has finished,
the reply is written into kept memory, then the operation ends, and nothing runs in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvservice.blocks.slices import Waits
from kvservice.errors import (
    DrainingError,
    InternalError,
    KVServiceError,
    OutOfBlocksError,
    QuotaExceededError,
    RegionsNotAllowedError,
    RestartingError,
)
from kvservice.server.calls.handlers import Begun, Handler, OpenHandler, Response, SessionHandler, WhileDraining
from kvservice.server.loop import After, Finished, go_on
from kvservice.server.rpc.contract import KEPT_METHODS
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import Roles, Tenants
from kvservice.telemetry.calls import CallTable
from kvservice.v1 import host_pb2, shared_memory_pb2, store_pb2, tensor_pb2
from kvservice.wire.tensors import Encoded

# The request types that only clients on this host may send.
HOST_REQUESTS: tuple[type[Message], ...] = (
    store_pb2.MapStoreRequest,
    *(
        GetMessageClass(method.input_type)
        for module, name in ((shared_memory_pb2, "SharedMemoryService"), (host_pb2, "HostService"))
        for method in module.DESCRIPTOR.services_by_name[name].methods
    ),
)

if TYPE_CHECKING:
    from kvservice.server.rpc.tracing import Tracer

logger = logging.getLogger(__name__)


class Dispatcher:
    """Runs the handler of each call."""

    def __init__(
        self,
        handlers: Iterable[Handler],
        sessions: SessionRegistry,
        table: CallTable,
        tracer: Tracer | None,
        end_operation: Callable[[], object],
        tenants: Tenants | None = None,
    ) -> None:
        """`tracer` is None if calls are not traced. `end_operation` declares that the latest operation of the block
        manager counts, also if the process dies now. `tenants` is None if every caller may make every call."""
        self._tenants = tenants
        self._end_operation = end_operation
        self._handlers = {handler.method: handler for handler in handlers}
        # The methods whose requests may have a request id.
        self._repeatable = frozenset(
            handler.method
            for handler in self._handlers.values()
            if isinstance(handler, SessionHandler) and "request_id" in handler.request_type.DESCRIPTOR.fields_by_name
        )
        self._sessions = sessions
        self._finished_steps = sessions.lanes.finished_steps
        self._table = table
        self.tracer = tracer
        # `restarting` is true while the daemon drains because a new process takes over.
        self.draining = self.restarting = False
        self.in_flight = self.num_begun = 0
        # The number of calls that failed with OutOfBlocksError.
        self.out_of_blocks = 0

    async def call(
        self,
        method: str,
        request: Message,
        session: ServerSession | None,
        transport: str,
        local: bool,
        traceparent: str = "",
    ) -> Response:
        """Run a call. Raises KVServiceError.

        `session` is the session of the stream that the call came over. It is None for a unary call, whose request has
        a session token if the method needs a session. `local` is true if the call came over the unix socket.
        `traceparent` is the caller's trace context.
        """
        span = self.tracer.begin(method, transport, traceparent) if self.tracer is not None else None
        start = time.perf_counter()
        status = "OK"
        self.in_flight += 1
        self.num_begun += 1
        try:
            if not local:
                self._check_remote(request, session)
            if self._tenants is not None:
                self.check_role(self._handlers[method].roles, session)
                self._tenants.count_call()
            started = self._start(self._handlers[method], request, session)
            if isinstance(started, (Message, Encoded, bytes)):
                return started
            if isinstance(started, asyncio.Task):
                return await asyncio.shield(started)  # the task completes even if its caller is cancelled
            return await started
        except KVServiceError as error:
            status = error.status
            self.out_of_blocks += isinstance(error, OutOfBlocksError)
            if self._tenants is not None and isinstance(error, QuotaExceededError):
                self._tenants.note_refusal(error)
            if logger.isEnabledFor(logging.DEBUG):
                fields = self._log_fields(method, status, request, session)
                logger.debug("%s refused: %s", method, error.reason, extra=fields)
            raise
        except asyncio.CancelledError:
            status = "CANCELLED"  # for example because the stream ended: there is nobody to respond to
            raise
        except Exception:
            status = InternalError.status
            logger.exception("%s failed", method, extra=self._log_fields(method, status, request, session))
            raise InternalError(f"{method} failed; the daemon's log says why") from None
        finally:
            self.in_flight -= 1
            self._table.observe(method, status, transport, time.perf_counter() - start)
            if span is not None:
                span.end(status, self._session_id(request, session))

    def check_role(self, roles: Roles, session: ServerSession | None = None) -> None:
        """Raise PermissionDeniedError unless the caller has one of these roles, and still belongs to the tenant of the
        stream's session."""
        if self._tenants is not None:
            self._tenants.check(roles, None if session is None else session.tenant)

    def refuse_new_work(self) -> None:
        """Raise DrainingError while the daemon drains: RestartingError if a new process takes over."""
        if self.draining:
            raise self._draining_error("")

    def _check_remote(self, request: Message, session: ServerSession | None) -> None:
        """Raise RegionsNotAllowedError for a request over TCP that shares memory of this host, UnknownSessionError for
        one that may not, because its session is not known."""
        names = named_regions(request)
        if names and not is_for_this_host(request):
            session = session or self._sessions.get(getattr(request, "session_token", b""))
            if session.regions.are_remote(names):
                return
        if names or is_for_this_host(request):
            raise RegionsNotAllowedError("shared memory is for clients on the unix socket")

    def _start(self, handler: Handler, request: Any, session: ServerSession | None) -> Begun:
        """Admit a call, and run its handler until it has finished or has to wait."""
        method = handler.method
        repeatable = method in self._repeatable
        request_id = request.request_id if repeatable else 0
        if isinstance(handler, SessionHandler):
            if session is None:
                session = self._sessions.get(request.session_token)
            if request_id and (known := session.replies.find(request_id, method)) is not None:
                return known
            if session.saving is not None or session.asleep:
                session.begin_call()
        if steps := self._finished_steps.take():  # the call sees the steps that lanes have completed
            self._sessions.lanes.commit(steps)
        if self.draining:
            self._check_draining(handler, request, session)
        started: Any
        if isinstance(handler, OpenHandler):
            started = handler.start(request)
        else:
            assert session is not None, "its token was looked up"
            started = handler.start(session, request)
        if isinstance(started, GeneratorType):
            try:
                event = next(started)
            except StopIteration as end:
                started = end.value
            else:
                if repeatable:
                    assert session is not None, "requests outside sessions are not repeatable"
                    started = self._ending(started, method, session, request_id)
                started = go_on(started, event)
        begun: Begun = started
        if not repeatable:
            return begun
        # Such a request changes bookkeeping only, so its handler is not async.
        assert session is not None, "requests outside sessions are not repeatable"
        if isinstance(started, After):
            self._end(method, session, request_id, started.answer)
            begun = started = started.task()
        elif not isinstance(started, asyncio.Task):
            self._end(method, session, request_id, started)
            return begun
        if request_id:
            session.replies.remember(request_id, method, started)
        return begun

    def _ending(
        self, slices: Waits[Finished[Message]], method: str, session: ServerSession, request_id: int
    ) -> Waits[Message]:
        reply = yield from slices
        if isinstance(reply, After):
            self._end(method, session, request_id, reply.answer)
            yield reply.event
            return reply.answer
        self._end(method, session, request_id, reply)
        return reply

    def _end(self, method: str, session: ServerSession, request_id: int, reply: Message) -> None:
        """End the operation of a request that was executed: remember the reply, then let the operation count."""
        if request_id and method in KEPT_METHODS:
            session.replies.keep(request_id, method, reply)
            self._end_operation()
            session.replies.settle()
            return
        if request_id:
            session.replies.remember(request_id, method, reply)
        self._end_operation()

    def _check_draining(self, handler: Handler, request: Any, session: ServerSession | None) -> None:
        """Raise DrainingError for new work."""
        if handler.while_draining is WhileDraining.REFUSED:
            raise self._draining_error("")
        if handler.while_draining is WhileDraining.FOR_BEGUN_STEPS:
            assert session is not None, "steps are of sessions"
            if not session.namespace.in_progress(request.step_id):
                raise self._draining_error(", and this step has not begun")

    def _draining_error(self, detail: str) -> DrainingError:
        if self.restarting:
            return RestartingError(f"a new process of the daemon takes over{detail}")
        return DrainingError(f"the daemon is shutting down{detail}")

    def _session_id(self, request: Message, session: ServerSession | None) -> int | None:
        """Return the id of `session`, or of the session of a unary call's token, or None if it has ended."""
        session = session or self._sessions.find(getattr(request, "session_token", b""))
        return None if session is None else session.session_id

    def _log_fields(self, method: str, status: str, request: Message, session: ServerSession | None) -> dict[str, Any]:
        """Return the structured fields of a call's log line. They contain none of the request's data."""
        return {
            "method": method,
            "status": status,
            "session_id": self._session_id(request, session),
            "request_id": getattr(request, "request_id", 0),
        }


def is_for_this_host(request: Message) -> bool:
    """Return whether only clients on the daemon's host may send requests of this type."""
    return isinstance(request, HOST_REQUESTS)


def named_regions(request: Message) -> list[str]:
    """Return the names of the regions that the blocks or tensors of a request are in."""
    names = []
    for _, value in request.ListFields():
        if isinstance(value, tensor_pb2.SharedMemoryPlace | store_pb2.Scatter):
            names.append(value.region)
        elif isinstance(value, tensor_pb2.Tensor) and value.HasField("shared_memory"):
            names.append(value.shared_memory.region)
    return names
