"""The blocking face: `core.py`'s coroutines over a stream that blocks, so that they end without ever suspending."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from kvservice.auth.client import ClientCredentials, TLSOption
from kvservice.client import channel, handover
from kvservice.client.choice import close_transport, open_transport
from kvservice.client.core import SessionCore
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.face import Connection, first_answer
from kvservice.client.link import RECONNECT_WAIT_S, Link
from kvservice.client.requests import build, time_limit, wait_time
from kvservice.client.step import StepCore
from kvservice.client.threads import BlockingConnection, ThreadFace, finish
from kvservice.client.values import PoolInfo, PoolStats, Sequence, from_message
from kvservice.client.watchdog import Watchdog
from kvservice.errors import KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc
from kvservice.wire.channels import open_channel

P = ParamSpec("P")
T = TypeVar("T")
SelfT = TypeVar("SelfT")


def blocking(method: Callable[Concatenate[SelfT, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The method without `await`."""

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
    """See SessionCore. A context manager: leaving it closes the session, which frees what it has."""

    def __init__(self, client: KVClient, token: bytes, resumed: bool, timeout_s: float | None) -> None:
        self._client = client
        self._stream = client._link(token, timeout_s)
        self.info = client.info
        self.token = token
        self.session_id = finish(self._stream.connect(max(client.info.session_grace_s, 1.0)))
        self._core = _Core(
            self._stream,
            client._handover_path,
            self.info,
            token,
            self.session_id,
            lambda *of: Step(StepCore(*of)),
            resumed=resumed,
        )
        try:
            self._core.attending = finish(open_transport(self._core, client._transport, client._completion))
        except BaseException:
            if resumed:
                finish(self._stream.close())  # the session is left as it was, for the next who presents its token
            else:
                self.close()
            raise

    @property
    def transport(self) -> str:
        """How tensors reach the daemon: "lane", "mapped", "region" or "inline"."""
        return self._core.transport

    allocate = blocking(_Core.allocate)
    allocate_batch = blocking(_Core.allocate_batch)
    can_allocate = blocking(_Core.can_allocate)
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
        """Leave the session to whoever presents its token, the result. Only of use if it was opened as detachable."""
        finish(close_transport(self._core))
        finish(self._stream.close())
        return self.token

    def close(self) -> None:
        """Free all that the session has. A session that is gone, or another client's by now, is left alone."""
        finish(close_transport(self._core))
        if finish(self._stream.close()):
            self._client._close_session(self.token, self._stream.holder)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KVClient:
    """A connection to a daemon. `address`: unix:///path/of.sock or host:port. Thread-safe; its sessions are too.

    `transport` is how sessions bring tensors to the daemon: "inline" in messages, "region" in shared memory, "lane"
    through rings in shared memory that a thread of the daemon serves, "mapped" not at all, for the client works on the
    pool itself; "auto" is the fastest of lane, mapped (if it may write), region and inline that the daemon allows. With
    a pool on a GPU, mapped is for tensors there, others go by a lane then; it comes first if torch is loaded.

    `completion` is how a lane's call ends whose tensors are on a GPU: "host", when it is done; "event", when it is
    launched, and the caller's stream waits for it. That hides what calls cost on the host, but if the daemon is killed
    in the middle of a call the stream stands for ever.

    `timeout_s` is the time limit of calls, of the client and of its sessions, that name none of their own; None: they
    wait for as long as the daemon lives. A call without an answer by then raises CallTimeoutError. When a session's
    connection breaks, the client makes it again in the background. Meanwhile calls wait, until `reconnect_wait_s` have
    passed or one of them has come to its limit; from then on they raise DaemonAwayError at once, until there is a
    connection again.

    `tls`, for host:port: True, the path of a CA's certificate, or a TLSConfig. `token`: what a daemon with tokens knows
    the client by, or the path (a pathlib.Path) of a file that holds it and is read again for each call.

    The daemon may still be starting: the client tries for `connect_timeout_s`. Raises ConnectionLostError then, and
    TLSHandshakeError or UnauthenticatedError at once.
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
        completion: str = "host",
    ) -> None:
        self._transport = transport
        self._completion = completion
        self._timeout_s = time_limit(timeout_s)
        self._reconnect_wait_s = wait_time(reconnect_wait_s, "reconnect_wait_s")
        self._watchdog = Watchdog()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._handover_path = handover.socket_path(address)
        self._credentials = ClientCredentials.for_address(address, tls, token)
        self._channel = open_channel(address, self._credentials, channel.CHANNEL_OPTIONS)
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            info = finish(first_answer(ThreadFace(), self._get_info, connect_timeout_s))
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
        """Open a session. Detachable: it outlives its client, by `detach_ttl_s` (0: by the daemon's limit). Operators
        see its name, and its tenant, on whose behalf it is. `timeout_s`: for its calls, in place of the client's."""
        request = build(
            session_pb2.OpenRequest, name=name, tenant=tenant, detachable=detachable, detach_ttl_s=detach_ttl_s
        )
        opened = self._unary(self._sessions.Open, request, timeout_s)
        return Session(self, opened.session_token, False, timeout_s)

    def resume(self, token: bytes, *, timeout_s: float | None = None) -> Session:
        """Take over a session. `describe()` tells its sequences. A stream that still holds it is ended. One that cannot
        be resumed, as when there is no lane left for it, keeps its sequences and waits as one that was detached."""
        return Session(self, token, True, timeout_s)

    def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        return from_message(PoolStats, self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest(), timeout_s))

    def ping(self, payload: bytes = b"", *, timeout_s: float | None = None) -> bytes:
        answer: bytes = self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload), timeout_s).payload
        return answer

    def events(self, start_number: int = 0, daemon_id: int = 0) -> Generator[KVEventBatch]:
        """What enters and leaves the prefix cache, until the generator is closed. From batch `start_number` on; 0: from
        now on. `daemon_id` is that of the batches before: if the daemon was started anew, the first batch tells of a
        gap. Raises EventsOffError, QuotaExceededError, ConnectionLostError."""
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
        """End the connection. Sessions that are still open are left as by `detach`."""
        for link in list(self._links):
            finish(link.close())
        self._watchdog.close()
        self._channel.close()

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _link(self, token: bytes, timeout_s: float | None) -> Link:
        """The connection of a session that is still to be attached."""

        def open_connection(on_end: Callable[[Connection], None], waits_for_daemon: bool) -> Connection:
            headers = self._credentials.headers()
            return BlockingConnection(self._sessions, headers, self._watchdog, on_end, waits_for_daemon)

        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        link = Link(ThreadFace(), open_connection, token, timeout_s=limit_s, reconnect_wait_s=self._reconnect_wait_s)
        self._links.add(link)
        return link

    def _unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        metadata = channel.trace_metadata() + self._credentials.headers()
        try:
            return method(request, metadata=metadata, timeout=limit_s)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    def _close_session(self, token: bytes, holder: int) -> None:
        """If the daemon cannot be told in time, the session is closed as one that lost its stream."""
        request = session_pb2.CloseRequest(session_token=token, holder=holder)
        with contextlib.suppress(*channel.NO_CLOSING):
            self._unary(self._sessions.Close, request, min(self._timeout_s or channel.CLOSE_S, channel.CLOSE_S))
