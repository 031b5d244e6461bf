"""The open lanes of all sessions, and the steps that they complete.

The thread of a lane adds a step to `Device.finished_steps` before it completes the call for the last layer. The event
loop commits the step when the lane signals it, and before any call. So a call that a client makes after it has seen the
completion finds the step committed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvservice.devices import FinishedSteps, LaneServer

# The number of calls, the number of failed calls, the latency histogram (calls per bucket, the last entry is the
# overflow), and the sum of the latencies in seconds.
LaneStats: TypeAlias = tuple[int, int, list[int], float]


class LaneOwner(Protocol):
    """The session that a lane belongs to."""

    def commit(self, step_id: int) -> None:
        """Commit a step whose last layer was written by the lane."""

    def drain(self) -> None:
        """Make the lane refuse steps that have not begun."""

    def close_lane(self) -> None:
        """Close the lane."""


@dataclass(frozen=True)
class OpenLane:
    owner: LaneOwner
    server: LaneServer


class Lanes:
    """All open lanes, by the number of their session, see `new_number`."""

    def __init__(self, num_buckets: int, finished_steps: FinishedSteps) -> None:
        """`num_buckets` is the length of the latency histograms."""
        self._finished_steps = finished_steps
        self._lanes: dict[int, OpenLane] = {}
        self._numbers = itertools.count()
        # Totals over closed lanes.
        self._ended: LaneStats = (0, 0, [0] * num_buckets, 0.0)

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def descriptor(self) -> int:
        """The file descriptor that is readable while there are steps for `commit_finished`."""
        return self._finished_steps.descriptor

    def new_number(self) -> int:
        """Return a number for the lanes of a session. It identifies the session in the finished steps."""
        return next(self._numbers)

    def add(self, number: int, owner: LaneOwner, server: LaneServer) -> None:
        self._lanes[number] = OpenLane(owner, server)

    def end(self, number: int) -> None:
        """Close a lane after its running calls, and commit the steps that it completed."""
        server = self._lanes[number].server
        server.close()
        self.commit_finished()
        del self._lanes[number]
        self._ended = _sum(self._ended, server.stats())

    def commit_finished(self) -> None:
        """Commit the steps whose last layer was written by a lane. Costs little if there are none."""
        for number, step_id in self._finished_steps.take():
            self._lanes[number].owner.commit(step_id)

    def stats(self) -> LaneStats:
        """Return totals over open and closed lanes."""
        stats = self._ended
        for lane in self._lanes.values():
            stats = _sum(stats, lane.server.stats())
        return stats

    def drain(self) -> None:
        """Make all lanes refuse steps that have not begun."""
        for lane in self._lanes.values():
            lane.owner.drain()

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            lane.owner.close_lane()


def _sum(one: LaneStats, other: LaneStats) -> LaneStats:
    counts = [a + b for a, b in zip(one[2], other[2], strict=True)]
    return one[0] + other[0], one[1] + other[1], counts, one[3] + other[3]
