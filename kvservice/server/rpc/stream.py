"""The handlers of all RPCs, created from the protobuf descriptors, and the stream of a session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2
from grpc_status import rpc_status

from kvservice.auth import CALLER
from kvservice.config import RequestLimits
from kvservice.errors import FailedPreconditionError, KVServiceError, RestartingError, UnauthenticatedError
from kvservice.server.calls.events import EventStreams
from kvservice.server.rpc.callers import Callers, Context
from kvservice.server.rpc.contract import ANSWERED_BY_OBSERVER, SERVICES, call_name
from kvservice.server.rpc.dispatch import Dispatcher
from kvservice.server.rpc.limits import (
    RPC,
    UNATTACHED_S,
    Handler,
    Refused,
    Rpc,
    Slots,
    answering,
    check_accepted,
    parser,
)
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import ADMINS, ENGINES
from kvservice.v1 import session_pb2
from kvservice.wire.status import to_status
from kvservice.wire.tensors import Encoded

logger = logging.getLogger(__name__)


def _traceparent(context: Context) -> str:
    """Return the W3C traceparent header of a unary call, or an empty string."""
    found = dict(context.invocation_metadata() or ()).get("traceparent", "")
    return found if isinstance(found, str) else ""


def _serialize(response: Message | Encoded) -> bytes:
    return response.to_bytes() if isinstance(response, Encoded) else response.SerializeToString()


class Services:
    """The services of the contract on one port. `callers` are the callers of that port."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        sessions: SessionRegistry,
        events: EventStreams,
        limits: RequestLimits,
        callers: Callers,
        slots: Slots,
    ) -> None:
        self._dispatcher = dispatcher
        self._callers = callers
        self._sessions = sessions
        self._events = events
        self._limits = limits
        self._slots = slots

    def handlers(self) -> dict[str, Handler]:
        """Return all RPC handlers by method path."""
        return {
            f"/{service.full_name}/{method.name}": self._rpc(method)
            for service in SERVICES
            for method in service.methods
        }

    def _rpc(self, method: MethodDescriptor) -> Handler:
        parse = parser(GetMessageClass(method.input_type), self._limits)
        answered_here = method.name not in ANSWERED_BY_OBSERVER
        serialize = _serialize if answered_here else None
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._connect, parse, None)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._subscribe, parse, None)
        return grpc.unary_unary_rpc_method_handler(self._unary(call_name(method)), parse, serialize)

    def _unary(self, name: str) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            rpc = RPC.get()
            rpc.stalled_since = None
            try:
                self._callers.admit(context)
                check_accepted(request)
                traceparent = "" if self._dispatcher.tracer is None else _traceparent(context)
                return await self._dispatcher.call(name, request, None, "unary", self._callers.local, traceparent)
            except KVServiceError as error:
                return await context.abort_with_status(rpc_status.to_status(to_status(error)))
            finally:
                rpc.stalled_since = time.monotonic()

        return answer

    async def _subscribe(self, request: Any, context: Context) -> None:
        try:
            async with answering(context) as rpc:
                with self._slots.of_peer("event stream", context.peer()):
                    self._callers.admit(context)
                    check_accepted(request)
                    self._dispatcher.check_role(ADMINS)
                    async with contextlib.aclosing(self._events.subscribe(request)) as messages:
                        async for message in messages:
                            self._dispatcher.check_role(ADMINS)
                            with rpc.waiting():
                                await context.write(message)
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            logger.debug("a subscriber has gone: %s", error)  # gRPC detected it only during a write

    async def _connect(self, _: Any, context: Context) -> None:
        try:
            self._callers.admit(context)
            self._slots.check_unattached()
        except KVServiceError as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
        rpc = RPC.get()
        with rpc.working():
            await Stream(self._dispatcher, self._sessions, context, self._callers, self._slots, rpc).serve()


class Stream:
    """The stream of one session. It reads a call, sends the reply, then reads the next call."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        sessions: SessionRegistry,
        context: Context,
        callers: Callers,
        slots: Slots,
        rpc: Rpc,
    ) -> None:
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._context = context
        self._callers = callers
        self._slots = slots
        self._rpc = rpc
        self._session: ServerSession | None = None
        self._ending: asyncio.Task[None] | None = None
        # Whether a call is being executed or answered, and the error that ends the stream after that.
        self._answering = False
        self._restarting: RestartingError | None = None
        # gRPC fails if a status is sent during the write of a message.
        self._sending = asyncio.Lock()
        self._ended = False

    def end(self, error: KVServiceError) -> None:
        """End the stream with an error from outside `serve`. Its pending read ends when the status is sent.

        The status is ABORTED, which means that the lease is lost. An UnauthenticatedError keeps its status, because the
        caller still has the lease and can reconnect with another token. So does a RestartingError, whose stream ends
        after the reply to the current call: calls without a reply were not executed.
        """
        if isinstance(error, RestartingError) and self._answering:
            self._restarting = error
            return
        status = to_status(error)
        if not isinstance(error, UnauthenticatedError | RestartingError):
            status.code = code_pb2.ABORTED
        self._ending = asyncio.create_task(self._abort(rpc_status.to_status(status)))

    async def _abort(self, status: grpc.Status) -> None:
        async with self._sending:
            self._ended = True
            # The call always raises: AbortError, or another one of these if the client has already ended the RPC.
            with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
                await self._context.abort_with_status(status)

    async def serve(self) -> None:
        self._slots.num_unattached += 1
        self._expect_attach()
        try:
            while (call := await self._context.read()) is not grpc.aio.EOF:
                if self._ending is not None:  # the lease is lost, but the client has not read the status yet
                    return await self._ending
                self._answering = True
                reply = self._refusal(call) if isinstance(call, Refused) else await self._answer(call)
                async with self._sending:
                    if self._ended:
                        return None
                    self._rpc.stalled_since = time.monotonic()
                    await self._context.write(reply)
                    self._rpc.stalled_since = None
                self._answering = False
                if self._restarting is not None:
                    raise self._restarting
        except KVServiceError as error:
            await self._context.abort_with_status(rpc_status.to_status(to_status(error)))
        finally:
            if self._session is not None:
                self._sessions.detach(self._session, self.end)
            else:
                self._attached()

    def _expect_attach(self) -> None:
        """End the stream if it is not attached in time."""
        late = FailedPreconditionError(f"the stream was not attached within {UNATTACHED_S:g} s")
        self._unattached = asyncio.get_running_loop().call_later(UNATTACHED_S, self.end, late)

    def _attached(self) -> None:
        """Stop the attach timeout, because the stream was attached or has ended."""
        self._unattached.cancel()
        self._slots.num_unattached -= 1

    def _refusal(self, call: Refused) -> bytes:
        """Return the serialized error reply to a refused call. Raises the error if the call id is unknown, because the
        client could not match the reply to a call."""
        if call.call_id is None:
            raise call.error
        return session_pb2.Reply(call_id=call.call_id, error=to_status(call.error)).SerializeToString()

    async def _answer(self, call: session_pb2.Call) -> bytes:
        """Return the serialized reply to a call."""
        name = call.WhichOneof("call")
        try:
            if name is None:
                raise FailedPreconditionError("a call of a later version, or none", field="call")
            request = getattr(call, name)
            if name == "attach":
                return session_pb2.Reply(call_id=call.call_id, attach=await self._attach(request)).SerializeToString()
            if self._session is None and name != "ping":
                raise FailedPreconditionError("the stream's first call must be attach", field="call")
            response = await self._dispatcher.call(
                name, request, self._session, "stream", self._callers.local, call.traceparent
            )
            if isinstance(response, Encoded):
                reply = session_pb2.Reply(call_id=call.call_id).SerializeToString()
                field = session_pb2.Reply.DESCRIPTOR.fields_by_name[name]
                return b"".join((reply, *response.inside(field.number).pieces))
            result: dict[str, Any] = {name: response}
            return session_pb2.Reply(call_id=call.call_id, **result).SerializeToString()
        except KVServiceError as error:
            return session_pb2.Reply(call_id=call.call_id, error=to_status(error)).SerializeToString()

    async def _attach(self, request: session_pb2.AttachRequest) -> session_pb2.AttachResponse:
        if self._session is not None:
            raise FailedPreconditionError("the stream is attached already", field="call")
        self._callers.check(CALLER.get())
        self._dispatcher.check_role(ENGINES)
        self._dispatcher.refuse_new_work()
        restoring = None if request.reconnects else self._sessions.restoring(request.session_token)
        if restoring is not None:
            self._unattached.cancel()  # the client waits for the daemon
            try:
                await restoring
            finally:
                self._expect_attach()
            self._dispatcher.refuse_new_work()
        self._session = self._sessions.attach(request.session_token, request.holder, request.reconnects, self.end)
        self._attached()
        return session_pb2.AttachResponse(session_id=self._session.session_id, daemon_start=self._sessions.daemon_start)
