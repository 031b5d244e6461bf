"""The process of an engine, as the process that uses it sees it. The methods block."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvservice.errors import TransferFailedError
from kvservice.owned import OwnedProcess
from kvservice.transfer import protocol
from kvservice.transfer.library import Endpoint
from kvservice.transfer.protocol import Operation, Range

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
        assert len(ranges) <= protocol.MAX_RANGES, "the caller splits transfers"
        number = next(self._numbers)
        message = {
            "id": number,
            "operation": operation,
            "segments": list(segments),
            "address": address,
            "ranges": [list(one) for one in ranges],
        }
        try:
            protocol.send(self._control, message)
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
            message = protocol.receive(self._control)
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
