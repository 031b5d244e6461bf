"""Limits on the open RPCs of each kind, per port and per peer, and on the time that a client may stall an RPC.

An RPC occupies a slot from its arrival until its status is sent, also while its message is still being received and
while its response waits for a client that does not read. This bounds the memory that clients can make the daemon hold.
Each kind has its own slots, so one kind cannot use up those of another. An RPC that its client stalls is cancelled.
gRPC itself limits the connections and the RPCs per connection; see grpc_options.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvservice.auth import CALLER, Identity
from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError, ResourceExhaustedError, UnauthenticatedError
from kvservice.server import health
from kvservice.server.contract import SERVICES, is_of_session
from kvservice.server.rpc_tasks import OUTER_TASK
from kvservice.wire.status import to_status

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Kind: TypeAlias = Literal["session stream", "event stream", "health watch", "reflection", "session call", "other call"]

# The time that a client may stall an RPC: by not sending the rest of its message, or by not reading the response.
STALL_S: Final = 60.0
SWEEP_S: Final = 5.0
# The limit on session streams that are not attached yet, and the time they have to attach.
MAX_UNATTACHED: Final = 64
UNATTACHED_S: Final = 30.0
# One peer may use 1/_PEERS of the slots of a kind.
_PEERS: Final = 4
# Extra RPCs beyond the limits, so that they can be refused with a status.
_REFUSING: Final = 64
# Streams that belong to no session. They end when their caller's token is removed.
_SESSIONLESS: Final[tuple[Kind, ...]] = ("event stream", "health watch", "reflection")


def kind_limits(config: ServeConfig) -> dict[Kind, int]:
    """Return the limit on open RPCs of each kind on one port."""
    return {
        "session stream": config.max_sessions + MAX_UNATTACHED,
        # EventStreams enforces the limit over all ports, with an error that names the option.
        "event stream": config.max_event_streams + _REFUSING,
        "health watch": 64,
        "reflection": 16,
        "session call": max(256, 2 * config.max_sessions),
        "other call": 256,
    }


def max_rpcs(config: ServeConfig) -> int:
    """Return the number of RPCs that gRPC accepts on one port, including some that are then refused."""
    return sum(kind_limits(config).values()) + _REFUSING


def max_rpcs_of_connection(config: ServeConfig) -> int:
    """Return the limit on RPCs per connection. One connection may carry all sessions and some calls besides."""
    return config.max_sessions + 128


# The kinds of all methods except those of kind "other call", by method path.
_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(
        (
            f"/{service.full_name}/{method.name}"
            for service in SERVICES
            for method in service.methods
            if is_of_session(method)
        ),
        "session call",
    ),
    "/kvservice.v1.SessionService/Connect": "session stream",
    "/kvservice.v1.EventService/Subscribe": "event stream",
    f"/{health.SERVICE_NAME}/Watch": "health watch",
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": "reflection",
}


@dataclass(slots=True, eq=False)
class Rpc:
    """An RPC that occupies a slot.

    `stalled_since` is the time (`time.monotonic`) since which the RPC waits for its client, or None while it waits for
    the daemon. `ended_for` is the error for which the daemon has cancelled it.
    """

    task: asyncio.Task[Any]
    stalled_since: float | None
    slots: Slots
    kind: Kind
    caller: Identity = field(default_factory=CALLER.get)
    outer: asyncio.Task[Any] | None = field(default_factory=OUTER_TASK.get)
    ended_for: KVServiceError | None = None

    def end(self, _: asyncio.Task[Any]) -> None:
        self.slots.end(self)

    def cancel(self) -> None:
        """Cancel the RPC without a status, because its client does not read."""
        self.task.cancel()
        if self.outer is not None:
            self.outer.cancel()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Mark that the RPC waits for the daemon in this context, and for its client again afterwards."""
        self.stalled_since = None
        try:
            yield
        finally:
            self.stalled_since = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that the RPC waits in this context for its client to read or to write."""
        self.stalled_since = time.monotonic()
        try:
            yield
        finally:
            self.stalled_since = None


# The RPC that the current task handles.
RPC: ContextVar[Rpc] = ContextVar("kvservice_rpc")


class Slots(grpc.GenericRpcHandler):
    """The slots of one port. gRPC calls `service` for each RPC, in the RPC's own task and before its message is
    received. An interceptor would work too, but costs 20 µs per RPC."""

    def __init__(self, config: ServeConfig) -> None:
        self._limits = kind_limits(config)
        self._open: Counter[Kind] = Counter()
        self._of_peer: Counter[tuple[Kind, str]] = Counter()
        self._methods: dict[str, tuple[Kind, Handler]] = {}
        self._rpcs: set[Rpc] = set()
        self.num_unattached = 0

    def add(self, handlers: Mapping[str, Handler]) -> None:
        """Add handlers by method path."""
        self._methods.update({path: (_KINDS.get(path, "other call"), handler) for path, handler in handlers.items()})

    def service(self, details: grpc.HandlerCallDetails) -> Handler | None:
        found = self._methods.get(details.method)
        if found is None:
            return None
        kind, handler = found
        if self._open[kind] >= self._limits[kind]:
            return _refusal(_full(kind, self._limits[kind]))
        task = asyncio.current_task()
        assert task is not None, "gRPC has a task for each RPC, in which it looks for its handler and calls it"
        rpc = Rpc(task, time.monotonic(), self, kind)
        self._open[kind] += 1
        self._rpcs.add(rpc)
        RPC.set(rpc)
        task.add_done_callback(rpc.end)
        return handler

    def end(self, rpc: Rpc) -> None:
        """Free the slot of an RPC."""
        self._open[rpc.kind] -= 1
        self._rpcs.discard(rpc)

    @contextlib.contextmanager
    def of_peer(self, kind: Kind, peer: str) -> Iterator[None]:
        """Count a stream of this peer for the duration of the context. Raises ResourceExhaustedError if the peer has
        used its share of the kind. The share does not apply on the unix socket, where peers cannot be distinguished."""
        share = max(1, self._limits[kind] // _PEERS)
        key = (kind, peer)
        if self._of_peer[key] >= share and not peer.startswith("unix:"):
            raise _full(kind, share, "of one connection ")
        self._of_peer[key] += 1
        try:
            yield
        finally:
            self._of_peer[key] -= 1
            if not self._of_peer[key]:
                del self._of_peer[key]

    def check_unattached(self) -> None:
        """Raise ResourceExhaustedError if MAX_UNATTACHED session streams are not attached yet."""
        if self.num_unattached >= MAX_UNATTACHED:
            raise ResourceExhaustedError(f"{MAX_UNATTACHED} session streams are not attached, more are not taken")

    async def end_stalled(self) -> None:
        """Cancel RPCs that their clients stall. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        for rpc in self._rpcs:
            if rpc.stalled_since is not None and now - rpc.stalled_since > STALL_S:
                rpc.cancel()

    def end_revoked(self, check: Callable[[Identity], None]) -> None:
        """End the streams without a session for whose callers `check` raises UnauthenticatedError, with that error."""
        for rpc in self._rpcs:
            if rpc.kind in _SESSIONLESS:
                try:
                    check(rpc.caller)
                except UnauthenticatedError as error:
                    rpc.ended_for = error
                    rpc.task.cancel()


@contextlib.asynccontextmanager
async def answering(context: Any) -> AsyncIterator[Rpc]:
    """Context for the handler of an RPC. A KVServiceError becomes the status of the RPC."""
    rpc = RPC.get()
    try:
        with rpc.working():
            yield rpc
    except KVServiceError as error:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    except asyncio.CancelledError:
        if rpc.ended_for is None:
            raise
        await context.abort_with_status(rpc_status.to_status(to_status(rpc.ended_for)))


def _full(kind: Kind, limit: int, whose: str = "") -> ResourceExhaustedError:
    return ResourceExhaustedError(f"{limit} RPCs {whose}of the kind {kind!r} are open, more are not taken")


def _refusal(error: KVServiceError) -> Handler:
    """Return a handler that refuses an RPC of any method before its message is received."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))

    # The handler is a streaming one, because gRPC then receives no message until it asks for one.
    return grpc.stream_stream_rpc_method_handler(refuse)
