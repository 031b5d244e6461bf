"""The daemons of a cluster: which can be used, what is known of each, and the tasks that find out.

For each daemon there are two background tasks. One asks for its health and load, and decides whether it is used. The
other follows its block events. A call that fails takes its daemon out of use at once, and wakes the first task.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from kvservice.client.cluster.availability import Availability
from kvservice.client.cluster.links import DaemonLink, DaemonReport, MakeLink
from kvservice.client.cluster.placement import Placement
from kvservice.client.cluster.values import ClusterDaemon, ClusterOptions
from kvservice.client.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvservice.client.waiting import Background, Waiting
from kvservice.errors import ConnectionLostError, FailedPreconditionError, KVServiceError, NoDaemonError

ClientT = TypeVar("ClientT")

_LOG = logging.getLogger(__name__)

# Another waiter may clear the signal of a change, so conditions are also looked at after this many seconds.
MAX_WAIT_S = 0.2


class Member(Generic[ClientT]):
    """A daemon of the cluster."""

    def __init__(self, address: str, link: DaemonLink[ClientT], availability: Availability, waiting: Waiting) -> None:
        self.address, self.link, self.availability = address, link, availability
        self.wake = waiting.signal()
        self.report: DaemonReport | None = None
        self.events = "not following yet"


class Members(Generic[ClientT]):
    """All daemons of a cluster. `placement` is shared with the threads of the sync API and needs `lock`."""

    def __init__(
        self, addresses: Iterable[str], options: ClusterOptions, waiting: Waiting, make_link: MakeLink[ClientT]
    ) -> None:
        self._options, self._waiting = options, waiting
        self.by_address = {
            address: Member(address, make_link(address), Availability(waiting.clock, random.random), waiting)
            for address in addresses
        }
        self.placement = Placement(self.by_address, waiting.clock, options.placement)
        self.lock = threading.Lock()
        # Set with each change of availability.
        self._changed = waiting.signal()
        # Set with `close`.
        self._stop = waiting.signal()
        self._closed = False
        self._background: list[Background] = []

    async def start(self) -> None:
        """Begin to watch the daemons. Raises NoDaemonError."""
        for daemon in self.by_address.values():
            await daemon.link.open()
            self._background.append(self._waiting.start(self._watch(daemon)))
            self._background.append(self._waiting.start(self._follow(daemon)))
        if self._options.connect_timeout_s is not None:
            # A daemon that is up does not suffice: the first placements are to know all that answer.
            deadline = self._waiting.clock() + self._options.connect_timeout_s
            await self.wait(self._all_asked, deadline)
            if not self.up():
                raise self.none()

    async def close(self) -> None:
        """Close all connections. Sessions that are open are detached."""
        self._closed = True
        self._changed.set()
        self._stop.set()
        for daemon in self.by_address.values():
            daemon.link.stop_events()
            daemon.wake.set()
        for background in self._background:
            await background.stop()
        for daemon in self.by_address.values():
            await daemon.link.close()

    def up(self) -> list[str]:
        """Return the addresses of the daemons that can be used."""
        return [address for address, daemon in self.by_address.items() if daemon.availability.is_up]

    def _all_asked(self) -> bool:
        """Return whether each daemon has answered or failed, and at least one can be used."""
        return bool(self.up()) and all(one.availability.has_answered for one in self.by_address.values())

    def daemons(self) -> list[ClusterDaemon]:
        with self.lock:
            return [self._describe(daemon) for daemon in self.by_address.values()]

    async def _watch(self, daemon: Member[ClientT]) -> None:
        while not self._closed:
            try:
                self._use(daemon, await daemon.link.probe(self._options.probe_timeout_s))
            except KVServiceError as error:
                self.leave_out(daemon, error)
            while not self._closed and (pause_s := daemon.availability.pause_s) > 0:
                await daemon.wake.wait(pause_s)
                daemon.wake.clear()

    def _use(self, daemon: Member[ClientT], report: DaemonReport) -> None:
        """Note that a daemon serves. Raises FailedPreconditionError if its pool is not that of the others."""
        for other in self.by_address.values():
            if other is not daemon and other.availability.is_up and other.report:
                theirs = other.report.shape
                if names := [name for name, value in report.shape.items() if theirs[name] != value]:
                    differences = ", ".join(f"{name} is {report.shape[name]}, not {theirs[name]}" for name in names)
                    raise FailedPreconditionError(f"its pool differs from that of {other.address}: {differences}")
        was_up, daemon.report = daemon.availability.is_up, report
        with self.lock:
            self.placement.report(daemon.address, report.load)
        daemon.availability.succeed(self._options.probe_interval_s)
        if not was_up:
            _LOG.info("%s is used", daemon.address)
            self._changed.set()

    def leave_out(self, daemon: Member[ClientT], error: KVServiceError) -> None:
        """Use a daemon no more until it answers again."""
        was_up = daemon.availability.is_up
        daemon.availability.fail(str(error))
        if was_up and not self._closed:
            _LOG.warning("%s is left out: %s", daemon.address, error)
        if was_up:
            daemon.wake.set()
        self._changed.set()

    async def _follow(self, daemon: Member[ClientT]) -> None:
        """Apply a daemon's block events. When their stream breaks, some may be lost."""
        number, daemon_id, pause = 1, 0, Availability(self._waiting.clock, random.random)
        while not self._closed:
            daemon.events = "following"
            try:
                async for batch in daemon.link.events(number, daemon_id):
                    pause.succeed(0.0)
                    self._apply(daemon, batch)
                    number, daemon_id = batch.number + 1, batch.daemon_id
            except KVServiceError as error:
                daemon.events = str(error)
                if isinstance(error, ConnectionLostError) and daemon.availability.is_up:
                    self.leave_out(daemon, error)
            pause.fail("")
            with self.lock:
                self.placement.prefixes(daemon.address).doubt()
            await self._stop.wait(pause.pause_s)

    def _apply(self, daemon: Member[ClientT], batch: KVEventBatch) -> None:
        with self.lock:
            prefixes = self.placement.prefixes(daemon.address)
            if batch.gap is not None:
                prefixes.doubt()
            for event in batch.events:
                if isinstance(event, BlockStored):
                    prefixes.store(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    prefixes.remove(event.block_hashes)
                elif isinstance(event, AllBlocksCleared):
                    prefixes.clear()

    async def wait(self, met: Callable[[], bool], deadline: float) -> None:
        """Wait until a condition on the daemons' availability is met, or the deadline has passed."""
        while not self._closed and not met() and (left_s := deadline - self._waiting.clock()) > 0:
            self._changed.clear()
            if not met():
                await self._changed.wait(min(left_s, MAX_WAIT_S))

    def none(self) -> NoDaemonError:
        """Return the error with the reason of each daemon."""
        reasons = "; ".join(f"{address}: {one.availability.reason}" for address, one in self.by_address.items())
        return NoDaemonError(f"no daemon can be used ({reasons})")

    def _describe(self, daemon: Member[ClientT]) -> ClusterDaemon:
        load = daemon.report.load if daemon.report else None
        return ClusterDaemon(
            address=daemon.address,
            is_up=daemon.availability.is_up,
            reason=daemon.availability.reason,
            num_blocks=load.num_blocks if load else 0,
            used_blocks=load.used_blocks if load else 0,
            sessions=self.placement.sessions(daemon.address),
            known_blocks=len(self.placement.prefixes(daemon.address)),
            events=daemon.events,
        )
