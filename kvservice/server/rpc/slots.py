"""The limits on open RPCs and on connections of each port, and on the memory of answers that clients do not read; the
turns of unary calls."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvservice.auth import CALLER, Identity
from kvservice.config import ServeConfig
from kvservice.errors import KVServiceError, ResourceExhaustedError, UnauthenticatedError
from kvservice.server.loop import PAUSE_S
from kvservice.server.memory.remote import peer_address
from kvservice.server.rpc.contract import HEALTH_SERVICE, SERVICES, is_of_session
from kvservice.wire.channels import MIN_PING_INTERVAL_MS, keepalive_options
from kvservice.wire.status import to_status

# ---- the two tasks that gRPC runs for each RPC: an outer one waits for the end of the RPC, an inner one handles it
#
# A handler runs in the inner task. If only the inner task is cancelled, gRPC sends nothing and keeps the RPC, including
# a response of megabytes that the client does not read, until the client ends it. If the outer task is cancelled too,
# gRPC resets the stream and frees the response.

AnyTask: TypeAlias = "asyncio.Task[Any]"

# The coroutine of the outer task in gRPC. If a gRPC version renames it, stalled RPCs stay open until their clients end
# them. gRPC gives a handler no other way to its RPC, and none of its options limits this time. Tried by
# `test_grpc_forgets_answers_that_are_not_read` of tests/server/test_slots.py: with the inner task alone it fails.
_OUTER: Final = "_schedule_rpc_coro"
# The outer task of the RPC that the current task handles.
OUTER_TASK: ContextVar[AnyTask | None] = ContextVar("kvservice_outer_task", default=None)


def task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    *,
    context: Context | None = None,
    **options: Any,
) -> AnyTask:
    """Task factory for the event loop of gRPC's servers. It sets `OUTER_TASK` in inner tasks."""
    creator = asyncio.current_task(loop)
    if creator is not None and getattr(creator.get_coro(), "__name__", "") == _OUTER:
        context = copy_context() if context is None else context
        context.run(OUTER_TASK.set, creator)
    return asyncio.Task(coroutine, loop=loop, context=context, **options)


# The coroutine in which a server of gRPC accepts RPCs. It decodes the path of each as UTF-8, and the server closes its
# port for good when it fails. If a gRPC version renames it, one client can do that again. Interceptors and handlers
# come after the path is decoded, and no option turns it off. Tried by `test_methods_that_do_not_exist` of
# tests/server/test_random_bytes.py: without `accept_any_path` the port answers nobody after the first such path.
_ACCEPTING: Final = "_server_main_loop"


def accept_any_path() -> None:
    """Have gRPC's servers of this process decode paths that are not UTF-8 with replacement characters, as methods that
    do not exist. All other code gets the error as before."""
    strict = codecs.lookup_error("strict")

    def decode(error: UnicodeError) -> tuple[str | bytes, int]:
        with contextlib.suppress(RuntimeError):  # there is no event loop in this thread
            task = asyncio.current_task()
            accepting = task is not None and getattr(task.get_coro(), "__name__", "") == _ACCEPTING
            if accepting and isinstance(error, UnicodeDecodeError):
                return "\ufffd", error.end
        return strict(error)

    codecs.register_error("strict", decode)


# ---- limits on the open RPCs of each kind, per port and per peer, and on the time that a client may stall an RPC
#
# An RPC occupies a slot from its arrival until its status is sent, also while its message is still being received and
# while its response waits for a client that does not read. This bounds the memory that clients make the daemon hold.
# Each kind has its own slots, so one kind cannot use up those of another. An RPC that its client stalls is cancelled.
# gRPC itself limits the connections and the RPCs per connection; see server_options.
#
# The operator's door is a port like the others. Its limits are its own, so that a health check passes there while
# clients hold all connections and streams of the other ports.

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Kind: TypeAlias = Literal["session stream", "event stream", "health watch", "reflection", "session call", "other call"]

# The time that a client may stall an RPC: by not sending the rest of its message, or by not reading the response.
STALL_S: Final = 60.0
SWEEP_S: Final = 1.0
# Calls whose answers have many bytes for few in their request, see AnswerRoom.
BULKY: Final = frozenset(("store_batch_get", "read"))
UNREAD_BYTES: Final = 128 << 20
SESSION_UNREAD_BYTES: Final = UNREAD_BYTES // 4
ADDRESS_UNREAD_BYTES: Final = UNREAD_BYTES // 2
# The time that a client may read nothing of a large answer while calls wait for its room, and the time for which its
# session has one part of the room together with all others that did so.
HURRIED_STALL_S: Final = 2.0
CARELESS_S: Final = 60.0
_CARELESS: Final = b"sessions that did not read"
# Calls of a session pause after this time, and so often at most while more of them come.
TURNS_S: Final = 0.002
MAX_PAUSES: Final = 16
# The time that session streams have to attach.
UNATTACHED_S: Final = 30.0
# Most bytes of messages, beside those of the calls that are executed, which streams have read already or still send.
AHEAD_BYTES: Final = 128 << 20
# One address may use 1/_PEERS of the slots of a kind, and half of the unattached streams and of the streams of events.
_PEERS: Final = 4
# Extra RPCs beyond the limits, so that they can be refused with a status.
_REFUSING: Final = 64
# The limit on connections to the operator's door.
DOOR_CONNECTIONS: Final = 16
# Streams that belong to no session. They end when their caller's token is removed.
_SESSIONLESS: Final[tuple[Kind, ...]] = ("event stream", "health watch", "reflection")


def max_unattached(config: ServeConfig) -> int:
    """Return the limit on session streams that are not attached yet. After a restart all sessions may come at once."""
    return max(64, config.max_sessions)


def kind_limits(config: ServeConfig) -> dict[Kind, int]:
    """Return the limit on open RPCs of each kind on one port."""
    return {
        "session stream": config.max_sessions + max_unattached(config),
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
_METHOD_KINDS: Final[dict[str, Kind]] = {
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
    f"/{HEALTH_SERVICE}/Watch": "health watch",
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": "reflection",
}


@dataclass(slots=True, eq=False)
class Rpc:
    """An RPC that occupies a slot.

    `stalled_since` is the time (`time.monotonic`) since which the RPC waits for its client, or None while it waits for
    the daemon. `ended_for` is the error for which the daemon has cancelled it. `session` is the token of the session
    whose calls it brings, empty as long as nobody asks, and `address` that of its client, empty at the unix socket.

    `num_making` are the bytes that a large answer which is being made counts as, and `num_unread` those of the large
    answers that are being sent. They are in the part of `party`: its session, or all that did not read.
    """

    task: asyncio.Task[Any]
    stalled_since: float | None
    slots: Slots
    kind: Kind
    caller: Identity = field(default_factory=CALLER.get)
    outer: asyncio.Task[Any] | None = field(default_factory=OUTER_TASK.get)
    ended_for: KVServiceError | None = None
    session: bytes = b""
    address: str = ""
    party: bytes = b""
    num_making: int = 0
    num_unread: int = 0

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


class AnswerRoom:
    """The room that one port has for large answers while they are made and sent: UNREAD_BYTES.

    A call whose answer may be large begins when less is taken, and less than their parts by its session and by its
    address. So one that reads none of its answers leaves room for others, and all that did not read before have one
    part together. The calls of a session begin in the order in which they came; of the sessions, those that have least
    come first, and then by turns.
    """

    def __init__(self, made_bytes: int) -> None:
        """An answer that is being made counts as `made_bytes`."""
        self._made_bytes = made_bytes
        self.num_bytes = 0
        self._of_party: Counter[bytes] = Counter()
        self._of_address: Counter[str] = Counter()
        # This says, by session, when an RPC was ended because nobody read.
        self._careless: dict[bytes, float] = {}
        # These are the calls that wait, by session, at most one of each RPC.
        self._waiting: dict[bytes, dict[Rpc, asyncio.Future[None]]] = {}

    async def begin(self, rpc: Rpc) -> None:
        """Wait until there is room for an answer, and count it as one that is being made, until `end`."""
        if self._has_room(rpc):
            return self._make(rpc)
        begun = self._waiting.setdefault(rpc.session, {})[rpc] = asyncio.get_running_loop().create_future()
        try:
            await begun
        finally:
            self._remove(rpc)

    def end(self, rpc: Rpc) -> None:
        """The answer is made, or will not be."""
        num_bytes, rpc.num_making = rpc.num_making, 0
        self._take(rpc, -num_bytes)

    def sends(self, rpc: Rpc, num_bytes: int) -> None:
        """Count a large answer until `sent`, or until its RPC ends."""
        self._choose_party(rpc)
        rpc.num_unread += num_bytes
        self._take(rpc, num_bytes)

    def sent(self, rpc: Rpc, num_bytes: int) -> None:
        if num_bytes := min(num_bytes, rpc.num_unread):  # the RPC may have ended
            rpc.num_unread -= num_bytes
            self._take(rpc, -num_bytes)

    def is_in_the_way(self, rpc: Rpc) -> bool:
        """Whether calls wait for room that answers of this RPC take: those of its party or address, whose part is
        taken, or anyone's, while all is taken and its party has no less than the others on average."""
        if not rpc.num_unread or not self._waiting:
            return False
        if self.num_bytes >= UNREAD_BYTES:
            return self._of_party[rpc.party] * len(self._of_party) >= self.num_bytes
        if self._of_address[rpc.address] >= ADDRESS_UNREAD_BYTES and rpc.address:
            return any(other.address == rpc.address for other in self._first())
        return any(self._party(other) == rpc.party for other in self._first())

    def note_careless(self, rpc: Rpc, now: float) -> None:
        """An RPC is ended because nobody read."""
        self._careless[rpc.session] = now

    def forget_careless(self, now: float) -> None:
        self._careless = {session: at for session, at in self._careless.items() if now - at < CARELESS_S}
        self._begin_next()

    def _party(self, rpc: Rpc) -> bytes:
        return _CARELESS if rpc.session in self._careless else rpc.session

    def _choose_party(self, rpc: Rpc) -> None:
        if not rpc.num_making and not rpc.num_unread:
            rpc.party = self._party(rpc)

    def _has_room(self, rpc: Rpc) -> bool:
        return (
            self.num_bytes < UNREAD_BYTES
            and self._of_party[self._party(rpc)] < SESSION_UNREAD_BYTES
            and (not rpc.address or self._of_address[rpc.address] < ADDRESS_UNREAD_BYTES)
        )

    def _make(self, rpc: Rpc) -> None:
        self._choose_party(rpc)
        rpc.num_making = self._made_bytes
        self._take(rpc, self._made_bytes)

    def _take(self, rpc: Rpc, num_bytes: int) -> None:
        """Take room, or give it back and begin the calls that have room then."""
        self.num_bytes += num_bytes
        self._of_party[rpc.party] += num_bytes
        self._of_address[rpc.address] += num_bytes
        if num_bytes < 0:
            if not self._of_party[rpc.party]:
                del self._of_party[rpc.party]
            if not self._of_address[rpc.address]:
                del self._of_address[rpc.address]
            self._begin_next()

    def _first(self) -> Iterator[Rpc]:
        """The first call that waits of each session."""
        return (next(iter(calls)) for calls in self._waiting.values())

    def _begin_next(self) -> None:
        while able := [rpc for rpc in self._first() if self._has_room(rpc)]:
            rpc = min(able, key=lambda rpc: (self._of_address[rpc.address], self._of_party[self._party(rpc)]))
            begun = self._waiting[rpc.session][rpc]
            self._remove(rpc)
            if calls := self._waiting.pop(rpc.session, None):
                self._waiting[rpc.session] = calls  # at the end
            if not begun.done():  # its RPC may have been cancelled
                self._make(rpc)
                begun.set_result(None)

    def _remove(self, rpc: Rpc) -> None:
        calls = self._waiting.get(rpc.session, {})
        calls.pop(rpc, None)
        if not calls:
            self._waiting.pop(rpc.session, None)


class SessionTurns:
    """The turns of unary calls: those of the same key, which is their session, run one at a time, in the order of
    `begin`, with pauses for others. So however many calls one client makes at once, others wait for few of them."""

    def __init__(self) -> None:
        # These wait, by key, for the one whose turn it is.
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}
        # There was no pause, by key, since this time.
        self._since: dict[bytes, float] = {}

    async def begin(self, key: bytes) -> None:
        """Wait for the turn. `end` must follow, unless this is cancelled."""
        if (waiting := self._waiting.get(key)) is None:
            self._waiting[key] = deque()
            self._since[key] = time.monotonic()
            return
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._next(key)
            elif turn in waiting:  # it may take long until the turn would come
                waiting.remove(turn)
            raise

    def end(self, key: bytes) -> None:
        """Give the turn to the next one, after a pause if it is time for one. It is one for what comes meanwhile, too:
        gRPC accepts calls one by one, so those of one client may be most of those that it has not accepted yet."""
        if time.monotonic() - self._since[key] > TURNS_S:
            self._pause(key, MAX_PAUSES)
        else:
            self._next(key)

    def _pause(self, key: bytes, most: int) -> None:
        """Pause, and again as long as more with this key comes meanwhile: others may be behind that."""
        num_waiting = len(self._waiting[key])
        asyncio.get_running_loop().call_later(PAUSE_S, self._end_pause, key, num_waiting, most - 1)

    def _end_pause(self, key: bytes, num_waiting: int, most: int) -> None:
        # One that comes while none waited may be of a client that makes one call after the other.
        if most and len(self._waiting[key]) > max(num_waiting, 1):
            self._pause(key, most)
        else:
            self._since[key] = time.monotonic()
            self._next(key)

    def _next(self, key: bytes) -> None:
        waiting = self._waiting[key]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # its caller may have gone
                turn.set_result(None)
                return
        del self._waiting[key], self._since[key]


class Slots(grpc.GenericRpcHandler):
    """The slots of one port. gRPC calls `service` for each RPC, in the RPC's own task and before its message is
    received. An interceptor would work too, but costs 20 µs per RPC."""

    def __init__(self, config: ServeConfig) -> None:
        self._limits = kind_limits(config)
        self._open: Counter[Kind] = Counter()
        self._of_peer: Counter[tuple[Kind, str]] = Counter()
        self._methods: dict[str, tuple[Kind, Handler]] = {}
        self._rpcs: set[Rpc] = set()
        self._max_unattached = max_unattached(config)
        self._num_unattached = 0
        self._max_ahead = AHEAD_BYTES // (2 * config.max_message_bytes)
        self._num_ahead = 0
        self.room = AnswerRoom(config.max_message_bytes // 2)
        self._unattached_of: Counter[str] = Counter()
        self._shares = {kind: max(1, limit // _PEERS) for kind, limit in self._limits.items()}
        self._shares["event stream"] = max(1, config.max_event_streams // 2)

    def add(self, handlers: Mapping[str, Handler]) -> None:
        """Add handlers by method path."""
        self._methods.update(
            {path: (_METHOD_KINDS.get(path, "other call"), handler) for path, handler in handlers.items()}
        )

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
        self.room.sent(rpc, rpc.num_unread)

    @contextlib.contextmanager
    def of_peer(self, kind: Kind, peer: str) -> Iterator[None]:
        """Count a stream of this peer for the duration of the context. Raises ResourceExhaustedError if the address has
        used its share of the kind. The share does not apply on the unix socket, where peers cannot be distinguished."""
        address = peer_address(peer)
        key = (kind, address)
        if address and self._of_peer[key] >= self._shares[kind]:
            raise _full(kind, self._shares[kind], f"of {address} ")
        self._of_peer[key] += 1
        try:
            yield
        finally:
            self._of_peer[key] -= 1
            if not self._of_peer[key]:
                del self._of_peer[key]

    def check_unattached(self, peer: str) -> None:
        """Raise ResourceExhaustedError if too many session streams are not attached yet, or the address of this peer
        has half of them."""
        address, most = peer_address(peer), self._max_unattached
        share = most // 2
        if address and self._unattached_of[address] >= share:
            raise ResourceExhaustedError(f"{share} session streams of {address} are not attached, more are not taken")
        if self._num_unattached >= most:
            raise ResourceExhaustedError(f"{most} session streams are not attached, more are not taken")

    def add_unattached(self, peer: str) -> None:
        self._num_unattached += 1
        self._unattached_of[peer_address(peer)] += 1

    def remove_unattached(self, peer: str) -> None:
        """The stream is attached, or waits for the daemon to restore its session, or has ended."""
        address = peer_address(peer)
        self._num_unattached -= 1
        self._unattached_of[address] -= 1
        if not self._unattached_of[address]:
            del self._unattached_of[address]

    def begin_ahead(self) -> bool:
        """Count a call while whose execution its stream reads the next message, and while whose reply is sent it
        executes the next call. Returns False if there are too many."""
        if self._num_ahead >= self._max_ahead:
            return False
        self._num_ahead += 1
        return True

    def end_ahead(self) -> None:
        """The reply to a call that was counted has been sent, or will not be."""
        self._num_ahead -= 1

    async def end_stalled(self) -> None:
        """Cancel RPCs that their clients stall. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        self.room.forget_careless(now)
        for rpc in self._rpcs:
            if rpc.stalled_since is not None:
                hurried = self.room.is_in_the_way(rpc)
                if now - rpc.stalled_since > (HURRIED_STALL_S if hurried else STALL_S):
                    if hurried:
                        self.room.note_careless(rpc, now)
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


# ---- limits on connections, and other channel arguments of the servers; gRPC ignores unknown names

CONNECTION_OPTIONS: tuple[tuple[str, int], ...] = (
    # A connection is closed after this time if its client sends nothing or does not complete the TLS handshake.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Bytes of a stream that gRPC buffers before the daemon reads them. By default gRPC buffers up to 16 MiB per stream
    # for a fast client.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 512 << 10),
    # A client that pings more often than the daemon permits loses its connection.
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
)


def server_options(config: ServeConfig, max_connections: int, *, is_reserved: bool = False) -> list[tuple[str, int]]:
    """Return all channel arguments of a server of the daemon. `is_reserved`: the daemon holds another socket that is
    bound to the server's port (kvservice.server.rpc.listening)."""
    # The limit on RPCs that have arrived but that the event loop has not accepted yet; further RPCs are cancelled. Each
    # can hold 600 KB of metadata, and by default gRPC lets 3000 wait.
    waiting = max_rpcs(config)
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_rpcs_of_connection(config)),
        ("grpc.server.max_pending_requests", waiting),
        ("grpc.server.max_pending_requests_hard_limit", waiting),
        *keepalive_options(config.client_timeout_s),
        *CONNECTION_OPTIONS,
        # A second daemon on the same port must fail, not share it. The reservation sees to that, too.
        ("grpc.so_reuseport", int(is_reserved)),
    ]
