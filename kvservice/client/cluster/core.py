"""The part of a cluster that the sync and the async API share: its daemons, and placing prompts among them.

For each daemon there are two background tasks. One asks for its health and load, and decides whether it is used. The
other follows its block events. A call that fails takes its daemon out of use at once, and wakes the first task. Before
a prompt is placed, MatchPrefix checks what is known of the best daemon.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar

from grpc_health.v1 import health_pb2

from kvservice.auth.client import TLSOption
from kvservice.client.cluster.placement import (
    Candidate,
    HashedPrompt,
    Load,
    PlacedPrompt,
    Placement,
    PlacementSettings,
    rendezvous,
    to_prompt,
)
from kvservice.client.connection import Background, Waiting
from kvservice.client.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvservice.client.messages import ExtraKeys, int_list, listed, wait_time
from kvservice.client.values import PoolInfo, from_message
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DrainingError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    NoDaemonError,
    QuotaExceededError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from kvservice.v1 import pool_pb2
from kvservice.wire.status import HEALTH_REASON

# Most daemons of a cluster: each has two threads of the sync API.
MAX_DAEMONS = 256


@dataclass(frozen=True)
class ClusterDaemon:
    """The state of a daemon. `reason` says why it is not used; empty: it is. `sessions` are those that this cluster has
    placed there and that are open; `known_blocks` are the cached blocks of its prefix cache that the cluster knows."""

    address: str
    is_up: bool
    reason: str
    num_blocks: int
    used_blocks: int
    sessions: int
    known_blocks: int
    events: str
    """"following", or why the cluster does not receive the daemon's block events."""


@dataclass(frozen=True)
class ClusterOptions:
    """Time limits in seconds, see Cluster."""

    connect_timeout_s: float | None
    wait_s: float
    probe_interval_s: float
    probe_timeout_s: float
    open_timeout_s: float
    placement: PlacementSettings

    @classmethod
    def of(cls, placement: PlacementSettings | None, connect_timeout_s: float | None, **waits: Any) -> ClusterOptions:
        """Raises InvalidArgumentError naming the option."""
        for name, value in waits.items():
            if wait_time(value, name) == 0 and name != "wait_s":
                raise InvalidArgumentError("must be above 0", field=name)
        if connect_timeout_s is not None:
            connect_timeout_s = wait_time(connect_timeout_s, "connect_timeout_s")
        if placement is not None and not isinstance(placement, PlacementSettings):
            raise InvalidArgumentError(f"is {type(placement).__name__}, not PlacementSettings", field="placement")
        return cls(connect_timeout_s=connect_timeout_s, placement=placement or PlacementSettings(), **waits)


def check_addresses(addresses: Any) -> tuple[str, ...]:
    """Return the addresses. Raises InvalidArgumentError."""
    if isinstance(addresses, str):
        raise InvalidArgumentError("must be a list of addresses", field="addresses")
    given = tuple(listed(addresses, "addresses"))
    if not all(isinstance(address, str) and address for address in given):
        raise InvalidArgumentError("must be addresses such as unix:///path/of.sock or host:port", field="addresses")
    if not 1 <= len(given) <= MAX_DAEMONS or len(set(given)) < len(given):
        raise InvalidArgumentError(f"must be 1 to {MAX_DAEMONS} different addresses", field="addresses")
    return given


# The first pause after a failure, and the longest. Each failure doubles the pause.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0


class Availability:
    """A daemon is used from its first good answer until an error, and again after the next good answer. `random`
    returns numbers from 0 to below 1; it spreads the attempts of many clients."""

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock, self._random = clock, random
        self._failures = 0
        self._next_at = clock()
        self.is_up = False
        self.reason = "it has not answered yet"

    @property
    def has_answered(self) -> bool:
        """Whether an attempt was made, with any result."""
        return self.is_up or self._failures > 0

    def succeed(self, pause_s: float) -> None:
        """Note a good answer. The daemon is asked again after `pause_s` seconds."""
        self.is_up, self.reason, self._failures = True, "", 0
        self._next_at = self._clock() + pause_s

    def fail(self, reason: str) -> None:
        """Note a failure. The daemon is asked again after a pause that doubles each time, less up to half."""
        self.is_up, self.reason = False, reason
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, 32))
        self._failures += 1
        self._next_at = self._clock() + pause_s * (1 - self._random() / 2)

    @property
    def pause_s(self) -> float:
        """The seconds until the daemon is to be asked."""
        return max(0.0, self._next_at - self._clock())


# ---- one daemon


OfClientT = TypeVar("OfClientT", covariant=True)
ClientT = TypeVar("ClientT")

# The name of the session in which a cluster asks MatchPrefix.
CONTROL_SESSION = "cluster"
# Errors after which that session can still be used.
SESSION_STAYS = (CallTimeoutError, ResourceExhaustedError, InvalidArgumentError)

# The fields that all daemons of a cluster have in common: a block of one has the meaning and the size of the others'.
SHAPE_FIELDS = ("num_layers", "num_kv_heads", "head_size", "dtype", "block_size", "block_bytes", "kv_cache_dtype")


class DaemonReport(NamedTuple):
    """A daemon that serves: its pool and its load."""

    info: PoolInfo
    load: Load

    @property
    def shape(self) -> dict[str, Any]:
        return {name: getattr(self.info, name) for name in SHAPE_FIELDS}


class DaemonLink(Protocol[OfClientT]):
    """The connections of a cluster to one daemon. All methods raise KVServiceError."""

    @property
    def client(self) -> OfClientT:
        """The client in which sessions are opened."""

    async def open(self) -> None: ...

    async def probe(self, timeout_s: float) -> DaemonReport:
        """Ask for health, pool and load. Raises FailedPreconditionError if the daemon does not serve."""

    def events(self, start_number: int, daemon_id: int) -> AsyncIterator[KVEventBatch]: ...

    def stop_events(self) -> None:
        """End the stream of events, and all later ones. Any thread may call this."""

    async def match_prefix(self, token_ids: Iterable[int], extra_keys: ExtraKeys, timeout_s: float) -> int:
        """Return how many leading tokens of the prompt are cached, in a session that belongs to the link."""

    async def close(self) -> None: ...


MakeLink = Callable[[str], DaemonLink[ClientT]]


class ClientOptions(TypedDict, total=False):
    """The options of the clients of all daemons; see KVClient."""

    tls: TLSOption
    token: str | os.PathLike[str]
    timeout_s: float | None
    reconnect_wait_s: float
    transport: str


def control_options(options: ClientOptions) -> dict[str, Any]:
    """Return the options of the client that asks a daemon. It transports no tensors and does not wait."""
    shared = {name: value for name, value in options.items() if name in ("tls", "token")}
    return shared | {"connect_timeout_s": None, "transport": "inline", "reconnect_wait_s": 0.0}


def check_serving(status: health_pb2.HealthCheckResponse, trailing: Iterable[Any] | None) -> None:
    """Raise FailedPreconditionError with the reason if the daemon says that it does not serve."""
    if status.status != health_pb2.HealthCheckResponse.SERVING:
        reason = dict(trailing or ()).get(HEALTH_REASON, "it gives no reason")
        raise FailedPreconditionError(f"the daemon does not serve: {reason}")


def to_report(info: pool_pb2.GetInfoResponse, stats: pool_pb2.GetStatsResponse) -> DaemonReport:
    used = stats.active_blocks + stats.shared_blocks + stats.pinned_blocks
    return DaemonReport(from_message(PoolInfo, info), Load(max(1, stats.num_blocks), used))


# ---- all daemons


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
        """Wait until a condition on the daemons' availability is met, or the deadline has passed. Raises
        ConnectionLostError if the cluster is closed."""
        while not self._closed and not met() and (left_s := deadline - self._waiting.clock()) > 0:
            self._changed.clear()
            if not met():
                await self._changed.wait(min(left_s, MAX_WAIT_S))
        if self._closed:
            raise ConnectionLostError("the cluster is closed")

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


# ---- placing


SessionT = TypeVar("SessionT")

# Errors after which a daemon is not used until it answers again.
_AWAY = (ConnectionLostError, CallTimeoutError, DrainingError, UnauthenticatedError)
# Most checks of a placement by MatchPrefix. Each one that contradicts what was known corrects it.
MAX_CHECKS = 3


class ClusterCore(Generic[ClientT]):
    """The operations of a cluster. Its coroutines never suspend with the sync API."""

    def __init__(
        self, addresses: Iterable[str], options: ClusterOptions, waiting: Waiting, make_link: MakeLink[ClientT]
    ) -> None:
        self.options, self.waiting = options, waiting
        self._members = Members(addresses, options, waiting, make_link)
        self._placement, self._lock = self._members.placement, self._members.lock
        self.start, self.close = self._members.start, self._members.close
        self._turns = itertools.count()

    def daemons(self) -> list[ClusterDaemon]:
        return self._members.daemons()

    def client(self, address: str) -> ClientT:
        """Return the client of a daemon. Raises InvalidArgumentError."""
        if not isinstance(address, str) or address not in self._members.by_address:
            raise InvalidArgumentError(f"{address!r} is not an address of the cluster", field="address")
        return self._members.by_address[address].link.client

    async def choose(self, token_ids: Iterable[int], extra_keys: ExtraKeys) -> Candidate:
        """Return the best daemon for a prompt. Raises NoDaemonError, InvalidArgumentError."""
        tokens, keys = [*int_list(token_ids, "token_ids")], listed(extra_keys, "extra_keys")
        deadline = self.waiting.clock() + self.options.wait_s
        while True:
            prompt = await self._prompt(tokens, keys, deadline)
            if (candidate := await self._checked(prompt, tokens, keys, frozenset())) is not None:
                return candidate

    async def open(
        self,
        token_ids: Iterable[int],
        extra_keys: ExtraKeys,
        open_at: Callable[[ClientT], Awaitable[SessionT]],
    ) -> tuple[SessionT, PlacedPrompt]:
        """Open a session at the best daemon for a prompt, or at the next if that fails because of the daemon.

        Raises NoDaemonError when all have been away for `wait_s`, and QuotaExceededError if all others are full.
        """
        tokens, keys = [*int_list(token_ids, "token_ids")], listed(extra_keys, "extra_keys")
        deadline = self.waiting.clock() + self.options.wait_s
        full: dict[str, QuotaExceededError] = {}
        while True:
            prompt = await self._prompt(tokens, keys, deadline)
            candidate = await self._checked(prompt, tokens, keys, full.keys())
            if candidate is None:
                if full:
                    raise next(iter(full.values()))
                continue
            daemon = self._members.by_address[candidate.daemon]
            with self._lock:
                placed = self._placement.place(prompt, daemon.address)
            opened = False
            try:
                session = await open_at(daemon.link.client)
                opened = True
                return session, placed
            except QuotaExceededError as error:
                full[daemon.address] = error
            except _AWAY as error:
                self._members.leave_out(daemon, error)
            finally:
                if not opened:
                    self.end(placed)

    async def open_by_key(self, key: bytes, open_at: Callable[[ClientT], Awaitable[SessionT]]) -> SessionT:
        """Open something at the daemon that rendezvous hashing gives for a key. Raises NoDaemonError, and
        InvalidArgumentError for a key that is not bytes."""
        if not isinstance(key, bytes):
            raise InvalidArgumentError(f"{key!r} is not bytes", field="key")
        deadline = self.waiting.clock() + self.options.wait_s
        while True:
            await self._members.wait(lambda: bool(self._members.up()), deadline)
            up = self._members.up()
            if not up:
                raise self._members.none()
            daemon = self._members.by_address[max(up, key=lambda address: rendezvous(key, address))]
            try:
                return await open_at(daemon.link.client)
            except _AWAY as error:
                self._members.leave_out(daemon, error)

    def end(self, placed: PlacedPrompt) -> None:
        """Note that a placed session has ended."""
        with self._lock:
            self._placement.end(placed)

    async def _prompt(self, token_ids: list[int], extra_keys: list[tuple[int, bytes]], deadline: float) -> HashedPrompt:
        """Wait for a daemon, whose block size the hashes need, and return the prompt."""
        await self._members.wait(lambda: bool(self._members.up()), deadline)
        for address in self._members.up():
            if (report := self._members.by_address[address].report) is not None:
                return to_prompt(token_ids, extra_keys, report.info.block_size)
        raise self._members.none()

    async def _checked(
        self, prompt: HashedPrompt, token_ids: list[int], extra_keys: list[tuple[int, bytes]], without: Iterable[str]
    ) -> Candidate | None:
        """Return the best daemon, after asking it about the cached prefix that it is believed to have. None: there is
        none any more."""
        excluded, asked = set(without), set[str]()

        async def ask(address: str) -> int | None:
            asked.add(address)
            return await self._ask(self._members.by_address[address], prompt, token_ids, extra_keys)

        if (doubtful := self._doubtful(prompt, excluded)) is not None:
            await ask(doubtful)
        while True:
            among = [address for address in self._members.up() if address not in excluded]
            if not among:
                return None
            with self._lock:
                best = self._placement.rank(prompt, among)[0]
            if not best.num_cached_tokens or best.daemon in asked or len(asked) > MAX_CHECKS:
                return best
            found = await ask(best.daemon)
            if found is not None and found >= best.num_cached_tokens:
                return best

    def _doubtful(self, prompt: HashedPrompt, excluded: set[str]) -> str | None:
        """Return a daemon, another one each time, that may have more of a prompt than the cluster knows, because events
        were lost. None: there is none."""
        with self._lock:
            doubtful = [
                address
                for address in self._members.up()
                if address not in excluded and self._placement.prefixes(address).misses_some(prompt.hashes)
            ]
        return doubtful[next(self._turns) % len(doubtful)] if doubtful else None

    async def _ask(
        self, daemon: Member[ClientT], prompt: HashedPrompt, token_ids: list[int], extra_keys: list[tuple[int, bytes]]
    ) -> int | None:
        """Return how many leading tokens of a prompt a daemon has cached, and remember it; None: it has not answered.

        A daemon that has no room for the session that asks is not away; the caller's own session will see."""
        try:
            found = await daemon.link.match_prefix(token_ids, extra_keys, self.options.probe_timeout_s)
        except QuotaExceededError:
            return None
        except _AWAY as error:
            self._members.leave_out(daemon, error)
            return None
        with self._lock:
            self._placement.prefixes(daemon.address).learn(prompt.hashes, found // prompt.block_size)
        return found
