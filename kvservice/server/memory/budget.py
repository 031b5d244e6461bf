"""Limit on the host memory that all sessions share with the daemon: regions, lanes and step tables.

A client may keep memory mapped after its session has released it. Such memory counts until the last descriptor and
mapping outside the daemon is closed, because only then does the kernel free it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvservice.blocks import Slices
from kvservice.blocks.slices import finish
from kvservice.errors import QuotaExceededError, ResourceExhaustedError
from kvservice.pool.sealed import SealedMemory

logger = logging.getLogger(__name__)

# Memory reserved for the daemon's own calls in flight.
RESERVE_BYTES = 64 << 20
# The interval at which memory kept by clients is checked.
SWEEP_S = 1.0
# Limit on the released memory objects that clients keep; each uses a file descriptor of the daemon.
MAX_KEPT = 1024


class Budget:
    """Counts bytes before they are allocated."""

    def __init__(self, limit_mib: int) -> None:
        self._limit_mib = limit_mib
        self.used_bytes = 0
        # The memory of the host that is left for the daemon.
        self.reserve_bytes = RESERVE_BYTES
        # The size in bytes of each released memory object that clients still keep, by file descriptor.
        self._kept: dict[int, int] = {}
        # Used to release memory when the process has no file descriptors left.
        self.spare = SpareDescriptor()

    def reserve(self, num_bytes: int, field: str = "") -> None:
        """Count `num_bytes` as used. Raises QuotaExceededError naming `field`."""
        limit_bytes = self._limit_mib << 20
        if self.used_bytes + num_bytes > limit_bytes or len(self._kept) >= MAX_KEPT:
            self.sweep()
        if len(self._kept) >= MAX_KEPT:
            raise QuotaExceededError(
                f"clients keep {MAX_KEPT} pieces of memory that their sessions gave up", field=field,
                limit="max_shared_mib", value=self._limit_mib,
            )  # fmt: skip
        if self.used_bytes + num_bytes > limit_bytes:
            raise QuotaExceededError(
                f"{num_bytes} bytes, all sessions have {self.used_bytes} of {self._limit_mib} MiB", field=field,
                limit="max_shared_mib", value=self._limit_mib,
            )  # fmt: skip
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, "more was given back than taken"

    def make(self, name: str, num_bytes: int, *, read_only: bool = False, field: str = "") -> BudgetedMemory:
        """Allocate memory shared by a client and the daemon. Raises QuotaExceededError, and ResourceExhaustedError if
        the host has not enough memory; both name `field`."""
        return finish(self.make_in_slices(name, num_bytes, read_only=read_only, field=field))

    def make_in_slices(
        self, name: str, num_bytes: int, *, read_only: bool = False, field: str = ""
    ) -> Slices[BudgetedMemory]:
        """`make` in slices. All bytes count from the first slice on."""
        self.reserve(num_bytes, field)
        try:
            sealed = yield from SealedMemory.in_slices(
                name, num_bytes, read_only=read_only, reserve_bytes=self.reserve_bytes
            )
        except OSError as error:
            self.release(num_bytes)
            text = f"no {num_bytes} bytes of shared memory: {error.strerror}"
            raise ResourceExhaustedError(text, field=field) from None
        except GeneratorExit:
            self.release(num_bytes)
            raise
        return BudgetedMemory(sealed, self)

    def keep(self, descriptor: int, num_bytes: int) -> None:
        """Count the memory of this descriptor until no client keeps it. The budget owns the descriptor from now on."""
        if not self._kept:
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)
        self._kept[descriptor] = num_bytes

    def sweep(self) -> None:
        """Stop counting memory that no client keeps any more."""
        for descriptor, num_bytes in list(self._kept.items()):
            if not _is_open_elsewhere(descriptor):
                del self._kept[descriptor]
                close_later(descriptor)
                self.release(num_bytes)

    def _sweep_again(self) -> None:
        self.sweep()
        if self._kept:
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)


class BudgetedMemory:
    """Sealed memory that counts against the budget until it is released. `descriptor` opens it for a client."""

    def __init__(self, sealed: SealedMemory, budget: Budget) -> None:
        self.sealed = sealed
        self._budget = budget
        self._is_open = True

    def descriptor(self) -> int:
        """Return a file descriptor to send to a client; the caller closes its copy.

        It refers to a separate open file description, unlike a duplicate, so that the daemon can detect when the last
        one is closed. Raises ResourceExhaustedError.
        """
        with descriptors_needed():
            return self._open()

    def _open(self) -> int:
        return os.open(f"/proc/self/fd/{self.sealed.fd}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Release the daemon's mapping. Further calls have no effect."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            with self._budget.spare.lent():
                descriptor = self._open()
                self.sealed.close()
        except OSError as error:  # another thread has used the spare descriptor
            self.sealed.close()
            self._budget.release(self.sealed.num_bytes)
            logger.warning("it is not known whether a client keeps %d bytes: %s", self.sealed.num_bytes, error)
            return
        if _is_open_elsewhere(descriptor):
            self._budget.keep(descriptor, self.sealed.num_bytes)
        else:
            os.close(descriptor)
            self._budget.release(self.sealed.num_bytes)


def _is_open_elsewhere(descriptor: int) -> bool:
    """Return whether this memory has another open file description than that of `descriptor`, or a mapping of one.

    The kernel grants a write lease (fcntl(2)) only if there is none. If a process opens the file while the lease is
    held, the kernel sends a signal. It is set to SIGURG, which is ignored, because the default SIGIO would end the
    daemon.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


# ---- a thread that returns memory to the kernel

# The kernel takes about 0.2 ms per MiB to unmap or free pages. The thread does that work without the GIL, so that it
# does not block the event loop.

# Pages are unmapped in pieces, so that a thread that maps memory at the same time waits for one piece only.
_PIECE_BYTES = 4 << 20

_libc = ctypes.CDLL(None)
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvservice-unmapping")


def start_unmapping() -> None:
    """Start the thread now. Otherwise the first release would start it, and it would look like a leaked thread."""
    _thread.submit(int).result()


def unmap(memory: SealedMemory) -> None:
    """Unmap the pages of memory that the daemon no longer uses. Their content stays, because a client may still map
    them. The mapping itself ends when `memory.map` is dropped."""
    _thread.submit(_unmap_pages, memory.map, memory.address, memory.num_bytes)


def close_later(descriptor: int) -> None:
    """Close a file descriptor. If it is the last one of its memory, the kernel frees the pages."""
    _thread.submit(os.close, descriptor)


def _unmap_pages(_mapping: mmap.mmap, address: int, num_bytes: int) -> None:
    """Unmap the pages piece by piece. The argument `_mapping` keeps the mapping alive during the call."""
    for begin in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - begin)
        _libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


# ---- a full table of file descriptors

_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def descriptors_needed() -> Iterator[None]:
    """Raise ResourceExhaustedError if code in this context opens a file descriptor and none is left."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NONE_LEFT:
            raise
        raise ResourceExhaustedError(f"no file descriptor: {error.strerror}") from None


class SpareDescriptor:
    """A spare file descriptor, for operations that must not fail."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._open()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free the spare, so that one descriptor can be opened in this context. If the caller does not close it, and
        the table is still full, there is no spare until other descriptors are closed."""
        self.close()
        try:
            yield
        finally:
            self._open()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
