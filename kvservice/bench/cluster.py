"""Placing requests over 1, 8 and 64 daemons, simulated: hit share, balance and queueing of the client's placement
against simpler policies, perfect knowledge and bounds. The client's own code places; the rest is a model."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree
from zlib import crc32

from rich.console import Console

from kvservice.bench import table
from kvservice.bench.plot import COLOURS, text
from kvservice.client.cluster.placement import HashedPrompt, Load, PlacedPrompt, Placement, PlacementSettings
from kvservice.planning.trace import ConversationLoad, Trace, TracedRequest, read_trace, synthetic_trace

__all__ = [
    "ClusterBenchOptions",
    "ClusterSimulation",
    "Service",
    "everything_share",
    "measure",
    "one_cache_share",
    "policies",
    "render",
    "run",
]

# ---- the model
#
# A model of daemons with their engines, to simulate placement: no processes, no bytes, a clock of its own.
#
# An engine computes one prompt at a time, in the order of arrival, at `tokens_per_s`, less the more sequences it
# decodes. Then it decodes `output_tokens_per_s` for each. The blocks of a prompt are in the cache from the end of its
# prefill, are held until the end of its output, and are evicted then, least recently used first, leaves before roots. A
# prompt waits until its blocks fit. Blocks of outputs take room, and are not cached; a next turn computes them.


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


# ---- ways to place requests, for the simulation of a cluster


# Seconds between reports of load, as the client's default.
REPORT_S = 1.0
NEVER_S = 1e12


class Uninformed:
    """A router that needs no events."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        self.simulation = simulation

    def stored(self, daemon: int, blocks: Sequence[int]) -> None:
        pass

    def removed(self, daemon: int, blocks: Sequence[int]) -> None:
        pass

    def ended(self, number: int) -> None:
        pass


class RandomRouter(Uninformed):
    """Any daemon."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        super().__init__(simulation)
        self._rng = random.Random(0)

    def place(self, _number: int, _request: TracedRequest) -> int:
        return self._rng.randrange(len(self.simulation.daemons))


class RoundRobin(Uninformed):
    """One daemon after the other."""

    def place(self, number: int, _request: TracedRequest) -> int:
        return number % len(self.simulation.daemons)


class Sticky(Uninformed):
    """The daemon that the hash of the conversation gives."""

    def place(self, _number: int, request: TracedRequest) -> int:
        return crc32(b"%d" % request.conversation) % len(self.simulation.daemons)


class LeastLoaded(Uninformed):
    """The daemon with the fewest requests that are not finished, then with the fewest used blocks."""

    def place(self, _number: int, _request: TracedRequest) -> int:
        def load(daemon: int) -> tuple[int, int]:
            one = self.simulation.daemons[daemon]
            return len(one.queue) + one.busy + one.decoding, one.used_blocks

        return min(range(len(self.simulation.daemons)), key=load)


class Placing:
    """The client's own placement, with events that come `delay_s` late; without a delay and with loads that are known
    at once it is the oracle."""

    def __init__(
        self, simulation: ClusterSimulation, delay_s: float, settings: PlacementSettings, *, exact: bool
    ) -> None:
        self._simulation, self._delay_s, self._exact = simulation, delay_s, exact
        self._names = [str(daemon.number) for daemon in simulation.daemons]
        self._placement = Placement(self._names, lambda: simulation.now, settings)
        self._placed: dict[int, PlacedPrompt] = {}
        self._reported_at = -REPORT_S

    def place(self, number: int, request: TracedRequest) -> int:
        self._report()
        prompt = HashedPrompt(request.input_tokens, self._simulation.trace.block_size, request.blocks)
        best = self._placement.rank(prompt, self._names)[0].daemon
        if not self._exact:
            # MatchPrefix confirms or corrects the claim, as in the client.
            for _ in range(2):
                self._check(prompt, int(best))
                best = self._placement.rank(prompt, self._names)[0].daemon
        self._placed[number] = self._placement.place(prompt, best)
        return int(best)

    def _check(self, prompt: HashedPrompt, daemon: int) -> None:
        blocks, one = prompt.hashes, self._simulation.daemons[daemon]
        found = next((n for n, block in enumerate(blocks) if block not in one.held and block not in one.cached), None)
        known = self._placement.prefixes(str(daemon))
        if known.match(blocks).num_cached:
            known.learn(blocks, len(blocks) if found is None else found)

    def _report(self) -> None:
        if self._exact or self._simulation.now - self._reported_at >= REPORT_S:
            self._reported_at = self._simulation.now
            for daemon in self._simulation.daemons:
                self._placement.report(str(daemon.number), Load(daemon.service.num_blocks, daemon.used_blocks))

    def stored(self, daemon: int, blocks: Sequence[int]) -> None:
        self._after_delay(lambda: self._placement.prefixes(str(daemon)).store(blocks))

    def removed(self, daemon: int, blocks: Sequence[int]) -> None:
        self._after_delay(lambda: self._placement.prefixes(str(daemon)).remove(blocks))

    def ended(self, number: int) -> None:
        self._placement.end(self._placed.pop(number))

    def _after_delay(self, call: Callable[[], None]) -> None:
        if self._delay_s:
            self._simulation.later(self._delay_s, call)
        else:
            call()


OURS, ORACLE = "kvservice", "the same, perfect knowledge"


def policies(delay_s: float, settings: PlacementSettings) -> dict[str, Callable[[ClusterSimulation], Router]]:
    """Return the makers of routers by name."""
    exact = PlacementSettings(settings.queue_weight, expected_s=NEVER_S, max_blocks=1 << 40)
    return {
        "random": RandomRouter,
        "round robin": RoundRobin,
        "least loaded": LeastLoaded,
        "sticky": Sticky,
        OURS: lambda simulation: Placing(simulation, delay_s, settings, exact=False),
        ORACLE: lambda simulation: Placing(simulation, 0.0, exact, exact=True),
    }


# ---- upper bounds of the hit share of a trace, whatever the placement


def everything_share(trace: Trace) -> float:
    """Return the hit share if nothing were ever evicted, and all daemons had one cache."""
    seen, hits = set[int](), 0
    for request in trace.requests:
        hits += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    return hits * trace.block_size / trace.input_tokens


def one_cache_share(trace: Trace, num_blocks: int) -> float:
    """Return the hit share of one cache with the room of all daemons that knows the future: it evicts, or does not
    keep, the block that is needed last (Belady's MIN), and any block counts, with or without those before it."""
    accesses = [block for request in trace.requests for block in request.blocks]
    next_use = [len(accesses)] * len(accesses)
    last: dict[int, int] = {}
    for position in range(len(accesses) - 1, -1, -1):
        next_use[position] = last.get(accesses[position], len(accesses))
        last[accesses[position]] = position
    cached: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for position, block in enumerate(accesses):
        hits += block in cached
        cached[block] = next_use[position]
        heapq.heappush(latest, (-next_use[position], block))
        while len(cached) > num_blocks:
            use, candidate = heapq.heappop(latest)
            if cached.get(candidate) == -use:
                del cached[candidate]
    return hits * trace.block_size / trace.input_tokens


# ---- the measurement


DAEMONS = (1, 8, 64)
# The number of daemons for which events come late.
DELAYED = 8
DELAYS_S = (0.0, 0.1, 1.0, 10.0, 60.0)
# The delay of events in the comparison of policies: the daemon gathers them for 5 ms.
DELAY_S = 0.01
# Conversations for each daemon of a synthetic trace, and their rate.
CONVERSATIONS, CONVERSATIONS_PER_S = 20, 0.05
# Blocks of 64 tokens of one daemon's cache in a synthetic trace, and of all daemons' together for a trace from a file.
SYNTHETIC_BLOCKS, FILE_BLOCKS = 512, 40_960


@dataclass(frozen=True)
class ClusterBenchOptions:
    """Options of `bench cluster`. `demand` is the tokens of all prompts a second over those that the engines compute a
    second: above 1 only hits keep up."""

    trace: str | None = None
    seed: int = 0
    demand: float = 1.5
    queue_weight: float = PlacementSettings.queue_weight
    plot: str | None = None
    quick: bool = False


def run(options: ClusterBenchOptions) -> dict[str, Any]:
    """Return the figures of each number of daemons, and those of later and later events. Raises
    InvalidArgumentError for a file that is not a trace."""
    settings = PlacementSettings(options.queue_weight)
    clusters = []
    counts = DAEMONS[: 2 if options.quick else 3]
    workloads = {num_daemons: workload(options, num_daemons) for num_daemons in counts}
    for num_daemons, (trace, service) in workloads.items():
        rows = {name: measure(trace, num_daemons, service, make) for name, make in policies(DELAY_S, settings).items()}
        clusters.append(
            {
                "daemons": num_daemons,
                "trace": trace.name,
                "requests": len(trace.requests),
                "input_tokens": trace.input_tokens,
                "blocks": service.num_blocks,
                "block_size": trace.block_size,
                "tokens_per_s": service.tokens_per_s,
                "one_cache_share": one_cache_share(trace, service.num_blocks * num_daemons),
                "everything_share": everything_share(trace),
                "policies": rows,
            }
        )
    trace, service = workloads[DELAYED]
    delays = {delay_s: measure(trace, DELAYED, service, policies(delay_s, settings)[OURS]) for delay_s in DELAYS_S}
    results = {"demand": options.demand, "clusters": clusters, "delays": delays}
    if options.plot is not None:
        write_plot(options.plot, results)
    return results


def workload(options: ClusterBenchOptions, num_daemons: int) -> tuple[Trace, Service]:
    """Return the trace and the daemons. A synthetic trace grows with the daemons; one from a file is the same for any
    number of them, with the same room and the same speed in all."""
    if options.trace is not None:
        trace, num_blocks = read_trace(options.trace), FILE_BLOCKS // num_daemons
    else:
        conversations = CONVERSATIONS * num_daemons // (2 if options.quick else 1)
        made = ConversationLoad(
            conversations, CONVERSATIONS_PER_S * num_daemons, num_system_prompts=8 + 4 * num_daemons
        )
        trace, num_blocks = synthetic_trace(made, options.seed), SYNTHETIC_BLOCKS
    speed = trace.input_tokens / trace.duration_s / num_daemons / options.demand
    return trace, Service(num_blocks, speed)


def measure(trace: Trace, num_daemons: int, service: Service, make: Any) -> dict[str, Any]:
    """Run a trace with one policy and return its figures."""
    simulation = ClusterSimulation(trace, num_daemons, service)
    served = simulation.run(make(simulation))
    return figures(trace, simulation, served)


def figures(trace: Trace, simulation: ClusterSimulation, served: list[PlacedOutcome]) -> dict[str, Any]:
    """Return the share of prompt tokens that were cached; the most tokens that a daemon has computed, over the mean;
    and the times in seconds that requests waited for their prefill to begin."""
    computed = [daemon.computed_tokens for daemon in simulation.daemons]
    queued = sorted(one.queued_s for one in served)
    return {
        "hit_share": sum(one.hit_tokens for one in served) / trace.input_tokens,
        "imbalance": max(computed) / statistics.fmean(computed),
        "queued_mean_s": statistics.fmean(queued),
        "queued_p50_s": statistics.median(queued),
        "queued_p99_s": queued[min(len(queued) - 1, len(queued) * 99 // 100)],
        "first_token_mean_s": statistics.fmean(one.first_token_s for one in served),
    }


def render(results: dict[str, Any], console: Console) -> None:
    for cluster in results["clusters"]:
        title = (
            f"{cluster['daemons']} daemons, {cluster['trace']}: {cluster['requests']} requests, "
            f"{cluster['input_tokens']} prompt tokens; {cluster['blocks']} blocks of {cluster['block_size']} and "
            f"{cluster['tokens_per_s']:.0f} tokens/s each"
        )
        shown = table(title, ["policy"], ["hit share", "max/mean computed", "queued s, mean", "p50", "p99"])
        for name, row in cluster["policies"].items():
            times = [f"{row[f'queued_{which}_s']:.3g}" for which in ("mean", "p50", "p99")]
            shown.add_row(name, f"{row['hit_share']:.3f}", f"{row['imbalance']:.2f}", *times)
        shown.add_row("bound: one cache of all the room", f"{cluster['one_cache_share']:.3f}")
        shown.add_row("bound: nothing evicted", f"{cluster['everything_share']:.3f}")
        console.print(shown)
    late = table(f"{DELAYED} daemons, events late", ["delay in s"], ["hit share", "queued s"])
    for delay_s, row in results["delays"].items():
        late.add_row(f"{delay_s:g}", f"{row['hit_share']:.3f}", f"{row['queued_mean_s']:.3g}")
    console.print(late)


# ---- the chart of the simulated clusters: bars for each policy, grouped by the number of daemons


WIDTH, HEIGHT, LEFT, TOP, BAR = 960, 220, 60, 34, 26
# Space right of the bars, for the names of the policies.
LEGEND = 250
PANELS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    (
        "share of prompt tokens found in a cache; line: bound of one cache with all the room",
        lambda row: row["hit_share"],
    ),
    ("most tokens computed by a daemon, over the mean", lambda row: row["imbalance"]),
    ("mean queueing delay, in units of random placement", lambda row: row["queued"]),
)


def write_plot(path: str, results: dict[str, Any]) -> None:
    """Write the chart. Raises OSError."""
    size = {"width": str(WIDTH), "height": str(HEIGHT * len(PANELS))}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", **size})
    ElementTree.SubElement(root, "rect", {**size, "fill": "white"})
    for number, (title, value) in enumerate(PANELS):
        group = ElementTree.SubElement(root, "g", {"transform": f"translate(0 {number * HEIGHT})"})
        _draw(group, title, value, results["clusters"], with_bound=number == 0)
    Path(path).write_bytes(ElementTree.tostring(root))


def _draw(
    group: ElementTree.Element,
    title: str,
    value: Callable[[dict[str, Any]], float],
    clusters: list[dict[str, Any]],
    *,
    with_bound: bool,
) -> None:
    names = list(clusters[0]["policies"])
    heights = [[value(row) for row in _rows(cluster).values()] for cluster in clusters]
    bounds = [cluster["one_cache_share"] for cluster in clusters] if with_bound else []
    most = max([*(height for one in heights for height in one), *bounds, 1e-9])
    bottom, width = HEIGHT - 30, BAR * (len(names) + 2)
    text(group, (LEFT, TOP - 14), title, size=14)
    for tick in (0.0, 0.5, 1.0):
        y = bottom - tick * (bottom - TOP)
        _box(group, LEFT, y, width * len(clusters), 0.5, "#cccccc")
        text(group, (LEFT - 6, y + 4), f"{most * tick:.3g}", anchor="end")
    for place, (cluster, bars) in enumerate(zip(clusters, heights, strict=True)):
        left = LEFT + place * width + BAR
        for number, height in enumerate(bars):
            tall = height / most * (bottom - TOP)
            _box(group, left + number * BAR, bottom - tall, BAR - 3, tall, COLOURS[number % len(COLOURS)])
        if with_bound:
            _box(group, left, bottom - bounds[place] / most * (bottom - TOP), BAR * len(bars), 1.5, "#000000")
        label = f"{cluster['daemons']} daemon{'s' * (cluster['daemons'] > 1)}"
        text(group, (left + BAR * len(bars) / 2, bottom + 16), label, anchor="middle")
    for number, name in enumerate(names):
        _box(group, WIDTH - LEGEND, TOP + 20 * number, 12, 12, COLOURS[number % len(COLOURS)])
        text(group, (WIDTH - LEGEND + 18, TOP + 20 * number + 11), name)


def _rows(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the policies' figures, with the queueing delay in units of that of random placement."""
    unit = cluster["policies"]["random"]["queued_mean_s"] or 1.0
    return {name: row | {"queued": row["queued_mean_s"] / unit} for name, row in cluster["policies"].items()}


def _box(group: ElementTree.Element, x: float, y: float, width: float, height: float, colour: str) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    ElementTree.SubElement(group, "rect", {**place, "fill": colour})
