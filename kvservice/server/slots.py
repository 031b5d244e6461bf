"""How many RPCs of a kind may be open at one time, on one port and from one peer, and how long a client may stall one.

An RPC has its slot from its arrival until its status is sent: also while its message is still coming in, and while its
answer waits for a client that does not read. So what clients make the daemon hold is bounded, kind by kind, and nobody
takes the slots of another kind. An RPC that its client stalls is ended. gRPC itself bounds connections, and the RPCs of
each; see grpc_options.
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
from kvservice.server.contract import SERVICES, SESSION_SERVICES
from kvservice.server.rpc_tasks import OUTER_TASK
from kvservice.wire.status import to_status

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Kind: TypeAlias = Literal["session stream", "event stream", "health watch", "reflection", "session call", "other call"]

# For which a client may keep an RPC waiting: for the rest of its message, or to read its answer.
STALL_S: Final = 60.0
SWEEP_S: Final = 5.0
# Session streams that are not attached yet, and how long they may take.
MAX_UNATTACHED: Final = 64
UNATTACHED_S: Final = 30.0
# One peer may have a fourth of a kind.
_PEERS: Final = 4
# RPCs above the limits that are being refused.
_REFUSING: Final = 64
# Streams that belong to no session. What is known of their callers may change while they are open.
_SESSIONLESS: Final[tuple[Kind, ...]] = ("event stream", "health watch", "reflection")


def kind_limits(config: ServeConfig) -> dict[Kind, int]:
    """RPCs of each kind that may be open on one port."""
    return {
        "session stream": config.max_sessions + MAX_UNATTACHED,
        # EventStreams counts those of all ports, and says which option it is.
        "event stream": config.max_event_streams + _REFUSING,
        "health watch": 64,
        "reflection": 16,
        "session call": max(256, 2 * config.max_sessions),
        "other call": 256,
    }


def max_rpcs(config: ServeConfig) -> int:
    """All that gRPC is to take at one time on one port; some of them to be refused."""
    return sum(kind_limits(config).values()) + _REFUSING


def max_rpcs_of_connection(config: ServeConfig) -> int:
    """A client may have all sessions over one connection, and some calls beside them."""
    return config.max_sessions + 128


# Of the methods that are no "other call", by their paths.
_KINDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(
        (
            f"/{service.full_name}/{method.name}"
            for service in SERVICES
            if service.name in SESSION_SERVICES
            for method in service.methods
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
    """One that has a slot. `stalled_since`, on the clock of `time.monotonic`, while its client keeps it waiting.
    `ended_for` is why the daemon has cancelled it."""

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
        """End it without a status: its client does not read."""
        self.task.cancel()
        if self.outer is not None:
            self.outer.cancel()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """It waits for the daemon, and after that for its client again."""
        self.stalled_since = None
        try:
            yield
        finally:
            self.stalled_since = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """It waits for its client: to read, or to write."""
        self.stalled_since = time.monotonic()
        try:
            yield
        finally:
            self.stalled_since = None


# That of the RPC whose task this is.
RPC: ContextVar[Rpc] = ContextVar("kvservice_rpc")


class Slots(grpc.GenericRpcHandler):
    """Those of one port. gRPC asks it for the handler of each RPC, in the RPC's own task and before its message comes;
    an interceptor would do, but takes 20 µs."""

    def __init__(self, config: ServeConfig) -> None:
        self._limits = kind_limits(config)
        self._open: Counter[Kind] = Counter()
        self._of_peer: Counter[tuple[Kind, str]] = Counter()
        self._methods: dict[str, tuple[Kind, Handler]] = {}
        self._rpcs: set[Rpc] = set()
        self.num_unattached = 0

    def add(self, handlers: Mapping[str, Handler]) -> None:
        """Handlers by the paths of their methods."""
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
        """Give its slot up."""
        self._open[rpc.kind] -= 1
        self._rpcs.discard(rpc)

    @contextlib.contextmanager
    def of_peer(self, kind: Kind, peer: str) -> Iterator[None]:
        """While a stream of this peer is open. Raises ResourceExhaustedError where it has its share of the kind. Peers
        on the unix socket are not told apart."""
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
        """Raise ResourceExhaustedError where as many session streams are not attached as may be."""
        if self.num_unattached >= MAX_UNATTACHED:
            raise ResourceExhaustedError(f"{MAX_UNATTACHED} session streams are not attached, more are not taken")

    async def end_stalled(self) -> None:
        """End RPCs that their clients stall, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        for rpc in self._rpcs:
            if rpc.stalled_since is not None and now - rpc.stalled_since > STALL_S:
                rpc.cancel()

    def end_revoked(self, check: Callable[[Identity], None]) -> None:
        """End the streams of no session whose caller `check` raises UnauthenticatedError for, with that error."""
        for rpc in self._rpcs:
            if rpc.kind in _SESSIONLESS:
                try:
                    check(rpc.caller)
                except UnauthenticatedError as error:
                    rpc.ended_for = error
                    rpc.task.cancel()


@contextlib.asynccontextmanager
async def answering(context: Any) -> AsyncIterator[Rpc]:
    """For an RPC's handler: errors of ours become its status."""
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
    """A handler that refuses an RPC, whatever its method, before its message is received."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))

    # Streaming: gRPC receives no message before such a handler asks for one.
    return grpc.stream_stream_rpc_method_handler(refuse)
