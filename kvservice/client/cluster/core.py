"""The part of a cluster that the sync and the async API share: placing prompts, with a check of what is known."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from kvservice.client.cluster.links import MakeLink
from kvservice.client.cluster.members import Member, Members
from kvservice.client.cluster.placement import Candidate, HashedPrompt, PlacedPrompt, rendezvous
from kvservice.client.cluster.prompts import to_prompt
from kvservice.client.cluster.values import ClusterDaemon, ClusterOptions
from kvservice.client.requests import int_list
from kvservice.client.sequences import ExtraKeys
from kvservice.client.waiting import Waiting
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DrainingError,
    InvalidArgumentError,
    QuotaExceededError,
    UnauthenticatedError,
)

ClientT = TypeVar("ClientT")
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
        if address not in self._members.by_address:
            raise InvalidArgumentError(f"{address!r} is not an address of the cluster", field="address")
        return self._members.by_address[address].link.client

    async def choose(self, token_ids: Iterable[int], extra_keys: ExtraKeys) -> Candidate:
        """Return the best daemon for a prompt. Raises NoDaemonError, InvalidArgumentError."""
        tokens, keys = [*int_list(token_ids, "token_ids")], list(extra_keys)
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
        tokens, keys = [*int_list(token_ids, "token_ids")], list(extra_keys)
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
