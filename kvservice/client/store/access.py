"""The store's link to the daemon, opened again in the background whenever it is lost.

linked ── a call has no answer in time ──▶ silent: calls fail immediately ── the daemon answers ──▶ linked
linked, silent ── a call or the connection fails ──▶ away: calls fail immediately ── opened again ──▶ linked
any ── closed by the caller ──▶ closed

A link that was silent has its leases and reservations still. One that is opened again is another session: those of
the one before have ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable

from kvservice.client.connection import PAUSE_S, RECONNECT_WAIT_S, Background, OwnProcess
from kvservice.client.store.link import ANY_HOLDER, Dialer, StoreLink, StoreOptions, open_link
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    DrainingError,
    KVServiceError,
    QuotaExceededError,
    ResourceExhaustedError,
    SessionTakenError,
    TLSHandshakeError,
    UnauthenticatedError,
    UnknownNamespaceError,
    UnknownRegionError,
    UnknownSessionError,
)

logger = logging.getLogger(__name__)


class LinkReports:
    """Logs a warning when the store gets out of reach and for another refusal of the daemon, and a line when it is
    back. The caller serializes calls. It keeps no error: the frames of its traceback keep the mapped memory of the lost
    link."""

    def __init__(self, address: str, model: str, *, raises: bool) -> None:
        self._store = f"the block store at {address} for {model or 'a model without a name'}"
        self._answer = "errors" if raises else "misses"
        self._kind: type[KVServiceError] | None = None

    def away(self, error: KVServiceError, *, refused: bool = False) -> None:
        """Report why there is no link. Only the first time, unless the daemon has `refused` for a new reason."""
        if self._kind is None or (refused and type(error) is not self._kind):
            logger.warning(
                "%s is out of reach: %s; calls are %s until it is back", self._store, str(error), self._answer
            )
        self._kind = type(error)

    def back(self) -> None:
        """Report that calls are answered again, unless it was never away."""
        if self._kind is not None:
            logger.info("%s is back", self._store)
        self._kind = None


# Longest pause between attempts to open a link, in seconds: while the daemon is away, at first and later, and while it
# refuses. The pause starts at PAUSE_S and doubles.
QUICK_PAUSE_S = 0.05
MAX_PAUSE_S = 0.5
MAX_REFUSED_PAUSE_S = 10.0

# Errors of a first opening that may pass: the daemon cannot be reached or is about to stop, or a limit is reached, for
# example by the sessions of an engine that was killed.
_MAY_PASS = (ConnectionLostError, CallTimeoutError, DrainingError, UnknownSessionError, ResourceExhaustedError)
# Errors after which another session is opened: the daemon is away, has restarted, or has closed the session.
_LOST = (
    ConnectionLostError,
    DrainingError,
    UnauthenticatedError,
    UnknownSessionError,
    SessionTakenError,
    UnknownNamespaceError,
    UnknownRegionError,
)


def _is_over_quota(error: KVServiceError) -> bool:
    """Return whether a tenant has as much as it may have, in distinction to a daemon that is full."""
    return isinstance(error, QuotaExceededError) and "tenant" in error.metadata


# See open_link in link.py.
OpenLink = Callable[[Dialer, StoreOptions, Callable[[KVServiceError], None]], Awaitable[StoreLink]]


class StoreAccess:
    """The link, if there is one. With the sync API its coroutines never suspend, and threads share it."""

    def __init__(self, dialer: Dialer, options: StoreOptions, open_link: OpenLink = open_link) -> None:
        self._dialer, self._options, self._open_link = dialer, options, open_link
        self._process = OwnProcess()
        self._state_lock = threading.Lock()
        self.link: StoreLink | None = None  # only this class sets it
        self._reports = LinkReports(dialer.address, options.namespace.model, raises=options.raises)
        # Why there is no link.
        self._cause = "the store was never opened"
        # The link without an answer in time, and the one that `_settle` works on.
        self._silent: StoreLink | None = None
        self._settling: StoreLink | None = None
        # A link that is not closed yet.
        self._lost: StoreLink | None = None
        self._opening: Background | None = None
        self._settles: Background | None = None
        self._closing = dialer.waiting.signal()
        self._closed = False

    @property
    def answering(self) -> StoreLink | None:
        """The link, if calls do not fail immediately."""
        return link if (link := self.link) is not self._silent else None

    @property
    def reachable(self) -> bool:
        return (link := self.answering) is not None and link.connection.connected

    async def start(self, *, patient: bool = False) -> None:
        """Open the first link. A daemon that is away, or has no room for the session or namespace, is an error only
        with `raises`; every other error is raised. A quota of the caller's tenant is no lack of room: it is an error
        unless the client is `patient`."""
        try:
            self._join(await self._open())
        except TLSHandshakeError:
            raise
        except _MAY_PASS as error:
            if self._options.raises or (_is_over_quota(error) and not patient):
                raise
            self._failed_to_open(error)
            self._opening = self._dialer.waiting.start(self._reopen())

    async def attempt(self, work: Callable[[StoreLink], Awaitable[None]]) -> bool:
        """Run `work` on the link. Returns False if the daemon is away, or does not answer in time; with `raises`,
        raises the reason instead. Errors of other kinds are raised, and ConnectionLostError if the store is closed."""
        self._process.check()
        if self._closed:
            raise ConnectionLostError("the store is closed")
        link = self.answering
        if link is None:
            return self._failed(
                DaemonAwayError(f"the store is out of reach; the client goes on trying ({self._cause})")
            )
        return await self._run(link, work)

    async def attempt_on(self, link: StoreLink | None, work: Callable[[StoreLink], Awaitable[None]]) -> bool:
        """Run `work` on this link, as `attempt` does. Returns False if it was lost before."""
        return link is not None and link is self.answering and await self._run(link, work)

    async def _run(self, link: StoreLink, work: Callable[[StoreLink], Awaitable[None]]) -> bool:
        try:
            await work(link)
        except CallTimeoutError as error:
            self._settle_later(link, error)
            return self._failed(error)
        except _LOST as error:
            self._lose(link, error)
            return self._failed(error)
        finally:
            if link.unanswered:
                self._settle_later(link)
        return True

    def _failed(self, error: KVServiceError) -> bool:
        if self._options.raises:
            raise error
        return False

    async def close(self) -> None:
        """Close the session. Calls of the store raise ConnectionLostError from now on. Does nothing in a forked
        process: the session is the other one's."""
        if not self._process.is_here:
            return
        with self._state_lock:
            self._closed = True
            link, self.link = self.link, None
            self._silent = self._settling = None
            self._cause = "the store is closed"
        self._closing.set()
        if link is not None:
            await link.close(self._dialer)
        for background in (self._opening, self._settles):
            if background is not None:
                await background.stop()
        if self._lost is not None:
            await self._lost.close(self._dialer)
            self._lost = None

    async def _open(self) -> StoreLink:
        return await self._open_link(self._dialer, self._options, self._broke)

    def _join(self, link: StoreLink) -> bool:
        """Use a link from now on. Returns False if the store was closed meanwhile."""
        with self._state_lock:
            if self._closed:
                return False
            self.link = link
            if link.connection.connected:
                self._reports.back()
        if not link.connection.connected:
            self._lose(link, ConnectionLostError("the connection broke at once"))
        return True

    def _broke(self, error: KVServiceError) -> None:
        """Handle the end of a connection, on any thread. It may be one that is not used yet, or not any more."""
        link = self.link
        if link is not None and not link.connection.connected:
            self._lose(link, error)

    def _settle_later(self, link: StoreLink, error: CallTimeoutError | None = None) -> None:
        """Give back in the background what unanswered calls hold. With the error of a call without an answer, other
        calls fail until then."""
        with self._state_lock:
            if self.link is not link or self._closed:
                return
            if error is not None and self._silent is None:
                self._silent, self._cause = link, str(error)
                self._reports.away(error)
            if self._settling is None:
                self._settling = link
                self._settles = self._dialer.waiting.start(self._settle(link))

    async def _settle(self, link: StoreLink) -> None:
        settled = False
        try:
            while not settled:
                await link.settle()
                settled = self._has_settled(link)
        except KVServiceError as error:
            self._lose(link, error)

    def _has_settled(self, link: StoreLink) -> bool:
        """Use a link again unless calls were left without an answer meanwhile."""
        with self._state_lock:
            if self._settling is not link:
                return True  # it was lost, or the store is closed
            if link.unanswered:
                return False
            self._silent = self._settling = None
            self._reports.back()
            return True

    def _lose(self, link: StoreLink, error: KVServiceError) -> None:
        """Open another link. Several callers may report the loss; the first report counts."""
        with self._state_lock:
            if self.link is not link or self._closed:
                return
            self.link, self._lost, self._cause = None, link, str(error)
            self._silent = self._settling = None
            self._reports.away(error)
            self._opening = self._dialer.waiting.start(self._reopen())

    async def _reopen(self) -> None:
        """Close the lost link, and retry to open another one until it succeeds or the store is closed."""
        lost_token = b""
        if self._lost is not None:
            lost_token = self._lost.token
            with contextlib.suppress(KVServiceError):  # the daemon may refuse this client now
                await self._lost.close(self._dialer, lost=True)
            self._lost = None  # its mapping keeps the memory of a daemon that is gone
        pause_s, waiting = PAUSE_S, self._dialer.waiting
        restarts_until = waiting.clock() + RECONNECT_WAIT_S
        while not self._closed:
            try:
                link = await self._open()
            except KVServiceError as error:
                limit_s = QUICK_PAUSE_S if waiting.clock() < restarts_until else MAX_PAUSE_S
                if self._failed_to_open(error):
                    limit_s = MAX_REFUSED_PAUSE_S
                await self._closing.wait(min(pause_s, limit_s))
                pause_s = min(2 * pause_s, limit_s)
            else:
                if lost_token:  # the daemon may have restarted, and know the session
                    with contextlib.suppress(KVServiceError):
                        await self._dialer.close_session(lost_token, ANY_HOLDER)
                if not self._join(link):
                    await link.close(self._dialer)
                return

    def _failed_to_open(self, error: KVServiceError) -> bool:
        """Report why there is no link. Returns whether the daemon is there and refuses, for example because it has
        restarted without a store."""
        refused = not isinstance(error, (*_LOST, CallTimeoutError))
        with self._state_lock:
            self._cause = str(error)
            self._reports.away(error, refused=refused)
        return refused
