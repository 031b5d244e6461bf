"""Memory of clients on other hosts, which the daemon reads and writes with the Transfer Engine.

create_remote ─▶ a process with an engine maps slots ─▶ calls name the region: the engine copies between the client's
                 memory and a slot, the daemon between the slot and its store, one slot after the other
                 └── the region is removed, or the session ends ─▶ the process is killed, a call that waits for it
                     fails, and the memory is unmapped after that

The process maps the slots and nothing else, and it does not listen. So nobody on the network reaches memory of the
daemon, and it connects only to the address that its client has.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvservice.auth import is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    QuotaExceededError,
    TransferFailedError,
    TransferOffError,
)
from kvservice.logs import LogBudget
from kvservice.server.memory.budget import BudgetedMemory, unmap
from kvservice.server.memory.region import Array, Place, Places
from kvservice.telemetry.tables import BUCKETS_S, DIRECTIONS, WIDTH, TransferStats, TransferTable
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
            self.totals.stats.engine_failures += 1
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
        self.totals.stats.damaged_blocks += num_blocks

    def travelled_in_messages(self, num_bytes: int) -> None:
        """Note the bytes of blocks or K/V in the messages of this call. It is a fall back if they are many and the
        client is not on the unix socket."""
        if self._config.transfer_address and PEER.get() and num_bytes >= FALLBACK_BYTES:
            self.totals.fell_back(num_bytes)

    def stats(self) -> TransferStats:
        flows = {f"{name}_{way}": n for way, flow in self.totals.flows.items() for name, n in asdict(flow).items()}
        return replace(
            self.totals.stats,
            engines=sum(memory.process.is_running for memory in self._open),
            regions=len(self._open),
            region_bytes=sum(memory.num_bytes for memory in self._open),
            **flows,
        )

    def write(self, table: TransferTable) -> None:
        """Report the figures, unless the daemon has no engines."""
        if self._config.transfer_address:
            table.write(self.stats(), self.totals.durations, self.totals.seconds)


# ---- the memory of one region

T = TypeVar("T")

# One slot is copied while others are transferred.
NUM_SLOTS: Final = 3
# The engine moves parts of a slot over several connections.
PART_BYTES: Final = 1 << 20
# How long a slot may take, in seconds. A whole call may take so long, and a second for each SLOWEST_BYTES.
TRANSFER_S: Final = 5.0
SLOWEST_BYTES: Final = 8 << 20


class RemoteMemory:
    """Implements `Memory` as far as it can: tensors are not read and written in place. `pull` and `push` move blocks,
    `pull_ranges` and `push_ranges` tensors, for one call at a time, in threads of `run` and `run_alone`."""

    def __init__(
        self,
        memory: BudgetedMemory,
        process: TransferProcess,
        segments: Sequence[str],
        address: int,
        threads: ThreadPoolExecutor,
        totals: TransferTotals,
        on_close: Callable[[RemoteMemory], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._threads, self._totals, self._on_close = memory, threads, totals, on_close
        self.process, self._clock = process, clock
        # When the transfers of the current call must have ended.
        self._deadline = 0.0
        self._segments, self._address = segments, address
        self._slots: Array = np.frombuffer(memory.sealed.map, np.uint8)
        self.num_bytes = len(self._slots)
        # Held by the call that uses the memory.
        self.lock = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run work that pulls or pushes, in a thread. The caller must not be cancelled meanwhile."""
        async with self.lock:
            return await self.run_alone(work)

    async def run_alone(self, work: Callable[[], T]) -> T:
        """`run` for a caller that holds the lock."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def pull(self, places: Places, block_bytes: int, take: Callable[[int, int, Array], T]) -> list[T]:
        """Read blocks from the client's memory. `take` gets the number of the first block, their count, and the blocks
        one after the other; it may use them until it returns. Returns its results. Raises TransferFailedError."""
        with self._transfer(IN, len(places) * block_bytes):
            return self._pull(places, block_bytes, take)

    def _pull(self, places: Places, block_bytes: int, take: Callable[[int, int, Array], T]) -> list[T]:
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
            moving.append((first, len(part), self._start_blocks(READ, part, number)))
            if len(moving) == NUM_SLOTS:
                finish()
        while moving:
            finish()
        return taken

    def push(self, places: Places, block_bytes: int, give: Callable[[int, int, Array], T]) -> list[T]:
        """Write blocks to the client's memory. `give` puts them where `take` of `pull` finds them."""
        with self._transfer(OUT, len(places) * block_bytes):
            return self._push(places, block_bytes, give)

    def _push(self, places: Places, block_bytes: int, give: Callable[[int, int, Array], T]) -> list[T]:
        moving: deque[list[Ticket]] = deque()
        given: list[T] = []
        most = self._blocks_in_slot(block_bytes)
        for number, first in enumerate(range(0, len(places), most)):
            part = Places(places.piece_bytes, places.offsets[first : first + most])
            if len(moving) == NUM_SLOTS:
                self._wait(moving.popleft())
            given.append(give(first, len(part), self._slot(number, len(part) * block_bytes)))
            moving.append(self._start_blocks(WRITE, part, number))
        while moving:
            self._wait(moving.popleft())
        return given

    def packed(self, places: Sequence[Place]) -> list[Array]:
        """Return where ranges of the client's memory are in this one, uint8, one after the other. They fit into it."""
        ends = np.cumsum([place.byte_size for place in places])
        assert ends[-1] <= self.num_bytes, "the caller has compared the sizes"
        return [self._slots[end - place.byte_size : end] for end, place in zip(ends, places, strict=True)]

    def pull_ranges(self, places: Sequence[Place], use: Callable[[Array], T]) -> list[T]:
        """Read ranges of the client's memory to where `packed` says. `use` gets each as soon as it is there, while
        those after it still travel. Returns its results. Raises TransferFailedError."""
        with self._transfer(IN, sum(place.byte_size for place in places)):
            used = []
            for view, tickets in zip(self.packed(places), self._start_ranges(READ, places), strict=True):
                self._wait(tickets)
                used.append(use(view))
            return used

    def push_ranges(self, places: Sequence[Place], use: Callable[[Array], T]) -> list[T]:
        """Write what is where `packed` says to ranges of the client's memory. `use` gets each while it travels, to read
        it. Returns its results. Raises TransferFailedError."""
        with self._transfer(OUT, sum(place.byte_size for place in places)):
            started = self._start_ranges(WRITE, places)
            used = [use(view) for view in self.packed(places)]
            for tickets in started:
                self._wait(tickets)
            return used

    @contextmanager
    def _transfer(self, direction: Direction, num_bytes: int) -> Iterator[None]:
        """Count what happens inside as a transfer, and limit its time."""
        self._deadline = self._clock() + TRANSFER_S + num_bytes / SLOWEST_BYTES
        with self._totals.transfer(direction, num_bytes):
            yield

    def _start_ranges(self, operation: Operation, places: Sequence[Place]) -> list[list[Ticket]]:
        """Start the transfers of each range."""
        most = max(1, self.num_bytes // NUM_SLOTS // PART_BYTES)
        begins = np.cumsum([0, *(place.byte_size for place in places)]).tolist()
        return [
            self._start(operation, list(_parts(begin, place.offset, place.byte_size)), most)
            for begin, place in zip(begins, places, strict=False)
        ]

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

    def _start_blocks(self, operation: Operation, places: Places, number: int) -> list[Ticket]:
        return self._start(operation, list(_ranges(places, self._slot_begin(number))), MAX_RANGES)

    def _start(self, operation: Operation, ranges: list[Range], most: int) -> list[Ticket]:
        """Start transfers of at most so many ranges each."""
        most = min(most, MAX_RANGES)
        try:
            return [
                self.process.start(operation, self._segments, self._address, ranges[i : i + most])
                for i in range(0, len(ranges), most)
            ]
        except TransferFailedError:
            self.process.kill()
            raise

    def _wait(self, tickets: list[Ticket]) -> None:
        """Wait for transfers that have not ended. An engine that fails is not used again."""
        try:
            while tickets:
                self.process.wait(tickets[0], min(TRANSFER_S, self._deadline - self._clock()))
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
        raise InvalidArgumentError("is a remote region, which only some calls use", field="region")

    def interrupt(self) -> None:
        """End the engine. The call that uses the memory fails, and so do those that wait for it."""
        self.process.interrupt()

    def close(self) -> None:
        self.process.kill()
        unmap(self._memory.sealed)
        self._memory.close()
        self._on_close(self)


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
        yield from _parts(int(local), int(remote), int(num_bytes))


def _parts(local: int, remote: int, num_bytes: int) -> Iterator[Range]:
    for done in range(0, num_bytes, PART_BYTES):
        yield Range(local + done, remote + done, min(PART_BYTES, num_bytes - done))


# ---- totals: threads count, the event loop reads

Direction: TypeAlias = Literal["in", "out"]
IN: Final = "in"
OUT: Final = "out"


@dataclass
class Flow:
    """Transfers of one direction: in progress, ended well, failed; and the bytes of those that ended well.
    TransferStats has these names with the direction."""

    running: int = 0
    done: int = 0
    failed: int = 0
    bytes: int = 0


class TransferTotals:
    """`stats` has the counters that are of no direction, and `flows` the others. `durations` int64[2, buckets + 1] and
    `seconds` float64[2] are histograms in the order of `DIRECTIONS`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._log = LogBudget(logging.getLogger(__name__))
        self._lock = threading.Lock()
        self.stats = TransferStats()
        self.flows: dict[str, Flow] = {direction: Flow() for direction in DIRECTIONS}
        self.durations: npt.NDArray[np.int64] = np.zeros((len(DIRECTIONS), WIDTH), np.int64)
        self.seconds: npt.NDArray[np.float64] = np.zeros(len(DIRECTIONS), np.float64)

    @contextmanager
    def transfer(self, direction: Direction, num_bytes: int) -> Iterator[None]:
        """Count what happens inside as a transfer, which has failed if it raises."""
        flow = self.flows[direction]
        with self._lock:
            flow.running += 1
        begun = self._clock()
        try:
            yield
        except BaseException as error:
            with self._lock:
                flow.running -= 1
                flow.failed += 1
                if isinstance(error, TransferFailedError):
                    self._log.write(
                        logging.WARNING, "%d bytes could not be transferred %s: %s", num_bytes, direction, error
                    )
            raise
        seconds, row = self._clock() - begun, DIRECTIONS.index(direction)
        with self._lock:
            flow.running -= 1
            flow.done += 1
            flow.bytes += num_bytes
            self.durations[row, bisect_left(BUCKETS_S, seconds)] += 1
            self.seconds[row] += seconds

    def fell_back(self, num_bytes: int) -> None:
        """Count a call whose blocks came in messages. On the event loop."""
        self.stats.fallbacks += 1
        self.stats.fallback_bytes += num_bytes
