"""The dispatcher of all calls, unary or over a stream: admission, repeated requests, errors and latency."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import Message

from kvservice.errors import (
    DrainingError,
    InternalError,
    KVServiceError,
    OutOfBlocksError,
    RegionsNotAllowedError,
)
from kvservice.server.calls import Calls, OpenCalls
from kvservice.server.codec import shares_memory
from kvservice.server.sessions import Session, SessionRegistry
from kvservice.telemetry.calls import CallTable

if TYPE_CHECKING:
    from kvservice.server.tracing import Tracer

logger = logging.getLogger(__name__)

# Methods that are refused while the daemon drains.
NEW_WORK = frozenset(
    (
        "open", "attach", "allocate", "append", "open_step", "fork", "swap_out", "swap_in", "pin", "create_region",
        "open_lane", "map_pool",
    )
)  # fmt: skip
# Methods whose responses wait until the client may work on the step.
OPENS_STEP = frozenset(("append", "open_step"))
# Methods that stay allowed while the daemon drains, for steps that have begun.
STEP_WORK = frozenset(("decode", "extend", "write"))


class Dispatcher:
    """Runs the handler of each call. `tracer` is None if calls are not traced."""

    def __init__(
        self, calls: Calls, open_calls: OpenCalls, sessions: SessionRegistry, table: CallTable, tracer: Tracer | None
    ) -> None:
        self._calls = calls
        self._open_calls = open_calls
        self._sessions = sessions
        self._table = table
        self.tracer = tracer
        self.draining = False
        self.in_flight = self.num_begun = 0
        # The number of calls that failed with OutOfBlocksError.
        self.out_of_blocks = 0

    async def call(
        self, method: str, request: Any, session: Session, transport: str, local: bool, traceparent: str = ""
    ) -> Message:
        """Run a call within a session.

        `local` is true if the call came over the unix socket. `traceparent` is the caller's trace context. Raises
        KVServiceError.
        """
        return await self._measured(method, transport, traceparent, self._in_session, request, session, local)

    async def call_by_token(
        self, method: str, request: Any, transport: str, local: bool, traceparent: str = ""
    ) -> Message:
        """Run a call within the session whose token it carries. Raises KVServiceError."""
        return await self._measured(method, transport, traceparent, self._by_token, request, None, local)

    async def call_open(self, method: str, request: Any, transport: str, traceparent: str = "") -> Message:
        """Run a call that needs no session. Raises KVServiceError."""
        self._sessions.lanes.collect()
        return await self._measured(method, transport, traceparent, self._without_session, request, None, local=True)

    async def _measured(
        self,
        method: str,
        transport: str,
        traceparent: str,
        run: Any,
        request: Any,
        session: Session | None,
        local: bool,
    ) -> Message:
        span = self.tracer.begin(method, transport, traceparent) if self.tracer is not None else None
        start = time.perf_counter()
        status = "OK"
        self.in_flight += 1
        self.num_begun += 1
        try:
            if not local and shares_memory(request):
                raise RegionsNotAllowedError("shared memory is for clients on the unix socket")
            response = run(method, request, session)
            if isinstance(response, asyncio.Task):
                response = await asyncio.shield(response)  # the task completes even if its caller is cancelled
            elif inspect.isawaitable(response):
                response = await response
            return cast(Message, response)
        except KVServiceError as error:
            status = error.status
            self.out_of_blocks += isinstance(error, OutOfBlocksError)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s refused: %s", method, error.reason, extra=self._told(method, status, request, session))
            raise
        except asyncio.CancelledError:
            status = "CANCELLED"  # for example because the stream ended: there is nobody to respond to
            raise
        except Exception:
            status = InternalError.status
            logger.exception("%s failed", method, extra=self._told(method, status, request, session))
            raise InternalError(f"{method} failed; the daemon's log says why") from None
        finally:
            self.in_flight -= 1
            self._table.observe(method, status, transport, time.perf_counter() - start)
            if span is not None:
                span.end(status, self._session_id(request, session))

    def _session_id(self, request: Any, session: Session | None) -> int | None:
        """Return the id of `session`, or of the session of a unary call's token, or None if it has ended."""
        session = session or self._sessions.find(getattr(request, "session_token", b""))
        return None if session is None else session.session_id

    def _told(self, method: str, status: str, request: Any, session: Session | None) -> dict[str, Any]:
        """Return the structured fields of a call's log line. They contain none of the request's data."""
        return {
            "method": method,
            "status": status,
            "session_id": self._session_id(request, session),
            "request_id": getattr(request, "request_id", 0),
        }

    def _in_session(self, method: str, request: Any, session: Session) -> Any:
        response = self._repeated_or_new(method, request, session)
        if method in OPENS_STEP and (publishing := session.access.publishing) is not None:
            return _after(publishing, response)
        return response

    def _repeated_or_new(self, method: str, request: Any, session: Session) -> Any:
        request_id = getattr(request, "request_id", 0)
        if request_id and (known := session.replies.find(request_id, method)) is not None:
            return known
        self.admit(method)
        self._sessions.lanes.collect()
        if self.draining and method in STEP_WORK and not session.space.in_progress(request.step_id):
            raise DrainingError("the daemon is shutting down, and this step has not begun")
        response = getattr(self._calls, method)(session, request)
        if request_id:
            session.replies.remember(request_id, method, response)
        return response

    def _by_token(self, method: str, request: Any, _: None) -> Any:
        return self._in_session(method, request, self._sessions.get(request.session_token))

    def _without_session(self, method: str, request: Any, _: None) -> Any:
        self.admit(method)
        return getattr(self._open_calls, method)(request)

    def admit(self, method: str) -> None:
        """Raise DrainingError for new work while the daemon drains."""
        if self.draining and method in NEW_WORK:
            raise DrainingError("the daemon is shutting down")


async def _after(publishing: asyncio.Future[None], response: Message) -> Message:
    await asyncio.shield(publishing)
    return response
