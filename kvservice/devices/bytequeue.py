"""Work on bytes, done in the order of its submission: what a stream is on a GPU."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvservice.errors import InternalError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ByteQueue:
    """One worker thread. Submitted from the event loop only.

    Work has been validated before it is submitted and marked as done in the bookkeeping; so an exception in it is a
    bug, or one of `device_errors`: the device failed. Either leaves the pool's content unknown, and `fault` is set for
    the daemon to end itself. `on_start` is called in the worker thread before all else.
    """

    def __init__(
        self, device_errors: tuple[type[Exception], ...] = (), on_start: Callable[[], object] = lambda: None
    ) -> None:
        self.fault: BaseException | None = None
        self.on_fault: Callable[[], object] = lambda: None
        self._device_errors = device_errors
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bytes", initializer=on_start)
        # Set when what was submitted last is done. Its future would do, but keep a result that may lie in memory of a
        # client that is gone.
        self._last_done = threading.Event()
        self._last_done.set()

    async def run(self, work: Callable[[], T], *, inline: bool) -> T:
        """Do `work` in its turn and return its result, `inline` on the event loop if nothing is queued. A caller that
        is cancelled does not cancel the work."""
        if inline and self.idle:
            return self.guarded(work)
        return await asyncio.shield(asyncio.wrap_future(self.submit(work)))

    def post(self, work: Callable[[], object], *, inline: bool) -> None:
        """Do `work` in its turn; what is submitted later sees its effect."""
        if inline and self.idle:
            self.guarded(work)
        else:
            self.submit(work)

    @property
    def idle(self) -> bool:
        return self._last_done.is_set()

    def close(self) -> None:
        """Finish what is queued."""
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
        """Do `work`, on whatever thread this is; what it raises becomes the fault."""
        try:
            return work()
        except BaseException as error:
            raise self.fail(error) from None

    def fail(self, error: BaseException) -> BaseException:
        """Make it the fault, unless there is one. Returns what to tell the caller."""
        known = isinstance(error, self._device_errors)
        if self.fault is None:
            self.fault = error
            logger.critical("work on the pool failed, its content is lost: %s", error, exc_info=not known)
            self.on_fault()
        return InternalError(f"the device failed: {error}") if known else error
