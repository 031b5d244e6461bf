"""The process of the engines: `python -m kvservice.transfer.child` with the arguments CONTROL MEMORY NUM_BYTES
HOST LISTEN PROTOCOL SHARED NUM_ENGINES.

It maps the memory, and transfers ranges of it for the process at the other end of the socket CONTROL. The kernel kills
it when that process ends (`owned.py`), also while an engine waits for a peer.
With SHARED the memory is registered, so that engines on other hosts can read and write it. An engine has one thread for
its connections, so several take turns with the ranges.

    ◀─ {"segments", "address"}    first of all: the names of these engines, and the address of their memory
    ◀─ {"failed"}                 in place of that: why there is no engine
    ─▶ {"id", "operation", "segments", "address", "ranges"}
                                  starts a transfer with the memory at `address` of all `segments`
    ◀─ {"id", "done"}             a transfer has ended; nobody touches its ranges any more
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from mooncake.engine import TransferEngine, TransferOpcode

from kvservice.mooncake import ListeningError, check_listening
from kvservice.transfer import READ, WRITE, receive, send

# The engine has no descriptor that becomes readable when a transfer ends. It is asked this often, in seconds.
POLL_S: Final = 1e-4
# The engine's answers about a transfer.
_ENDED, _RUNNING = 1, 0
_OPCODES: Final = {READ: TransferOpcode.Read, WRITE: TransferOpcode.Write}


@dataclass
class Transfer:
    """A transfer in parts, one for each range. `running` are those that have not ended: the engine, and its number
    there."""

    number: int
    running: list[tuple[Any, int]]
    is_good: bool = True


class EngineServer:
    """Serves one control socket. `address` is the address of the memory."""

    def __init__(self, control: socket.socket, engines: Sequence[Any], address: int, num_bytes: int) -> None:
        self._control, self._engines = control, engines
        self._address, self._num_bytes = address, num_bytes
        self._transfers: list[Transfer] = []

    def serve(self) -> None:
        """Serve until the other side ends."""
        while True:
            timeout_s = POLL_S if self._transfers else None
            if select.select([self._control], [], [], timeout_s)[0]:
                message = receive(self._control)
                if message is None:
                    return
                self._transfers.append(self._start(message))
            for transfer in list(self._transfers):
                if self._has_ended(transfer):
                    self._transfers.remove(transfer)
                    send(self._control, {"id": transfer.number, "done": transfer.is_good})

    def _start(self, message: dict[str, Any]) -> Transfer:
        transfer = Transfer(message["id"], [])
        segments = message["segments"]
        for number, (local, remote, num_bytes) in enumerate(message["ranges"]):
            if not 0 <= local <= local + num_bytes <= self._num_bytes:
                raise ValueError(f"{num_bytes} bytes from {local} on are not inside the memory")
            engine = self._engines[number % len(self._engines)]
            part = engine.batch_transfer_async(
                segments[number % len(segments)],
                [self._address + local],
                [message["address"] + remote],
                [num_bytes],
                _OPCODES[message["operation"]],
            )
            if part:
                transfer.running.append((engine, part))
            else:
                transfer.is_good = False
        return transfer

    def _has_ended(self, transfer: Transfer) -> bool:
        """A part that failed does not end the transfer: the others still use its memory."""
        running = []
        for engine, part in transfer.running:
            found = engine.transfer_check_status(part)
            if found == _RUNNING:
                running.append((engine, part))
            elif found != _ENDED:
                transfer.is_good = False
        transfer.running = running
        return not running


def _open(engine: Any, host: str, listens_at: str, network: str, address: int, shared_bytes: int) -> str:
    """Start the engine, and register so much memory. Returns why that failed, or nothing."""
    if engine.initialize(host, "P2PHANDSHAKE", network, "") != 0:
        return f"it cannot listen on {host}"
    try:
        check_listening(listens_at)
    except ListeningError as error:
        return str(error)
    if shared_bytes and engine.register_memory(address, shared_bytes) != 0:
        return "it cannot register its memory"
    return ""


def main() -> None:
    control_fd, memory_fd, num_bytes, host, listens_at, network, shared, num_engines = sys.argv[1:]
    # `select` knows descriptors below 1024 only. Those that are inherited have the numbers of the other side, which may
    # have more of them open.
    control = socket.socket(fileno=os.dup(int(control_fd)))
    os.close(int(control_fd))
    mapping = mmap.mmap(int(memory_fd), int(num_bytes))
    os.close(int(memory_fd))
    address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    engines = [TransferEngine() for _ in range(int(num_engines))]
    for engine in engines:
        if (failed := _open(engine, host, listens_at, network, address, len(mapping) if shared == "1" else 0)) != "":
            send(control, {"failed": failed})
            os._exit(1)
    segments = [f"{host}:{engine.get_rpc_port()}" for engine in engines]
    send(control, {"segments": segments, "address": address})
    EngineServer(control, engines, address, len(mapping)).serve()
    os._exit(0)  # the engines' threads may still be at work


if __name__ == "__main__":
    main()
