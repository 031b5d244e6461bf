"""The disk tier: values in large files, read and written directly from and to the memory of the block store.

Native threads do the input and output, see csrc/disk. After a crash of the process, everything acknowledged is there.
After a power failure a value may be gone, a removed one may be back, and a checksum finds what is damaged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from kvservice._ext import DiskFiles
from kvservice.logs import LogBudget
from kvservice.store import LeaseClock
from kvservice.tiers.protocol import GetResult, LowerTier, Space, TierError, TierStats, Values

logger = logging.getLogger(__name__)

_GIB: Final = 1 << 30
# How often a write looks whether the directory is still there, in seconds.
CHECK_S: Final = 30.0


@dataclass(frozen=True)
class DiskOptions:
    """The directory of a disk tier and its limits. A value has at most `slab_bytes` bytes. A directory with files keeps
    their size of slabs. `max_queued` limits the values in each of the queues of reads and writes. A write looks whether
    the directory is still there if nobody has looked for `check_s` seconds."""

    directory: Path
    capacity_bytes: int
    num_threads: int = 16
    slab_bytes: int = 64 << 20
    max_queued: int = 1 << 16
    check_s: float = CHECK_S


class _Completed(NamedTuple):
    """The end of an operation, see DiskFiles.take_completed."""

    operation: int
    found: bytes
    checksums: bytes
    num_removed: int
    failed: bool


class DiskTier:
    """A LowerTier in a directory, for the event loop that makes it.

    While it opens, nothing is found and nothing is stored, and `remove` and `clear` wait.
    """

    name = "disk"
    fault = ""  # one that cannot be used is not made

    def __init__(self, options: DiskOptions, memory: int, memory_bytes: int) -> None:
        """`memory` is the address of the block store's memory. Raises TierError if the directory is in use, or has
        files of another format."""
        self._options = options
        self._began_s = time.monotonic()
        try:
            self._files = DiskFiles(
                str(options.directory),
                options.capacity_bytes,
                options.slab_bytes,
                memory,
                memory_bytes,
                options.num_threads,
                options.max_queued,
                secrets.randbits(64),
            )
        except RuntimeError as error:
            raise TierError(str(error)) from None
        self._lock_file = options.directory / "lock"
        self._locked = os.stat(self._lock_file)
        self._checked_s = self._began_s
        self._looking: asyncio.Future[None] | None = None
        self._log = LogBudget(logger)
        self._num_corrupt = 0
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[_Completed]] = {}
        self._opened = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._loop.add_reader(self._files.event_fd, self._complete)

    async def opened(self) -> None:
        """Wait until values can be found. Raises TierError if the files cannot be opened."""
        await self._opened.wait()
        self._check()

    async def lookup(self, space: Space, keys: bytes) -> bytes:
        self._check()
        return self._files.lookup(space.digest, space.block_bytes, keys)

    async def get(self, space: Space, values: Values) -> GetResult:
        self._check()
        result = await self._result(self._files.get(space.digest, space.block_bytes, values.keys, values.offsets))
        if 0 in result.found:
            stats = self._files.stats()
            if damaged := stats.corrupt - self._num_corrupt:
                self._num_corrupt = stats.corrupt
                where = self._options.directory
                self._log.write(
                    logging.WARNING, "values in %s that are removed because they were damaged: %d", where, damaged
                )
            if stats.reads_fail:
                raise TierError(f"{self._options.directory} cannot be read")
        return GetResult(result.found, result.checksums)

    async def put(self, space: Space, values: Values) -> bytes:
        self._check()
        if time.monotonic() >= self._checked_s + self._options.check_s:
            await self._look_at_directory()
            self._check()
        operation = self._files.put(space.digest, space.block_bytes, values.keys, values.offsets, values.checksums)
        stored = (await self._result(operation)).found
        if 0 in stored and (stats := self._files.stats()).writes_fail:
            broken_gib, capacity_gib = stats.broken_bytes / _GIB, stats.capacity_bytes / _GIB
            raise TierError(
                f"{self._options.directory} cannot be written: {broken_gib:.2f} of {capacity_gib:.2f} GiB failed"
            )
        return stored

    async def remove(self, space: Space, keys: bytes) -> int:
        await self.opened()
        return (await self._result(self._files.remove(space.digest, space.block_bytes, keys))).num_removed

    async def clear(self, space: Space) -> None:
        await self.opened()
        await self._result(self._files.clear(space.digest, space.block_bytes))

    def stats(self) -> TierStats:
        stats = self._files.stats()
        return TierStats(
            name=self.name,
            state=stats.state,
            num_values=stats.num_values,
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity_bytes,
            read_values=stats.read_values,
            read_bytes=stats.read_bytes,
            written_values=stats.written_values,
            written_bytes=stats.written_bytes,
            evicted=stats.evicted,
            removed=stats.removed,
            refused=stats.refused,
            dropped=stats.dropped,
            corrupt=stats.corrupt,
            errors=stats.errors,
        )

    async def close(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        was_open = self._files.stats().state == "open"
        await asyncio.to_thread(self._files.close)
        if was_open:
            logger.info(
                "the disk tier in %s is closed, %d values are kept", self._options.directory, self.stats().num_values
            )
        self._loop.remove_reader(self._files.event_fd)
        self._complete()

    def _check(self) -> None:
        if self._closing is not None:
            raise TierError("the disk tier is closed")
        if self._opened.is_set() and self._files.problem:
            raise TierError(self._files.problem)

    async def _look_at_directory(self) -> None:
        """Call `_check_directory`. On a disk that hangs all calls wait for one thread, and the others stay free."""
        if self._looking is None or self._looking.done():
            self._looking = self._loop.run_in_executor(None, self._check_directory)
            self._looking.add_done_callback(asyncio.Future.exception)  # nobody may wait for it any more
        await asyncio.shield(self._looking)

    def _check_directory(self) -> None:
        """Raise TierError if the directory is not there, or is another one than was opened: the files that are open are
        then lost with this process."""
        try:
            is_there = os.path.samestat(os.stat(self._lock_file), self._locked)
        except OSError as error:
            raise TierError(f"{self._options.directory} cannot be used: {error.strerror}") from None
        if not is_there:
            raise TierError(f"{self._options.directory} is not the directory that was opened")
        self._checked_s = time.monotonic()

    def _complete(self) -> None:
        """Hand out what has completed."""
        for completed in map(_Completed._make, self._files.take_completed()):
            self._waiting.pop(completed.operation).set_result(completed)
        if self._opened.is_set():
            return
        stats = self._files.stats()
        if stats.state == "opening":
            return
        self._opened.set()
        if stats.state != "open":
            return
        opening_s, capacity_gib = time.monotonic() - self._began_s, stats.capacity_bytes / _GIB
        logger.info(
            "the disk tier in %s is open after %.2f s: %.2f GiB, %d values are found",
            self._options.directory, opening_s, capacity_gib, stats.num_values,
        )  # fmt: skip
        if not stats.direct:
            logger.warning("%s: the file system has no O_DIRECT, so the page cache is used", self._options.directory)

    async def _result(self, operation: int) -> _Completed:
        """Wait for an operation. When cancelled, it waits until nobody uses the memory."""
        future: asyncio.Future[_Completed] = self._loop.create_future()
        self._waiting[operation] = future
        cancelled = False
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                cancelled = True
                self._files.cancel(operation)
        if cancelled:
            raise asyncio.CancelledError
        completed = future.result()
        if completed.failed:
            raise TierError("the disk could not be written, so that removed values may be back after a crash")
        return completed


# ---- a tier that is opened as soon as that succeeds, for example when the daemon before has let go of its files


# The pause in seconds after an attempt that failed. It doubles, up to the longest one.
PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 30.0
# A tier that cannot be opened for so long counts as failed. The attempts go on.
FAILED_AFTER_S: Final = 5.0


class OpeningTier(LowerTier, Protocol):
    """A tier that takes a while to open."""

    async def opened(self) -> None:
        """Wait until values can be found. Raises TierError if the tier cannot be opened."""


class LateTier:
    """The tier that `open_tier` returns, "opening" or "failed" until it is open. `open_tier` raises TierError."""

    def __init__(self, name: str, open_tier: Callable[[], OpeningTier], clock: LeaseClock) -> None:
        """To be called in the event loop: the first attempt is made now."""
        self.name = name
        self._open, self._clock = open_tier, clock
        self._tier: OpeningTier | None = None
        self._opening: asyncio.Task[None] | None = None
        self._began_s = clock.time()
        self._pause_s = PAUSE_S
        self._num_failures = 0
        self._is_closed = False
        self._logged = ""
        self._log = LogBudget(logger, clock.time)
        self._attempt()

    @property
    def fault(self) -> str:
        return self._logged if self._tier is None else self._tier.fault

    async def lookup(self, space: Space, keys: bytes) -> bytes:
        return await self._opened().lookup(space, keys)

    async def get(self, space: Space, values: Values) -> GetResult:
        return await self._opened().get(space, values)

    async def put(self, space: Space, values: Values) -> bytes:
        return await self._opened().put(space, values)

    async def remove(self, space: Space, keys: bytes) -> int:
        return await self._opened().remove(space, keys)

    async def clear(self, space: Space) -> None:
        await self._opened().clear(space)

    def stats(self) -> TierStats:
        if self._tier is not None:
            stats = self._tier.stats()
            return replace(stats, errors=stats.errors + self._num_failures)
        is_late = self._num_failures and self._clock.time() - self._began_s >= FAILED_AFTER_S
        return TierStats(self.name, state="failed" if is_late else "opening", errors=self._num_failures)

    async def close(self) -> None:
        self._is_closed = True
        if self._tier is not None:
            await self._tier.close()
        if self._opening is not None:
            await asyncio.wait({self._opening})

    def _opened(self) -> LowerTier:
        if self._tier is None:
            raise TierError(f"the tier {self.name} is not open yet")
        return self._tier

    def _attempt(self) -> None:
        if self._is_closed:
            return
        try:
            self._tier = self._open()
        except TierError as error:
            self._fail(error)
        else:
            self._opening = asyncio.ensure_future(self._await_opened(self._tier))

    async def _await_opened(self, tier: OpeningTier) -> None:
        try:
            await tier.opened()
        except TierError as error:
            self._tier = None
            await tier.close()
            self._fail(error)

    def _fail(self, error: TierError) -> None:
        """Log each reason once, and try again after a pause."""
        if self._is_closed:
            return
        self._num_failures += 1
        if str(error) != self._logged:
            self._log.write(logging.WARNING, "the tier %s cannot be opened, trying again: %s", self.name, error)
            self._logged = str(error)
        self._clock.call_later(self._pause_s, self._attempt)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
