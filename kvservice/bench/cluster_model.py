"""A model of daemons with their engines, to simulate placement: no processes, no bytes, a clock of its own.

An engine computes one prompt at a time, in the order of arrival, at `tokens_per_s`, less the more sequences it decodes.
Then it decodes `output_tokens_per_s` for each. The blocks of a prompt are in the cache from the end of its prefill, are
held until the end of its output, and are evicted then, least recently used first, leaves before roots. A prompt waits
until its blocks fit. Blocks of outputs take room, and are not cached; a next turn computes them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvservice.planning.trace import Trace, TracedRequest


@dataclass(frozen=True)
class Service:
    """How fast a daemon's engine is, and how many blocks its cache has. Each sequence that is decoded slows prefill by
    `decode_share` of its speed."""

    num_blocks: int
    tokens_per_s: float
    output_tokens_per_s: float = 50.0
    decode_share: float = 0.01


class Listener(Protocol):
    """Receives a daemon's events at once."""

    def stored(self, daemon: int, blocks: Sequence[int]) -> None: ...

    def removed(self, daemon: int, blocks: Sequence[int]) -> None: ...


@dataclass
class PlacedOutcome:
    """The outcome of a request."""

    daemon: int
    hit_tokens: int
    queued_s: float
    first_token_s: float


@dataclass
class ModelDaemon:
    """A daemon with its engine."""

    number: int
    block_size: int
    service: Service
    listener: Listener
    cached: dict[int, None] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    private_blocks: int = 0
    queue: deque[int] = field(default_factory=deque)
    busy: bool = False
    decoding: int = 0
    computed_tokens: int = 0

    @property
    def used_blocks(self) -> int:
        return len(self.held) + self.private_blocks

    def begin(self, request: TracedRequest) -> tuple[int, float] | None:
        """Begin a prefill: hold the cached blocks and make room for the others. Returns the tokens that were cached
        and the seconds that the rest takes; None: there is no room now."""
        found = next((n for n, one in enumerate(request.blocks) if not self._has(one)), len(request.blocks))
        hit = request.blocks[:found]
        again = sum(one not in self.held for one in hit)
        if self.used_blocks + again + self._needed(request, found) > self.service.num_blocks:
            return None
        for one in hit:
            self.cached.pop(one, None)
            self.held[one] = self.held.get(one, 0) + 1
        self.private_blocks += self._needed(request, found)
        self._evict()
        missing = max(1, request.input_tokens - found * self.block_size)
        self.computed_tokens += missing
        slowed = 1 + self.service.decode_share * self.decoding
        return found * self.block_size, missing / self.service.tokens_per_s * slowed

    def computed(self, request: TracedRequest, hit_tokens: int) -> None:
        """End a prefill: its blocks are cached."""
        new = request.blocks[hit_tokens // self.block_size :]
        for one in new:
            self.cached.pop(one, None)
            self.held[one] = self.held.get(one, 0) + 1
        self.private_blocks -= len(new)
        self.decoding += 1
        self.listener.stored(self.number, new)

    def finished(self, request: TracedRequest) -> None:
        """End the output: the blocks of the prompt may be evicted."""
        self.decoding -= 1
        self.private_blocks -= self._needed(request, len(request.blocks))
        for one in reversed(request.blocks):
            self.held[one] -= 1
            if not self.held[one]:
                del self.held[one]
                self.cached[one] = None

    def _has(self, block: int) -> bool:
        return block in self.held or block in self.cached

    def _needed(self, request: TracedRequest, found: int) -> int:
        """Return the blocks that a request takes besides those that were found."""
        return -(-(request.input_tokens + request.output_tokens) // self.block_size) - found

    def _evict(self) -> None:
        excess = self.used_blocks + len(self.cached) - self.service.num_blocks
        evicted = list(itertools.islice(self.cached, max(0, excess)))
        for one in evicted:
            del self.cached[one]
        if evicted:
            self.listener.removed(self.number, evicted)


class Router(Listener, Protocol):
    """Places requests."""

    def place(self, number: int, request: TracedRequest, /) -> int:
        """Return the daemon for a request."""

    def ended(self, number: int) -> None:
        """Note that a request's output is complete."""


class ClusterSimulation:
    """Runs a trace. Routers read `now` and `daemons`, and plan calls with `later`."""

    def __init__(self, trace: Trace, num_daemons: int, service: Service) -> None:
        self.trace, self.now = trace, 0.0
        self.served: list[PlacedOutcome] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._router: Router | None = None
        self.daemons = [ModelDaemon(number, trace.block_size, service, self) for number in range(num_daemons)]

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._numbers), call))

    def stored(self, daemon: int, blocks: Sequence[int]) -> None:
        assert self._router is not None
        self._router.stored(daemon, blocks)

    def removed(self, daemon: int, blocks: Sequence[int]) -> None:
        assert self._router is not None
        self._router.removed(daemon, blocks)

    def run(self, router: Router) -> list[PlacedOutcome]:
        """Return what became of each request."""
        self._router = router
        self.served = [PlacedOutcome(-1, 0, 0.0, 0.0) for _ in self.trace.requests]
        for number, request in enumerate(self.trace.requests):
            self._advance(request.arrival_s)
            daemon = router.place(number, request)
            self.served[number].daemon = daemon
            self.daemons[daemon].queue.append(number)
            self._next(self.daemons[daemon], router)
        self._advance(float("inf"))
        assert not any(daemon.queue for daemon in self.daemons), "a request is larger than the cache"
        return self.served

    def _advance(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()
        if until < float("inf"):
            self.now = until

    def _next(self, daemon: ModelDaemon, router: Router) -> None:
        """Begin the first prefill in the queue, if the engine is free and the blocks fit."""
        if daemon.busy or not daemon.queue:
            return
        number = daemon.queue[0]
        request = self.trace.requests[number]
        begun = daemon.begin(request)
        if begun is None:
            return
        daemon.queue.popleft()
        daemon.busy = True
        hit_tokens, takes_s = begun
        waited = self.now - request.arrival_s
        self.served[number] = PlacedOutcome(daemon.number, hit_tokens, waited, waited + takes_s)

        def computed() -> None:
            daemon.busy = False
            daemon.computed(request, hit_tokens)
            self.later(request.output_tokens / daemon.service.output_tokens_per_s, finished)
            self._next(daemon, router)

        def finished() -> None:
            daemon.finished(request)
            router.ended(number)
            self._next(daemon, router)

        self.later(takes_s, computed)
