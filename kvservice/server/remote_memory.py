"""Memory of a client on another host, that the daemon reads and writes with the Transfer Engine.

create_remote ─▶ a process with an engine maps slots ─▶ calls name the region: the engine copies between the client's
                 memory and a slot, the daemon between the slot and its store, one slot after the other
                 └── the region is removed, or the session ends ─▶ the process is killed

The process maps the slots and nothing else, and it does not listen. So nobody on the network reaches memory of the
daemon, and it connects only to the address that its client has.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Final, NoReturn, TypeVar

import numpy as np

from kvservice.auth import is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError, QuotaExceededError, TransferFailedError, TransferOffError
from kvservice.server import unmapping
from kvservice.server.budget import BudgetedMemory
from kvservice.server.region import Array
from kvservice.server.scatter import Places
from kvservice.transfer import (
    MAX_RANGES,
    READ,
    WRITE,
    Endpoint,
    Operation,
    Range,
    Ticket,
    TransferProcess,
    is_installed,
)

T = TypeVar("T")

# One slot is copied while others are transferred.
NUM_SLOTS: Final = 3
# The engine moves parts of a slot over several connections.
PART_BYTES: Final = 1 << 20
# How long a slot may take, in seconds.
TRANSFER_S: Final = 5.0
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
    """The engines of all sessions. Each has a process of its own."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(config.max_transfers, thread_name_prefix="kvservice-transfer")
        self.count = 0

    def check(self) -> None:
        """Raise TransferOffError or TransferFailedError if there are no engines, QuotaExceededError if there are too
        many."""
        if not self._config.transfer_address:
            raise TransferOffError("the daemon runs without transfer_address")
        if not is_installed():
            raise TransferFailedError("the daemon lacks its Transfer Engine: install kvservice[mooncake]")
        limit = self._config.max_transfers
        if self.count >= limit:
            raise QuotaExceededError(f"{limit} remote regions are open", limit="max_transfers", value=limit)

    async def open(self, memory: BudgetedMemory, port: int, address: int) -> RemoteMemory:
        """Start an engine for the memory, which connects to an engine at this port of the client of this call. Raises
        the errors of `check`, and TransferFailedError; the caller then still owns the memory."""
        self.check()
        peer = PEER.get()
        if is_loopback(peer):
            peer = self._config.transfer_address  # a client on this host
        if ":" in peer or not peer:
            raise TransferFailedError(f"{peer or 'a unix socket'} is no IPv4 address, to which engines connect")
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
        except BaseException:
            self.count -= 1
            raise
        return RemoteMemory(memory, process, f"{peer}:{port}", address, self._threads, self._closed)

    def _closed(self) -> None:
        self.count -= 1


class RemoteMemory:
    """Implements `Memory` as far as it can: tensors cannot be there. `pull` and `push` move blocks, for one call at a
    time."""

    def __init__(
        self,
        memory: BudgetedMemory,
        process: TransferProcess,
        segment: str,
        address: int,
        threads: ThreadPoolExecutor,
        on_close: Callable[[], None],
    ) -> None:
        self._memory, self._threads, self._on_close = memory, threads, on_close
        self.process = process
        self._segment, self._address = segment, address
        self._slots: Array = np.frombuffer(memory.sealed.map, np.uint8)
        self.num_bytes = len(self._slots)
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run work that pulls or pushes, in a thread. The caller must not be cancelled meanwhile."""

        def alone() -> T:
            with self._lock:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._threads, alone)

    def pull(self, places: Places, block_bytes: int, take: Callable[[int, int, Array], T]) -> list[T]:
        """Read blocks from the client's memory. `take` gets the number of the first block, their count, and the blocks
        one after the other; it may use them until it returns. Returns its results. Raises TransferFailedError."""
        moving: deque[tuple[int, int, list[Ticket]]] = deque()
        taken: list[T] = []

        def finish() -> None:
            first, count, tickets = moving[0]
            self._wait(tickets)
            moving.popleft()
            taken.append(take(first, count, self._slot(first // most, count * block_bytes)))

        most = self._blocks_in_slot(block_bytes)
        for number, first in enumerate(range(0, len(places), most)):
            part = Places(places.piece_bytes, places.offsets[first : first + most])
            if len(moving) == NUM_SLOTS - 1:
                self._wait(moving[0][2])
            moving.append((first, len(part), self._start(READ, part, number)))
            if len(moving) == NUM_SLOTS:
                finish()
        while moving:
            finish()
        return taken

    def push(self, places: Places, block_bytes: int, give: Callable[[int, int, Array], T]) -> list[T]:
        """Write blocks to the client's memory. `give` puts them where `take` of `pull` finds them."""
        moving: deque[list[Ticket]] = deque()
        given: list[T] = []
        most = self._blocks_in_slot(block_bytes)
        for number, first in enumerate(range(0, len(places), most)):
            part = Places(places.piece_bytes, places.offsets[first : first + most])
            if len(moving) == NUM_SLOTS:
                self._wait(moving.popleft())
            given.append(give(first, len(part), self._slot(number, len(part) * block_bytes)))
            moving.append(self._start(WRITE, part, number))
        while moving:
            self._wait(moving.popleft())
        return given

    def _blocks_in_slot(self, block_bytes: int) -> int:
        most = self.num_bytes // NUM_SLOTS // block_bytes
        if most < 1:
            raise InvalidArgumentError(
                f"is for blocks of at most {self.num_bytes // NUM_SLOTS} bytes", field="region.region"
            )
        return most

    def _slot(self, number: int, num_bytes: int) -> Array:
        begin = self._slot_begin(number)
        return self._slots[begin : begin + num_bytes]

    def _slot_begin(self, number: int) -> int:
        return number % NUM_SLOTS * (self.num_bytes // NUM_SLOTS)

    def _start(self, operation: Operation, places: Places, number: int) -> list[Ticket]:
        ranges = list(_ranges(places, self._slot_begin(number)))
        try:
            return [
                self.process.start(operation, self._segment, self._address, ranges[i : i + MAX_RANGES])
                for i in range(0, len(ranges), MAX_RANGES)
            ]
        except TransferFailedError:
            self.process.kill()
            raise

    def _wait(self, tickets: list[Ticket]) -> None:
        """Wait for transfers that have not ended. An engine that fails is not used again."""
        try:
            while tickets:
                self.process.wait(tickets[0], TRANSFER_S)
                tickets.pop(0)
        except TransferFailedError:
            self.process.kill()
            raise

    def check(self, _end: int) -> None:
        self._refuse()

    def read(self, _begin: int, _num_bytes: int) -> Array:
        self._refuse()

    def write(self, _begin: int, _data: Array) -> None:
        self._refuse()

    def view(self, _begin: int, _num_bytes: int) -> Array | None:
        return None

    def _refuse(self) -> NoReturn:
        raise InvalidArgumentError("is a remote region, which carries blocks of the store only", field="region")

    def close(self) -> None:
        self.process.kill()
        unmapping.unmap(self._memory.sealed)
        self._memory.close()
        self._on_close()


def _ranges(places: Places, begin: int) -> Iterator[Range]:
    """Yield the ranges of blocks in the client's memory, and their places one after the other from `begin` on. Pieces
    that are neighbours are ranges of PART_BYTES."""
    offsets = places.offsets.reshape(-1).astype(np.int64)
    sizes = np.broadcast_to(places.piece_bytes, places.offsets.shape).reshape(-1).astype(np.int64)
    starts = np.concatenate(([True], offsets[1:] != offsets[:-1] + sizes[:-1]))
    first = np.flatnonzero(starts)
    locals_ = begin + np.concatenate(([0], np.cumsum(sizes)[:-1]))
    totals = np.add.reduceat(sizes, first)
    for local, remote, num_bytes in zip(locals_[first], offsets[first], totals, strict=True):
        for done in range(0, int(num_bytes), PART_BYTES):
            yield Range(int(local) + done, int(remote) + done, min(PART_BYTES, int(num_bytes) - done))
