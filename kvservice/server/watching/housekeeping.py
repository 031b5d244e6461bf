"""The daemon's work beside calls: it checks its bookkeeping, trims its heap, and counts its connections."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

from kvservice.blocks import Slices
from kvservice.errors import InternalError
from kvservice.logs import LogBudget

logger = logging.getLogger(__name__)

# The interval between two slices; each slice takes a fraction of a millisecond.
SLICE_EVERY_S: Final = 0.001


class Activity(Protocol):
    """The number of calls begun since the daemon started, and the number of calls in flight."""

    num_begun: int
    in_flight: int


class IntegrityWatch:
    """Runs integrity checks. `turn` is called at short intervals during a pass.

    `num_checks` counts the passes that succeeded, `num_failures` those that failed. `failure` describes the first
    failed pass. Later successful passes do not clear it, because the consequences of the corruption are unknown.
    """

    def __init__(self, check: Callable[[], Slices[bool]], calls: Activity, on_failure: Callable[[str], object]) -> None:
        """`check` starts a pass, see check_in_slices. `on_failure` is called once, with `failure`."""
        self._check = check
        self._calls = calls
        self._on_failure = on_failure
        self._num_begun = -1
        self.num_checks = self.num_failures = 0
        self.failure = ""
        self.begin()

    def begin(self) -> None:
        """Start another pass."""
        self._slices = self._check()

    def turn(self) -> bool:
        """Run a slice, unless a call has been active since the previous turn. Returns whether the pass is complete."""
        before, self._num_begun = self._num_begun, self._calls.num_begun
        if self._calls.in_flight or self._num_begun != before:
            return False
        try:
            next(self._slices)
        except StopIteration as end:
            self.num_checks += bool(end.value)
            return True
        except Exception as error:  # corrupt state may break the check itself
            self._fail(error)
            return True
        return False

    def _fail(self, error: Exception) -> None:
        self.num_failures += 1
        if self.failure:
            return
        self.failure = f"the bookkeeping is corrupt: {error or type(error).__name__}"
        logger.error("%s", self.failure, exc_info=None if isinstance(error, InternalError) else error)
        self._on_failure(self.failure)

    async def run(self, interval_s: float, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Run passes until cancelled, each `interval_s` seconds after the end of the previous one. 0 runs none."""
        while interval_s:
            await sleep(interval_s)
            self.begin()
            while not self.turn():
                await sleep(SLICE_EVERY_S)


# ---- the heap: memory that stays free after a burst of large messages is returned to the kernel
#
# malloc is configured to keep freed memory (see kvservice.environment), because large messages recur and returned pages
# have to be faulted in again. Memory that has been free for NUM_SAMPLES samples is returned.

SAMPLE_S: Final = 5.0
# Memory is returned if it was free in this number of consecutive samples.
NUM_SAMPLES: Final = 4
# Smaller amounts are kept.
LEAST_BYTES: Final = 64 << 20


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


class Malloc:
    """The allocator of this process (glibc)."""

    def __init__(self) -> None:
        """Raises AttributeError if the C library is not glibc 2.33 or later."""
        library = ctypes.CDLL(None)
        self._info = library.mallinfo2
        self._info.restype = _MallocInfo
        self._trim = library.malloc_trim

    def resident_bytes(self) -> int:
        """Return the private resident memory in bytes, without shared memory such as the pool."""
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0

    def free_bytes(self) -> int:
        """Return the free bytes of the heap, resident or already returned to the kernel."""
        return int(self._info().fordblks)

    def trim(self) -> None:
        """Return free pages to the kernel. This takes about 0.1 ms per MiB and blocks all other allocations."""
        self._trim(0)


class HeapTrimmer:
    """Decides when to trim. `sample` must be called at equal intervals."""

    def __init__(self, malloc: Malloc) -> None:
        self._malloc = malloc
        self._kept_bytes = malloc.resident_bytes()
        self._samples: deque[int] = deque(maxlen=NUM_SAMPLES)

    def sample(self) -> None:
        resident = self._malloc.resident_bytes()
        self._kept_bytes = min(self._kept_bytes, resident)
        grown = resident - self._kept_bytes
        self._samples.append(min(grown, self._malloc.free_bytes()) if grown >= LEAST_BYTES else 0)
        if len(self._samples) == NUM_SAMPLES and min(self._samples) >= LEAST_BYTES:
            self._malloc.trim()
            self._kept_bytes = self._malloc.resident_bytes()
            self._samples.clear()
            logger.info("%d MiB that were free are given back", (resident - self._kept_bytes) >> 20)


def freeze_heap() -> None:
    """Exclude all current objects from garbage collection.

    A full collection runs whenever requests have created many objects. Traversing the imported modules alone would
    block the event loop for tens of milliseconds. Until then a daemon that starts collects nothing.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


async def trim_heap() -> None:
    """Trim the heap until cancelled. Returns at once if the C library does not support it."""
    try:
        trimmer = HeapTrimmer(Malloc())
    except AttributeError:
        return
    while True:
        await asyncio.sleep(SAMPLE_S)
        trimmer.sample()


# ---- connections
#
# gRPC closes connections above the limit without a notice to the daemon, so they are counted in the kernel's tables.

COUNT_EVERY_S = 10.0
# The states of a connected socket in /proc/net/tcp and in /proc/net/unix.
_TCP_ESTABLISHED, _UNIX_CONNECTED = b"01", b"03"


def count_tcp(port: int, tables: Path = Path("/proc/net")) -> int:
    """Return the number of connections to a TCP port of this network namespace."""
    end = b":%04X" % port
    count = 0
    for name in ("tcp", "tcp6"):
        for fields in _rows(tables / name):
            count += fields[1].endswith(end) and fields[3] == _TCP_ESTABLISHED
    return count


def count_unix(path: str, tables: Path = Path("/proc/net")) -> int:
    """Return the number of connections to a unix socket. A table's row of a connection has the path of the socket on
    the accepting side only."""
    wanted = path.encode()
    rows = _rows(tables / "unix", 7)
    return sum(len(fields) == 8 and fields[7] == wanted and fields[5] == _UNIX_CONNECTED for fields in rows)


def _rows(table: Path, max_splits: int = -1) -> list[list[bytes]]:
    with contextlib.suppress(OSError):  # for example without IPv6
        return [line.split(None, max_splits) for line in table.read_bytes().splitlines()[1:]]
    return []


class ConnectionWatch:
    """Counts the connections of the daemon's gRPC addresses, and logs when an address has reached the limit. `num_unix`
    and `num_tcp` are the latest counts."""

    def __init__(self, limit: int) -> None:
        self.num_unix = self.num_tcp = 0
        self._limit = limit
        self._unix_socket = self._unix_bound = self._tcp_address = ""
        self._full: set[str] = set()
        self._log = LogBudget(logger)

    def add_unix(self, path: str, bound: str) -> None:
        """`bound` is the path to which the socket was bound, before it was moved to `path`."""
        self._unix_socket, self._unix_bound = path, bound

    def add_tcp(self, address: str) -> None:
        """`address` is host:port."""
        self._tcp_address = address

    @property
    def addresses(self) -> list[str]:
        return [address for address in (self._unix_socket, self._tcp_address) if address]

    async def run(self) -> None:
        """Count until cancelled. The first count is at once, so that its thread is there from the start."""
        while True:
            self.note(*await asyncio.to_thread(self.count))
            await asyncio.sleep(COUNT_EVERY_S)

    def count(self) -> tuple[int, int]:
        """Return the number of connections on the unix socket and over TCP. Reads tables that can be long."""
        num_unix = count_unix(self._unix_bound) if self._unix_socket else 0
        num_tcp = count_tcp(int(self._tcp_address.rpartition(":")[2])) if self._tcp_address else 0
        return num_unix, num_tcp

    def note(self, num_unix: int, num_tcp: int) -> None:
        """Keep the counts, and log the addresses that have reached the limit since the last time."""
        self.num_unix, self.num_tcp = num_unix, num_tcp
        counts = {self._unix_socket: num_unix, self._tcp_address: num_tcp}
        full = {address for address, count in counts.items() if count >= self._limit}
        for address in sorted(full - self._full):
            message = "%s has %d connections, and max_connections is %d: further ones are closed at once"
            self._log.write(logging.WARNING, message, address, counts[address], self._limit)
        self._full = full
