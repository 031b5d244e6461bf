"""The rule by which a prompt is placed at one of several daemons. It does no I/O and reads no clock: the client and the
simulation (`kvservice bench cluster`) run the same code.

The cost of a daemon is the work, in tokens, that lies before the prompt's first token there:

    cost = (tokens of the prompt that are not cached + queue_weight x tokens that are still to be computed)
           x (1 + the used share of the pool)

The prompt goes where the cost is least. So a prefix draws prompts to the daemon that has it, until the queue there is
longer than computing the prefix elsewhere; then a second daemon gets the prefix too. Cached tokens are those of the
daemon's block events, see CachedPrefixes; tokens still to be computed are those of prompts that were placed and whose
blocks no event has reported yet. Daemons of equal cost, work and number of sessions are ordered by rendezvous hashing
of the prompt's first block, so that routers which know nothing of each other agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from kvservice.chain_hash import block_hash, encoded_extra_keys, root_hash
from kvservice.client.messages import ExtraKeys, int_list, whole
from kvservice.errors import InvalidArgumentError

Hashes = Sequence[Hashable]


class Match(NamedTuple):
    """Leading blocks of a prompt. `num_expected` counts the cached ones and those that will be computed soon."""

    num_cached: int
    num_expected: int


class CachedPrefixes:
    """The chain hashes of a daemon's cached blocks, and of blocks that it is expected to compute.

    Blocks become cached by the daemon's events, or because the daemon was asked. At most `max_blocks` are kept; the
    least recently used ones are forgotten. After a loss of events the entries are doubtful: they stay, because most are
    still right, until the daemon contradicts one.

    Expected blocks belong to prompts that were placed a moment ago. They are the daemon's queue of work, and the next
    prompt that shares them finds them computed by the time it is its turn. They expire.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # The epoch in which each block was last reported. The order is that of their use, the oldest first.
        self._cached: dict[Hashable, int] = {}
        self._epoch = 0
        # Whether no event is missing since the cache was last empty.
        self._is_complete = True
        # The time of expiry and the placement of each expected block, in the order of expiry.
        self._expected: dict[Hashable, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def num_expected(self) -> int:
        """The number of blocks that are expected and not cached yet."""
        return len(self._expected)

    def store(self, hashes: Iterable[Hashable]) -> None:
        """Note that blocks are cached. Their root comes first."""
        for block in hashes:
            self._cached.pop(block, None)
            self._cached[block] = self._epoch
            self._expected.pop(block, None)
        self._trim()

    def remove(self, hashes: Iterable[Hashable]) -> None:
        for block in hashes:
            self._cached.pop(block, None)

    def clear(self) -> None:
        self._cached.clear()
        self._is_complete = True

    def doubt(self) -> None:
        """Note that events are missing."""
        self._epoch += 1
        self._is_complete = False

    def misses_some(self, hashes: Hashes) -> bool:
        """Return whether more of these blocks may be cached than `match` says, because events are missing."""
        return not self._is_complete and self._count(hashes) < len(hashes)

    def match(self, hashes: Hashes) -> Match:
        """Return how many leading blocks are cached, and how many are cached or expected."""
        cached = self._count(hashes)
        expected = cached
        for block in itertools.islice(hashes, cached, None):
            if block not in self._cached and block not in self._expected:
                break
            expected += 1
        return Match(cached, expected)

    def learn(self, hashes: Hashes, num_found: int) -> None:
        """Note the daemon's answer: it has the first `num_found` of these blocks, and not the next."""
        claimed = self._count(hashes)
        if num_found == 0 and claimed and self._cached[hashes[0]] < self._epoch:
            # Nothing of what was known before the loss can be relied on: the daemon may have begun empty.
            self._cached = {block: epoch for block, epoch in self._cached.items() if epoch == self._epoch}
        self.remove(itertools.islice(hashes, num_found, max(num_found, claimed)))
        # In reverse, so that a prefix is forgotten from its end.
        self.store(reversed(hashes[:num_found]))

    def expect(self, hashes: Hashes, until: float, placement: int) -> None:
        """Note that a prompt was placed: the blocks that are not cached will be computed."""
        for block in hashes:
            if block not in self._cached:
                self._expected.pop(block, None)
                self._expected[block] = until, placement
        for block in reversed(hashes):
            if (epoch := self._cached.pop(block, None)) is not None:
                self._cached[block] = epoch
        for block in list(itertools.islice(self._expected, max(0, len(self._expected) - self._max_blocks))):
            del self._expected[block]

    def give_up(self, hashes: Iterable[Hashable], placement: int) -> None:
        """Note that a placement has ended: blocks that it alone would have computed are no longer expected."""
        for block in hashes:
            if (entry := self._expected.get(block)) is not None and entry[1] == placement:
                del self._expected[block]

    def expire(self, now: float) -> None:
        """Forget the expected blocks whose time is over."""
        while self._expected and self._expected[first := next(iter(self._expected))][0] <= now:
            del self._expected[first]

    def _count(self, hashes: Hashes) -> int:
        """Return the number of leading blocks that are cached."""
        for number, block in enumerate(hashes):
            if block not in self._cached:
                return number
        return len(hashes)

    def _trim(self) -> None:
        for block in list(itertools.islice(self._cached, max(0, len(self._cached) - self._max_blocks))):
            del self._cached[block]


# ---- the rule


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
    """A daemon's report: blocks of its pool, and those of them that are in block tables or pinned."""

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
    """The cached prefixes, the load and the placed prompts of a daemon, as far as they are known."""

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
        # Among equal costs the least work is better: waiting for a prefix costs no more than computing it again.
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


def to_prompt(token_ids: Iterable[int], extra_keys: ExtraKeys, block_size: int) -> HashedPrompt:
    """Compute the hashes of a prompt's full blocks. Raises InvalidArgumentError naming token_ids or extra_keys."""
    listed = int_list(token_ids, "token_ids")
    try:
        tokens = np.asarray(listed) if listed else np.zeros(0, np.int32)
    except ValueError as error:  # lists of several lengths
        raise InvalidArgumentError(str(error), field="token_ids") from None
    whole_numbers = tokens.ndim == 1 and tokens.dtype.kind in "iu"
    if not whole_numbers or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31):
        raise InvalidArgumentError("must be whole numbers from 0 to below 2**31", field="token_ids")
    data = tokens.astype("<i4").tobytes()
    pairs = [(whole(position, "extra_keys"), bytes(key)) for position, key in extra_keys]
    if any(position < 0 for position, _ in pairs):
        raise InvalidArgumentError("a position is negative", field="extra_keys")
    extra = encoded_extra_keys(pairs, block_size)
    size, parent = 4 * block_size, root_hash(block_size)
    hashes: list[bytes] = []
    for start in range(0, len(data) - size + 1, size):
        parent = block_hash(parent, data[start : start + size], extra.get(start // size, b""))
        hashes.append(parent)
    return HashedPrompt(len(tokens), block_size, hashes)
