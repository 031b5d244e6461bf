"""A tier with its figures, its time limits and its circuit breaker. A failure is a miss here, not an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from kvservice.logs import LogBudget
from kvservice.store import LeaseClock
from kvservice.tiers.protocol import GetResult, LowerTier, Space, TierError, TierStats, Values

# ---- moving averages of a tier's speed


# The weight of all earlier transfers against the next one.
_DECAY: Final = 0.95
# Sizes that differ by less than this share of their mean do not tell latency and bandwidth apart.
_SPREAD: Final = 0.1


class Speed:
    """The time of a transfer as latency + bytes / bandwidth: a least-squares fit in which old transfers count less and
    less. Transfers that run at the same time share the bandwidth, so the bytes of a transfer are those in progress when
    it begins, its own included."""

    def __init__(self) -> None:
        # Decayed sums over transfers: their number, bytes, seconds, bytes squared, bytes times seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self.latency_s = 0.0
        self._s_per_byte = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth, or 0 before the first transfer."""
        return 1 / self._s_per_byte if self._s_per_byte else 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count a transfer."""
        new = (1.0, num_bytes, seconds, num_bytes * num_bytes, num_bytes * seconds)
        count, x, y, xx, xy = self._sums = tuple(  # type: ignore[assignment]
            _DECAY * before + now for before, now in zip(self._sums, new, strict=True)
        )
        mean_x, mean_y = x / count, y / count
        variance, covariance = xx / count - mean_x**2, xy / count - mean_x * mean_y
        self.latency_s, self._s_per_byte = 0.0, mean_y / mean_x if mean_x else 0.0
        if variance > (_SPREAD * mean_x) ** 2 and covariance > 0:
            latency_s = mean_y - covariance / variance * mean_x
            if latency_s > 0:
                self.latency_s, self._s_per_byte = latency_s, covariance / variance

    def seconds(self, num_bytes: int) -> float:
        """Return how long a transfer takes, 0 before the first one."""
        return self.latency_s + num_bytes * self._s_per_byte

    def bytes_in(self, seconds: float) -> float:
        """Return how many bytes a transfer of this time has, infinite before the first one."""
        left_s = seconds - self.latency_s
        if left_s < 0:
            return 0.0
        return left_s / self._s_per_byte if self._s_per_byte else float("inf")


# ---- the circuit breaker: after several failures in a row a tier is left alone for a while, then one call tries it
#
# closed ── FAILURES in a row ──▶ suspended ── the pause is over ──▶ one trial ── succeeds ──▶ closed
#                                     ◀── fails: the pause doubles ──┘
#
# Failures are counted for each kind of call, because one kind says little about another: a disk whose reads fail still
# answers lookups from its index. The trial is of the kind that failed. Other calls are admitted too after the pause.


# Failures in a row after which a tier is suspended.
FAILURES: Final = 3
# The first pause in seconds, and the longest one.
PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0


@dataclass(frozen=True, eq=False)
class Attempt:
    """A call that the breaker admitted. Only the attempts of the current `era` count."""

    kind: str
    era: int


class Breaker:
    """Decides which calls reach a tier. The caller passes the time, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        # Failures in a row by kind of call.
        self._failures: dict[str, int] = {}
        self._pause_s = PAUSE_S
        # The kind of calls that failed, and when the next trial may begin; None: the breaker is closed.
        self._suspended: tuple[str, float] | None = None
        self._trial: Attempt | None = None
        # Changes whenever the breaker opens or closes, so that calls from before do not count.
        self._era = 0
        self.num_suspensions = 0

    @property
    def is_suspended(self) -> bool:
        return self._suspended is not None

    def admits(self, now: float) -> bool:
        """Return whether a call may begin now."""
        return self._suspended is None or (self._trial is None and now >= self._suspended[1])

    def begin(self, kind: str, now: float) -> Attempt | None:
        """Admit a call, or return None. Each attempt ends with one of the methods below."""
        if not self.admits(now):
            return None
        attempt = Attempt(kind, self._era)
        if self._suspended is not None and self._suspended[0] == kind:
            self._trial = attempt
        return attempt

    def succeeded(self, attempt: Attempt) -> bool:
        """Return whether the breaker closed with this."""
        if attempt.era != self._era:
            return False
        self._failures.pop(attempt.kind, None)
        if attempt is not self._trial:
            return False
        self._suspended = self._trial = None
        self._failures.clear()
        self._pause_s = PAUSE_S
        self._era += 1
        return True

    def failed(self, attempt: Attempt, now: float) -> bool:
        """Return whether the breaker opened with this."""
        if attempt.era != self._era:
            return False
        if self._suspended is not None:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._suspended, self._trial = (self._suspended[0], now + self._pause_s), None
            return False
        failures = self._failures[attempt.kind] = self._failures.get(attempt.kind, 0) + 1
        if failures < FAILURES:
            return False
        self._suspended = attempt.kind, now + self._pause_s
        self._era += 1
        self.num_suspensions += 1
        return True

    def abandoned(self, attempt: Attempt) -> None:
        """End an attempt that says nothing about the tier."""
        if attempt is self._trial:
            self._trial = None


# ---- a tier with its speed and its breaker


T = TypeVar("T")

logger = logging.getLogger(__name__)

# A call that takes longer is a failure, and a miss for those who wait for it.
LIMIT_S: Final = 10.0


class MeasuredTier:
    """Calls of a tier. All run on the event loop, and none raises TierError."""

    def __init__(self, tier: LowerTier, clock: LeaseClock, limit_s: float = LIMIT_S) -> None:
        self._tier, self._clock, self._limit_s = tier, clock, limit_s
        self._breaker = Breaker()
        self._reads, self._writes = Speed(), Speed()
        # The bytes of transfers in progress.
        self._bytes_read, self._bytes_written = 0, 0
        self.counters = TierStats(tier.name)
        self._log = LogBudget(logger, clock.time)
        self._late: set[asyncio.Task[Any]] = set()

    @property
    def fault(self) -> str:
        """See LowerTier."""
        return self._tier.fault

    @property
    def name(self) -> str:
        return self._tier.name

    @property
    def is_available(self) -> bool:
        """Whether a call would reach the tier now."""
        return self._tier.stats().state == "open" and self._breaker.admits(self._clock.time())

    async def lookup(self, space: Space, keys: bytes, num_keys: int) -> bytes:
        """Return a byte per key: 1 if the tier has the value."""
        found = await self._ask("lookup", lambda: self._tier.lookup(space, keys))
        return bytes(num_keys) if found is None else found

    async def get(self, space: Space, values: Values, on_late: Callable[[], object]) -> GetResult:
        """Read values. `on_late` is called when the time limit has passed. The call itself ends when nobody touches the
        memory any more."""
        misses = GetResult(bytes(len(values)), bytes(8 * len(values)))
        if (attempt := self._begin("get")) is None:
            return misses
        num_bytes, began_s = len(values) * space.block_bytes, self._clock.time()
        self._bytes_read += num_bytes
        in_progress = self._bytes_read
        try:
            got = await self._transfer(attempt, self._tier.get(space, values), on_late)
        finally:
            self._bytes_read -= num_bytes
        if got is None:
            return misses
        num_found, seconds = sum(got.found), self._clock.time() - began_s
        if num_found == len(values):
            self._reads.add(in_progress, seconds)
        self.counters.read_values += num_found
        self.counters.read_bytes += num_found * space.block_bytes
        self.counters.read_s += seconds
        return got

    async def put(self, space: Space, values: Values) -> bytes:
        """Store values. Returns a byte per key: 1 if the tier has the value now."""
        if (attempt := self._begin("put")) is None:
            return bytes(len(values))
        num_bytes, began_s = len(values) * space.block_bytes, self._clock.time()
        self._bytes_written += num_bytes
        in_progress = self._bytes_written
        try:
            stored = await self._transfer(attempt, self._tier.put(space, values), lambda: None)
        finally:
            self._bytes_written -= num_bytes
        if stored is None:
            return bytes(len(values))
        num_stored, seconds = sum(stored), self._clock.time() - began_s
        if num_stored == len(values):
            self._writes.add(in_progress, seconds)
        self.counters.written_values += num_stored
        self.counters.written_bytes += num_stored * space.block_bytes
        self.counters.write_s += seconds
        return stored

    async def remove(self, space: Space, keys: bytes) -> bool:
        """Remove values. Returns whether that is done."""

        async def remove() -> bool:
            await self._tier.remove(space, keys)
            return True

        return await self._end(remove)

    async def clear(self, space: Space) -> bool:
        """Remove all values of a space. Returns whether that is done."""

        async def clear() -> bool:
            await self._tier.clear(space)
            return True

        return await self._end(clear)

    def num_in(self, seconds: float, block_bytes: int) -> float:
        """Return how many values can be read in this time, after the reads in progress."""
        return max(0.0, self._reads.bytes_in(seconds) - self._bytes_read) // block_bytes

    def stats(self) -> TierStats:
        stats, own = self._tier.stats(), self.counters
        return replace(
            own,
            num_values=stats.num_values,
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity_bytes,
            evicted=stats.evicted,
            removed=stats.removed,
            refused=own.refused + stats.refused,
            dropped=own.dropped + stats.dropped,
            corrupt=stats.corrupt,
            errors=own.errors + stats.errors,
            state="suspended" if self._breaker.is_suspended else stats.state,
            suspensions=self._breaker.num_suspensions,
            latency_s=self._reads.latency_s,
            read_bytes_per_s=self._reads.bytes_per_s,
            write_bytes_per_s=self._writes.bytes_per_s,
        )

    async def close(self) -> None:
        """Wait for calls in progress, then release the tier's resources."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(self._late)
        try:
            await self._tier.close()
        except TierError as error:
            self._log.write(logging.WARNING, "the tier %s was not closed in order: %s", self.name, error)

    # ---- one call

    def _begin(self, kind: str) -> Attempt | None:
        return self._breaker.begin(kind, self._clock.time()) if self._tier.stats().state == "open" else None

    async def _ask(self, kind: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Make a call that touches no memory. Returns None if it fails or takes too long."""
        if (attempt := self._begin(kind)) is None:
            return None
        late = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._transfer(attempt, call(), late.cancel))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        try:
            await asyncio.wait({task, late}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result() if task.done() and not task.cancelled() else None

    async def _end(self, call: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Make a call that removes values, and wait for its end even if it takes too long: it must not remove values
        that are stored after this. Returns False if it fails."""
        attempt = self._begin("remove")
        return attempt is not None and bool(await self._transfer(attempt, call(), lambda: None))

    async def _transfer(
        self, attempt: Attempt, call: Coroutine[Any, Any, T], on_late: Callable[[], object]
    ) -> T | None:
        """Make a call, and tell the breaker how it ends. Returns None if it fails or takes too long."""
        task = asyncio.create_task(call)
        is_late = False

        def expire() -> None:
            nonlocal is_late
            is_late = True
            self._failed(attempt, f"no answer in {self._limit_s:g} s")
            on_late()
            task.cancel()

        timer = self._clock.call_later(self._limit_s, expire)
        try:
            answer = await task
        except TierError as error:
            if not is_late:
                self._failed(attempt, str(error))
            return None
        except asyncio.CancelledError:
            self._breaker.abandoned(attempt)
            current = asyncio.current_task()
            if not is_late or (current is not None and current.cancelling()):
                raise
            return None
        except BaseException:
            self._breaker.abandoned(attempt)
            raise
        finally:
            timer.cancel()
        if not is_late and self._breaker.succeeded(attempt):
            self._log.write(logging.INFO, "the tier %s answers again", self.name)
        return answer

    def _failed(self, attempt: Attempt, reason: str) -> None:
        self.counters.errors += 1
        opened = self._breaker.failed(attempt, self._clock.time())
        end = ", it is left alone for a while" if opened else ""
        self._log.write(logging.WARNING, "the tier %s failed%s: %s", self.name, end, reason)
