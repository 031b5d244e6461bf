"""Ways to place requests, for the simulation of a cluster."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from zlib import crc32

from kvservice.bench.cluster_model import ClusterSimulation, Router
from kvservice.client.cluster.placement import HashedPrompt, Load, PlacedPrompt, Placement, PlacementSettings
from kvservice.planning.trace import TracedRequest

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
