"""Health check of a daemon over grpc.health.v1, for scripts and containers."""

from __future__ import annotations

import os
import socket
from typing import Any, Final, NamedTuple

from kvservice.auth.client import NO_CREDENTIALS, ClientCredentials
from kvservice.config import ServeConfig
from kvservice.environment import prepare_grpc
from kvservice.keeper import ControlSocketError, control_path, door_path
from kvservice.keeper import ask as ask_keeper

prepare_grpc()

import grpc  # noqa: E402  the environment must be set first
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402

from kvservice.wire.channels import connection_error, open_channel  # noqa: E402
from kvservice.wire.status import HEALTH_NOTE, HEALTH_REASON  # noqa: E402

KEEPER_S: Final = 2.0
_DOOR_S: Final = 1.0
# A daemon that listens on all interfaces is checked over loopback.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def address_of(config: ServeConfig) -> str:
    """Return the gRPC address of a daemon with this configuration, for clients on its host.

    It is the unix socket if there is one, else the TCP address, or empty if the configuration opens neither.
    """
    if config.unix_socket:
        return f"unix:{config.unix_socket}"
    host, _, port = config.tcp_address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}" if host else ""


def door_of(address: str, timeout_s: float = _DOOR_S) -> str:
    """Return the operator's door of the daemon at a unix address, which has connections when clients hold all others.

    It is `address` itself over TCP, and if this user may not connect to the door, or the daemon takes no connection
    there.
    """
    kind, _, path = address.partition(":")
    path = path.removeprefix("//")
    door = door_path(path) if kind == "unix" else ""
    if not door:
        return address
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(min(timeout_s, _DOOR_S))
        try:
            # Where others can write to the folder, one could have put the door there.
            if os.lstat(door).st_uid != os.lstat(path).st_uid:
                return address
            probe.connect(door)
            # gRPC's server is the first to send, and closes a connection over its limit.
            is_taken = bool(probe.recv(1))
        except TimeoutError:  # the daemon is there and busy
            is_taken = True
        except OSError:
            is_taken = False
    return f"unix:{door}" if is_taken else address


def check(address: str, timeout_s: float, credentials: ClientCredentials = NO_CREDENTIALS) -> bool:
    """Return whether the daemon at `address` (a gRPC target) reports SERVING within `timeout_s` seconds.

    The result is False if it reports another status (draining, or failed integrity), does not answer in time, or is not
    reachable. No error is raised for these.
    """
    return not reason_not_serving(address, timeout_s, credentials)


class HealthAnswer(NamedTuple):
    """`reason` is why the daemon does not serve, as far as the client knows, or empty if it does. `note` is what the
    daemon does without, for example a tier that is suspended."""

    reason: str
    note: str = ""


def reason_not_serving(address: str, timeout_s: float, credentials: ClientCredentials) -> str:
    """Return why the daemon does not serve, as far as the client knows, or an empty string if it does."""
    return ask(address, timeout_s, credentials).reason


def ask(address: str, timeout_s: float, credentials: ClientCredentials) -> HealthAnswer:
    """Ask the daemon, at the operator's door if it is open."""
    with open_channel(door_of(address, timeout_s), credentials, ()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the published stubs declare no methods
        try:
            request, headers = health_pb2.HealthCheckRequest(), credentials.headers()
            answer, call = stub.Check.with_call(request, timeout=timeout_s, metadata=headers)
        except grpc.RpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            said = f"no answer within {timeout_s:g} s" if is_late else f"{error.code().name}: {error.details()}"
            no_answer = str(connection_error(said))
            return HealthAnswer(_said_by_keeper(address) or no_answer)
    metadata: dict[str, str] = dict(call.trailing_metadata() or ())
    reason, note = metadata.get(HEALTH_REASON, ""), metadata.get(HEALTH_NOTE, "")
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return HealthAnswer("", note)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return HealthAnswer(f"it says {status}: {reason}" if reason else f"it says {status}", note)


def _said_by_keeper(address: str) -> str:
    """Return what the keeper says of a daemon that does not answer yet, or an empty string."""
    kind, _, path = address.partition(":")
    control = control_path(path.removeprefix("//")) if kind == "unix" else ""
    try:
        status = next(ask_keeper(control, "status", KEEPER_S)) if control else {"ready": True}
    except ControlSocketError:
        return ""
    if status["ready"]:
        return ""
    said = f": {status['status']}" if status["status"] else ""
    if status["starts_in_s"] is None:
        return f"the daemon is starting{said}"
    return f"the daemon starts again in {status['starts_in_s']:.0f} s, its last process has ended{said}"
