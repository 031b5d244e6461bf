"""The rule by which a prompt is placed at one of several daemons. It does no I/O and reads no clock: the client and the
simulation (`kvservice bench cluster`) run the same code.

The cost of a daemon is the work, in tokens, that lies before the prompt's first token there:

    cost = (tokens of the prompt that are not cached + queue_weight x tokens that are still to be computed)
           x (1 + the used share of the pool)

The prompt goes where the cost is least. So a prefix draws prompts to the daemon that has it, until the queue there is
longer than computing the prefix elsewhere; then a second daemon gets the prefix too. Cached tokens are those of the
daemon's block events, see `prefixes`; tokens still to be computed are those of prompts that were placed and whose
blocks no event has reported yet. Daemons of equal cost, work and number of sessions are ordered by rendezvous hashing
of the prompt's first block, so that routers which know nothing of each other agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from kvservice.client.cluster.prefixes import CachedPrefixes, Hashes


@dataclass(frozen=True)
class PlacementSettings:
    """`queue_weight`: below 1, prompts wait somewhat longer for a prefix than computing it again would take, which pays
    because the next prompts find it too; the bench's README compares some. `expected_s`: after this many seconds, a
    placed prompt whose blocks no event has reported no longer counts as queued. `max_blocks`: blocks that are known of
    each daemon at most, about 150 bytes each."""

    queue_weight: float = 0.5
    expected_s: float = 300.0
    max_blocks: int = 1 << 17


class HashedPrompt(NamedTuple):
    """A prompt as placement sees it. `hashes` are those of its full blocks."""

    num_tokens: int
    block_size: int
    hashes: Hashes


class Load(NamedTuple):
    """What a daemon reports: blocks of its pool, and those of them that are in block tables or pinned."""

    num_blocks: int
    used_blocks: int


class Candidate(NamedTuple):
    """A daemon for a prompt. `num_cached_tokens` are those that the router knows to be cached there, and
    `num_expected_tokens` also those that the daemon will have computed for earlier prompts."""

    daemon: str
    cost: float
    num_cached_tokens: int
    num_expected_tokens: int


class PlacedPrompt(NamedTuple):
    """A prompt that was placed, until it ends."""

    number: int
    daemon: str
    hashes: Hashes


class _Known:
    """What is known of a daemon."""

    def __init__(self, settings: PlacementSettings) -> None:
        self.prefixes = CachedPrefixes(settings.max_blocks)
        self.load = Load(1, 0)
        self.sessions = 0


class Placement:
    """Knows the daemons' caches and loads, and ranks daemons for a prompt. `clock` returns seconds."""

    def __init__(
        self, daemons: Iterable[str], clock: Callable[[], float], settings: PlacementSettings | None = None
    ) -> None:
        self.settings = settings or PlacementSettings()
        self._clock = clock
        self._known = {daemon: _Known(self.settings) for daemon in daemons}
        self._numbers = itertools.count(1)

    # ---- what is reported

    def prefixes(self, daemon: str) -> CachedPrefixes:
        """Return the known blocks of a daemon. The caller adds its events."""
        return self._known[daemon].prefixes

    def report(self, daemon: str, load: Load) -> None:
        self._known[daemon].load = load

    def sessions(self, daemon: str) -> int:
        """Return the number of placed prompts that have not ended."""
        return self._known[daemon].sessions

    # ---- decisions

    def rank(self, prompt: HashedPrompt, among: Collection[str]) -> list[Candidate]:
        """Return the daemons `among` all, the best first."""
        root = repr(prompt.hashes[0]).encode() if prompt.hashes else b""
        ranked = [(self._candidate(daemon, prompt), rendezvous(root, daemon)) for daemon in among]
        # Of equal costs the least work is better: waiting for a prefix costs no more than computing it again.
        ranked.sort(key=lambda one: (one[0].cost, -one[0].num_expected_tokens, self.sessions(one[0].daemon), -one[1]))
        return [candidate for candidate, _ in ranked]

    def place(self, prompt: HashedPrompt, daemon: str) -> PlacedPrompt:
        """Note that a prompt goes to a daemon."""
        known, placed = self._known[daemon], PlacedPrompt(next(self._numbers), daemon, prompt.hashes)
        known.sessions += 1
        known.prefixes.expect(prompt.hashes, self._clock() + self.settings.expected_s, placed.number)
        return placed

    def end(self, placed: PlacedPrompt) -> None:
        """Note that a placed prompt is over, computed or not."""
        known = self._known[placed.daemon]
        known.sessions -= 1
        known.prefixes.give_up(placed.hashes, placed.number)

    def _candidate(self, daemon: str, prompt: HashedPrompt) -> Candidate:
        known = self._known[daemon]
        known.prefixes.expire(self._clock())
        match = known.prefixes.match(prompt.hashes)
        # The last token of a prompt is always computed, for its logits.
        missing = max(1, prompt.num_tokens - match.num_expected * prompt.block_size)
        queued = known.prefixes.num_expected * prompt.block_size
        cost = missing + self.settings.queue_weight * queued
        used = known.load.used_blocks / known.load.num_blocks
        cached, expected = (number * prompt.block_size for number in match)
        return Candidate(daemon, cost * (1 + used), cached, expected)


def rendezvous(key: bytes, daemon: str) -> int:
    """Return the weight of a daemon for a key. The daemon with the highest weight has the key (rendezvous hashing,
    Thaler and Ravishankar): without one daemon, only its own keys move."""
    return int.from_bytes(blake2b(key + b"\0" + daemon.encode(), digest_size=8).digest())
