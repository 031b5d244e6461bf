"""The part that the sync and the async client share: credentials, time limits, and the opening of sessions, with their
transport: the fastest available one, or the requested one."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

from kvservice.auth.client import ClientCredentials, TLSOption, target_of
from kvservice.client import channel
from kvservice.client.connection import (
    PAUSE_S,
    UNANSWERED,
    Background,
    OpenStream,
    OwnProcess,
    SessionConnection,
    Signal,
    Waiting,
    once_more,
)
from kvservice.client.mapped import MappedPool
from kvservice.client.messages import build, choice, time_limit, wait_time
from kvservice.client.regions import socket_path
from kvservice.client.remote import Context, RemoteRegions
from kvservice.client.session import CloseSession, SessionCore
from kvservice.client.step import Transport, TransportName
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.link import Dialer, StoreOptions
from kvservice.client.transports.inline import InlineTransport
from kvservice.client.transports.lane import LaneTransport
from kvservice.client.transports.mapped import MappedTransport
from kvservice.client.transports.region import RegionTransport
from kvservice.client.transports.transfer import TransferTransport
from kvservice.client.values import PoolInfo
from kvservice.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    RestartingError,
    TransferFailedError,
    TransferOffError,
)
from kvservice.v1 import host_pb2, session_pb2, session_pb2_grpc

logger = logging.getLogger(__name__)

AUTO = "auto"


def check_transport(wanted: str) -> None:
    """Raise InvalidArgumentError for what is no transport."""
    choice(wanted, (AUTO, *_OPEN), "transport")


async def open_transport(context: Context, wanted: TransportName | str, session_id: int) -> Transport:
    """Open the transport `wanted`. Raises its errors. "auto" falls back to slower transports and raises only connection
    errors."""
    if wanted != AUTO:
        return await _OPEN[wanted](context, session_id)
    if context.remote.allowed:
        return TransferTransport(context)  # its engine starts with the first large call
    return await _open_first(context, session_id, _allowed(context))


async def _open_first(context: Context, session_id: int, names: Iterable[str]) -> Transport:
    """Open the first transport that works, or inline if none does. Logs a warning with the reason for each failure."""
    reasons: list[str] = []
    opened: Transport | None = None
    for name in names:
        try:
            opened = await _OPEN[name](context, session_id)
            break
        except (RegionsNotAllowedError, ResourceExhaustedError, ConnectionLostError, FailedPreconditionError) as error:
            # All lanes are in use, the daemon passes no descriptors to this user, or CUDA is not available here.
            reasons.append(f"{name}: {error}")
            if name in _GIVE_UP:
                call, request = _GIVE_UP[name]
                connection = context.connection
                await connection.call(call, build(request, request_id=connection.next_request_id()))
    opened = opened or InlineTransport(context)
    if reasons:
        logger.warning(
            "session %d uses the transport %s, slower than what the daemon offers (%s)",
            session_id,
            opened.name,
            "; ".join(reasons),
        )
    return opened


def _allowed(context: Context) -> Iterator[str]:
    """Yield the transports that the daemon allows, fastest first."""
    if context.fds.path is None:
        return
    info = context.info
    may_write, on_cpu = info.share_pool == "write", info.device == "cpu"
    # Two processes time-share a GPU, and the context switch takes longer than a small call, so the mapped pool is
    # faster than a lane there. A process that has not loaded torch has no GPU tensors.
    if may_write and not on_cpu and "torch" in sys.modules:
        yield "mapped"
    if info.allow_client_shm:
        yield "lane"
    if may_write and on_cpu:
        yield "mapped"
    if info.allow_client_shm:
        yield "region"


async def _open_lane(context: Context, _: int) -> Transport:
    return await LaneTransport.open(context)


async def _open_mapped(context: Context, session_id: int) -> Transport:
    info = context.info
    pool = await MappedPool.open(context, info.share_pool == "write")
    # The transport for calls that this process does not execute; with a pool on a GPU, those with host tensors.
    others = ("region",) if info.device == "cpu" else ("lane", "region")
    rest = await _open_first(context, session_id, others if info.allow_client_shm else ())
    return MappedTransport(context, pool, rest)


async def _open_region(context: Context, _: int) -> Transport:
    if context.fds.path is None or not context.info.allow_client_shm:
        raise RegionsNotAllowedError("regions are for clients on the unix socket, with --allow-client-shm")
    # Creating a region here reports missing permissions now, and not in the middle of a step.
    await context.regions.unregister(await context.regions.create(1))
    return RegionTransport(context)


async def _open_transfer(context: Context, _: int) -> Transport:
    if not context.info.transfer_protocol:
        raise TransferOffError("the daemon has no Transfer Engine")
    if context.fds.path is not None:
        raise FailedPreconditionError("a Transfer Engine is for clients over TCP", field="transport")
    if not context.remote.allowed:
        raise TransferFailedError("there is no Transfer Engine here: install kvservice[mooncake]")
    await context.remote.open()
    return TransferTransport(context)


async def _open_inline(context: Context, _: int) -> Transport:
    return InlineTransport(context)


_OPEN: dict[str, Callable[[Context, int], Awaitable[Transport]]] = {
    "lane": _open_lane,
    "mapped": _open_mapped,
    "region": _open_region,
    "transfer": _open_transfer,
    "inline": _open_inline,
}
# The calls that close a transport on the daemon if the client could not open its side.
_GIVE_UP: dict[str, tuple[str, Any]] = {
    "lane": ("close_lane", host_pb2.CloseLaneRequest),
    "mapped": ("unmap_pool", host_pb2.UnmapPoolRequest),
}


# ---- clients


T = TypeVar("T")
# How long a client waits for a session that the daemon reads from its disk, without a time limit of its own.
RESTORE_WAIT_S = 600.0
# How long a client tries to close a session that it has opened without an answer: the daemon closes it then itself.
GIVE_UP_S = 5.0
# The bytes of the token that a client chooses for a session.
TOKEN_BYTES = 16
SessionT = TypeVar("SessionT", bound=SessionCore[Any, Any])


# The clients of this process that are not closed.
_open: weakref.WeakSet[ClientCore] = weakref.WeakSet()
# Whether there were any in the process that this one was forked from. A child would use gRPC's connections of its
# parent, which breaks them for both, and has not gRPC's threads.
_forked_from_client = False


def _after_fork() -> None:
    global _forked_from_client
    _forked_from_client |= bool(_open)


os.register_at_fork(after_in_child=_after_fork)


class ClientCore:
    """The options of a client, see KVClient, and the connections of its sessions."""

    def __init__(
        self,
        address: str,
        tls: TLSOption,
        token: str | os.PathLike[str],
        timeout_s: float | None,
        reconnect_wait_s: float,
        transport: str,
    ) -> None:
        """Raises InvalidArgumentError, FailedPreconditionError."""
        if _forked_from_client:
            raise FailedPreconditionError(
                "this process was forked from one with an open client, and gRPC does not work in both: start it anew, "
                "for example with the start method `spawn` of multiprocessing, or before the first client"
            )
        self.process = OwnProcess()
        self.address = address = target_of(address)
        self.credentials = ClientCredentials.for_address(address, tls, token)
        self.fd_path = socket_path(address)
        self._timeout_s = time_limit(timeout_s)
        self._reconnect_wait_s = wait_time(reconnect_wait_s, "reconnect_wait_s")
        check_transport(transport)
        self._transport = transport
        self._connections: weakref.WeakSet[SessionConnection] = weakref.WeakSet()
        self._stores: weakref.WeakSet[StoreAccess] = weakref.WeakSet()
        self._remotes: weakref.WeakSet[RemoteRegions] = weakref.WeakSet()
        # The sessions without an answer that are being closed, by token, each with a flag for its end.
        self._unanswered: dict[bytes, tuple[Background, Signal]] = {}
        self._closed = False
        self._ended = False  # stores and sessions have been closed, too
        _open.add(self)

    def limit_s(self, timeout_s: float | None) -> float | None:
        """Return the time limit of a call; None: no limit. Raises InvalidArgumentError."""
        return self._timeout_s if timeout_s is None else time_limit(timeout_s)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers of a unary call."""
        return channel.trace_metadata() + self.credentials.headers()

    async def ask(self, waiting: Waiting, send: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Make a unary call, and again if the daemon is being replaced and has not executed it."""
        self._check_open()
        return await once_more(waiting, send, self._wait_s(timeout_s), RestartingError)

    async def ask_patiently(
        self, waiting: Waiting, send: Callable[[], Awaitable[T]], timeout_s: float | None = None
    ) -> T:
        """Make a unary call that may be repeated, and again while the daemon is away."""
        self._check_open()
        return await once_more(waiting, send, self._wait_s(timeout_s), (RestartingError, ConnectionLostError))

    def _check_open(self) -> None:
        if self._ended:
            raise ConnectionLostError("the client is closed")

    def _wait_s(self, timeout_s: float | None) -> float:
        """Return how long a call with this time limit waits for a daemon that is away, in seconds."""
        return min(self._reconnect_wait_s, self.limit_s(timeout_s) or self._reconnect_wait_s)

    async def close(self) -> None:
        """Close the stores, and the connections of the sessions, which are detached then."""
        self._closed = True
        for _, done in list(self._unanswered.values()):
            await done.wait(channel.CLOSE_S)
        for store in list(self._stores):
            await store.close()
        for remote in list(self._remotes):
            remote.close()
        for connection in list(self._connections):
            await connection.close()
        self._ended = True
        _open.discard(self)

    async def open_store(self, dialer: Dialer, options: StoreOptions, *, patient: bool) -> StoreAccess:
        """Open the link of a store. Raises the errors of StoreAccess.start."""
        access = StoreAccess(dialer, options)
        await access.start(patient=patient)
        self._stores.add(access)
        return access

    async def open(
        self,
        waiting: Waiting,
        sessions: session_pb2_grpc.SessionServiceStub,
        send: Callable[[Any, Any, float | None], Awaitable[Any]],
        request: session_pb2.OpenRequest,
        timeout_s: float | None,
        *,
        patiently: bool,
    ) -> session_pb2.OpenResponse:
        """Open a session, also after waiting for a daemon that is away with `patiently`. `send` sends a request to a
        method. A session whose caller does not get the answer is closed in the background: its token is known, because
        it is chosen here."""
        self._check_open()
        ask = self.ask_patiently if patiently else self.ask
        request.session_token = token = secrets.token_bytes(TOKEN_BYTES)
        try:
            opened: session_pb2.OpenResponse = await ask(
                waiting, lambda: send(sessions.Open, request, timeout_s), timeout_s
            )
            return opened
        except BaseException as error:
            if not isinstance(error, KVServiceError) or isinstance(error, UNANSWERED):
                done = waiting.signal()
                closing = self._close_unanswered(
                    waiting, lambda: send(sessions.Close, *self.close_request(token, 0)), token, done
                )
                self._unanswered[token] = waiting.start(closing), done
            raise

    async def _close_unanswered(
        self, waiting: Waiting, close: Callable[[], Awaitable[object]], token: bytes, done: Signal
    ) -> None:
        deadline = waiting.clock() + GIVE_UP_S
        try:
            while True:
                try:
                    await close()
                    return
                except (RestartingError, *UNANSWERED):
                    if self._closed or waiting.clock() >= deadline:
                        return
                    await waiting.signal().wait(PAUSE_S)
                except KVServiceError:  # it was not opened
                    return
        finally:
            done.set()
            self._unanswered.pop(token, None)

    def new_connection(
        self,
        waiting: Waiting,
        open_stream: OpenStream,
        token: bytes,
        timeout_s: float | None,
        on_break: Callable[[KVServiceError], None] | None = None,
    ) -> SessionConnection:
        """Create the connection of a session. `connect` attaches it."""
        if not isinstance(token, bytes):
            raise InvalidArgumentError(f"{token!r} is not bytes", field="token")
        connection = SessionConnection(
            waiting,
            open_stream,
            token,
            timeout_s=self.limit_s(timeout_s),
            reconnect_wait_s=self._reconnect_wait_s,
            on_break=on_break,
        )
        self._connections.add(connection)
        return connection

    async def open_session(
        self,
        kind: type[SessionT],
        ask_info: Callable[[], Awaitable[PoolInfo]],
        connection: SessionConnection,
        token: bytes,
        make_step: Callable[..., Any],
        make_scheduler: Callable[..., Any],
        close_session: CloseSession,
        *,
        resumed: bool,
    ) -> SessionT:
        """Attach a session, after waiting for a daemon that is away, and open its transport. If that fails, a new
        session is closed; a resumed one is kept, so that a client with its token can resume it."""
        context: Context | None = None
        try:
            info = await ask_info()
            wait_s = RESTORE_WAIT_S if resumed else max(info.session_grace_s, 1.0)
            session_id = await once_more(
                connection.waiting,
                lambda: connection.connect(wait_s),
                connection.left_s(connection.deadline(), self._reconnect_wait_s),
                (RestartingError, ConnectionLostError),
            )
            transfers = self._transport == "transfer" or (self._transport == AUTO and self.fd_path is None)
            context = Context.of(info, connection, self.fd_path, token, transfers=transfers)
            self._remotes.add(context.remote)
            transport = await open_transport(context, self._transport, session_id)
        except BaseException:
            if context is not None:
                context.remote.close()
            if await connection.close() and not resumed:
                await close_session(token, connection.holder)
            raise
        return kind(context, transport, token, session_id, make_step, make_scheduler, close_session, resumed=resumed)

    def close_request(self, token: bytes, holder: int) -> tuple[session_pb2.CloseRequest, float]:
        """Return the request that closes a session, and its time limit in seconds. If the daemon does not answer in
        time, the session ends as one that has lost its stream."""
        request = session_pb2.CloseRequest(session_token=token, holder=holder)
        return request, min(self._timeout_s or channel.CLOSE_S, channel.CLOSE_S)
