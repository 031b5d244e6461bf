"""The blocking face of a cluster."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.auth.client import ClientCredentials, target_of
from kvservice.client import channel
from kvservice.client.blocking import KVClient, Session, Store
from kvservice.client.cluster.core import (
    CONTROL_SESSION,
    SESSION_STAYS,
    ClientOptions,
    ClusterCore,
    ClusterDaemon,
    ClusterOptions,
    DaemonReport,
    check_addresses,
    check_serving,
    control_options,
    to_report,
)
from kvservice.client.cluster.placement import Candidate, PlacementSettings
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.messages import ExtraKeys, time_limit
from kvservice.client.store.values import StoreNamespace
from kvservice.client.threads import ThreadWaiting, finish
from kvservice.errors import CallTimeoutError, KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc
from kvservice.wire.channels import open_channel


class BlockingLink:
    """See DaemonLink."""

    def __init__(self, address: str, options: ClientOptions) -> None:
        address = target_of(address)
        credentials = ClientCredentials.for_address(address, options.get("tls"), options.get("token", ""))
        self.client = KVClient(address, connect_timeout_s=None, **options)
        self._control = KVClient(address, **control_options(options))
        self._headers = credentials.headers
        self._channel = open_channel(address, credentials, channel.channel_options(address))
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)  # the published stubs declare no methods
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._events = events_pb2_grpc.EventServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._stream: Any = None
        self._stopped = False

    async def open(self) -> None:
        pass

    async def probe(self, timeout_s: float) -> DaemonReport:
        status, call = self._ask(self._health.Check, health_pb2.HealthCheckRequest(), timeout_s)
        check_serving(status, call.trailing_metadata())
        info, _ = self._ask(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout_s)
        stats, _ = self._ask(self._pool.GetStats, pool_pb2.GetStatsRequest(), timeout_s)
        return to_report(info, stats)

    def _ask(self, method: Any, request: Any, timeout_s: float) -> Any:
        """Return the answer of a unary call, and the call."""
        try:
            return method.with_call(request, metadata=self._headers(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    async def events(self, start_number: int, daemon_id: int) -> AsyncIterator[KVEventBatch]:
        request = events_pb2.SubscribeRequest(start_number=start_number, daemon_id=daemon_id)
        self._stream = self._events.Subscribe(request, metadata=self._headers())
        if self._stopped:
            self._stream.cancel()
        try:
            for message in self._stream:
                yield to_batch(message)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        finally:
            self._stream.cancel()

    def stop_events(self) -> None:
        self._stopped = True
        if (stream := self._stream) is not None:
            stream.cancel()

    async def match_prefix(self, token_ids: Iterable[int], extra_keys: ExtraKeys, timeout_s: float) -> int:
        if (session := self._session) is not None:
            try:
                return session.match_prefix(token_ids, extra_keys, timeout_s=timeout_s)
            except SESSION_STAYS:
                raise
            except KVServiceError:  # the daemon may have lost the session; another one will do
                self._session = None
                session.detach()
        return self._opened(timeout_s).match_prefix(token_ids, extra_keys, timeout_s=timeout_s)

    def _opened(self, timeout_s: float) -> Session:
        """Return the session of the link."""
        if not self._lock.acquire(timeout=timeout_s):
            raise CallTimeoutError("another thread is opening the session that asks")
        try:
            self._session = self._session or self._control.session(CONTROL_SESSION, timeout_s=timeout_s)
            return self._session
        finally:
            self._lock.release()

    async def close(self) -> None:
        self._control.close()
        self.client.close()
        self._channel.close()


class PlacedSession(Session):
    """A session that a cluster has placed. Its end is reported to the cluster, also if it is only dropped."""

    def __init__(self, session: Session, on_end: Callable[[], None]) -> None:
        super().__init__(session._core)
        self._ended = weakref.finalize(self, on_end)

    def close(self) -> None:
        """See SessionCore.close."""
        self._ended()
        super().close()


class Cluster:
    """Several daemons behind one face: sessions are placed at the daemon that has most of a prompt in its prefix cache,
    weighed against the work that waits there; see `placement`.

    with Cluster(["unix:///run/a.sock", "host:50051"]) as cluster, cluster.session(token_ids) as kv: ...

    The cluster follows the block events of all daemons. When they claim a prefix for the best daemon, MatchPrefix there
    confirms it, or corrects what is known. A daemon that is lost, drains, does not answer within `probe_timeout_s`
    seconds or does not serve is left out at once, and asked again after 0.1 s, then less and less often, up to 10 s.
    All daemons are to have pools of one shape; one that differs is left out.

    The constructor waits up to `connect_timeout_s` seconds for a daemon, and for the answers of the others; None: it
    does not wait. `session` and `choose` wait up to `wait_s` seconds while all daemons are away. Raises NoDaemonError.
    Daemons are asked for health and load every `probe_interval_s` seconds; opening a session may take
    `open_timeout_s` seconds before the next daemon is tried. The other options are those of KVClient, for all daemons.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        placement: PlacementSettings | None = None,
        connect_timeout_s: float | None = 10.0,
        wait_s: float = 10.0,
        probe_interval_s: float = 1.0,
        probe_timeout_s: float = 2.0,
        open_timeout_s: float = 5.0,
        **client_options: Unpack[ClientOptions],
    ) -> None:
        options = ClusterOptions.of(
            placement,
            connect_timeout_s,
            wait_s=wait_s,
            probe_interval_s=probe_interval_s,
            probe_timeout_s=probe_timeout_s,
            open_timeout_s=open_timeout_s,
        )
        self._timeout_s = time_limit(client_options.get("timeout_s"))
        self._placed: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()
        self._core: ClusterCore[KVClient] = ClusterCore(
            check_addresses(addresses), options, ThreadWaiting(), lambda address: BlockingLink(address, client_options)
        )
        try:
            finish(self._core.start())
        except BaseException:
            self.close()
            raise

    def session(
        self,
        token_ids: Iterable[int] = (),
        *,
        extra_keys: ExtraKeys = (),
        name: str = "",
        tenant: str = "",
        detachable: bool = False,
        detach_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> PlacedSession:
        """Open a session at the best daemon for a prompt; without a prompt, at the one with the least load. The other
        arguments are those of KVClient.session.

        Raises NoDaemonError if all daemons are away, and QuotaExceededError if those that are not are full.
        """
        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)

        async def open_at(client: KVClient) -> Session:
            session = client.session(
                name,
                tenant=tenant,
                detachable=detachable,
                detach_ttl_s=detach_ttl_s,
                timeout_s=self._core.options.open_timeout_s,
            )
            session._core.context.connection.set_time_limit(limit_s)
            return session

        opened, placed = finish(self._core.open(token_ids, extra_keys, open_at))
        core = self._core
        session = PlacedSession(opened, lambda: core.end(placed))
        self._placed[session] = placed.daemon
        return session

    def address_of(self, session: Session) -> str:
        """Return the address of the daemon at which a session was placed. Raises KeyError."""
        return self._placed[session]

    def choose(self, token_ids: Iterable[int], extra_keys: ExtraKeys = ()) -> Candidate:
        """Return the best daemon for a prompt, for callers that have sessions of their own."""
        return finish(self._core.choose(token_ids, extra_keys))

    def store(self, namespace: StoreNamespace, key: bytes = b"", **options: Any) -> Store:
        """Open a namespace of the block store at one daemon; `options` are those of KVClient.store.

        The daemon is chosen by rendezvous hashing of `key`: clients that name the same key, for example that of a
        conversation or a tenant, meet at the same daemon, and if one is away only its keys move. Keys of blocks are not
        spread over daemons: the blocks of one prompt are looked up together, and would need a call to each daemon and
        be cut short by any that is away. What all daemons are to find belongs into a tier that they share (Mooncake).
        Raises NoDaemonError.
        """

        async def open_at(client: KVClient) -> Store:
            return client.store(namespace, **options)

        return finish(self._core.open_by_key(key, open_at))

    def daemons(self) -> list[ClusterDaemon]:
        """Return the state of each daemon, in the order of the addresses."""
        return self._core.daemons()

    def client(self, address: str) -> KVClient:
        """Return the client of a daemon, for example to resume a session there. Raises InvalidArgumentError."""
        return self._core.client(address)

    def close(self) -> None:
        """Close all connections. Open sessions are detached."""
        finish(self._core.close())

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
