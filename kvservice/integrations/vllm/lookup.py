"""The scheduler's questions to the store: which blocks are there, and may they stay until they are loaded.

    find ── in memory ─▶ leased, the answer is a promise ── vLLM allocates: take ─▶ released when they are loaded
      │                                                └── vLLM does not: kept for a while, then dropped
      ├── below memory ─▶ None; a thread brings them up ─▶ leased, a promise
      └── late, an error, away ─▶ a miss; then misses without asking, until a ping is answered in time

vLLM's scheduler waits for answers, for a short time in each step. Everything else is done by a thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from kvservice.errors import KVServiceError
from kvservice.integrations.common.waiting import ComputeTime, FoundBlocks, find_blocks
from kvservice.integrations.vllm.steps import LeasedBlocks, Rank

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The least time in seconds between two requests to touch blocks.
TOUCH_INTERVAL_S = 0.5
# The most keys of one such request. Others are touched the next time they are used.
MAX_TOUCHED = 16384
# Requests whose blocks are brought into the daemon's memory at one time.
NUM_BRINGING = 8
# Promises that vLLM has not used: the most of them, and how long one is kept. That of no blocks is asked again sooner,
# since another engine may have stored them. The daemon's leases last longer.
MAX_PROMISES = 128
PROMISE_S, NOTHING_S = 10.0, 0.25
# The age at which a promise is renewed before it is answered again: the daemon may have restarted.
FRESH_S = 1.0
# Time between pings of a store that does not answer in time.
PING_S = 0.1
# A lease is of blocks that are in memory. 0 would stand for no limit.
_NO_WAIT_S = 1e-6


class BlockLease(Protocol):
    """A lease of the client."""

    found: Any
    alive: bool
    offsets: bytes
    versions: bytes

    def renew(self, *, timeout_s: float | None = None) -> bool: ...

    def release(self) -> None: ...


class BlockFinder(Protocol):
    """The blocks of one worker, in the store. A daemon that is away has none. Methods raise KVServiceError."""

    rank: Rank

    def find(self, keys: Sequence[bytes], timeout_s: float) -> FoundBlocks:
        """Return how many keys are there before the first missing one, and how many of them are in memory."""

    def lease(
        self, keys: Sequence[bytes], timeout_s: float, *, wait_s: float = 0.0, counted: bool = False
    ) -> BlockLease:
        """Lease the blocks before the first that is missing, and bring those below the daemon's memory up, at most for
        `wait_s` seconds. `counted`: the blocks are read under this lease."""

    def compute_s(self, num_blocks: int) -> float:
        """Return how long the engine takes to compute blocks."""

    def places(self, lease: BlockLease, num_blocks: int) -> LeasedBlocks | None:
        """Return where the first blocks of a lease lie, if the store's memory can be mapped."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the blocks the most recently used; the first key is the most recent."""

    def answers(self, timeout_s: float) -> bool:
        """Ask anything. Returns whether the answer came in time."""

    def close(self) -> None:
        """Close the session."""


class StoreFinder:
    """A BlockFinder over a store of the client. The worker reads the blocks, so leases do not count as reads unless
    it reads under them."""

    def __init__(self, rank: Rank, store: Any, compute: ComputeTime) -> None:
        self.rank, self._store, self._compute = rank, store, compute

    def find(self, keys: Sequence[bytes], timeout_s: float) -> FoundBlocks:
        return find_blocks(self._store, keys, self._compute, timeout_s=timeout_s)

    def lease(
        self, keys: Sequence[bytes], timeout_s: float, *, wait_s: float = 0.0, counted: bool = False
    ) -> BlockLease:
        lease: BlockLease = self._store.acquire(
            keys,
            leading_only=True,
            counted=counted,
            max_wait_s=wait_s or _NO_WAIT_S,
            timeout_s=timeout_s + 2 * wait_s,
        )
        return lease

    def compute_s(self, num_blocks: int) -> float:
        return self._compute.wait_s(num_blocks)

    def places(self, lease: BlockLease, num_blocks: int) -> LeasedBlocks | None:
        memory = self._store.memory
        if memory is None or not lease.alive:
            return None
        stop = 8 * num_blocks
        return LeasedBlocks(memory.identity, lease.offsets[:stop], lease.versions[:stop])

    def touch(self, keys: Sequence[bytes]) -> None:
        self._store.touch(keys)

    def answers(self, timeout_s: float) -> bool:
        self._store.lookup([bytes(32)], counted=False, timeout_s=timeout_s)
        return bool(self._store.reachable)

    def close(self) -> None:
        self._store.close()


class Found(NamedTuple):
    """The answer to a look-up. `at_hand`: the blocks were in the daemon's memory already."""

    num_blocks: int
    at_hand: bool


@dataclass(eq=False)
class _Promise:
    """An answer, and the leases that keep it. `bringing` is the work of the thread that brings blocks up."""

    keys: Sequence[bytes]
    until_s: float
    fresh_s: float = 0.0
    found: Found = field(default_factory=lambda: Found(0, True))
    leases: dict[Rank, BlockLease] = field(default_factory=dict)
    bringing: Future[tuple[Found, dict[Rank, BlockLease]]] | None = None


class StoreLookup:
    """Asks the finders of all workers. Methods are for one thread, vLLM's scheduler; only `find` and `close` wait."""

    def __init__(
        self,
        finders: Sequence[BlockFinder],
        step_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_s` is how long a step of the scheduler waits for an answer, and after which it asks no more.
        `timeout_s` is the time limit of a call in the background, without its wait for blocks below the daemon's
        memory."""
        self._finders, self._step_s, self._timeout_s, self._clock = tuple(finders), step_s, timeout_s, clock
        self._left_s = step_s
        self._promises: dict[str, _Promise] = {}  # the oldest first
        self._taken: dict[str | int, dict[Rank, BlockLease]] = {}  # by the load
        self._asks = True
        self._touched: dict[bytes, None] = {}
        self._touch_s = -TOUCH_INTERVAL_S
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._bringing = ThreadPoolExecutor(NUM_BRINGING, thread_name_prefix="kvservice-bringing")
        self._asking = ThreadPoolExecutor(max(len(self._finders) - 1, 1), thread_name_prefix="kvservice-asking")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvservice-lookup", daemon=True)
        self._thread.start()

    @property
    def asks(self) -> bool:
        """Whether the store is asked: it has answered in time."""
        return self._asks

    def find(self, request_id: str, keys: Sequence[bytes], *, reads: bool = False) -> Found | None:
        """Return how many of the first blocks are there for every worker. They are leased from now on. None: they are
        being brought into memory, or the time of this step is used up: ask again in a later step. `reads`: workers read
        the blocks under this lease."""
        promise = self._promises.get(request_id)
        if promise is not None and promise.bringing is not None and promise.keys == keys:
            if not promise.bringing.done():
                return None
            promise.found, promise.leases = promise.bringing.result()
            promise.bringing, promise.until_s = None, self._clock() + PROMISE_S
            promise.fresh_s = self._clock() + FRESH_S
        if promise is not None and promise.keys == keys and self._is_kept(promise):
            return promise.found
        self.drop(request_id)
        if not self._asks:
            return Found(0, True)
        if self._left_s <= 0:
            return None  # too many have asked in this step
        began = self._clock()
        promise = self._ask(keys, began, reads=reads)
        taken_s = self._clock() - began
        self._left_s -= taken_s
        if taken_s >= self._step_s:
            self._stop_asking("the daemon answers late")
        self._promises[request_id] = promise
        while len(self._promises) > MAX_PROMISES:
            self.drop(next(iter(self._promises)))
        return promise.found if promise.bringing is None else None

    def take(self, request_id: str, num_blocks: int, load: str | int) -> dict[Rank, LeasedBlocks] | None:
        """Keep the lease of a request until this load is released, since it loads `num_blocks` blocks; 0: it loads
        none. Returns the same as `places`."""
        places = self.places(request_id, num_blocks)
        promise = self._promises.get(request_id)
        if promise is not None and num_blocks and promise.bringing is None:
            del self._promises[request_id]
            self._taken[load] = promise.leases
        else:
            self.drop(request_id)
        return places

    def places(self, request_id: str, num_blocks: int) -> dict[Rank, LeasedBlocks] | None:
        """Return where the first promised blocks of a request lie for each worker; None: not every store is mapped."""
        promise = self._promises.get(request_id)
        leases = {} if promise is None else promise.leases
        found: dict[Rank, LeasedBlocks] = {}
        for finder in self._finders:
            lease = leases.get(finder.rank)
            places = None if lease is None else finder.places(lease, num_blocks)
            if places is None or len(places.offsets) != 8 * num_blocks:
                return None
            found[finder.rank] = places
        return found

    def release(self, load: str | int) -> None:
        """End the lease of a load."""
        self._release_later(self._taken.pop(load, {}))

    def drop(self, request_id: str) -> None:
        """Forget the answer to a request that will not use it."""
        promise = self._promises.pop(request_id, None)
        if promise is None:
            return
        if promise.bringing is not None:
            promise.bringing.add_done_callback(self._release_brought)
        self._release_later(promise.leases)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make blocks the most recently used soon, the first key the most recent."""
        if len(self._touched) < MAX_TOUCHED:
            self._touched.update(dict.fromkeys(keys))

    def end_step(self) -> None:
        """Send what has gathered, and drop old promises. The next step may wait again."""
        self._left_s = self._step_s
        now = self._clock()
        old = [name for name, promise in self._promises.items() if now >= promise.until_s and promise.bringing is None]
        for request_id in old:
            self.drop(request_id)
        if self._touched and now >= self._touch_s + TOUCH_INTERVAL_S:
            keys, self._touched, self._touch_s = list(self._touched), {}, now
            for finder in self._finders:
                self._queue.put(lambda finder=finder: finder.touch(keys))  # type: ignore[misc]

    def close(self, timeout_s: float) -> None:
        """Do what is pending, at most for `timeout_s` seconds, and close the finders."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(timeout_s)
        for threads in (self._bringing, self._asking):
            threads.shutdown(wait=False, cancel_futures=True)
        for finder in self._finders:
            finder.close()

    def _is_kept(self, promise: _Promise) -> bool:
        """Whether an answer can be given again. Renews its leases from time to time."""
        now = self._clock()
        if now >= promise.until_s or not all(lease.alive for lease in promise.leases.values()):
            return False
        if now < promise.fresh_s or not promise.leases:
            return True
        renewed = False
        if self._asks:
            try:
                renewed = all(lease.renew(timeout_s=self._step_s) for lease in promise.leases.values())
            except KVServiceError as error:
                logger.warning("a lease could not be renewed: %s", error)
            self._left_s -= self._clock() - now
        promise.fresh_s = now + FRESH_S
        return renewed

    def _ask(self, keys: Sequence[bytes], began: float, *, reads: bool) -> _Promise:
        """Ask all finders, and lease what they have in memory. An error is a miss."""
        promise = _Promise(keys, began + NOTHING_S)

        def left_s() -> float:
            return max(self._step_s - (self._clock() - began), _NO_WAIT_S)

        def lease(finder: BlockFinder) -> None:
            promise.leases[finder.rank] = finder.lease(keys, left_s(), counted=reads)

        try:
            found = self._of_each(lambda finder: finder.find(keys, left_s()))
            keys = keys[: min((each.num_leading for each in found), default=0)]
            num_in_memory = min((each.num_in_memory for each in found), default=0)
            if num_in_memory < len(keys):
                promise.bringing = self._bringing.submit(self._bring_up, keys, num_in_memory)
                return promise
            if keys:
                self._of_each(lease)
                keys = keys[: min(map(_num_leading, promise.leases.values()))]
        except Exception as error:
            # The requests must go on after any error.
            self._failed("blocks could not be looked up", error)
            self._stop_asking("the daemon answers with an error")
            keys = []
        if keys:
            promise.found = Found(len(keys), True)
            promise.until_s, promise.fresh_s = began + PROMISE_S, began + FRESH_S
        else:
            self._release_later(promise.leases)
            promise.leases = {}
        return promise

    def _of_each(self, ask: Callable[[BlockFinder], T]) -> list[T]:
        """Ask all finders at the same time. Returns their answers when all have come, or raises one of their errors."""
        asked = [self._asking.submit(ask, finder) for finder in self._finders[1:]]
        try:
            answers = [ask(finder) for finder in self._finders[:1]]
        finally:
            wait(asked)
        return answers + [each.result() for each in asked]

    def _bring_up(self, keys: Sequence[bytes], num_in_memory: int) -> tuple[Found, dict[Rank, BlockLease]]:
        """Lease blocks when they are in memory, so that loads do not wait for one another. On a thread of its own."""
        leases: dict[Rank, BlockLease] = {}
        try:
            for finder in self._finders:
                if keys:
                    wait_s = finder.compute_s(max(len(keys) - num_in_memory, 0))
                    lease = leases[finder.rank] = finder.lease(keys, self._timeout_s, wait_s=wait_s)
                    keys = keys[: _num_leading(lease)]
        except Exception as error:
            self._failed("blocks could not be brought into the daemon's memory", error)
            keys = []
        if not keys:
            self._release_later(leases)
            leases = {}
        return Found(len(keys), False), leases

    def _release_brought(self, done: Future[tuple[Found, dict[Rank, BlockLease]]]) -> None:
        if not done.cancelled():
            self._release_later(done.result()[1])

    def _stop_asking(self, why: str) -> None:
        """All blocks count as missing until the store answers a ping in time."""
        if self._asks:
            logger.warning("%s: vLLM computes until it answers in time again", why)
            self._asks = False
            self._queue.put(self._ping)

    def _ping(self) -> None:
        """Ask until every finder answers in time. Releases wait behind this: the daemon does not answer them either."""
        while not self._closing.is_set():
            try:
                if all(finder.answers(self._step_s) for finder in self._finders):
                    self._asks = True
                    return
            except KVServiceError as error:
                logger.debug("the daemon does not answer: %s", error)
            self._closing.wait(PING_S)

    def _release_later(self, leases: dict[Rank, BlockLease]) -> None:
        for lease in leases.values():
            self._queue.put(lease.release)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:
                self._failed("blocks could not be touched, or a lease not be ended", error)

    @staticmethod
    def _failed(what: str, error: Exception) -> None:
        if isinstance(error, KVServiceError):
            logger.warning("%s: %s", what, error)
        else:
            logger.error("%s", what, exc_info=error)


def _num_leading(lease: BlockLease) -> int:
    return len(lease.found) if lease.found.all() else int(lease.found.argmin())
