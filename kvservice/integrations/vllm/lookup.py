"""The scheduler's questions to the store: which blocks are there, and may they stay until they are loaded.

    is_miss ── the first block is seen to be nowhere ─▶ a miss

    find ── seen in the mapped memory ─▶ leased, the answer is a promise ── vLLM allocates: take ─▶ released when loaded
      │                                                                  └── vLLM does not: kept a while, then dropped
      ├── not seen, and nothing is below memory ─▶ a miss
      └── cannot see: ask the daemon

    expect ─▶ a thread asks for all requests that have come, in one call
    ask ── expected, and not there ─▶ a miss, without a call
      ├── in memory ─▶ leased, a promise
      ├── below memory ─▶ None; a thread brings them up ─▶ leased, a promise
      └── an error, away ─▶ a miss. Then, and after a late answer: misses without asking, until a ping is in time

vLLM's scheduler waits for the daemon's answers, for a short time in each step. What is seen in the memory that this
process maps for writing costs it microseconds. Everything else is done by a thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvservice.client.store.memory import LOOK_S, SharedLease
from kvservice.client.store.values import (
    Flags,
    SharedUses,
    distinct_keys,
    num_keys,
    num_leading,
    some_keys,
)
from kvservice.errors import KVServiceError
from kvservice.integrations.vllm.finder import NO_WAIT_S, BlockLease, Leases, StoreFinder
from kvservice.integrations.vllm.groups import Wanted
from kvservice.integrations.vllm.steps import LeasedBlocks, Rank

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The least time in seconds between two requests to touch blocks.
TOUCH_INTERVAL_S = 0.5
# The most keys of one such request. Others are touched the next time they are used.
MAX_TOUCHED = 16384
# How many keys are gathered for that. Requests with a common prefix repeat its keys.
MAX_GATHERED = 8 * MAX_TOUCHED
# Requests whose blocks are brought into the daemon's memory at one time.
NUM_BRINGING = 8
# Promises that vLLM has not used: the most of them, and how long one is kept. That of no blocks is asked again sooner,
# since another engine may have stored them. The daemon's leases last longer.
MAX_PROMISES = 128
PROMISE_S, NOTHING_S = 10.0, 0.25
# The age at which a promise is renewed before it is answered again: the daemon may have restarted.
FRESH_S = 1.0
# Requests that wait in vLLM's queue: the most that are asked for early, the most keys of each and of one call. An
# answer is used for some time, and asked for anew before that.
MAX_EXPECTED, MAX_KEYS_EACH, MAX_KEYS = 4096, 512, 4096
EXPECTED_S, RENEWED_S = 1.0, 0.4
# Time between pings of a store that does not answer in time, and between renewals of leases in the mapped memory.
PING_S, RENEW_S = 0.1, 1.0
# How old the view of the mapped memory may be in a step that also computes for others, which would wait while it looks
# for new blocks. While vLLM makes steps, a thread looks so often, and spends at most one part in so many of its time on
# that.
SEEN_S, LOOK_AGAIN_S, LOOK_PART = 0.1, 0.05, 10


class Found(NamedTuple):
    """The answer to a look-up. `at_hand`: the blocks were in the daemon's memory already."""

    num_blocks: int
    at_hand: bool


NOTHING = Found(0, True)


@dataclass(eq=False, slots=True)
class _Promise:
    """An answer, and the leases that keep it. `is_shared`: they were taken without the daemon. A load of the first
    `num_read` blocks reads `leased`, of each worker in one of `memories`. `bringing` is the work of the thread that
    brings blocks up."""

    wanted: Wanted
    until_s: float
    fresh_s: float = 0.0
    found: Found = NOTHING
    leases: Leases = field(default_factory=dict)
    is_shared: bool = False
    num_read: int = 0
    leased: Mapping[Rank, LeasedBlocks] | None = None
    memories: Sequence[Any] = ()
    bringing: Future[tuple[Found, Leases]] | None = None


@dataclass(eq=False)
class _Expected:
    """The first blocks of a prompt that vLLM has not scheduled yet. `found` says which were there at `asked_s`."""

    keys: bytes
    found: Flags | None = None
    # Which of them some workers have.
    some: Flags | None = None
    asked_s: float = 0.0

    def is_miss(self, first: int, now: float) -> bool:
        """Whether it is known that this block was not there."""
        return self._is_known(first, now) and not self.found[first]  # type: ignore[index]

    def is_hit(self, first: int, now: float) -> bool:
        """Whether it is known that this block was there."""
        return self._is_known(first, now) and bool(self.found[first])  # type: ignore[index]

    def _is_known(self, first: int, now: float) -> bool:
        return self.found is not None and now < self.asked_s + EXPECTED_S and first < len(self.found)


class StoreLookup:
    """Asks the finders of all workers. Methods are for one thread, vLLM's scheduler; only `find` and `close` wait."""

    def __init__(
        self,
        finders: Sequence[StoreFinder],
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
        # Requests whose miss is counted. They may ask again in each step.
        self._missed: set[str] = set()
        # By the load, those of its requests.
        self._taken: dict[str | int, list[_Promise]] = {}
        self._expected: dict[str, _Expected] = {}
        self._expecting: Future[None] | None = None
        self._asks = True
        # Whether there was a step since the thread has looked for new blocks, and when it looks again.
        self._has_stepped, self._look_s = False, 0.0
        self._uses, self._uses_lock = SharedUses(), threading.Lock()
        # The latest figures of the engine, for the daemon.
        self._engine: Mapping[str, int] = {}
        self._engine_told = Counter[str]()
        # The keys of each touch, and how many they are.
        self._touched: list[bytes] = []
        self._num_touched = 0
        self._touch_s = -TOUCH_INTERVAL_S
        self._renewed_s = clock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._bringing = ThreadPoolExecutor(NUM_BRINGING, thread_name_prefix="kvservice-bringing")
        self._asking = ThreadPoolExecutor(max(len(self._finders) - 1, 1), thread_name_prefix="kvservice-asking")
        self._aside = ThreadPoolExecutor(2, thread_name_prefix="kvservice-aside")  # early questions, and counting
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvservice-lookup", daemon=True)
        self._thread.start()

    @property
    def asks(self) -> bool:
        """Whether the store is asked: it has answered in time."""
        return self._asks

    @property
    def sees_all(self) -> bool:
        """Whether no question needs the daemon now."""
        return bool(self._finders) and all(finder.sees_all for finder in self._finders)

    def expect(self, request_id: str, keys: bytes) -> None:
        """A request has come, and will ask for blocks of this prompt; `keys` has one of each, without which the block
        is a miss. Ask early, for all that have come meanwhile."""
        if keys and len(self._expected) < MAX_EXPECTED and not self.sees_all:
            self._expected[request_id] = _Expected(some_keys(keys, slice(0, MAX_KEYS_EACH)))
            self._ask_early(self._clock())

    def is_miss(self, request_id: str, key: bytes, num_keys: int, *, hurries: bool = False) -> bool:
        """Whether it is seen in the mapped memories that no worker has this first block of a prompt, without which none
        of its `num_keys` can be used. Most prompts are new: nothing else is looked at. Otherwise `find` tells."""
        if not self._finders or request_id in self._promises:
            return False
        for finder in self._finders:
            if not finder.is_nowhere(key, SEEN_S if hurries else LOOK_S):
                return False
        if request_id not in self._missed:
            self._missed.add(request_id)
            with self._uses_lock:
                self._uses.misses += num_keys
                self._uses.add_missing(key)
        return True

    def find(self, request_id: str, wanted: Wanted, *, reads: bool = False, hurries: bool = False) -> Found | None:
        """Return how many of the first blocks can be used: every worker has what is needed for it, which is leased from
        now on. None: it is being brought into memory, or the time of this step is used up: ask again in a later step.
        `reads`: workers read the blocks under this lease. `hurries`: others wait for this step."""
        promise = self._promises.get(request_id)
        if promise is not None:
            if promise.bringing is not None and promise.wanted == wanted:
                if not promise.bringing.done():
                    return None
                promise.found, promise.leases = promise.bringing.result()
                promise.bringing, promise.until_s = None, self._clock() + PROMISE_S
                promise.fresh_s = self._clock() + FRESH_S
            if promise.wanted == wanted and self._is_kept(promise):
                return promise.found
            self.drop(request_id)
        began = self._clock()
        if (shared := self._share(wanted, began, SEEN_S if hurries else LOOK_S)) is not None:
            self._keep(request_id, shared)
            return shared.found
        if not self._asks:
            return NOTHING
        expected = self._expected.get(request_id)
        if expected is not None and expected.is_miss(wanted.first, began):
            self._found(wanted, 0, int(expected.some[wanted.first]), counted=True)  # type: ignore[index]
            self._keep(request_id, _Promise(wanted, began + NOTHING_S))
            return NOTHING
        if self._left_s <= 0:
            return None  # too many have asked in this step
        likely = expected is not None and expected.is_hit(wanted.first, began)
        promise = self._ask(wanted, began, likely=likely, reads=reads)
        taken_s = self._clock() - began
        self._left_s -= taken_s
        if taken_s >= self._step_s:
            self._stop_asking("the daemon answers late")
        self._keep(request_id, promise)
        return promise.found if promise.bringing is None else None

    def _keep(self, request_id: str, promise: _Promise) -> None:
        self._promises[request_id] = promise
        while len(self._promises) > MAX_PROMISES:
            self.drop(next(iter(self._promises)))

    def _share(self, wanted: Wanted, began: float, max_age_s: float) -> _Promise | None:
        """Find and lease blocks in the mapped memories of all workers; None: ask the daemon. It has to be asked for
        blocks below its memory, and if a memory is mapped for reading only."""
        leading, keys, num_blocks, most = wanted.groups.leading, wanted.keys, len(wanted), 0
        if not leading:
            seen = [flags for finder in self._finders if (flags := finder.see(keys, max_age_s)) is not None]
            if not seen or len(seen) < len(self._finders):
                return None
            most, num_blocks = max(map(wanted.leading, seen)), wanted.longest(np.logical_and.reduce(seen))
            if num_blocks < len(wanted) and not self.sees_all:
                return None
            keys = wanted.needed(num_blocks)
        leases: dict[Rank, SharedLease] = {}
        fewest, most_leased = num_keys(keys), 0
        for finder in self._finders:
            if (lease := finder.share(keys, max_age_s)) is None:
                self._release(leases)
                return None
            leases[finder.rank] = lease
            fewest, most_leased = min(fewest, lease.num_blocks), max(most_leased, lease.num_blocks)
        if not leases:
            return None
        if leading:
            num_blocks, most = fewest, most_leased
        elif fewest < num_keys(keys):
            num_blocks = 0  # they went after they were seen
        self._found(wanted, num_blocks, most, counted=True)
        if not num_blocks:
            if most_leased:
                self._release(leases)
            return _Promise(wanted, began + NOTHING_S)
        return _Promise(wanted, began + PROMISE_S, began + FRESH_S, Found(num_blocks, True), leases, is_shared=True)

    def take(self, request_id: str, num_blocks: int, load: str | int) -> Mapping[Rank, LeasedBlocks] | None:
        """Keep the lease of a request until this load is released, since it loads `num_blocks` blocks; 0: it loads
        none. A load may be of several requests. Returns the same as `places`."""
        self._expected.pop(request_id, None)
        self._missed.discard(request_id)
        promise = self._promises.get(request_id)
        if promise is None or not num_blocks or promise.bringing is not None:
            self.drop(request_id)
            return None
        # The load reads what vLLM was told about, even if the lease has ended since. It is checked afterwards.
        if promise.num_read != num_blocks and self.places(request_id, num_blocks) is None:
            promise.leased, promise.memories = None, ()
        del self._promises[request_id]
        self._taken.setdefault(load, []).append(promise)
        if promise.is_shared:
            needed = promise.wanted.needed(num_blocks)
            self.touch(needed)
            with self._uses_lock:
                self._uses.read += num_keys(needed)
        return promise.leased

    def places(self, request_id: str, num_blocks: int) -> dict[Rank, LeasedBlocks] | None:
        """Return where what the first promised blocks of a request need lies for each worker; None: not every store is
        mapped."""
        promise = self._promises.get(request_id)
        if promise is None or num_blocks > promise.found.num_blocks:
            return None
        num_needed = num_blocks
        if not promise.wanted.groups.leading:
            if num_blocks < promise.found.num_blocks:
                return None  # fewer blocks need others than are leased
            num_needed = num_keys(promise.wanted.needed(num_blocks))
        leased: dict[Rank, LeasedBlocks] = {}
        memories = []
        for finder in self._finders:
            memory, lease = finder.memory, promise.leases.get(finder.rank)
            places = None if lease is None or memory is None else finder.places(memory, lease, num_needed)
            if places is None or places.num_blocks != num_needed:
                return None
            leased[finder.rank] = places
            memories.append(memory)
        promise.num_read, promise.leased, promise.memories = num_blocks, leased, memories
        return leased

    def lasts(self, load: str | int) -> bool:
        """Whether all blocks of a load are still those that were leased. It has ended: what it read was right, then."""
        return all(
            memory.identity == places.memory and bool(memory.unchanged(places.offsets, places.versions).all())
            for promise in self._taken[load]
            for memory, places in zip(promise.memories, (promise.leased or {}).values(), strict=True)
        )

    def release(self, load: str | int) -> None:
        """End the lease of a load."""
        for promise in self._taken.pop(load, ()):
            self._release(promise.leases)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._expected.pop(request_id, None)
        self._missed.discard(request_id)
        self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Forget the answer to a request that will not use it."""
        promise = self._promises.pop(request_id, None)
        if promise is None:
            return
        if promise.bringing is not None:
            promise.bringing.add_done_callback(self._release_brought)
        if promise.leases:
            self._release(promise.leases)

    def touch(self, keys: bytes) -> None:
        """Make blocks the most recently used soon, the first key the most recent."""
        if keys and self._num_touched < MAX_GATHERED:
            self._touched.append(keys)
            self._num_touched += num_keys(keys)

    def end_step(self, engine: Mapping[str, int] | None = None) -> None:
        """Send what has gathered, and drop old promises. The next step may wait again. The daemon shows the figures of
        the `engine`, by the names of EngineReport of the contract, to operators."""
        self._engine = engine or self._engine
        self._left_s = self._step_s
        now = self._clock()
        old = [name for name, promise in self._promises.items() if now >= promise.until_s and promise.bringing is None]
        for request_id in old:
            self.drop(request_id)
        self._ask_early(now)
        self._has_stepped = True
        if self._touched and now >= self._touch_s + TOUCH_INTERVAL_S:
            touched, self._touched, self._num_touched, self._touch_s = self._touched, [], 0, now
            self._queue.put(lambda: self._touch_and_count(distinct_keys(touched, MAX_TOUCHED)))

    def close(self, timeout_s: float) -> None:
        """Do what is pending, at most for `timeout_s` seconds, and close the finders."""
        self._closing.set()
        self._queue.put(lambda: self._touch_and_count(b""))
        self._queue.put(None)
        self._thread.join(timeout_s)
        for threads in (self._bringing, self._asking, self._aside):
            threads.shutdown(wait=False, cancel_futures=True)
        for finder in self._finders:
            finder.close()

    def _ask_early(self, now: float) -> None:
        """Ask for the requests that have come, and those whose answers get old, unless such a question is under way."""
        if not self._asks or (self._expecting is not None and not self._expecting.done()):
            return
        chosen, num_asked = [], 0
        for expected in self._expected.values():
            if expected.found is None or now >= expected.asked_s + RENEWED_S:
                chosen.append(expected)
                num_asked += num_keys(expected.keys)
                if num_asked >= MAX_KEYS:
                    break
        if chosen:
            self._expecting = self._aside.submit(self._answer_early, chosen)

    def _answer_early(self, chosen: Sequence[_Expected]) -> None:
        """On a thread of its own. An error leaves the answers as they are: `find` asks."""
        keys = b"".join(expected.keys for expected in chosen)
        asked_s = self._clock()
        try:
            flags = [finder.flags(keys, self._timeout_s) for finder in self._finders]
            found, some = np.logical_and.reduce(flags), np.logical_or.reduce(flags)
        except Exception as error:
            self._failed("blocks could not be looked up", error)
            return
        stop = 0
        for expected in chosen:
            start, stop = stop, stop + num_keys(expected.keys)
            expected.asked_s, expected.found, expected.some = asked_s, found[start:stop], some[start:stop]

    def _found(self, wanted: Wanted, num_blocks: int, most: int, *, counted: bool) -> None:
        """Let the daemon count why a look-up has found no more than `num_blocks`, and with `counted` also how many
        blocks were looked up, for which it was not asked. `most`: how many leading blocks any worker has, of a group
        that needs all."""
        width, num_missing = wanted.groups.num, len(wanted) - num_blocks
        with self._uses_lock:
            uses = self._uses
            if counted:
                uses.hits += num_blocks * width
                uses.misses += num_missing * width
            if num_missing and most > num_blocks:
                uses.not_whole += 1
            elif num_missing:
                uses.add_missing(wanted.key(num_blocks))

    def _touch_and_count(self, keys: bytes) -> None:
        """On the thread: tell the daemon what was used. It counts for all ranks alike, but reasons of misses once."""
        uses = self._take_uses()
        for finder in self._finders if keys or uses is not None else ():
            finder.touch(keys, uses)
            uses = uses and dataclasses.replace(uses, missing=[], not_whole=0, engine=None)

    def _take_uses(self) -> SharedUses | None:
        with self._uses_lock:
            uses, self._uses = self._uses, SharedUses()
        engine = Counter(self._engine)
        if uses == SharedUses() and engine == self._engine_told:
            return None
        self._engine_told = engine
        return dataclasses.replace(uses, engine=engine)

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

    def _ask(self, wanted: Wanted, began: float, *, likely: bool, reads: bool) -> _Promise:
        """Ask all finders, and lease what they have in memory. An error is a miss. `likely`: the first block is there,
        so that a lease answers as well."""
        leases: dict[Rank, BlockLease] = {}
        promise = _Promise(wanted, began + NOTHING_S, leases=leases)

        def left_s() -> float:
            return max(self._step_s - (self._clock() - began), NO_WAIT_S)

        def lease(keys: bytes) -> int:
            """Return how many keys all have leased before the first that is missing."""

            def of(finder: StoreFinder) -> None:
                leases[finder.rank] = finder.lease(keys, left_s(), counted=reads)

            self._of_each(of)
            return min(map(_num_leased, leases.values()))

        def bring_up(num_blocks: int, num_in_memory: int) -> int:
            self._release(promise.leases)
            promise.leases = {}
            promise.bringing = self._bringing.submit(self._bring_up, wanted, num_blocks, num_in_memory)
            return 0

        def leading() -> int:
            """Return the number of leased blocks of a prefix that is its first blocks."""
            keys = wanted.keys
            num_leased = lease(keys) if likely else 0
            if num_leased == len(wanted):
                self._found(wanted, num_leased, num_leased, counted=True)
                return num_leased
            found = self._of_each(lambda finder: finder.find(keys, left_s()))
            num_blocks = min(each.num_leading for each in found)
            self._found(wanted, num_blocks, max(each.num_leading for each in found), counted=False)
            num_in_memory = min(each.num_in_memory for each in found)
            if num_in_memory < num_blocks:
                return bring_up(num_blocks, num_in_memory)
            if num_blocks and not likely:
                num_leased = lease(some_keys(keys, slice(0, num_blocks)))
            return min(num_blocks, num_leased)

        def longest() -> int:
            """Return the number of leased blocks of a prefix of which several groups need different blocks."""
            flags = self._of_each(lambda finder: finder.present(wanted.keys, len(wanted), left_s()))
            num_blocks = wanted.longest(np.logical_and.reduce(flags))
            self._found(wanted, num_blocks, max(map(wanted.leading, flags)), counted=False)
            keys = wanted.needed(num_blocks)
            return bring_up(num_blocks, 0) if keys and lease(keys) < num_keys(keys) else num_blocks

        num_blocks = 0
        try:
            if self._finders:
                num_blocks = leading() if wanted.groups.leading else longest()
        except Exception as error:
            # The requests must go on after any error.
            self._failed("blocks could not be looked up", error)
            self._stop_asking("the daemon answers with an error")
        if num_blocks:
            promise.found = Found(num_blocks, True)
            promise.until_s, promise.fresh_s = began + PROMISE_S, began + FRESH_S
        else:
            self._release(promise.leases)
            promise.leases = {}
        return promise

    def _of_each(self, ask: Callable[[StoreFinder], T]) -> list[T]:
        """Ask all finders at the same time. Returns their answers when all have come, or raises one of their errors."""
        asked = [self._asking.submit(ask, finder) for finder in self._finders[1:]]
        try:
            answers = [ask(finder) for finder in self._finders[:1]]
        finally:
            wait(asked)
        return answers + [each.result() for each in asked]

    def _bring_up(self, wanted: Wanted, num_blocks: int, num_in_memory: int) -> tuple[Found, Leases]:
        """Lease blocks when they are in memory, so that loads do not wait for one another. On a thread of its own."""
        leases: dict[Rank, BlockLease] = {}
        try:
            for finder in self._finders:
                if num_blocks:
                    keys, wait_s = wanted.needed(num_blocks), finder.compute.wait_s(max(num_blocks - num_in_memory, 0))
                    lease = leases[finder.rank] = finder.lease(keys, self._timeout_s, wait_s=wait_s)
                    if (num_leased := _num_leased(lease)) < num_keys(keys):
                        num_blocks = num_leased if wanted.groups.leading else 0
        except Exception as error:
            self._failed("blocks could not be brought into the daemon's memory", error)
            num_blocks = 0
        if not num_blocks:
            self._release(leases)
            leases = {}
        return Found(num_blocks, False), leases

    def _release_brought(self, done: Future[tuple[Found, Leases]]) -> None:
        if not done.cancelled():
            self._release(done.result()[1])

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
                self._renew_shared()
                if all(finder.answers(self._step_s) for finder in self._finders):
                    self._asks = True
                    return
            except Exception as error:
                # After any error the daemon must be found again when it answers.
                logger.debug("the daemon does not answer: %s", error)
            self._closing.wait(PING_S)

    def _release(self, leases: Leases) -> None:
        """End leases: those in the mapped memory at once, others on the thread, since the daemon is asked."""
        for lease in leases.values():
            if isinstance(lease, SharedLease):
                lease.release()
            else:
                self._queue.put(lease.release)

    def _run(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=LOOK_AGAIN_S)
                if work is None:
                    return
                work()
            except queue.Empty:
                pass
            except Exception as error:
                self._failed("blocks could not be touched, or a lease not be ended", error)
            try:
                self._renew_shared()
            except Exception as error:
                self._failed("leases could not be renewed", error)

    def _renew_shared(self) -> None:
        """From time to time, renew the leases of loads under way, look for new blocks, and tell the daemon of uses. On
        the thread: the scheduler may wait for long."""
        now = time.monotonic()
        if self._has_stepped and now >= self._look_s:
            self._has_stepped = False
            for finder in self._finders:
                finder.look()
            ended = time.monotonic()
            self._look_s = ended + max(LOOK_AGAIN_S / 2, LOOK_PART * (ended - now))
        now = self._clock()
        if now >= self._renewed_s + RENEW_S:
            self._renewed_s = now
            for promise in itertools.chain.from_iterable(list(self._taken.values())):
                for lease in promise.leases.values():
                    if isinstance(lease, SharedLease):
                        lease.renew()
            if self._asks:
                self._touch_and_count(b"")

    @staticmethod
    def _failed(what: str, error: Exception) -> None:
        if isinstance(error, KVServiceError):
            logger.warning("%s: %s", what, error)
        else:
            logger.error("%s", what, exc_info=error)


def _num_leased(lease: BlockLease) -> int:
    if isinstance(lease, SharedLease):
        return lease.num_blocks  # those before the first that is missing
    return num_leading(lease.found)
