"""The callers of RPCs: their authentication, the tokens and certificates for it, and the audit of callers over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc
from grpc_status import rpc_status

from kvservice.auth import CALLER, CertificateFiles, Certificates, Identity, Reloading, Tokens
from kvservice.auth.tokens import CAUSES, UNKNOWN
from kvservice.config import ServeConfig
from kvservice.errors import PermissionDeniedError, UnauthenticatedError
from kvservice.logs import LogBudget
from kvservice.server.memory.remote import PEER, peer_address
from kvservice.server.rpc.peers import Peers
from kvservice.server.tenants import DOOR, Door, Tenants
from kvservice.wire.status import to_status

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_SCHEME = "bearer "


class Callers(Protocol):
    """The callers of one port. With tenants, each caller belongs to one.

    `local` is true if they are on this host, connected to the unix socket. `interceptors` are installed in the gRPC
    server of the port. `counts_begun` is true if a call counts for the limits by peer when it begins, and again when
    its message is there: these callers are known by then. Of others a call counts when its message is there alone.
    """

    local: bool
    counts_begun: bool
    interceptors: Sequence[grpc.aio.ServerInterceptor]

    def admit(self, context: Context, *, is_check: bool = False) -> None:
        """Admit an RPC. Called at the start of each RPC that the interceptors accepted. `is_check` is true for RPCs of
        the standard services, which need no tenant. Raises PermissionDeniedError for a caller without a tenant."""

    @property
    def called_again(self) -> Callable[[Context], None] | None:
        """Notes a further call of an RPC that was admitted. None where nobody counts them."""

    def opened(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Return a context in which messages of this RPC may be on their way."""

    def check(self, caller: Identity) -> None:
        """Raise UnauthenticatedError for a caller whose token is no longer in the token file."""


class LocalCallers:
    """Callers on a unix socket. Its file mode is the only access control. They have no names."""

    local = True
    counts_begun = False
    called_again = None  # gRPC has one name for all connections to a unix socket
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()

    def __init__(self, door: Door, tenants: Tenants | None) -> None:
        self._door, self._tenants = door, tenants

    def admit(self, _context: Context, *, is_check: bool = False) -> None:
        if self._tenants is not None:
            DOOR.set(self._door)
            if not is_check:
                self._tenants.caller()

    def opened(self, _context: Context) -> contextlib.AbstractContextManager[None]:
        """Do nothing: nobody counts the bytes at the unix socket."""
        return contextlib.nullcontext()

    def check(self, _caller: Identity) -> None:
        """Do nothing: local callers have no tokens."""


class RemoteCallers(grpc.aio.ServerInterceptor):
    """Callers over TCP. If the daemon has a token file, every RPC needs a token, whatever its service and method. An
    RPC without one is refused before its message is received."""

    local = False

    def __init__(
        self, tokens: Reloading[Tokens] | None, certified: bool, audit: Audit, peers: Peers, tenants: Tenants | None
    ) -> None:
        """`certified` is true if TLS verifies client certificates. They name the callers unless tokens do."""
        self.interceptors: Sequence[grpc.aio.ServerInterceptor] = () if tokens is None else (self,)
        self.counts_begun = certified or tokens is not None
        self._tokens = tokens
        self._named_by_certificate = certified and tokens is None
        self._audit = audit
        self._peers = peers
        self._tenants = tenants

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
        tenant = ""
        if self._tenants is not None and not is_check:
            try:
                tenant = self._tenants.caller().tenant.name
            except PermissionDeniedError as error:
                self._audit.denied(context.peer(), CALLER.get(), error)
                raise
        self._peers.called(context.peer())
        self._audit.accepted(context.peer(), CALLER.get(), tenant, is_check=is_check)

    def called_again(self, context: Context) -> None:
        self._peers.called(context.peer())

    def opened(self, context: Context) -> contextlib.AbstractContextManager[None]:
        return self._peers.opened(context.peer())

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


# ---- audit

logger = logging.getLogger(__name__)

# A refusal is sent after this delay, which slows down callers that retry in a loop. At most MAX_DELAYED_REFUSALS wait
# at a time; further refusals are sent at once.
REFUSAL_DELAY_S = 1.0
MAX_DELAYED_REFUSALS = 64
# The connections that are remembered, so that each is logged once.
MAX_KNOWN_CONNECTIONS = 4096


class Audit:
    """Counts and logs connections and refused RPCs, at a bounded cost.

    `refusals` counts refused RPCs by cause. `num_connections` counts connections with at least one accepted RPC."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.refusals = dict.fromkeys(CAUSES, 0)
        self.num_connections = 0
        self._sleep = sleep
        self._num_delayed = 0
        # Whether each was logged.
        self._known: OrderedDict[tuple[str, Identity], bool] = OrderedDict()
        self._connection_log = LogBudget(logger, clock)
        self._refusal_log = LogBudget(logger, clock)

    def accepted(self, peer: str, caller: Identity, tenant: str = "", *, is_check: bool = False) -> None:
        """Record an accepted RPC. `peer` is gRPC's name for the remote end of the connection. `tenant` is empty if the
        daemon has one tenant.

        `is_check` is true for RPCs of the standard services. Their connections are counted but not logged, because
        each health check of an orchestrator opens one.
        """
        connection = peer, caller
        if connection not in self._known:
            self.num_connections += 1
        elif is_check or self._known[connection]:
            return
        self._known[connection] = not is_check
        if len(self._known) > MAX_KNOWN_CONNECTIONS:
            self._known.popitem(last=False)
        if is_check:
            return
        who = f"{caller.name} of tenant {tenant}" if tenant else caller.name or "a client"
        self._connection_log.write(logging.INFO, "%s connected from %s", who, peer)

    def denied(self, peer: str, caller: Identity, error: PermissionDeniedError) -> None:
        """Record an RPC of a caller who may make none."""
        self._refusal_log.write(logging.WARNING, "%s at %s: %s", caller.name or "a client", peer, error)

    async def refused(self, peer: str, method: str, error: UnauthenticatedError) -> None:
        """Record a refused RPC. Returns when the refusal may be sent, after the delay."""
        cause = error.metadata["cause"]
        self.refusals[cause] += 1
        self._refusal_log.write(logging.WARNING, "%s refused to %s: %s token", repr(method[:100]), peer, cause)
        if self._num_delayed >= MAX_DELAYED_REFUSALS:
            return
        self._num_delayed += 1
        try:
            await self._sleep(REFUSAL_DELAY_S)
        finally:
            self._num_delayed -= 1


# ---- tokens and TLS certificates

RELOAD_EVERY_S = 1.0


class Credentials:
    """Tokens, TLS certificates and tenants, which are read from files, and again when the files change. Each is None if
    the configuration names no file for it."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises InvalidArgumentError naming the option whose file cannot be used."""
        self.tokens: Reloading[Tokens] | None = None
        self.certificates: Reloading[Certificates] | None = None
        if config.auth_tokens:
            file = Path(config.auth_tokens)
            self.tokens = Reloading([file], lambda: Tokens.read(file))
        if config.tls_cert:
            client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
            files = CertificateFiles(Path(config.tls_cert), Path(config.tls_key), client_ca)
            self.certificates = Reloading(files.paths, lambda: _read(files))
        self.tenants = Tenants.of(config)
        # The number of TLS handshakes that clients started. gRPC does not report how many of them fail.
        self.num_handshakes = 0
        self._lock = threading.Lock()

    @property
    def note(self) -> str:
        """Say which files have changed and cannot be used, or return an empty string."""
        faults = (each.fault for each in (self.tokens, self.certificates) if each is not None)
        return ", ".join(filter(None, (*faults, "" if self.tenants is None else self.tenants.note)))

    def for_server(self) -> grpc.ServerCredentials | None:
        """Return the credentials of a TCP port, or None for plain text. gRPC accepts no TLS version below 1.2."""
        if self.certificates is None:
            return None
        self._served = self.certificates.value
        # The type annotation of the second parameter does not allow a callback that returns None; gRPC does.
        newer: Any = self._newer_configuration
        return grpc.dynamic_ssl_server_credentials(_configuration(self._served), newer, bool(self._served.client_ca))

    async def keep_current(self, on_new_tokens: Callable[[], None], on_new_tenants: Callable[[], None]) -> None:
        """Reload changed files until cancelled. Calls `on_new_tokens` after the token file has changed, and
        `on_new_tenants` after the file of tenants has. Returns at once if there are no files."""
        while self.certificates is not None or self.tokens is not None or self.tenants is not None:
            await asyncio.sleep(RELOAD_EVERY_S)
            if self.certificates is not None:
                self.certificates.reload()
            if self.tokens is not None and self.tokens.reload():
                on_new_tokens()
            if self.tenants is not None and self.tenants.reload():
                on_new_tenants()

    def _newer_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if they have changed, or None. gRPC's threads call this before each handshake."""
        assert self.certificates is not None, "there is a TLS port"
        with self._lock:
            self.num_handshakes += 1
            current = self.certificates.value
            if current is self._served:
                return None
            self._served = current
            return _configuration(current)


def _read(files: CertificateFiles) -> Certificates:
    """Read the certificates; log a warning if they are expired or not yet valid. Raises InvalidArgumentError."""
    found = Certificates.read(files)
    if fault := found.time_fault():
        logger.warning("%s: clients will refuse it: %s", files.cert, fault)
    return found


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.cert)], root_certificates=certificates.client_ca or None
    )
