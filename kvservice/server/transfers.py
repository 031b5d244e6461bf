"""The Transfer Engines of the daemon, which carry blocks of clients on other hosts, and what is reported about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Final

from kvservice.auth import is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import FailedPreconditionError, QuotaExceededError, TransferFailedError, TransferOffError
from kvservice.server.budget import BudgetedMemory
from kvservice.server.remote_memory import RemoteMemory
from kvservice.server.transfer_totals import TransferTotals
from kvservice.telemetry.transfers import TransferStats, TransferTable
from kvservice.transfer import Endpoint, TransferProcess, is_installed

# Requests with at least so many bytes of blocks or K/V would travel by engines if the client could.
FALLBACK_BYTES: Final = 1 << 20
# The IP address of the client whose call is executed; empty on the unix socket.
PEER: ContextVar[str] = ContextVar("peer", default="")
_NOT_INSTALLED: Final = "the daemon lacks its Transfer Engine"


def peer_address(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer, such as ipv4:10.0.0.1:4711 or ipv6:%5B::1%5D:4711."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    return host.removeprefix("::ffff:")


class Transfers:
    """The engines of all sessions. Each has a process of its own.

    `totals` counts all transfers. `note` says that engines do not start, or is empty."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._threads = ThreadPoolExecutor(config.max_transfers, thread_name_prefix="kvservice-transfer")
        self.count = 0
        self.totals = TransferTotals(clock)
        self._open: set[RemoteMemory] = set()
        self.note = _NOT_INSTALLED if config.transfer_address and not is_installed() else ""

    def check(self) -> None:
        """Raise TransferOffError or TransferFailedError if there are no engines, FailedPreconditionError if they cannot
        reach the client of this call, QuotaExceededError if there are too many."""
        if not self._config.transfer_address:
            raise TransferOffError("the daemon runs without transfer_address")
        if not is_installed():
            raise TransferFailedError(f"{_NOT_INSTALLED}: install kvservice[mooncake]")
        self._peer()
        limit = self._config.max_transfers
        if self.count >= limit:
            raise QuotaExceededError(f"{limit} remote regions are open", limit="max_transfers", value=limit)

    async def open(self, memory: BudgetedMemory, ports: Sequence[int], address: int) -> RemoteMemory:
        """Start engines for the memory, which connect to engines at these ports of the client of this call. Raises
        the errors of `check`, and TransferFailedError; the caller then still owns the memory."""
        self.check()
        peer = self._peer()
        # The engine of the client may name any host for the data, and this one connects to `peer` only.
        endpoint = Endpoint(self._config.transfer_address, self._config.transfer_protocol, peer=peer, calls=True)
        self.count += 1
        try:
            process = await asyncio.to_thread(
                TransferProcess,
                memory.sealed.fd,
                memory.sealed.num_bytes,
                endpoint,
                shared=self._config.transfer_protocol != "tcp",
            )
        except TransferFailedError:
            self.count -= 1
            self.totals.engine_failures += 1
            self.note = "the latest Transfer Engine has not started"
            raise
        except BaseException:
            self.count -= 1
            raise
        self.note = ""
        segments = [f"{peer}:{port}" for port in ports]
        opened = RemoteMemory(memory, process, segments, address, self._threads, self.totals, self._closed, self._clock)
        self._open.add(opened)
        return opened

    def _peer(self) -> str:
        """Return the IPv4 address of the client of this call."""
        peer = PEER.get()
        if is_loopback(peer):
            return self._config.transfer_address  # a client on this host
        if ":" in peer or not peer:
            raise FailedPreconditionError(
                f"engines connect to clients over TCP and IPv4, and this one calls over {peer or 'a unix socket'}",
                field="ports",
            )
        return peer

    def _closed(self, memory: RemoteMemory) -> None:
        self.count -= 1
        self._open.remove(memory)

    def arrived_damaged(self, num_blocks: int) -> None:
        """Count blocks of a client that do not have its checksums."""
        self.totals.damaged_blocks += num_blocks

    def travelled_in_messages(self, num_bytes: int) -> None:
        """Note the bytes of blocks or K/V in the messages of this call. It is a fall back if they are many and the
        client is not on the unix socket."""
        if self._config.transfer_address and PEER.get() and num_bytes >= FALLBACK_BYTES:
            self.totals.fell_back(num_bytes)

    def stats(self) -> TransferStats:
        totals, (came, went) = self.totals, self.totals.flows.values()
        return TransferStats(
            engines=sum(memory.process.is_running for memory in self._open),
            regions=len(self._open),
            region_bytes=sum(memory.num_bytes for memory in self._open),
            running_in=came.running,
            running_out=went.running,
            done_in=came.done,
            done_out=went.done,
            failed_in=came.failed,
            failed_out=went.failed,
            bytes_in=came.num_bytes,
            bytes_out=went.num_bytes,
            engine_failures=totals.engine_failures,
            damaged_blocks=totals.damaged_blocks,
            fallbacks=totals.fallbacks,
            fallback_bytes=totals.fallback_bytes,
        )

    def write(self, table: TransferTable) -> None:
        """Report the figures, unless the daemon has no engines."""
        if self._config.transfer_address:
            table.write(self.stats(), self.totals.durations, self.totals.seconds)
