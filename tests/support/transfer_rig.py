"""Transfer Engines for tests: their processes, their memories, and daemons that have them."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from store_daemons import SMALL_STORE
from waiting import until

from kvservice.transfer import Endpoint, Operation, Range, TransferProcess

LOOPBACK = "127.0.0.1"
# What a daemon needs besides a TCP address.
TRANSFERS: dict[str, Any] = SMALL_STORE | {
    "max_message_mib": 4,
    "max_request_blocks": 4096,
    "transfer_address": LOOPBACK,
    "max_region_mib": 64,
    "store_gib": 1 / 4,
}


class Side:
    """A memory with its engine."""

    def __init__(self, num_bytes: int, *, shared: bool, peer: str = LOOPBACK, num_engines: int = 1) -> None:
        descriptor = os.memfd_create("side")
        try:
            os.ftruncate(descriptor, num_bytes)
            self.bytes = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
            endpoint = Endpoint(LOOPBACK, peer=peer, calls=not shared, num_engines=num_engines)
            self.process = TransferProcess(descriptor, num_bytes, endpoint, shared=shared)
        finally:
            os.close(descriptor)

    @property
    def ports(self) -> list[int]:
        return [int(segment.rpartition(":")[2]) for segment in self.process.segments]

    def move(self, operation: Operation, other: TransferProcess, *ranges: Range, timeout_s: float = 60.0) -> None:
        self.process.wait(self.process.start(operation, other.segments, other.address, ranges), timeout_s)


class LyingPeer:
    """An engine's peer that names another place for the data of its memory, as Mooncake's handshake allows. `answered`
    is set when it has done so."""

    address = 1 << 20

    def __init__(self, data_host: str, data_port: int, num_bytes: int) -> None:
        self._server = socket.create_server((LOOPBACK, 0))
        segment = f"{LOOPBACK}:{self._server.getsockname()[1]}"
        self.segments = [segment]
        buffer = {"addr": self.address, "length": num_bytes, "name": segment}
        answer = {
            "buffers": [buffer],
            "name": segment,
            "protocol": "tcp",
            "rdma_server_name": "",
            "tcp_data_host": data_host,
            "tcp_data_port": data_port,
            "tcp_proto_version": 2,
            "timestamp": "2026-01-01 00:00:00.000000",
        }
        self.answered = threading.Event()
        self._answer = b"\1" + json.dumps(answer).encode() + b"\n"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, struct.error):  # closed
            while True:
                with self._server.accept()[0] as connection, connection.makefile("rb") as received:
                    # The whole question: a socket that is closed before it is read resets the connection.
                    (num_bytes,) = struct.unpack("<Q", received.read(8))
                    received.read(num_bytes)
                    connection.sendall(struct.pack("<Q", len(self._answer)) + self._answer)
                    self.answered.set()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@contextlib.contextmanager
def sides(num_bytes: int, num_engines: tuple[int, int] = (1, 1)) -> Iterator[tuple[Side, Side]]:
    """Yield a side that calls, as the daemon's, and one that listens, as the client's."""
    near = Side(num_bytes, shared=False, num_engines=num_engines[0])
    far = Side(num_bytes, shared=True, num_engines=num_engines[1])
    try:
        yield near, far
    finally:
        near.process.kill()
        far.process.kill()


def engines_of(pid: int) -> list[int]:
    """Return the processes of engines that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"kvservice.transfer.child" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, even if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process until the context ends."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and ports that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                # The last four bytes are the IPv4 address, as this machine orders them.
                numbers = bytes.fromhex(host)[-4:][::-1]
                found.add((".".join(map(str, numbers)), int(port, 16)))
    return found
