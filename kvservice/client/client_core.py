"""The part that the sync and the async client share: credentials, time limits, and the opening of sessions."""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvservice.auth.client import ClientCredentials, TLSOption
from kvservice.client import channel, fd_passing
from kvservice.client.connection import SessionConnection
from kvservice.client.context import Context
from kvservice.client.process import OwnProcess
from kvservice.client.remote import RemoteRegions
from kvservice.client.requests import time_limit, wait_time
from kvservice.client.selection import AUTO, check_transport, open_transport
from kvservice.client.session import CloseSession, SessionCore
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.link import Dialer, StoreOptions
from kvservice.client.values import PoolInfo
from kvservice.client.waiting import OpenStream, Waiting, once_more
from kvservice.errors import ConnectionLostError, InvalidArgumentError, KVServiceError, RestartingError
from kvservice.v1 import session_pb2

T = TypeVar("T")
# How long a client waits for a session that the daemon reads from its disk, without a time limit of its own.
RESTORE_WAIT_S = 600.0
SessionT = TypeVar("SessionT", bound=SessionCore[Any, Any])


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
        """Raises InvalidArgumentError."""
        self.process = OwnProcess()
        self.address = address
        self.credentials = ClientCredentials.for_address(address, tls, token)
        self.fd_path = fd_passing.socket_path(address)
        self._timeout_s = time_limit(timeout_s)
        self._reconnect_wait_s = wait_time(reconnect_wait_s, "reconnect_wait_s")
        check_transport(transport)
        self._transport = transport
        self._connections: weakref.WeakSet[SessionConnection] = weakref.WeakSet()
        self._stores: weakref.WeakSet[StoreAccess] = weakref.WeakSet()
        self._remotes: weakref.WeakSet[RemoteRegions] = weakref.WeakSet()

    def limit_s(self, timeout_s: float | None) -> float | None:
        """Return the time limit of a call; None: no limit. Raises InvalidArgumentError."""
        return self._timeout_s if timeout_s is None else time_limit(timeout_s)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers of a unary call."""
        return channel.trace_metadata() + self.credentials.headers()

    async def ask(self, waiting: Waiting, send: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Make a unary call, and again if the daemon is being replaced and has not executed it."""
        return await once_more(waiting, send, self._wait_s(timeout_s), RestartingError)

    async def ask_patiently(
        self, waiting: Waiting, send: Callable[[], Awaitable[T]], timeout_s: float | None = None
    ) -> T:
        """Make a unary call that may be repeated, and again while the daemon is away."""
        return await once_more(waiting, send, self._wait_s(timeout_s), (RestartingError, ConnectionLostError))

    def _wait_s(self, timeout_s: float | None) -> float:
        """Return how long a call with this time limit waits for a daemon that is away, in seconds."""
        return min(self._reconnect_wait_s, self.limit_s(timeout_s) or self._reconnect_wait_s)

    async def close(self) -> None:
        """Close the stores, and the connections of the sessions, which are detached then."""
        for store in list(self._stores):
            await store.close()
        for remote in list(self._remotes):
            remote.close()
        for connection in list(self._connections):
            await connection.close()

    async def open_store(self, dialer: Dialer, options: StoreOptions) -> StoreAccess:
        """Open the link of a store. Raises the errors of StoreAccess.start."""
        access = StoreAccess(dialer, options)
        await access.start()
        self._stores.add(access)
        return access

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
        info: PoolInfo,
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
        try:
            transport = await open_transport(context, self._transport, session_id)
        except BaseException:
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
