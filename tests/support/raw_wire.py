"""The gRPC contract without the client: raw stubs, raw streams, statuses with their details."""

from __future__ import annotations

import itertools
import queue
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvservice.launch import Daemon
from kvservice.v1 import (
    attention_pb2,
    attention_pb2_grpc,
    blocks_pb2,
    blocks_pb2_grpc,
    events_pb2,
    events_pb2_grpc,
    host_pb2,
    host_pb2_grpc,
    inspect_pb2,
    inspect_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    regions_pb2,
    regions_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
    tensor_pb2,
    transfer_pb2,
    transfer_pb2_grpc,
)

# Far above the duration of any call, and far below the time limit of a test.
TIMEOUT_S = 20.0
SERVICES = tuple(
    service
    for module in (
        session_pb2, blocks_pb2, attention_pb2, regions_pb2, host_pb2, store_pb2, transfer_pb2, scheduler_pb2,
        pool_pb2, inspect_pb2, events_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)  # fmt: skip
CALLS = session_pb2.Call.DESCRIPTOR.oneofs_by_name["call"].fields
SESSION_CALLS = sorted({field.name for field in CALLS} - {"attach", "ping"})


def call_name(method: Any) -> str:
    """Return the name of an RPC's field in Call, such as can_allocate, and store_lookup for StoreService's Lookup."""
    prefix = "store_" if method.containing_service.name == "StoreService" else ""
    return prefix + re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


def is_of_session(method: Any) -> bool:
    """Return whether the calls of a method belong to a session."""
    return call_name(method) in SESSION_CALLS


def request_of(name: str) -> Any:
    """Return an empty request of a session's call."""
    kind: Any = session_pb2.Call.DESCRIPTOR.fields_by_name[name].message_type
    return GetMessageClass(kind)()


@dataclass(frozen=True)
class Refusal:
    """The error of a call: the status and its google.rpc details."""

    code: str
    reason: str
    field: str
    metadata: dict[str, str]
    details: frozenset[str]
    message: str


def refusal(status: status_pb2.Status) -> Refusal:
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        _ = detail.Unpack(info) or detail.Unpack(request)
    return Refusal(
        code=grpc.StatusCode((status.code, _code_text(status.code))).name,
        reason=info.reason,
        field=request.field_violations[0].field if request.field_violations else "",
        metadata=dict(info.metadata),
        details=frozenset(detail.TypeName().removeprefix("google.rpc.") for detail in status.details),
        message=status.message,
    )


def _code_text(number: int) -> str:
    return next(code.value[1] for code in grpc.StatusCode if code.value[0] == number)


class RawStream:
    """A session's stream of calls and replies, as in the contract."""

    def __init__(self, stub: session_pb2_grpc.SessionServiceStub) -> None:
        self._calls: queue.SimpleQueue[session_pb2.Call | None] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self.replies = stub.Connect(iter(self._calls.get, None), timeout=120)

    def put(self, call: session_pb2.Call) -> None:
        self._calls.put(call)

    def send(self, name: str, request: Any) -> session_pb2.Reply:
        call_id = next(self._ids)
        self.put(session_pb2.Call(call_id=call_id, **{name: request}))
        reply = next(self.replies)
        assert reply.call_id == call_id
        return reply

    def attach(self, token: bytes, *, reconnects: bool = False) -> session_pb2.Reply:
        return self.send("attach", session_pb2.AttachRequest(session_token=token, reconnects=reconnects))

    def end(self) -> None:
        """Half-close the stream, as a client does when it is done."""
        self._calls.put(None)

    def cancel(self) -> None:
        self._calls.put(None)
        self.replies.cancel()


class Wire:
    """All RPCs by the names of their calls, at an address or over a channel."""

    def __init__(self, where: str | grpc.Channel) -> None:
        self.channel = grpc.insecure_channel(where) if isinstance(where, str) else where
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.pool = pool_pb2_grpc.PoolServiceStub(self.channel)
        stubs = {
            "SessionService": self.sessions,
            "PoolService": self.pool,
            "BlockService": blocks_pb2_grpc.BlockServiceStub(self.channel),
            "AttentionService": attention_pb2_grpc.AttentionServiceStub(self.channel),
            "RegionService": regions_pb2_grpc.RegionServiceStub(self.channel),
            "HostService": host_pb2_grpc.HostServiceStub(self.channel),
            "SchedulerService": scheduler_pb2_grpc.SchedulerServiceStub(self.channel),
            "StoreService": store_pb2_grpc.StoreServiceStub(self.channel),
            "TransferService": transfer_pb2_grpc.TransferServiceStub(self.channel),
            "InspectService": inspect_pb2_grpc.InspectServiceStub(self.channel),
            "EventService": events_pb2_grpc.EventServiceStub(self.channel),
        }
        self.methods = {
            call_name(method): getattr(stubs[service.name], method.name)
            for service in SERVICES
            for method in service.methods
        }

    def unary(self, name: str, request: Any) -> Any:
        """Return the response, or a Refusal."""
        try:
            return self.methods[name](request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            status = rpc_status.from_call(cast(Any, error))
            if status is None:
                return Refusal(error.code().name, "", "", {}, frozenset(), error.details() or "")
            return refusal(status)

    def stream(self) -> RawStream:
        return RawStream(self.sessions)

    def stats(self) -> pool_pb2.GetStatsResponse:
        return self.pool.GetStats(pool_pb2.GetStatsRequest(), timeout=TIMEOUT_S)

    def close(self) -> None:
        self.channel.close()


class RawSession:
    """An open session with its stream. `call` uses the requested transport."""

    def __init__(self, wire: Wire, **options: Any) -> None:
        self.wire = wire
        self.token = wire.sessions.Open(session_pb2.OpenRequest(**options), timeout=TIMEOUT_S).session_token
        self.stream = wire.stream()
        assert self.stream.attach(self.token).WhichOneof("reply") == "attach"

    def call(self, name: str, request: Any, transport: str = "unary") -> Any:
        """Return the response, or a Refusal."""
        if transport == "unary":
            request.session_token = self.token
            return self.wire.unary(name, request)
        reply = self.stream.send(name, request)
        kind = reply.WhichOneof("reply")
        return refusal(reply.error) if kind == "error" else getattr(reply, kind)

    def ok(self, name: str, request: Any) -> Any:
        answer = self.call(name, request)
        assert not isinstance(answer, Refusal), answer
        return answer

    def describe(self) -> blocks_pb2.DescribeResponse:
        return self.ok("describe", blocks_pb2.DescribeRequest(return_token_ids=True, return_block_ids=True))

    def close(self) -> None:
        self.stream.cancel()
        self.wire.unary("close", session_pb2.CloseRequest(session_token=self.token))


def tensor(*shape: int, dtype: str = "FLOAT32", fill: float = 1.0, **changes: Any) -> tensor_pb2.Tensor:
    """Return a valid tensor message with `changes`."""
    kind = {"FLOAT32": np.float32, "FLOAT16": np.float16}.get(dtype, np.float32)
    message = tensor_pb2.Tensor(
        data_type=getattr(tensor_pb2, f"DATA_TYPE_{dtype}"), shape=shape, inline=np.full(shape, fill, kind).tobytes()
    )
    for name, value in changes.items():
        message.ClearField(name)
        if name == "shape":
            message.shape.extend(value)
        else:
            setattr(message, name, value)
    return message


def await_no_sessions(wire: Wire) -> None:
    """Wait until the sessions of earlier tests have ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while wire.stats().sessions:
        assert time.monotonic() < deadline, "sessions are left over"
        time.sleep(0.02)


class Toolbox:
    """The functions of this module that test files use."""

    Refusal = Refusal
    Wire = Wire
    RawSession = RawSession
    tensor = staticmethod(tensor)
    refusal = staticmethod(refusal)
    await_no_sessions = staticmethod(await_no_sessions)


@pytest.fixture(scope="session")
def raw() -> type[Toolbox]:
    return Toolbox


@pytest.fixture(scope="session")
def wire(daemon: Daemon) -> Iterator[Wire]:
    connected = Wire(daemon.address)
    yield connected
    connected.close()


@pytest.fixture
def raw_session(wire: Wire) -> Iterator[RawSession]:
    await_no_sessions(wire)
    session = RawSession(wire)
    yield session
    session.close()
