"""The blocking client API. It runs the coroutines of `core.py` over a blocking stream, so they never suspend."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from kvservice.auth.client import ClientCredentials, TLSOption
from kvservice.client import channel, fd_passing
from kvservice.client.choice import close_transport, open_transport
from kvservice.client.connection import RECONNECT_WAIT_S, SessionConnection
from kvservice.client.core import SessionCore
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.requests import build, time_limit, wait_time
from kvservice.client.step import StepCore
from kvservice.client.threads import BlockingStream, ThreadWaiting, finish
from kvservice.client.values import PoolInfo, PoolStats, Sequence, from_message
from kvservice.client.waiting import SessionStream, first_answer
from kvservice.client.watchdog import Watchdog
from kvservice.errors import KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc
from kvservice.wire.channels import open_channel

P = ParamSpec("P")
T = TypeVar("T")
SelfT = TypeVar("SelfT")


def blocking(method: Callable[Concatenate[SelfT, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a blocking version of an async method."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(method(self._core, *args, **kwargs))

    return call


class Step:
    """See StepCore."""

    def __init__(self, core: StepCore) -> None:
        self._core = core
        self.sequences = core.sequences
        self.step_id = core.step_id
        self.query_lens = core.query_lens
        self.context_lens = core.context_lens
        self.num_tokens = core.num_tokens
        self.cow_copies = core.cow_copies
        self.mapped = core.mapped

    decode = blocking(StepCore.decode)
    extend = blocking(StepCore.extend)
    attend = blocking(StepCore.attend)
    write = blocking(StepCore.write)


_Core = SessionCore[Step]


class Session:
    """See SessionCore. A session is a context manager: leaving it closes the session and frees everything it owns."""

    def __init__(self, client: KVClient, token: bytes, resumed: bool, timeout_s: float | None) -> None:
        self._client = client
        self._connection = client._new_connection(token, timeout_s)
        self.info = client.info
        self.token = token
        self.session_id = finish(self._connection.connect(max(client.info.session_grace_s, 1.0)))
        self._core = _Core(
            self._connection,
            client._fd_path,
            self.info,
            token,
            self.session_id,
            lambda *of: Step(StepCore(*of)),
            resumed=resumed,
        )
        try:
            self._core.attending = finish(open_transport(self._core, client._transport))
        except BaseException:
            if resumed:
                finish(self._connection.close())  # keeps the session, so that a client with its token can resume it
            else:
                self.close()
            raise

    @property
    def transport(self) -> str:
        """The name of the session's transport: "lane", "mapped", "region" or "inline"."""
        return self._core.transport

    allocate = blocking(_Core.allocate)
    allocate_batch = blocking(_Core.allocate_batch)
    can_allocate = blocking(_Core.can_allocate)
    can_append = blocking(_Core.can_append)
    can_swap_out = blocking(_Core.can_swap_out)
    can_swap_in = blocking(_Core.can_swap_in)
    append = blocking(_Core.append)
    open_step = blocking(_Core.open_step)
    fork = blocking(_Core.fork)
    fork_batch = blocking(_Core.fork_batch)
    truncate = blocking(_Core.truncate)
    swap_out = blocking(_Core.swap_out)
    swap_in = blocking(_Core.swap_in)
    free = blocking(_Core.free)
    describe = blocking(_Core.describe)
    read = blocking(_Core.read)
    match_prefix = blocking(_Core.match_prefix)
    pin = blocking(_Core.pin)
    unpin = blocking(_Core.unpin)
    reset_prefix_cache = blocking(_Core.reset_prefix_cache)
    common_prefix = blocking(_Core.common_prefix)
    create_region = blocking(_Core.create_region)
    open_region = blocking(_Core.open_region)
    unregister_region = blocking(_Core.unregister_region)
    regions = blocking(_Core.regions)
    map_pool = blocking(_Core.map_pool)
    commit = blocking(_Core.commit)

    def free_later(self, sequences: Iterable[Sequence]) -> None:
        """See SessionCore.free_later."""
        self._core.free_later(sequences)

    def detach(self) -> bytes:
        """Detach from the session and return its token, with which another client can resume it. Useful only if the
        session was opened as detachable."""
        finish(close_transport(self._core))
        finish(self._connection.close())
        return self.token

    def close(self) -> None:
        """Close the session and free everything it owns. Does nothing if the session is gone or belongs to another
        client by now."""
        finish(close_transport(self._core))
        if finish(self._connection.close()):
            self._client._close_session(self.token, self._connection.holder)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KVClient:
    """A connection to a daemon at `address`, unix:///path/of.sock or host:port. Clients and sessions are thread-safe.

    `transport` selects how sessions pass tensors to the daemon. "inline" sends them in messages. "region" places them
    in shared memory. "lane" uses shared-memory rings that a thread of the daemon serves. "mapped" passes none: the
    client runs the kernels on the mapped pool itself. "auto" selects the fastest that the daemon allows, in the order
    lane, mapped (only if writable), region, inline. If the pool is on a GPU, mapped serves tensors on that GPU and a
    lane serves all others; "auto" then tries mapped first if torch is loaded.

    `timeout_s` is the default time limit of calls of the client and its sessions, in seconds; None: calls wait as long
    as the daemon lives. A call without an answer by its limit raises CallTimeoutError. If a session's connection
    breaks, the client reconnects in the background. Calls wait until `reconnect_wait_s` seconds have passed or one of
    them reaches its limit; after that they raise DaemonAwayError immediately until the connection is restored.

    `tls`, for host:port: True, the path of a CA certificate, or a TLSConfig. `token`: the token by which the daemon
    identifies the client, or the path (a pathlib.Path) of a file with the token, which is read again for each call.

    The daemon may still be starting, so the client retries for `connect_timeout_s` seconds. Raises ConnectionLostError
    when they have passed, and TLSHandshakeError or UnauthenticatedError immediately.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TLSOption = None,
        token: str | os.PathLike[str] = "",
        connect_timeout_s: float = 10.0,
        timeout_s: float | None = None,
        reconnect_wait_s: float = RECONNECT_WAIT_S,
        transport: str = "auto",
    ) -> None:
        self._transport = transport
        self._timeout_s = time_limit(timeout_s)
        self._reconnect_wait_s = wait_time(reconnect_wait_s, "reconnect_wait_s")
        self._watchdog = Watchdog()
        self._connections: weakref.WeakSet[SessionConnection] = weakref.WeakSet()
        self._fd_path = fd_passing.socket_path(address)
        self._credentials = ClientCredentials.for_address(address, tls, token)
        self._channel = open_channel(address, self._credentials, channel.CHANNEL_OPTIONS)
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            info = finish(first_answer(ThreadWaiting(), self._get_info, connect_timeout_s))
        except KVServiceError:
            self._channel.close()
            raise
        self.info: PoolInfo = from_message(PoolInfo, info)

    async def _get_info(self, timeout_s: float) -> pool_pb2.GetInfoResponse:
        info: pool_pb2.GetInfoResponse = self._unary(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout_s)
        return info

    def session(
        self,
        name: str = "",
        *,
        tenant: str = "",
        detachable: bool = False,
        detach_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Session:
        """Open a session.

        A detachable session outlives its client by `detach_ttl_s` seconds (0: by the daemon's limit). Operators see
        `name` and `tenant`, which says on whose behalf the session runs. `timeout_s` is the default time limit of the
        session's calls in seconds; None: the client's.
        """
        request = build(
            session_pb2.OpenRequest, name=name, tenant=tenant, detachable=detachable, detach_ttl_s=detach_ttl_s
        )
        opened = self._unary(self._sessions.Open, request, timeout_s)
        return Session(self, opened.session_token, False, timeout_s)

    def resume(self, token: bytes, *, timeout_s: float | None = None) -> Session:
        """Resume a session. `describe()` lists its sequences. The daemon ends a stream that is still attached to the
        session. If resuming fails, for example because no lane is free, the session keeps its sequences and stays
        detached."""
        return Session(self, token, True, timeout_s)

    def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        return from_message(PoolStats, self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest(), timeout_s))

    def ping(self, payload: bytes = b"", *, timeout_s: float | None = None) -> bytes:
        answer: bytes = self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload), timeout_s).payload
        return answer

    def events(self, start_number: int = 0, daemon_id: int = 0) -> Generator[KVEventBatch]:
        """Yield changes of the prefix cache until the generator is closed.

        The first batch is number `start_number`; 0: only new batches. `daemon_id` is the id in earlier batches: if the
        daemon has restarted since, the first batch reports a gap. Raises EventsOffError, QuotaExceededError,
        ConnectionLostError.
        """
        request = build(events_pb2.SubscribeRequest, start_number=start_number, daemon_id=daemon_id)
        stub = events_pb2_grpc.EventServiceStub(self._channel)  # type: ignore[no-untyped-call]
        call = stub.Subscribe(request, metadata=self._credentials.headers())
        try:
            for message in call:
                yield to_batch(message)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the connection. Open sessions are detached."""
        for connection in list(self._connections):
            finish(connection.close())
        self._watchdog.close()
        self._channel.close()

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_connection(self, token: bytes, timeout_s: float | None) -> SessionConnection:
        """Create the connection of a session. `connect` attaches it."""

        def open_stream(on_end: Callable[[SessionStream], None], waits_for_daemon: bool) -> SessionStream:
            headers = self._credentials.headers()
            return BlockingStream(self._sessions, headers, self._watchdog, on_end, waits_for_daemon)

        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        connection = SessionConnection(
            ThreadWaiting(), open_stream, token, timeout_s=limit_s, reconnect_wait_s=self._reconnect_wait_s
        )
        self._connections.add(connection)
        return connection

    def _unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        metadata = channel.trace_metadata() + self._credentials.headers()
        try:
            return method(request, metadata=metadata, timeout=limit_s)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    def _close_session(self, token: bytes, holder: int) -> None:
        """Ask the daemon to close a session. If it does not answer in time, the session ends as one that has lost its
        stream."""
        request = session_pb2.CloseRequest(session_token=token, holder=holder)
        with contextlib.suppress(*channel.NO_CLOSING):
            self._unary(self._sessions.Close, request, min(self._timeout_s or channel.CLOSE_S, channel.CLOSE_S))
