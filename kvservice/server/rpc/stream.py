"""The way of a call: the RPCs, made from the protobuf descriptors, the stream of a session, and the dispatcher.

Services (unary), Stream ─▶ Dispatcher.call ─▶ handler.start(session, request) ─▶ block manager, engine
                              │  ▲
                              │  └── the other slices of a long operation run in a task
                              └── a repeated request gets the remembered reply
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2
from grpc_status import rpc_status

from kvservice.auth import CALLER
from kvservice.blocks.slices import Waits
from kvservice.config import RequestLimits
from kvservice.errors import (
    DrainingError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    KVServiceError,
    OutOfBlocksError,
    QuotaExceededError,
    RegionsNotAllowedError,
    RestartingError,
    UnauthenticatedError,
)
from kvservice.server.calls.events import EventStreams
from kvservice.server.calls.handlers import AnyHandler, Kind, Response, WhileDraining
from kvservice.server.loop import cancelled, drained, resumed, to_the_end
from kvservice.server.memory.remote import peer_address
from kvservice.server.rpc.callers import Callers, Context
from kvservice.server.rpc.contract import KEPT_METHODS, SERVICES, call_name, is_of_session
from kvservice.server.rpc.requests import (
    LARGE_BYTES,
    MAX_CALLS,
    BlocksCall,
    Calls,
    Refused,
    check_accepted,
    moves_blocks,
    parser,
)
from kvservice.server.rpc.slots import BULKY, RPC, UNATTACHED_S, Handler, Rpc, SessionTurns, Slots, answering
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import EVERYONE, Tenants
from kvservice.telemetry.tables import CallTable
from kvservice.v1 import host_pb2, regions_pb2, session_pb2, store_pb2, tensor_pb2
from kvservice.wire.status import to_status
from kvservice.wire.tensors import Encoded, join_elements, with_field

if TYPE_CHECKING:
    from kvservice.server.rpc.tracing import Tracer

logger = logging.getLogger(__name__)

# Replies to calls of one message go together up to this size, and no reply waits longer than this for the next one.
# Other streams are served while a message is sent.
JOINED_BYTES: Final = 64 << 10
JOINED_S: Final = 0.002
_REPLY_NUMBERS: Final = {field.name: field.number for field in session_pb2.Reply.DESCRIPTOR.fields}


def _first_field(data: bytes) -> bytes:
    """Return the first field of a message, if it is field 1, a short text and serialized first, else anything."""
    return data[2 : 2 + data[1]] if data[:1] == b"\x0a" and len(data) > 1 else b""


def _traceparent(context: Context) -> str:
    """Return the W3C traceparent header of a unary call, or an empty string."""
    found = dict(context.invocation_metadata() or ()).get("traceparent", "")
    return found if isinstance(found, str) else ""


def _serialize(response: Response) -> bytes:
    if isinstance(response, bytes):
        return response
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
        kind: Any = GetMessageClass(method.input_type)  # mypy takes the hash of a class for that of its objects
        parse = parser(kind, self._limits)
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._connect, parse, None)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._subscribe, parse, None)
        token_of: Callable[[bytes], bytes] | None = None
        if is_of_session(method):
            is_first = method.input_type.fields_by_name["session_token"].number == 1
            token_of = _first_field if is_first else lambda data: getattr(parse(data), "session_token", b"")
        answer = self._unary(call_name(method), parse, token_of)
        if self._callers.local:
            return grpc.unary_unary_rpc_method_handler(answer, None, None)
        # gRPC runs the handler of a unary RPC when the message is there, that of a stream when the RPC begins.
        return grpc.stream_unary_rpc_method_handler(answer, None, None)

    def _unary(self, name: str, parse: Callable[[bytes], Any], token_of: Callable[[bytes], bytes] | None = None) -> Any:
        """Return the handler of a unary call. `token_of` returns the token of the session from the message, at a small
        cost; None if the call is of no session."""

        async def answer(data: Any, context: Context) -> Any:
            rpc = RPC.get()
            try:
                if self._callers.local:
                    self._callers.admit(context)
                else:
                    data = await self._read(context)
                rpc.stalled_since = None
                async with contextlib.nullcontext() if token_of is None else self._turn(token_of(data)):
                    request = parse(data)
                    check_accepted(request)
                    traceparent = "" if self._dispatcher.tracer is None else _traceparent(context)
                    if name in BULKY:
                        rpc.session, rpc.address = request.session_token, peer_address(context.peer())
                        await self._slots.room.begin(rpc)
                    local = self._callers.local
                    # Serialized here, because nothing else may run between the handler and that, see Encoded.
                    reply = _serialize(await self._dispatcher.call(name, request, None, "unary", local, traceparent))
                # Others, of which many may be made at once, would take all of the room.
                if name in BULKY and len(reply) >= LARGE_BYTES:
                    self._slots.room.sends(rpc, len(reply))
                return reply
            except KVServiceError as error:
                status = rpc_status.to_status(to_status(error))
            finally:
                if rpc.num_making:
                    self._slots.room.end(rpc)
                rpc.stalled_since = time.monotonic()
            # Without an exception: gRPC would make a cycle of it that keeps the message until the next collection.
            context.set_code(status.code)
            context.set_details(status.details)
            context.set_trailing_metadata(status.trailing_metadata)
            return b""

        return answer

    @contextlib.asynccontextmanager
    async def _turn(self, token: bytes) -> AsyncIterator[None]:
        """Wait for the turn of a call among the unary calls of its session, so that they take no more of the daemon's
        time than those by its stream. Calls of unknown sessions have turns together."""
        key = b"" if self._sessions.find(token) is None else token
        await self._dispatcher.turns.begin(key)
        try:
            yield
        finally:
            self._dispatcher.turns.end(key)

    async def _read(self, context: Context) -> Any:
        """Admit a unary RPC over TCP, and return its request."""
        counts_begun, called_again = self._callers.counts_begun, self._callers.called_again
        if counts_begun:
            self._callers.admit(context)
        with self._callers.opened(context):
            request = await context.read()
        if request is grpc.aio.EOF:
            raise InvalidArgumentError("the RPC has no message")
        if not counts_begun:
            self._callers.admit(context)
        elif called_again is not None:
            called_again(context)
        return request

    async def _subscribe(self, request: Any, context: Context) -> None:
        try:
            async with answering(context) as rpc:
                with self._slots.of_peer("event stream", context.peer()):
                    self._callers.admit(context)
                    check_accepted(request)
                    self._dispatcher.admit_subscriber()
                    with self._dispatcher.noting_refusals(), self._sessions.event_stream():
                        domain = self._dispatcher.event_domain
                        async with contextlib.aclosing(self._events.subscribe(request, domain)) as messages:
                            async for message in messages:
                                with rpc.waiting():
                                    await context.write(message)
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            logger.debug("a subscriber has gone: %s", error)  # gRPC detected it only during a write

    async def _connect(self, _: Any, context: Context) -> None:
        try:
            self._callers.admit(context)
            self._slots.check_unattached(context.peer())
        except KVServiceError as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
        rpc = RPC.get()
        with self._callers.opened(context), rpc.working():
            await Stream(self._dispatcher, self._sessions, context, self._callers, self._slots, rpc).serve()


class Stream:
    """The stream of one session. It reads a call, or several in one message, sends the replies, then reads on."""

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
        # A read that has begun before the call is answered, and a reply that is sent while the next call is answered.
        self._next: asyncio.Task[Any] | None = None
        self._reply: asyncio.Task[None] | None = None
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
        if self._reply is not None:  # it may not have begun
            await asyncio.wait((self._reply,))
        async with self._sending:
            self._ended = True
            # The call always raises: AbortError, or another one of these if the client has already ended the RPC.
            with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
                await self._context.abort_with_status(status)

    async def serve(self) -> None:
        self._expect_attach()
        try:
            while not self._ended:
                begun, self._next = self._next, None
                if (call := await (begun or self._context.read())) is grpc.aio.EOF:
                    break
                if self._ending is not None:  # the lease is lost, but the client has not read the status yet
                    return await self._ending
                self._answering = True
                if self._callers.called_again is not None:
                    self._callers.called_again(self._context)
                if moves_blocks(call) and self._slots.begin_ahead():
                    await self._answer_ahead(call)
                else:
                    if self._reply is not None:
                        await self._sent()
                    if isinstance(call, Calls):
                        await self._answer_all(call)
                    else:
                        await self._send(await self._answer(call))
                self._answering = False
                if self._restarting is not None:
                    raise self._restarting
            await self._sent()
        except KVServiceError as error:
            await self._sent()
            await self._context.abort_with_status(rpc_status.to_status(to_status(error)))
        finally:
            for beside in (self._next, self._reply):
                if beside is not None:
                    beside.cancel()
            if self._session is not None:
                self._detach(self._session)
            else:
                self._expect_no_attach()

    async def _answer_ahead(self, call: session_pb2.Call | BlocksCall) -> None:
        """Answer a call that moves blocks. Clients send the next one before they have the reply: it is read while this
        one is executed, and executed while the reply is sent."""
        self._next = to_the_end(self._context.read())
        try:
            await asyncio.sleep(0)  # gRPC receives no more than the beginning of a message that nobody reads
            reply = await self._answer(call)
            await self._sent()
            self._reply = to_the_end(self._send(reply))
        except BaseException:
            self._slots.end_ahead()
            raise
        self._reply.add_done_callback(lambda _: self._slots.end_ahead())

    async def _sent(self) -> None:
        """Wait for the reply that is sent beside the next call."""
        if self._reply is not None:
            await self._reply
            self._reply = None

    def _detach(self, session: ServerSession) -> None:
        """Release the lease. The client has gone, so that only the log can say what fails."""
        try:
            self._sessions.detach(session, self.end)
        except Exception:
            logger.exception("the end of a stream failed", extra={"session_id": session.session_id})

    def _expect_attach(self) -> None:
        """Count the stream as unattached, and end it if it is not attached in time."""
        self._slots.add_unattached(self._context.peer())
        late = FailedPreconditionError(f"the stream was not attached within {UNATTACHED_S:g} s")
        self._unattached = asyncio.get_running_loop().call_later(UNATTACHED_S, self.end, late)

    def _expect_no_attach(self) -> None:
        """The stream was attached, or waits for the daemon to restore its session, or has ended."""
        self._unattached.cancel()
        self._slots.remove_unattached(self._context.peer())

    async def _send(self, reply: bytes) -> None:
        """Send a message, unless the stream has ended."""
        is_large = len(reply) >= LARGE_BYTES
        if is_large:
            self._slots.room.sends(self._rpc, len(reply))
        try:
            async with self._sending:
                if not self._ended:
                    self._rpc.stalled_since = time.monotonic()
                    await self._context.write(reply)
                    self._rpc.stalled_since = None
        finally:
            if is_large:
                self._slots.room.sent(self._rpc, len(reply))

    async def _answer_all(self, calls: Calls) -> None:
        """Answer the calls of one message with one message, or with several: the replies so far are sent when they are
        large or have taken long, when the next call waits for something, and when the stream ends."""
        replies: list[bytes] = []
        num_bytes, begun_at = 0, time.monotonic()
        for data in calls.serialized:
            answer = self._answer(calls.parse(data))
            try:
                event = answer.send(None)
            except StopIteration as end:
                replies.append(end.value)
            except KVServiceError:  # it ends the stream
                await self._send_all(replies)
                raise
            else:
                try:
                    await self._send_all(replies)
                except BaseException:  # nobody waits for the answer any more
                    await cancelled(answer)
                    raise
                replies, num_bytes, begun_at = [await resumed(answer, event)], 0, time.monotonic()
            if self._restarting is not None or self._ending is not None:
                break
            num_bytes += len(replies[-1])
            if num_bytes > JOINED_BYTES or time.monotonic() - begun_at > JOINED_S:
                await self._send_all(replies)
                replies, num_bytes, begun_at = [], 0, time.monotonic()
        await self._send_all(replies)

    async def _send_all(self, replies: list[bytes]) -> None:
        if len(replies) > 1:
            await self._send(join_elements(replies, session_pb2.Reply.REPLIES_FIELD_NUMBER))
        elif replies:
            await self._send(replies[0])

    async def _answer(self, call: session_pb2.Call | BlocksCall | Refused) -> bytes:
        """Return the serialized reply to a call. Raises the error of a refused call whose id is not known, because the
        client could not match the reply to a call."""
        if isinstance(call, Refused):
            if call.call_id is None:
                raise call.error
            return session_pb2.Reply(call_id=call.call_id, error=to_status(call.error)).SerializeToString()
        blocks: Any = None
        if isinstance(call, BlocksCall):
            blocks, call = call.request, call.call
        name = call.WhichOneof("call")
        try:
            if name is None:
                raise FailedPreconditionError("a call of a later version, or none", field="call")
            request: Any = blocks or getattr(call, name)
            if name == "attach":
                return session_pb2.Reply(call_id=call.call_id, attach=await self._attach(request)).SerializeToString()
            if self._session is None and name != "ping":
                raise FailedPreconditionError("the stream's first call must be attach", field="call")
            if name in BULKY:
                await self._slots.room.begin(self._rpc)
            response = await self._dispatcher.call(
                name, request, self._session, "stream", self._callers.local, call.traceparent
            )
            head = session_pb2.Reply(call_id=call.call_id).SerializeToString()
            return with_field(head, _REPLY_NUMBERS[name], response)
        except KVServiceError as error:
            return session_pb2.Reply(call_id=call.call_id, error=to_status(error)).SerializeToString()
        except Exception:  # of attach: the dispatcher has dealt with those of other calls
            logger.exception("%s failed", name)
            failed = to_status(InternalError(f"{name} failed; the daemon's log says why"))
            return session_pb2.Reply(call_id=call.call_id, error=failed).SerializeToString()
        finally:
            if self._rpc.num_making:
                self._slots.room.end(self._rpc)

    async def _attach(self, request: session_pb2.AttachRequest) -> session_pb2.AttachResponse:
        if self._session is not None:
            raise FailedPreconditionError("the stream is attached already", field="call")
        self._callers.check(CALLER.get())
        self._dispatcher.refuse_new_work()
        self._dispatcher.admit_attach()
        restoring = None if request.reconnects else self._sessions.restoring(request.session_token)
        if restoring is not None:
            self._expect_no_attach()
            try:
                await restoring
            finally:
                self._expect_attach()
            self._dispatcher.refuse_new_work()
        with self._dispatcher.noting_refusals():
            self._session = self._sessions.attach(request.session_token, request.holder, request.reconnects, self.end)
        self._expect_no_attach()
        self._rpc.session, self._rpc.address = self._session.token, peer_address(self._context.peer())
        return session_pb2.AttachResponse(
            session_id=self._session.session_id, daemon_start=self._sessions.daemon_start, max_calls=MAX_CALLS
        )


# ---- every call, unary or over a stream: admission, repeated requests, errors and latency
#
# An operation and the reply to its request survive the process together or not at all: when the operation has finished,
# the reply is written into kept memory, then the operation ends, and nothing runs in between.

# The request types that only clients on this host may send.
HOST_REQUESTS: tuple[type[Message], ...] = (
    store_pb2.MapStoreRequest,
    *(
        GetMessageClass(method.input_type)
        for module, name in ((regions_pb2, "RegionService"), (host_pb2, "HostService"))
        for method in module.DESCRIPTOR.services_by_name[name].methods
    ),
)


class Dispatcher:
    """Runs the handler of each call."""

    def __init__(
        self,
        handlers: Iterable[AnyHandler],
        sessions: SessionRegistry,
        table: CallTable,
        tracer: Tracer | None,
        end_operation: Callable[[], object],
        tenants: Tenants | None = None,
    ) -> None:
        """`tracer` is None if calls are not traced. `end_operation` declares that the latest operation of the block
        manager counts, also if the process dies now. `tenants` is None if every caller may make every call."""
        self._tenants = tenants
        # This runs the unary calls of each session one at a time, over all ports.
        self.turns = SessionTurns()
        self._end_operation = end_operation
        self._handlers = {handler.method: handler for handler in handlers}
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
            handler = self._handlers[method]
            if not local:
                self._check_remote(request, session)
            if self._tenants is not None:
                repeated = self._is_repeated(handler, request, session)
                admit = self._tenants.check if repeated else self._tenants.admit
                admit(handler.roles, None if session is None else session.tenant)
            return await self._run(handler, request, session)
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

    def _is_repeated(self, handler: AnyHandler, request: Any, session: ServerSession | None) -> bool:
        """Return whether a request was executed before or is being executed, so that it counts already."""
        if not handler.repeatable or not request.request_id:
            return False
        session = session or self._sessions.find(request.session_token)
        return session is not None and request.request_id in session.replies

    def admit_subscriber(self) -> None:
        """Count a stream of events as a call. Raises PermissionDeniedError, QuotaExceededError."""
        if self._tenants is not None:
            with self.noting_refusals():
                self._tenants.admit(EVERYONE, None)

    def admit_attach(self) -> None:
        """Count a stream that attaches. Raises PermissionDeniedError, QuotaExceededError."""
        if self._tenants is not None:
            with self.noting_refusals():
                self._tenants.admit_attach(self._sessions.num_sessions)

    def event_domain(self) -> str | None:
        """Return the domain of tenants whose events the caller may see now, None for all. Raises
        PermissionDeniedError."""
        return None if self._tenants is None else self._tenants.event_domain()

    @contextlib.contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Count what is refused meanwhile because of a tenant's quota."""
        try:
            yield
        except QuotaExceededError as error:
            if self._tenants is not None:
                self._tenants.note_refusal(error)
            raise

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

    async def _run(self, handler: AnyHandler, request: Any, session: ServerSession | None) -> Response:
        """Run the handler of a call. Nothing else runs between the last slice of an operation and its end."""
        request_id = request.request_id if handler.repeatable else 0
        response: Response
        if handler.in_session:
            if session is None:
                session = self._sessions.get(request.session_token)
            if request_id and (known := session.replies.find(request_id, handler.method)) is not None:
                return await asyncio.shield(known) if isinstance(known, asyncio.Task) else known
            if session.saving is not None or session.asleep:
                session.begin_call()
        if steps := self._finished_steps.take():  # the call sees the steps that lanes have completed
            self._sessions.lanes.commit(steps)
        if self.draining:
            self._check_draining(handler, request, session)
        started: Any = handler.start(session, request) if handler.in_session else handler.start(request)
        if handler.kind is Kind.ASYNC:
            response = await started
            return response
        if handler.kind is Kind.SLICED:
            try:
                event = next(started)
            except StopIteration as end:
                started = end.value
            else:
                rest = self._slices(handler, request_id, session, started, event)
                return await self._to_the_end(handler, request_id, session, rest)
        response, published = started if handler.publishes else (started, None)
        self._end(handler, request_id, session, response)
        if published is None:
            return response
        return await self._to_the_end(handler, request_id, session, self._after(published, response))

    async def _slices(
        self,
        handler: AnyHandler,
        request_id: int,
        session: ServerSession | None,
        slices: Waits[Any],
        event: Awaitable[object] | None,
    ) -> Response:
        """Run the slices of an operation after the first one, which has yielded `event`, and end it."""
        result = await drained(slices, event)
        response, published = result if handler.publishes else (result, None)
        self._end(handler, request_id, session, response)
        return await self._after(published, response)

    async def _after(self, event: Awaitable[None] | None, response: Response) -> Response:
        if event is not None:
            await event
        return response

    async def _to_the_end(
        self,
        handler: AnyHandler,
        request_id: int,
        session: ServerSession | None,
        work: Coroutine[Any, Any, Any],
    ) -> Response:
        """Run the rest of a call, which completes even if its caller goes away. Who repeats the request waits for it,
        too."""
        task: asyncio.Task[Any] = to_the_end(work)
        if request_id:
            assert session is not None, "requests outside sessions are not repeatable"
            session.replies.remember(request_id, handler.method, task)
        response: Response = await asyncio.shield(task)
        return response

    def _end(self, handler: AnyHandler, request_id: int, session: ServerSession | None, reply: Any) -> None:
        """End the operation of a request that was executed: remember the reply, then let the operation count. Other
        calls change no bookkeeping, or end what they do themselves."""
        if not handler.repeatable:
            return
        assert session is not None, "requests outside sessions are not repeatable"
        if request_id and handler.method in KEPT_METHODS:
            session.replies.keep(request_id, handler.method, reply)
            self._end_operation()
            session.replies.end_latest()
            return
        if request_id:
            session.replies.remember(request_id, handler.method, reply)
        self._end_operation()

    def _check_draining(self, handler: AnyHandler, request: Any, session: ServerSession | None) -> None:
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
