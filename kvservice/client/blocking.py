"""The blocking face: `core.py`'s coroutines over a stream that blocks, so that they end without ever suspending."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import grpc

from kvservice.auth.client import ClientCredentials, TLSOption
from kvservice.client import channel, handover
from kvservice.client.choice import close_transport, open_transport
from kvservice.client.core import SessionCore
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.requests import build
from kvservice.client.step import StepCore
from kvservice.client.values import PoolInfo, PoolStats, Sequence, from_message
from kvservice.errors import (
    ConnectionLostError,
    KVServiceError,
    SessionTakenError,
    TLSHandshakeError,
    UnauthenticatedError,
    UnknownSessionError,
)
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc
from kvservice.wire.channels import open_channel

P = ParamSpec("P")
T = TypeVar("T")
SelfT = TypeVar("SelfT")


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine over a blocking stream returns."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("a blocking stream suspended")


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

    def __init__(self, client: KVClient, token: bytes, resumed: bool) -> None:
        self._client = client
        self._stream = _Stream(client._channel, client._credentials, token, client.info.session_grace_s)
        self.info = client.info
        self.token = token
        self.session_id = self._stream.session_id
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
                self._stream.close()  # the session is left as it was, for the next who presents its token
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
        self._stream.close()
        return self.token

    def close(self) -> None:
        """Free all that the session has. A session that is gone, or another client's by now, is left alone."""
        finish(close_transport(self._core))
        if self._stream.close():
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
        transport: str = "auto",
        completion: str = "host",
    ) -> None:
        self._transport = transport
        self._completion = completion
        self._handover_path = handover.socket_path(address)
        self._credentials = ClientCredentials.for_address(address, tls, token)
        self._channel = open_channel(address, self._credentials, channel.CHANNEL_OPTIONS)
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            info = self._first_answer(connect_timeout_s)
        except KVServiceError:
            self._channel.close()
            raise
        self.info: PoolInfo = from_message(PoolInfo, info)

    def _first_answer(self, timeout_s: float) -> pool_pb2.GetInfoResponse:
        """The daemon's answer to GetInfo, once it listens. What TLS does not agree on does not change by waiting."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(deadline - time.monotonic(), channel.PAUSE_S)
                return cast(
                    pool_pb2.GetInfoResponse,
                    self._unary(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout=left_s),
                )
            except TLSHandshakeError:
                raise
            except ConnectionLostError:
                if time.monotonic() + channel.PAUSE_S >= deadline:
                    raise
                time.sleep(channel.PAUSE_S)

    def session(
        self, name: str = "", *, tenant: str = "", detachable: bool = False, detach_ttl_s: float = 0.0
    ) -> Session:
        """Open a session. Detachable: it outlives its client, by `detach_ttl_s` (0: by the daemon's limit). Operators
        see its name, and its tenant, on whose behalf it is."""
        request = build(
            session_pb2.OpenRequest, name=name, tenant=tenant, detachable=detachable, detach_ttl_s=detach_ttl_s
        )
        opened = self._unary(self._sessions.Open, request)
        return Session(self, opened.session_token, resumed=False)

    def resume(self, token: bytes) -> Session:
        """Take over a session. `describe()` tells its sequences. A stream that still holds it is ended. One that cannot
        be resumed, as when there is no lane left for it, keeps its sequences and waits as one that was detached."""
        return Session(self, token, resumed=True)

    def stats(self) -> PoolStats:
        return from_message(PoolStats, self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest()))

    def ping(self, payload: bytes = b"") -> bytes:
        answer: bytes = self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload)).payload
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
        self._channel.close()

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(self, method: Any, request: Any, **options: Any) -> Any:
        try:
            return method(request, metadata=channel.trace_metadata() + self._credentials.headers(), **options)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    def _close_session(self, token: bytes, holder: int) -> None:
        with contextlib.suppress(UnknownSessionError, SessionTakenError, ConnectionLostError, UnauthenticatedError):
            self._unary(self._sessions.Close, session_pb2.CloseRequest(session_token=token, holder=holder))


class _Lock:
    """A lock for coroutines that never suspend."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class _Stream:
    """A session's stream. One call at a time; reconnects within the grace time."""

    def __init__(
        self, grpc_channel: grpc.Channel, credentials: ClientCredentials, token: bytes, grace_s: float
    ) -> None:
        self._stub = session_pb2_grpc.SessionServiceStub(grpc_channel)  # type: ignore[no-untyped-call]
        self._credentials = credentials
        self._token = token
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._call_ids = itertools.count(1)
        self._taken: SessionTakenError | None = None
        self.holder = channel.new_holder()
        self.closed = False
        self._connect(max(grace_s, 1.0), reconnects=False)

    async def call(self, name: str, request: Any) -> Any:
        with self._lock:
            if self._replies.done() and not (self.closed or self._lost()):
                self._reconnect()
            for _ in range(channel.MAX_SENDS - 1):
                try:
                    return self._exchange(name, request)
                except ConnectionLostError:
                    if self.closed:
                        raise
                    self._reconnect()
                    if not channel.repeatable(name):
                        raise
            return self._exchange(name, request)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)

    def lock(self) -> _Lock:
        return _Lock()

    @property
    def broken(self) -> bool:
        return self.closed or self._replies.done()

    def close(self) -> bool:
        """Whether the session was held until now, as far as is known here."""
        held = not (self.closed or self._lost())
        self.closed = True
        self._end()
        return held

    def _lost(self) -> bool:
        """Whether the daemon has said that the session is closed, or another client's."""
        if self._taken is not None:
            return True
        return self._replies.done() and self._replies.code() is grpc.StatusCode.ABORTED

    def _end(self) -> None:
        self._requests.put(None)  # gRPC's thread waits for it
        self._replies.cancel()

    def _connect(self, wait_s: float, *, reconnects: bool) -> None:
        self._requests: queue.SimpleQueue[session_pb2.Call | None] = queue.SimpleQueue()
        headers = self._credentials.headers()
        self._replies = self._stub.Connect(iter(self._requests.get, None), metadata=headers, wait_for_ready=True)
        too_late = threading.Timer(wait_s, self._replies.cancel)
        too_late.start()
        try:
            request = session_pb2.AttachRequest(session_token=self._token, holder=self.holder, reconnects=reconnects)
            self.session_id: int = self._exchange("attach", request).session_id
        except BaseException:
            self._end()
            raise
        finally:
            too_late.cancel()

    def _exchange(self, name: str, request: Any) -> Any:
        if self.closed:
            raise ConnectionLostError("the session is closed")
        if self._taken is not None:
            raise self._taken.with_traceback(None)
        call_id = next(self._call_ids)
        self._requests.put(channel.make_call(call_id, name, request))
        try:
            # A reply to an earlier call is there if that call was interrupted while it waited.
            while (reply := next(self._replies)).call_id != call_id:
                pass
            return channel.take_reply(reply)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        except StopIteration:
            raise ConnectionLostError("the daemon ended the stream") from None

    def _reconnect(self) -> None:
        self._end()
        deadline = time.monotonic() + self._grace_s
        while True:
            try:
                return self._connect(deadline - time.monotonic(), reconnects=True)
            except SessionTakenError as taken:
                self._taken = taken
                raise
            except ConnectionLostError:
                if self.closed or time.monotonic() + channel.PAUSE_S >= deadline:
                    raise
                time.sleep(channel.PAUSE_S)
