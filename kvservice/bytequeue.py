"""Work on bytes, done in the order of its submission: what a stream is on a GPU."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Work below this is done on the event loop at once if nothing is queued: a hop to a thread and back costs more.
INLINE_BYTES = 2 << 20


class ByteQueue:
    """One worker thread. Submitted from the event loop only.

    Work has been validated before it is submitted and marked as done in the bookkeeping; so an exception in it is a bug
    that leaves the pool's content unknown, and `fault` is set for the daemon to end itself.
    """

    def __init__(self) -> None:
        self.fault: BaseException | None = None
        self.on_fault: Callable[[], object] = lambda: None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bytes")
        self._last: Future[object] | None = None

    async def run(self, work: Callable[[], T], num_bytes: int) -> T:
        """Do `work` in its turn and return its result. A caller that is cancelled does not cancel the work."""
        if num_bytes <= INLINE_BYTES and self.idle:
            return self._guarded(work)
        return await asyncio.shield(asyncio.wrap_future(self._submit(work)))

    def post(self, work: Callable[[], object], num_bytes: int) -> None:
        """Do `work` in its turn; what is submitted later sees its effect."""
        if num_bytes <= INLINE_BYTES and self.idle:
            self._guarded(work)
        else:
            self._submit(work)

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.done()

    def close(self) -> None:
        """Finish what is queued."""
        self._worker.shutdown(wait=True)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future = self._worker.submit(self._guarded, work)
        self._last = future  # type: ignore[assignment]
        return future

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException as error:
            if self.fault is None:
                logger.critical("work on the pool failed; its content is unknown", exc_info=True)
                self.fault = error
                self.on_fault()
            raise
