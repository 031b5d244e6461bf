"""The scheduler's calls to the store, on a thread: vLLM's scheduler does not wait for a daemon that is slow."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvservice.integrations.common.waiting import FoundBlocks

logger = logging.getLogger(__name__)

# The most time in seconds that a step of the scheduler waits for answers: a few times what a look-up takes.
STEP_PATIENCE_S = 0.004
# The least time in seconds between two requests to touch blocks.
TOUCH_INTERVAL_S = 0.5
# The most keys of one such request. Others are touched the next time they are used.
MAX_TOUCHED = 16384
# Requests whose blocks are brought into the daemon's memory at one time.
NUM_BRINGING = 8
_LOOKUP, _LEASE, _TOUCH, _STOP = range(4)


class BlockFinder(Protocol):
    """The blocks of one worker, in the store."""

    def find(self, keys: Sequence[bytes]) -> FoundBlocks:
        """Return how many keys are there before the first missing one, and how many of them are in memory."""

    def bring_up(self, keys: Sequence[bytes], num_in_memory: int) -> int:
        """Bring blocks into memory, of which the first `num_in_memory` are there. Returns how many are there then,
        before the first that is not."""

    def lease(self, keys: Sequence[bytes]) -> Callable[[], None]:
        """Protect the blocks from eviction. Returns the function that ends the protection."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the blocks the most recently used; the first key is the most recent."""

    def close(self) -> None:
        """Close the session."""


@dataclass(eq=False)
class _Lookup:
    keys: Sequence[bytes]
    num_leading: int = 0
    is_brought_up: bool = False
    answered: threading.Event = field(default_factory=threading.Event)


class StoreAsker:
    """Asks the finders of all workers. Methods are for one thread, vLLM's scheduler; only `num_leading` and `close`
    wait, and `num_leading` at most for STEP_PATIENCE_S seconds in each step. Look-ups come before leases, leases before
    touches."""

    def __init__(
        self,
        finders: Sequence[BlockFinder],
        patience_s: float = STEP_PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._finders, self._patience_s, self._clock = tuple(finders), patience_s, clock
        self._left_s = patience_s
        self._lookups: dict[str, _Lookup] = {}
        self._leases: dict[str, list[Callable[[], None]]] = {}  # of the thread
        self._touched: dict[bytes, None] = {}
        self._touch_s = -TOUCH_INTERVAL_S
        self._queue: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._number = 0
        self._bringing = ThreadPoolExecutor(NUM_BRINGING, thread_name_prefix="kvservice-bringing")
        self._thread = threading.Thread(target=self._run, name="kvservice-asker", daemon=True)
        self._thread.start()

    def num_leading(self, request_id: str, keys: Sequence[bytes]) -> int | None:
        """Return how many keys each finder finds before the first missing one; None: not known yet, ask again in a
        later step."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.keys != keys:
            lookup = self._lookups[request_id] = _Lookup(keys)
            self._put(_LOOKUP, partial(self._answer, lookup))
        began = self._clock()
        answered = lookup.answered.wait(0.0 if lookup.is_brought_up else max(self._left_s, 0.0))
        self._left_s -= self._clock() - began
        if not answered:
            return None
        del self._lookups[request_id]
        return lookup.num_leading

    def lease(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Protect blocks from eviction until `release`."""
        self._put(_LEASE, partial(self._lease, request_id, keys))

    def release(self, request_ids: Iterable[str]) -> None:
        """End the leases of requests."""
        for request_id in request_ids:
            self._put(_LEASE, partial(self._release, request_id))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make blocks the most recently used soon, the first key the most recent."""
        if len(self._touched) < MAX_TOUCHED:
            self._touched.update(dict.fromkeys(keys))

    def forget(self, request_id: str) -> None:
        """Drop the look-up of a request that has ended."""
        self._lookups.pop(request_id, None)

    def end_step(self) -> None:
        """Send what has gathered. The next step may wait again."""
        self._left_s = self._patience_s
        now = self._clock()
        if self._touched and now >= self._touch_s + TOUCH_INTERVAL_S:
            keys, self._touched, self._touch_s = list(self._touched), {}, now
            self._put(_TOUCH, partial(self._touch, keys))

    def close(self, timeout_s: float) -> None:
        """Do what is pending, at most for `timeout_s` seconds, and close the finders."""
        self._put(_STOP, None)
        self._thread.join(timeout_s)
        self._bringing.shutdown(wait=False, cancel_futures=True)
        for finder in self._finders:
            finder.close()

    def _put(self, order: int, work: Callable[[], None] | None) -> None:
        self._number += 1
        self._queue.put((order, self._number, work))

    def _run(self) -> None:
        while True:
            _, _, work = self._queue.get()
            if work is None:
                return
            try:
                work()
            except Exception:
                # The requests must go on after any error.
                logger.exception("the store could not be asked")

    def _answer(self, lookup: _Lookup) -> None:
        try:
            keys, num_in_memory = lookup.keys, len(lookup.keys)
            for finder in self._finders:
                if not keys:
                    break
                found = finder.find(keys)
                keys, num_in_memory = keys[: found.num_leading], min(num_in_memory, found.num_in_memory)
            if num_in_memory < len(keys):
                lookup.is_brought_up = True
                self._bringing.submit(self._bring_up, lookup, keys, num_in_memory)
                return
            lookup.num_leading = len(keys)
        except BaseException:
            lookup.answered.set()
            raise
        lookup.answered.set()

    def _bring_up(self, lookup: _Lookup, keys: Sequence[bytes], num_in_memory: int) -> None:
        """Answer a look-up when the blocks are in memory, so that loads do not wait for one another."""
        try:
            for finder in self._finders:
                keys = keys[: finder.bring_up(keys, num_in_memory)]
            lookup.num_leading = len(keys)
        except Exception:
            logger.exception("blocks could not be brought into the daemon's memory")
        finally:
            lookup.answered.set()

    def _lease(self, request_id: str, keys: Sequence[bytes]) -> None:
        self._leases.setdefault(request_id, []).extend(finder.lease(keys) for finder in self._finders)

    def _release(self, request_id: str) -> None:
        for release in self._leases.pop(request_id, ()):
            release()

    def _touch(self, keys: Sequence[bytes]) -> None:
        for finder in self._finders:
            finder.touch(keys)
