"""Authentication of callers. Callers on the unix socket are trusted; callers over TCP are checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import grpc
from grpc_status import rpc_status

from kvservice.auth import CALLER, Identity, Reloading, Tokens
from kvservice.auth.tokens import UNKNOWN
from kvservice.errors import UnauthenticatedError
from kvservice.server.audit import Audit
from kvservice.server.memory.remote import PEER, peer_address
from kvservice.wire.status import to_status

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_SCHEME = "bearer "


class Callers(Protocol):
    """The callers of one port.

    `local` is true if they are on this host, connected to the unix socket. `interceptors` are installed in the gRPC
    server of the port.
    """

    local: bool
    interceptors: Sequence[grpc.aio.ServerInterceptor]

    def admit(self, context: Context, *, is_check: bool = False) -> None:
        """Admit an RPC. Called at the start of each RPC that the interceptors accepted. `is_check` is true for RPCs of
        the standard services."""

    def check(self, caller: Identity) -> None:
        """Raise UnauthenticatedError for a caller whose token is no longer in the token file."""


class LocalCallers:
    """Callers on the unix socket. Its file mode is the only access control."""

    local = True
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()

    def admit(self, _context: Context, *, is_check: bool = False) -> None:
        """Do nothing: local callers have no names."""

    def check(self, _caller: Identity) -> None:
        """Do nothing: local callers have no tokens."""


class RemoteCallers(grpc.aio.ServerInterceptor):
    """Callers over TCP. If the daemon has a token file, every RPC needs a token, whatever its service and method. An
    RPC without one is refused before its message is received."""

    local = False

    def __init__(self, tokens: Reloading[Tokens] | None, certified: bool, audit: Audit) -> None:
        """`certified` is true if TLS verifies client certificates. They name the callers unless tokens do."""
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = () if tokens is None else (self,)
        self._tokens = tokens
        self._named_by_certificate = certified and tokens is None
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if self._tokens is not None:
            try:
                CALLER.set(self._tokens.value.identify(_bearer_token(details.invocation_metadata)))
            except UnauthenticatedError as error:
                return self._refusal(details.method, error)
        return await continuation(details)

    def admit(self, context: Context, *, is_check: bool = False) -> None:
        if self._named_by_certificate:
            CALLER.set(Identity(_certificate_name(context.auth_context())))
        PEER.set(peer_address(context.peer()))
        self._audit.accepted(context.peer(), CALLER.get(), is_check=is_check)

    def check(self, caller: Identity) -> None:
        if caller.credential and self._tokens is not None and not self._tokens.value.has(caller):
            raise UnauthenticatedError("the token was removed from the daemon's token file", cause=UNKNOWN)

    def _refusal(self, method: str, error: UnauthenticatedError) -> Handler:
        async def refuse(_: Any, context: Context) -> None:
            await self._audit.refused(context.peer(), method, error)
            await context.abort_with_status(rpc_status.to_status(to_status(error)))

        # The handler is a streaming one for every method, because gRPC then receives no message until it asks for one.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the token of an RPC, None if it has none, and "" if it has no valid bearer token or more than one."""
    values = [value for key, value in metadata if key == "authorization"]
    if not values:
        return None
    (value, *others) = values
    if others or not isinstance(value, str) or value[: len(_SCHEME)].lower() != _SCHEME:
        return ""
    return value[len(_SCHEME) :]


def _certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """Return the name in a client certificate: its common name, or else its first alternative name. Unprintable
    characters are escaped."""
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for name in filter(None, auth_context.get(key, ())):
            return name.decode(errors="backslashreplace").encode("unicode_escape").decode()
    # The empty name would mean a trusted caller without a name.
    return "certificate without a name"
