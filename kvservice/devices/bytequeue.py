"""An in-order queue of work on the pool, the CPU's counterpart of a CUDA stream."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvservice.errors import InternalError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ByteQueue:
    """An in-order queue with one worker thread. Work is submitted from the event loop only.

    Work is validated, and recorded as done in the bookkeeping, before it is submitted. An exception in it is therefore
    a bug or, for `device_errors`, a device failure. Either leaves the content of the pool undefined and sets `fault`,
    and the daemon exits. `on_start` runs first in the worker thread. `mark_faulted` is called first of all on a fault,
    on any thread.
    """

    def __init__(
        self,
        mark_faulted: Callable[[], object],
        device_errors: tuple[type[Exception], ...] = (),
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        self.fault: BaseException | None = None
        self.on_fault: Callable[[], object] = lambda: None
        self._mark_faulted = mark_faulted
        self._device_errors = device_errors
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bytes", initializer=on_start)
        # Set when the last submission is done. Its future would also say so, but it would keep a result alive that may
        # be in memory of a disconnected client.
        self._last_done = threading.Event()
        self._last_done.set()

    def run(self, work: Callable[[], T], *, inline: bool) -> Awaitable[T]:
        """Run `work` in order. The caller awaits its result. With `inline` and an empty queue it runs now, on the event
        loop. Cancelling the caller does not cancel the work."""
        if inline and self.idle:
            return ready(self.guarded(work))
        return awaited(self.submit(work))

    def post(self, work: Callable[[], object], *, inline: bool) -> None:
        """Run `work` in order without waiting for it. Later submissions see its effect."""
        if inline and self.idle:
            self.guarded(work)
        else:
            self.submit(work)

    @property
    def idle(self) -> bool:
        return self._last_done.is_set()

    def close(self) -> None:
        """Finish all queued work."""
        self._worker.shutdown(wait=True)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        done = self._last_done = threading.Event()

        def run() -> T:
            try:
                return self.guarded(work)
            finally:
                done.set()

        return self._worker.submit(run)

    def guarded(self, work: Callable[[], T]) -> T:
        """Run `work` on the calling thread. An exception in it becomes the fault."""
        try:
            return work()
        except BaseException as error:
            raise self.fail(error) from None

    def fail(self, error: BaseException) -> BaseException:
        """Record an error as the fault, unless there is one already. Returns the error for the caller."""
        known = isinstance(error, self._device_errors)
        if self.fault is None:
            self._mark_faulted()
            self.fault = error
            logger.critical("work on the pool failed, its content is lost: %s", error, exc_info=not known)
            self.on_fault()
        return InternalError(f"the device failed: {error}") if known else error


async def ready(result: T) -> T:
    """Return a result that is known already."""
    return result


async def awaited(done: Future[T]) -> T:
    """Wait for a future of a thread. Cancelling the caller does not cancel it."""
    return await asyncio.shield(asyncio.wrap_future(done))
