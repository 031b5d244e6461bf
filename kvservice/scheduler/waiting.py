"""The queue of waiting requests, sorted by rank."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from kvservice.scheduler.requests import RequestState


class WaitingQueue:
    """Waiting requests in the order of their ranks, which are distinct. The first is admitted first. A sample waits
    alone; of beams that wait together the first stands for all. `num_samples` counts them all."""

    def __init__(self) -> None:
        self._ranks: list[tuple[int, float, int]] = []
        self._states: list[RequestState] = []
        self._sizes: list[int] = []
        self.num_samples = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def __contains__(self, state: object) -> bool:
        """Return whether a request is at its place in the queue."""
        if not isinstance(state, RequestState):
            return False
        at = bisect.bisect_left(self._ranks, state.rank)
        return at < len(self._states) and self._states[at] is state

    def add(self, state: RequestState, num_samples: int = 1) -> None:
        """Insert a request at its place. It stands for `num_samples` beams."""
        at = bisect.bisect_left(self._ranks, state.rank)
        self._ranks.insert(at, state.rank)
        self._states.insert(at, state)
        self._sizes.insert(at, num_samples)
        self.num_samples += num_samples

    def remove(self, state: RequestState) -> None:
        """Remove a request that is in the queue."""
        at = bisect.bisect_left(self._ranks, state.rank)
        assert self._states[at] is state, "every waiting request is at its rank"
        del self._ranks[at]
        del self._states[at]
        self.num_samples -= self._sizes.pop(at)

    def discard(self, state: RequestState) -> None:
        """Remove a request if it is in the queue. Of beams, only the first is."""
        if state in self:
            self.remove(state)

    def oldest_arrival_s(self) -> float:
        """Return the earliest arrival of the queue, which is not empty."""
        return min(state.arrived_at_s for state in self._states)
