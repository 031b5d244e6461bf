"""The blocks that one daemon has in its prefix cache, as far as a router knows."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

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
