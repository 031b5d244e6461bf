"""Moves bytes between hosts with Mooncake's Transfer Engine, between memories that were made for that.

Blocks in regions travel 4.7 to 6 times as fast by it as in messages on a host with 16 cores, 1.8 to 1.9 times with 2
cores, and K/V of sequences 1.2 to 1.6 times ("Remote blocks" in kvservice/bench/README.md). Over TCP a socket of our
own would do as well, as the plain socket there shows; RDMA (`transfer_protocol`) is what only the engine has.

The engine checks no credentials: whoever reaches its ports may read and write all memory that is registered with it. So
each memory has a process of its own (`child`), which maps nothing else, and is killed when the memory is given up. A
late transfer then has no target. The daemon's engines call those of clients, and do not listen.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from kvservice import plain_json
from kvservice.errors import TransferFailedError
from kvservice.mooncake import NOWHERE, PRELOADED, listening_environment
from kvservice.owned import OwnedProcess

# ---- the messages between a process and that of its engines: JSON, one message in each packet of a socket pair


READ: Final = "read"
WRITE: Final = "write"
Operation: TypeAlias = Literal["read", "write"]

# Most engines of one memory.
MAX_ENGINES: Final = 8
# Most ranges of one transfer, so that its message fits into a packet.
MAX_RANGES: Final = 1024
_MAX_MESSAGE_BYTES: Final = 256 << 10


class Range(NamedTuple):
    """`num_bytes` at `local` of the memory of this side, and at `remote` of that of the other side."""

    local: int
    remote: int
    num_bytes: int


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Raises OSError."""
    connection.send(plain_json.dumps(message, separators=(",", ":")).encode())


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message, or None if the other side has ended. Raises OSError and ValueError."""
    data = connection.recv(_MAX_MESSAGE_BYTES)
    if not data:
        return None
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("the message is no object")
    return message


# ---- the library of the engine: whether it is installed, and the environment of its process
#
# Mooncake's TCP transport advertises the address that it is given, and listens on all addresses nevertheless. A small
# library of ours, which is preloaded, decides where it listens and for whom (csrc/listen).

MODULE: Final = "mooncake"
# The bytes that the engine hands to the kernel at once. They stay in a core's cache.
_CHUNK_BYTES: Final = 32 << 10
# The engines of a memory, on a host with enough cores for them and for those who copy beside them.
_NUM_ENGINES: Final = 2
_CORES_FOR_THEM: Final = 4
# The connections between two engines. One thread of the engine serves all of them.
_NUM_CONNECTIONS: Final = 2
# The engine drops a connection that makes no progress for so long, in seconds.
_PROGRESS_S: Final = 10


def is_installed() -> bool:
    """Return whether the engine can be started here."""
    return importlib.util.find_spec(MODULE) is not None and PRELOADED.exists()


def num_engines() -> int:
    """Return how many engines a memory has on this host."""
    return _NUM_ENGINES if (os.cpu_count() or 1) >= _CORES_FOR_THEM else 1


@dataclass(frozen=True)
class Endpoint:
    """The place where engines of a memory listen: `host`, a numeric address, each at two ports from `first_port` to
    `last_port`; 0 and 0: at any. They have connections with the address `peer` only; empty: with everybody. Engines
    that only `calls` do not listen. `protocol` is "tcp" or "rdma". `num_engines` share the work."""

    host: str
    protocol: str = "tcp"
    first_port: int = 0
    last_port: int = 0
    peer: str = ""
    calls: bool = False
    num_engines: int = field(default_factory=num_engines)

    def __post_init__(self) -> None:
        """Raises ValueError for an address that is not numeric."""
        for address in filter(None, (self.host, self.peer)):
            ipaddress.ip_address(address)

    @property
    def name(self) -> str:
        """The host as part of host:port."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def listens_at(self) -> str:
        return NOWHERE if self.calls else self.host

    def environment(self) -> dict[str, str]:
        """Return the environment of the engine's process."""
        variables = {
            "MC_TCP_BIND_ADDRESS": self.host,
            "MC_TCP_SLICE_SIZE": str(_CHUNK_BYTES),
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "MC_TCP_LANES_PER_PEER": str(_NUM_CONNECTIONS),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_PROGRESS_S),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(_PROGRESS_S),
            "MC_LOG_LEVEL": "ERROR",
        }
        if self.protocol == "tcp":
            variables["MC_FORCE_TCP"] = "1"
        if self.peer:
            variables["KVSERVICE_PEER_ADDRESS"] = self.peer
        if self.first_port:
            for first, last in (("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"), ("MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT")):
                variables[first], variables[last] = str(self.first_port), str(self.last_port)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        return inherited | listening_environment(self.listens_at) | variables


# ---- the process of the engines, as the process that uses it sees it. The methods block

# How long the process may take to start, in seconds. It imports the engine.
START_S: Final = 20.0


@dataclass(frozen=True)
class Ticket:
    """A transfer that was started."""

    number: int


class TransferProcess:
    """A process with engines for one memory. `segments` and `address` are what others call the engines and the memory.

    One thread uses it at a time. After an error it is of no use: `kill` it.
    """

    def __init__(self, memory_fd: int, num_bytes: int, endpoint: Endpoint, *, shared: bool) -> None:
        """Start the process, which maps `num_bytes` of the memory. If it is `shared`, other engines can read and write
        it. The caller still owns the descriptor. Raises TransferFailedError."""
        self._numbers = itertools.count(1)
        self._outcomes: dict[int, bool] = {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _start(theirs, memory_fd, num_bytes, endpoint, shared)
        except OSError as error:
            ours.close()
            raise TransferFailedError(f"the transfer engine cannot be started: {error}") from None
        self._control = ours
        try:
            hello = self._receive(time.monotonic() + START_S)
            if "failed" in hello:
                raise TransferFailedError(f"the transfer engine has not started: {hello['failed']}")
        except TransferFailedError:
            self.kill()
            raise
        self.segments, self.address = [str(segment) for segment in hello["segments"]], int(hello["address"])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def start(self, operation: Operation, segments: Sequence[str], address: int, ranges: Sequence[Range]) -> Ticket:
        """Start a transfer of at most MAX_RANGES ranges with the memory at `address` of the engines of another process.
        Raises TransferFailedError."""
        assert len(ranges) <= MAX_RANGES, "the caller splits transfers"
        number = next(self._numbers)
        message = {
            "id": number,
            "operation": operation,
            "segments": list(segments),
            "address": address,
            "ranges": [list(one) for one in ranges],
        }
        try:
            send(self._control, message)
        except OSError:
            raise TransferFailedError("the transfer engine has ended") from None
        return Ticket(number)

    def wait(self, ticket: Ticket, timeout_s: float) -> None:
        """Wait for the end of a transfer. Raises TransferFailedError if it failed, or has not ended in time."""
        deadline = time.monotonic() + timeout_s
        while ticket.number not in self._outcomes:
            message = self._receive(deadline)
            self._outcomes[int(message["id"])] = bool(message["done"])
        if not self._outcomes.pop(ticket.number):
            raise TransferFailedError("the other side cannot be reached, or has refused")

    def interrupt(self) -> None:
        """End the process while another thread may use it, whose calls then fail. `kill` must still follow."""
        self._process.kill()

    def kill(self) -> None:
        """End the process. Its memory is no longer mapped there when it is gone, which a thread waits for."""
        self._process.kill()
        self._control.close()
        threading.Thread(target=self._process.wait, name="kvservice-transfer-end", daemon=True).start()

    def _receive(self, deadline: float) -> dict[str, Any]:
        try:
            self._control.settimeout(max(deadline - time.monotonic(), 1e-3))
            message = receive(self._control)
        except TimeoutError:
            raise TransferFailedError("no answer of the transfer engine in time") from None
        except (OSError, ValueError):
            raise TransferFailedError("the transfer engine has ended") from None
        if message is None:
            raise TransferFailedError("the transfer engine has ended")
        return message


def _start(theirs: socket.socket, memory_fd: int, num_bytes: int, endpoint: Endpoint, shared: bool) -> OwnedProcess:
    where = (endpoint.name, endpoint.listens_at, endpoint.protocol)
    arguments = (theirs.fileno(), memory_fd, num_bytes, *where, int(shared), endpoint.num_engines)
    return OwnedProcess(
        [sys.executable, "-P", "-m", "kvservice.transfer.child", *map(str, arguments)],
        pass_fds=(theirs.fileno(), memory_fd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=endpoint.environment(),
    )
