"""Memory files with a sealed size, for sharing with untrusted processes.

A process that accesses a mapping past the end of its file is killed by SIGBUS. A seal on the size (memfd_create(2),
fcntl(2)) makes truncation impossible, so the daemon can safely use memory that untrusted processes have mapped too.

A second seal keeps other processes from writing. Memory that a later process of the daemon maps again (kvservice.kept)
cannot have it, because it would keep that process from writing too. Others then get a descriptor for reading only, and
the mode of the file keeps other users from opening it again for writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import time
import weakref
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvservice import _ext
from kvservice.errors import ResourceExhaustedError

# ---- amount of memory available to this process


MEMORY_INFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping and within the limits of the process's control groups
    (its container or service). Check this before an allocation: a memory file that is too large gets the process
    killed instead of raising an error."""
    return min([_host_available_bytes(), *_cgroup_available_bytes()])


def _host_available_bytes() -> int:
    for line in MEMORY_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise ResourceExhaustedError(f"{MEMORY_INFO} has no line MemAvailable")


def _cgroup_available_bytes() -> Iterator[int]:
    """Yield the remaining bytes under each control-group limit, version 2 and 1. Groups without a limit yield
    nothing."""
    for group in _groups(CGROUPS, ""):
        yield from _left(group, "memory.max", "memory.current", "inactive_file")
    for group in _groups(CGROUPS / "memory", "memory"):
        yield from _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the process's control group and its ancestors. In a container its own group appears as the root, under any
    name."""
    yield root
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            parts = Path(path).parts[1:]
            if controller in controllers.split(",") and ".." not in parts:
                yield from (root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


def _left(group: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        limit_bytes = int((group / limit).read_text())
        yield limit_bytes - int((group / usage).read_text()) + _droppable_bytes(group, cache)


def _droppable_bytes(group: Path, name: str) -> int:
    """Return the bytes of inactive page cache. They count as used memory, but the kernel drops them on demand."""
    with contextlib.suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


logger = logging.getLogger(__name__)

_ADD_SEALS = 1033
_populate = _ext.populate
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
# Bytes that `in_slices` allocates per slice. A slice takes at most a few milliseconds.
SLICE_BYTES: Final = 1 << 20
# `in_slices` checks the available memory again after this many bytes. The check takes as long as a slice.
CHECKED_BYTES: Final = 16 << 20
GIB: Final = 1 << 30
# `populate`: its threads, the memory that they allocate between two looks at the clock, the multiple of a thread's
# part, and the time between lines in the log.
MAX_POPULATE_THREADS: Final = 16
POPULATE_BYTES: Final = 1 << 30
PART_BYTES: Final = 2 << 20
SAY_EVERY_S: Final = 2.0


class SealedMemory:
    """`num_bytes` of zeroed memory, allocated up front and mapped for writing as `map` at `address`.

    `fd` is its descriptor, and `shared_fd` the one for other processes. With `read_only`, no later mapping in any
    process is writable. With `read_only` and `kept`, only mappings of `shared_fd` are never writable.
    """

    def __init__(
        self,
        name: str,
        num_bytes: int,
        *,
        read_only: bool,
        reserve_bytes: int = 0,
        kept: bool = False,
        first_bytes: int | None = None,
    ) -> None:
        """Allocate the memory, or only its `first_bytes`: the rest must not be used before `allocate`. Raises OSError
        if all of it would leave less than `reserve_bytes` of available memory."""
        self._create(name, num_bytes, reserve_bytes)
        try:
            os.ftruncate(self.fd, num_bytes)
            self.map = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED)
            populate(name, self.map, self.fd, num_bytes if first_bytes is None else first_bytes)
            self._seal(read_only=read_only and not kept)
        except OSError:
            os.close(self.fd)
            raise
        if read_only and kept:
            self._share_for_reading()

    @classmethod
    def sparse(cls, name: str, num_bytes: int) -> SealedMemory:
        """Create memory whose pages are allocated on first use, for content that uses few of them. Raises OSError."""
        memory = cls.__new__(cls)
        memory.num_bytes = num_bytes
        memory.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory.fd, num_bytes)
            memory.map = mmap.mmap(memory.fd, num_bytes, flags=mmap.MAP_SHARED)
            memory._seal(read_only=False)
        except OSError:
            os.close(memory.fd)
            raise
        return memory

    @classmethod
    def reopen(cls, fd: int, num_bytes: int, *, read_only: bool) -> SealedMemory:
        """Map the `kept` memory of an earlier process, with its content. The result owns `fd`. Its pages are mapped on
        first use. Raises OSError."""
        memory = cls.__new__(cls)
        memory.num_bytes, memory.fd = num_bytes, fd
        memory.map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        memory._own()
        if read_only:
            memory._share_for_reading()
        return memory

    @classmethod
    def in_slices(
        cls, name: str, num_bytes: int, *, read_only: bool, reserve_bytes: int = 0
    ) -> Generator[None, None, SealedMemory]:
        """Allocate the memory in slices of SLICE_BYTES. Returns it."""
        memory = cls.__new__(cls)
        memory._create(name, num_bytes, reserve_bytes)
        try:
            os.ftruncate(memory.fd, num_bytes)
            memory.map = mmap.mmap(memory.fd, num_bytes, flags=mmap.MAP_SHARED)
            pages = np.frombuffer(memory.map, np.uint8)[:: mmap.PAGESIZE]
            for begin in range(0, num_bytes, SLICE_BYTES):
                if begin:
                    yield
                if begin and begin % CHECKED_BYTES == 0:
                    _require(num_bytes - begin + reserve_bytes)
                end = min(begin + SLICE_BYTES, num_bytes)
                os.posix_fallocate(memory.fd, begin, end - begin)
                pages[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)] = 0  # pre-faults the pages
            memory._seal(read_only=read_only)
        except BaseException:  # includes GeneratorExit, if the caller abandons the allocation
            os.close(memory.fd)
            raise
        return memory

    def _create(self, name: str, num_bytes: int, reserve_bytes: int) -> None:
        _require(num_bytes + reserve_bytes)
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def _seal(self, *, read_only: bool) -> None:
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL | (_SEAL_FUTURE_WRITE if read_only else 0)
        fcntl.fcntl(self.fd, _ADD_SEALS, seals)
        self._own()

    def _own(self) -> None:
        self.address: int = np.frombuffer(self.map, np.uint8).ctypes.data
        self.shared_fd = self.fd
        self._finalizers = [weakref.finalize(self, os.close, self.fd)]

    def _share_for_reading(self) -> None:
        os.fchmod(self.fd, stat.S_IRUSR)
        self.shared_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._finalizers.append(weakref.finalize(self, os.close, self.shared_fd))

    def allocate(self, begin: int, num_bytes: int) -> None:
        """Allocate the pages of a part of memory that was not allocated as a whole. Any thread may call this. Raises
        OSError."""
        _allocate(self.address, self.fd, begin, num_bytes)

    def close(self) -> None:
        """Close the descriptors. The memory is freed after the last mapping is gone, in all processes."""
        for finalizer in self._finalizers:
            finalizer()


def populate(name: str, memory: mmap.mmap, fd: int, num_bytes: int) -> None:
    """Allocate the first pages of a mapped memory file, with a thread for each processor, and log the progress. Raises
    OSError.

    The kernel zeroes the pages, which is most of the work. It does that for pages of 2 MiB where
    /sys/kernel/mm/transparent_hugepage/shmem_enabled says "advise".
    """
    began_s = time.monotonic()
    num_threads = num_processors()
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    said_s = began_s
    with ThreadPoolExecutor(num_threads) as threads:
        for begin in range(0, num_bytes, POPULATE_BYTES):
            end = min(begin + POPULATE_BYTES, num_bytes)
            part = -(-(end - begin) // num_threads // PART_BYTES) * PART_BYTES
            parts = [(at, min(part, end - at)) for at in range(begin, end, part)]
            list(threads.map(lambda one: _allocate(address, fd, *one), parts))
            now_s = time.monotonic()
            if now_s - said_s >= SAY_EVERY_S and end < num_bytes:
                said_s = now_s
                logger.info("%s: %.1f of %.1f GiB are allocated", name, end / GIB, num_bytes / GIB)
    took_s = time.monotonic() - began_s
    if took_s >= SAY_EVERY_S:
        rate = num_bytes / GIB / took_s
        logger.info("%s: %.1f GiB are allocated, %.1f GiB/s by %d threads", name, num_bytes / GIB, rate, num_threads)


def num_processors() -> int:
    """Return for how many threads there are processors that allocate memory at the same time."""
    return min(MAX_POPULATE_THREADS, len(os.sched_getaffinity(0)))


def _allocate(address: int, fd: int, begin: int, num_bytes: int) -> None:
    """Allocate pages, without the interpreter lock. On kernels before 5.14 they are mapped later, on first use."""
    number = _populate(address + begin, num_bytes)
    if number == errno.EINVAL:
        os.posix_fallocate(fd, begin, num_bytes)
    elif number:
        number = errno.ENOMEM if number == errno.EFAULT else number
        raise OSError(number, os.strerror(number))


def _require(num_bytes: int) -> None:
    if num_bytes > available_bytes():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
