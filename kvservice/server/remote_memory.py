"""Memory of a region that a client on another host reads and writes with the Transfer Engine.

create_remote ─▶ a process with an engine maps the memory ─▶ the client transfers, and names the region in its calls
                 └── the region is removed, or the session ends ─▶ the process is killed: late transfers have no target
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace

import numpy as np

from kvservice.auth import is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import QuotaExceededError, TransferFailedError, TransferOffError
from kvservice.server import unmapping
from kvservice.server.budget import BudgetedMemory
from kvservice.server.region import Array
from kvservice.transfer import Endpoint, TransferProcess, is_installed

# The IP address of the client whose call is executed; empty on the unix socket.
PEER: ContextVar[str] = ContextVar("peer", default="")


def peer_address(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer, such as ipv4:10.0.0.1:4711 or ipv6:%5B::1%5D:4711."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    return host.removeprefix("::ffff:")


class Transfers:
    """The engines of all sessions. Each has a process of its own, which only the address of its client can reach."""

    def __init__(self, config: ServeConfig) -> None:
        self._endpoint = _endpoint(config)
        self._limit = config.max_transfers
        self.count = 0

    def check(self) -> None:
        """Raise TransferOffError if there is no engine, QuotaExceededError if there are too many."""
        if self._endpoint is None:
            raise TransferOffError("the daemon runs without transfer_address")
        if not is_installed():
            raise TransferFailedError("the daemon lacks its Transfer Engine: install kvservice[mooncake]")
        if self.count >= self._limit:
            raise QuotaExceededError(f"{self._limit} remote regions are open", limit="max_transfers", value=self._limit)

    async def open(self, memory: BudgetedMemory) -> RemoteMemory:
        """Start an engine for the memory, for the client of this call. Raises the errors of `check`, and
        TransferFailedError; the caller then still owns the memory."""
        self.check()
        assert self._endpoint is not None, "it was checked"
        peer = PEER.get()
        # A client on this host connects to the engine from the engine's own address.
        endpoint = replace(self._endpoint, peer=peer if peer and not is_loopback(peer) else self._endpoint.host)
        self.count += 1
        try:
            process = await asyncio.to_thread(
                TransferProcess, memory.sealed.fd, memory.sealed.num_bytes, endpoint, shared=True
            )
        except BaseException:
            self.count -= 1
            raise
        return RemoteMemory(memory, process, self._closed)

    def _closed(self) -> None:
        self.count -= 1


def _endpoint(config: ServeConfig) -> Endpoint | None:
    if not config.transfer_address:
        return None
    host, _, port = config.transfer_address.rpartition(":")
    first = int(port)
    last = first + config.transfer_ports - 1 if first else 0
    return Endpoint(host, config.transfer_protocol, first, last)


class RemoteMemory:
    """Implements `Memory`. `process` is the engine of the memory."""

    def __init__(self, memory: BudgetedMemory, process: TransferProcess, on_close: Callable[[], None]) -> None:
        self._memory, self._on_close = memory, on_close
        self.process = process
        self._bytes: Array = np.frombuffer(memory.sealed.map, np.uint8)

    def check(self, end: int) -> None:
        """Do nothing: the memory cannot shrink."""

    def read(self, begin: int, num_bytes: int) -> Array:
        return self.view(begin, num_bytes)

    def write(self, begin: int, data: Array) -> None:
        self._bytes[begin : begin + len(data)] = data

    def view(self, begin: int, num_bytes: int) -> Array:
        return self._bytes[begin : begin + num_bytes]

    def close(self) -> None:
        self.process.kill()
        unmapping.unmap(self._memory.sealed)
        self._memory.close()
        self._on_close()
