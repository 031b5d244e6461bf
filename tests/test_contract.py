"""The contract is complete: a daemon serves each RPC, alone or on a session's stream, and a change can be repeated."""

from __future__ import annotations

import importlib
import pkgutil
import re
import signal
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from small_pool import SMALL_POOL
from waiting import PATIENCE_S, until

import kvservice.v1
from kvservice.client import KVClient
from kvservice.errors import DrainingError, UnknownSessionError
from kvservice.launch import Daemon
from kvservice.v1 import session_pb2

# Their calls need no session, but for DETACH's.
OPEN_SERVICES = {"SessionService", "PoolService", "InspectService", "EventService"}
DETACH = "detach"
# Messages of a stream other than the calls of a session.
OTHER_STREAM_CALLS = {"attach", "ping"}
# Calls that have the same effect when they are repeated.
REPEATED_WITHOUT_AN_ID = {
    "create_remote_region", "remove_remote_region",
    "store_lookup", "store_renew", "store_release", "store_abort", "store_batch_get", "store_batch_put", "store_touch",
    "detach",
}  # fmt: skip
READ_ONLY = {
    "can_allocate", "can_append", "can_swap_out", "can_swap_in", "describe", "match_prefix", "common_prefix",
    "describe_requests", "list_regions",
}  # fmt: skip
REFUSED_WHILE_DRAINING = {
    "open", "allocate", "append", "open_step", "open_ahead", "fork", "swap_out", "swap_in", "pin",
    "create_region", "open_lane", "create_remote_region",
    "map_pool", "open_scheduler", "add_requests", "schedule",
    "store_open_namespace", "store_reserve", "store_batch_put", "store_map_store",
}  # fmt: skip
# While the daemon drains they are for steps that have begun.
OF_BEGUN_STEPS = {"decode", "extend", "write"}


def call_name(method: MethodDescriptor) -> str:
    """Return the name of a call on a stream: CanAllocate → can_allocate, and Lookup of StoreService → store_lookup."""
    prefix = "store_" if method.containing_service.name == "StoreService" else ""
    return prefix + re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


def unary_rpcs() -> dict[str, MethodDescriptor]:
    """Return the RPCs without streams, of all services of the contract, by the names of their calls."""
    names = [module.name for module in pkgutil.iter_modules(kvservice.v1.__path__) if module.name.endswith("_pb2")]
    files = [importlib.import_module(f"kvservice.v1.{name}").DESCRIPTOR for name in names]
    methods = [method for file in files for service in file.services_by_name.values() for method in service.methods]
    return {call_name(one): one for one in methods if not (one.client_streaming or one.server_streaming)}


RPCS = unary_rpcs()
OF_SESSIONS = {
    name: method
    for name, method in RPCS.items()
    if method.containing_service.name not in OPEN_SERVICES or name == DETACH
}


def answer(channel: grpc.Channel, method: MethodDescriptor, token: bytes = b"") -> Any:
    """Send a request that has at most a session's token. Returns the response, or the reason of the refusal: that of
    the contract, or gRPC's status."""
    request = GetMessageClass(method.input_type)(**{"session_token": token} if token else {})
    path = f"/{method.containing_service.full_name}/{method.name}"
    read = GetMessageClass(method.output_type).FromString
    call: Any = channel.unary_unary(path, type(request).SerializeToString, read)
    try:
        return call(request, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        known: Any = error
        status, info = rpc_status.from_call(known), error_details_pb2.ErrorInfo()
        for detail in status.details if status is not None else ():
            detail.Unpack(info)
        return info.reason or known.code().name


def test_every_rpc_is_served(daemon: Daemon) -> None:
    """And those of sessions, with Close, ask for the session."""
    with grpc.insecure_channel(daemon.address) as channel:
        answers = {name: answer(channel, method) for name, method in RPCS.items()}
        closed = answer(channel, RPCS["close"], answers["open"].session_token)
    assert isinstance(closed, session_pb2.CloseResponse)
    without_session = {name for name, one in answers.items() if one == UnknownSessionError.reason}
    assert without_session == OF_SESSIONS.keys() | {"close"}
    assert {name: one for name, one in answers.items() if isinstance(one, str) and name not in without_session} == {}


def test_calls_of_a_session_and_nothing_else_can_go_over_its_stream() -> None:
    calls, replies = (message.DESCRIPTOR.fields_by_name for message in (session_pb2.Call, session_pb2.Reply))
    names = OF_SESSIONS.keys() | OTHER_STREAM_CALLS
    assert set(calls) == names | {"call_id", "traceparent", "calls"}
    assert set(replies) == names | {"call_id", "error", "replies"}
    others = {}
    for name, method in OF_SESSIONS.items():
        call, reply = calls[name], replies[name]
        types = call.message_type, reply.message_type
        in_the_oneof = call.containing_oneof is not None and reply.containing_oneof is not None
        if types != (method.input_type, method.output_type) or call.number != reply.number or not in_the_oneof:
            others[name] = call, reply
    assert others == {}


def test_requests_of_a_session_name_it() -> None:
    tokens = {name: method.input_type.fields_by_name["session_token"] for name, method in OF_SESSIONS.items()}
    assert {token.type for token in tokens.values()} == {FieldDescriptor.TYPE_BYTES}
    # Requests of RegionService have it after their own fields.
    of_regions = {name for name, one in OF_SESSIONS.items() if one.containing_service.name == "RegionService"}
    assert {name: token.number for name, token in tokens.items()} == {
        name: 15 if name in of_regions else 1 for name in tokens
    }


def test_every_change_but_of_tensors_can_be_repeated() -> None:
    changes = {name for name, one in OF_SESSIONS.items() if one.containing_service.name != "AttentionService"}
    repeatable = {name for name in changes if "request_id" in OF_SESSIONS[name].input_type.fields_by_name}
    assert repeatable == changes - READ_ONLY - REPEATED_WITHOUT_AN_ID


def test_while_the_daemon_drains_no_work_begins() -> None:
    """A step between two of its layers holds the daemon. A session without a stream sends each call."""
    options = SMALL_POOL | {"drain_stall_s": 60, "session_grace_s": 600}
    with Daemon(**options) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        step = kv.open_step([kv.allocate([1, 2, 3])])
        ones = np.ones((3, 2, 32), np.float32)
        step.extend(0, ones, ones, ones)
        with grpc.insecure_channel(daemon.address) as channel:
            token = answer(channel, RPCS["open"]).session_token
            daemon.process.send_signal(signal.SIGTERM)
            until(lambda: answer(channel, RPCS["open"]) == DrainingError.reason)
            answers = {name: answer(channel, method, token) for name, method in OF_SESSIONS.items()}
            answers |= {name: answer(channel, RPCS[name]) for name in RPCS.keys() - OF_SESSIONS.keys()}
        refused = {name for name, one in answers.items() if one == DrainingError.reason}
        assert refused == REFUSED_WHILE_DRAINING | OF_BEGUN_STEPS
        step.extend(1, ones, ones, ones)
