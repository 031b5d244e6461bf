"""The limits on the elements of a request, before it is parsed, on open RPCs, and on connections.

A message of a few MiB can have millions of elements, and parsing them would block the event loop for seconds. So a
scanner first counts the elements of a message, and it is parsed only if they are within limits. The counting rules are
derived from the protobuf descriptors; each new repeated field needs an entry in `_ELEMENTS`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeGuard

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvservice import _ext
from kvservice.auth import CALLER, Identity
from kvservice.blocks.arguments import MAX_EXTRA_KEY_BYTES, MAX_EXTRA_KEYS
from kvservice.config import RequestLimits, ServeConfig
from kvservice.errors import (
    InvalidArgumentError,
    KVServiceError,
    QuotaExceededError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from kvservice.server.memory.remote import peer_address
from kvservice.server.rpc.contract import HEALTH_SERVICE, SERVICES, is_of_session
from kvservice.transfer import MAX_ENGINES
from kvservice.v1 import session_pb2, store_pb2
from kvservice.wire.channels import MIN_PING_INTERVAL_MS, keepalive_options
from kvservice.wire.status import to_status
from kvservice.wire.tensors import split_elements, split_last_field, with_field

MAX_TEXT_BYTES: Final = 4096
MAX_PING_BYTES: Final = 1 << 20
# The limits on the pieces of a block of the store, and on the leases that one request may end.
MAX_PIECES: Final = 16384
MAX_LEASE_IDS: Final = 4096
# The limit on missing keys of which one request asks for the reason.
MAX_MISSING: Final = 256
# The limit on the layers that one request names.
MAX_LAYERS: Final = 4096
# The limit on the calls of one message of a session's stream.
MAX_CALLS: Final = 128
# The limit on batches of a scheduler that are not reported.
MAX_REPORTS: Final = 2
# The limit on records (a tag with its value) of a request, in addition to one per token and a few per sequence.
_MAX_OTHER_RECORDS: Final = 16384
_RECORDS_PER_SEQUENCE: Final = 16

_SEQUENCES: Final = "max_request_sequences"
_TOKENS: Final = "max_request_tokens"
# The limit on the elements of each repeated field, by field name: the name of a field of RequestLimits, or a number.
_ELEMENTS: Final[dict[str, str | int]] = {
    "sequences": _SEQUENCES,
    "sequence_ids": _SEQUENCES,
    "parent_ids": _SEQUENCES,
    "layers": MAX_LAYERS,
    "requests": _SEQUENCES,
    "request_ids": _SEQUENCES,
    "finished_ids": _SEQUENCES,
    "num_proposed": _SEQUENCES,
    "stop_lengths": _SEQUENCES,
    "child_ids": _SEQUENCES,
    "num_tokens": _SEQUENCES,
    "lengths": _SEQUENCES,
    "expected_lengths": _SEQUENCES,
    "ranges": _SEQUENCES,
    "token_ids": _TOKENS,
    "proposals": _TOKENS,
    "reports": MAX_REPORTS,
    "extra_keys": MAX_EXTRA_KEYS,
    "shape": 8,
    "alibi_slopes": 65535,
    "piece_bytes": MAX_PIECES,
    "ports": MAX_ENGINES,
    "lease_ids": MAX_LEASE_IDS,
}
# The limit in bytes on the fields that are not texts. None means that only the message size limits the field.
_BYTES: Final[dict[str, int | None]] = {
    "kvservice.v1.Tensor.inline": None,
    "kvservice.v1.PingRequest.payload": MAX_PING_BYTES,
    "kvservice.v1.ExtraKey.key": MAX_EXTRA_KEYS * MAX_EXTRA_KEY_BYTES,
    "kvservice.v1.Scatter.offsets": None,
    "kvservice.v1.BatchPutRequest.data": None,
    "kvservice.v1.TouchRequest.missing": MAX_MISSING * 32,
}
# Fields with something for each of max_request_blocks blocks, by field name: the bytes for each.
_BYTES_PER_BLOCK: Final = {"keys": 32, "written": 1, "checksums": 8}

# The field kinds of the scanner.
_VARINT, _FIXED64, _FIXED32, _LENGTH, _MESSAGE = range(5)
_FIELD_KINDS: Final = {
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _MESSAGE,
}
_NONE: Final = -1
# The field of Call with the calls of one message, and its tag.
_CALLS: Final = session_pb2.Call.CALLS_FIELD_NUMBER
_CALLS_TAG: Final = bytes((_CALLS << 3 | 2,))


# The fields of the blocks in a call, and the size from which on protobuf does not parse them.
_BATCH_PUT: Final = session_pb2.Call.STORE_BATCH_PUT_FIELD_NUMBER
_DATA: Final = store_pb2.BatchPutRequest.DATA_FIELD_NUMBER
LARGE_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Refused:
    """Replaces a request that is malformed or exceeds a limit. An exception raised in the deserializer would make gRPC
    end the call with UNKNOWN. `call_id` is the id of a call on a stream, if it could be parsed."""

    error: KVServiceError
    call_id: int | None = None


@dataclass(frozen=True)
class Calls:
    """Several calls of one message, still serialized: each is counted and parsed when it is its turn."""

    serialized: list[bytes]
    parse: Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class BlocksRequest:
    """A BatchPutRequest without its blocks, which are in `data`, a view of the received message: protobuf would copy
    them twice."""

    message: store_pb2.BatchPutRequest
    data: memoryview

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)


@dataclass(frozen=True, slots=True)
class BlocksCall:
    """A call with a BlocksRequest."""

    call: session_pb2.Call
    request: BlocksRequest


def moves_blocks(call: session_pb2.Call | BlocksCall | Calls | Refused) -> TypeGuard[session_pb2.Call | BlocksCall]:
    """Return whether a call takes blocks of the store in its message, or may return some in its reply."""
    return isinstance(call, BlocksCall) or (isinstance(call, session_pb2.Call) and call.HasField("store_batch_get"))


def check_accepted(request: object) -> None:
    """Raise the error of a request that was refused."""
    if isinstance(request, Refused):
        raise request.error


@functools.cache
def parser(kind: type[Message], limits: RequestLimits) -> Callable[[bytes], Message | Refused | Calls | BlocksCall]:
    """Return a gRPC deserializer for requests of this type, the same one for all ports. Only a message of calls becomes
    `Calls`, and only a call with many bytes of blocks a `BlocksCall`."""
    rules = _Rules(limits)
    rules.add(kind.DESCRIPTOR, "")
    scanner = _ext.WireScanner(rules.messages, [counter.limit for counter in rules.counters], rules.max_records)
    is_call = kind is session_pb2.Call

    def parse(data: bytes, joined: bool = is_call) -> Message | Refused | Calls | BlocksCall:
        if joined and data[:1] == _CALLS_TAG:
            try:
                return Calls(split_elements(data, _CALLS, MAX_CALLS), functools.partial(parse, joined=False))
            except (ValueError, IndexError):
                return Refused(InvalidArgumentError(f"must be up to {MAX_CALLS} calls and nothing else", field="calls"))
        found = scanner.scan(data)
        if found == _ext.WIRE_WITHIN_LIMITS:
            try:
                if is_call and len(data) >= LARGE_BYTES and (call := _blocks_call(memoryview(data))) is not None:
                    return call
                return kind.FromString(data)
            except DecodeError:  # a string that is not UTF-8
                found = _ext.WIRE_MALFORMED
        return Refused(rules.error(found), _call_id(data) if is_call else None)

    return parse


def _blocks_call(data: memoryview) -> BlocksCall | None:
    """Parse a call that was counted without its last field, which are blocks, or return None if it ends otherwise.
    Raises DecodeError."""
    if (of_call := split_last_field(data, _BATCH_PUT)) is None:
        return None
    if (of_request := split_last_field(of_call[1], _DATA)) is None:
        return None
    call = session_pb2.Call.FromString(with_field(bytes(of_call[0]), _BATCH_PUT, bytes(of_request[0])))
    return BlocksCall(call, BlocksRequest(call.store_batch_put, of_request[1]))


@dataclass(frozen=True)
class _Counter:
    """A limit on one field. `field` is its path from the request. `option` is the configuration field that sets the
    limit, or empty for a fixed limit; a field of bytes may have `per_unit` bytes for each of its units."""

    field: str
    limit: int
    unit: str
    option: str = ""
    per_unit: int = 1

    def error(self) -> KVServiceError:
        if not self.option:
            return InvalidArgumentError(f"a request may have {self.limit} {self.unit} here", field=self.field)
        value = self.limit // self.per_unit
        return QuotaExceededError(
            f"a request may have {self.option} = {value} {self.unit} here",
            field=self.field,
            limit=self.option,
            value=value,
        )


@dataclass
class _Rules:
    """The scanner's table for one message type, and the meaning of its counters."""

    limits: RequestLimits
    messages: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    counters: list[_Counter] = field(default_factory=list)

    @property
    def max_records(self) -> int:
        limits = self.limits
        return limits.max_request_tokens + _RECORDS_PER_SEQUENCE * limits.max_request_sequences + _MAX_OTHER_RECORDS

    def add(self, kind: Any, path: str) -> int:
        """Add the message type with this descriptor, found at this path. Returns its number."""
        number = len(self.messages)
        self.messages.append([])
        self.messages[number] = [self._rule(of, f"{path}{of.name}") for of in kind.fields]
        return number

    def _rule(self, of: FieldDescriptor, path: str) -> tuple[int, int, int, int]:
        kind = _FIELD_KINDS.get(of.type, _VARINT)
        if of.message_type is session_pb2.Call.DESCRIPTOR:
            kind = _LENGTH  # it is empty, so that calls do not nest
        counter = self._counter(of, path)
        if counter is not None:
            self.counters.append(counter)
        number = _NONE if counter is None else len(self.counters) - 1
        if kind != _MESSAGE:
            return of.number, kind, number, _NONE
        # The field of `Call` is not part of the path, so both kinds of transport report the same field names.
        below = "" if of.containing_type is session_pb2.Call.DESCRIPTOR else f"{path}."
        return of.number, kind, number, self.add(of.message_type, below)

    def _counter(self, of: FieldDescriptor, path: str) -> _Counter | None:
        if of.message_type is session_pb2.Call.DESCRIPTOR:
            return _Counter(path, 0, "calls")
        if of.is_repeated:
            limit = _ELEMENTS[of.name]
            if isinstance(limit, str):
                return _Counter(path, getattr(self.limits, limit), "elements", limit)
            return _Counter(path, limit, "elements")
        if _FIELD_KINDS.get(of.type) == _LENGTH:
            if (per_block := _BYTES_PER_BLOCK.get(of.name)) is not None:
                limit = self.limits.max_request_blocks * per_block
                return _Counter(path, limit, "blocks", "max_request_blocks", per_block)
            num_bytes = _BYTES.get(of.full_name, MAX_TEXT_BYTES)
            return None if num_bytes is None else _Counter(path, num_bytes, "bytes")
        return None

    def error(self, found: int) -> KVServiceError:
        """Return the error for a result of the scanner."""
        if found == _ext.WIRE_MALFORMED:
            return InvalidArgumentError("the request's bytes are no message of its type")
        if found == _ext.WIRE_TOO_MANY_RECORDS:
            return InvalidArgumentError(f"the request's message has more than {self.max_records} fields")
        return self.counters[found].error()


def _call_id(data: bytes) -> int | None:
    """Return the first field of a Call if it is the call id, else None. Protobuf libraries serialize the id first."""
    number = 0
    if data[:1] == b"\x08":
        for i, byte in enumerate(data[1:11]):
            number |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return number & (1 << 64) - 1
    return None


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
# Calls whose answers have many bytes for few in their request. None begins while large answers of so many bytes are
# being made or sent on its port; one that is made counts as half of the largest message. While a call waits for that,
# clients that do not read such an answer have less time.
BULKY: Final = frozenset(("store_batch_get", "read"))
UNREAD_BYTES: Final = 256 << 20
HURRIED_STALL_S: Final = 2.0
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
    the daemon. `ended_for` is the error for which the daemon has cancelled it. `num_unread` are the bytes of its large
    answers that are being sent.
    """

    task: asyncio.Task[Any]
    stalled_since: float | None
    slots: Slots
    kind: Kind
    caller: Identity = field(default_factory=CALLER.get)
    outer: asyncio.Task[Any] | None = field(default_factory=OUTER_TASK.get)
    ended_for: KVServiceError | None = None
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
        # Bytes of large answers that are being made or sent, and how many calls wait until these are less.
        self._made_bytes = config.max_message_bytes // 2
        self._num_unread = self._num_waiting = 0
        self._has_room = asyncio.Event()
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
        self.sent(rpc, rpc.num_unread)

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

    async def begin_bulky(self) -> None:
        """Wait until there is room for a large answer, and count it as one that is made, until `end_bulky`."""
        self._num_waiting += 1
        try:
            while self._num_unread >= UNREAD_BYTES:
                self._has_room.clear()
                await self._has_room.wait()
        finally:
            self._num_waiting -= 1
        self._num_unread += self._made_bytes

    def end_bulky(self) -> None:
        """The answer is made, or will not be."""
        self._num_unread -= self._made_bytes
        self._has_room.set()

    def sends(self, rpc: Rpc, num_bytes: int) -> None:
        """Count a large answer until `sent`, or until its RPC ends."""
        self._num_unread += num_bytes
        rpc.num_unread += num_bytes

    def sent(self, rpc: Rpc, num_bytes: int) -> None:
        num_bytes = min(num_bytes, rpc.num_unread)  # the RPC may have ended
        self._num_unread -= num_bytes
        rpc.num_unread -= num_bytes
        self._has_room.set()

    async def end_stalled(self) -> None:
        """Cancel RPCs that their clients stall. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        for rpc in self._rpcs:
            limit_s = HURRIED_STALL_S if self._num_waiting and rpc.num_unread else STALL_S
            if rpc.stalled_since is not None and now - rpc.stalled_since > limit_s:
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
