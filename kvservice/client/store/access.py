"""The store's link to the daemon, opened again in the background whenever it is lost.

linked ── a call has no answer in time ──▶ silent: calls fail immediately ── the daemon answers ──▶ linked
linked, silent ── a call or the connection fails ──▶ away: calls fail immediately ── opened again ──▶ linked
any ── closed by the caller ──▶ closed

A link that was silent has its leases and reservations still. One that is opened again is another session: those of
the one before have ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvservice.client.store.link import Dialer, StoreLink, StoreOptions, open_link
from kvservice.client.waiting import PAUSE_S, Background
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    DrainingError,
    KVServiceError,
    SessionTakenError,
    TLSHandshakeError,
    UnauthenticatedError,
    UnknownNamespaceError,
    UnknownRegionError,
    UnknownSessionError,
)

logger = logging.getLogger(__name__)

# Longest pause between attempts to open a link, in seconds. The pause starts at PAUSE_S and doubles.
MAX_PAUSE_S = 0.5

# Errors of a daemon that cannot be reached, or that is about to stop.
_AWAY = (ConnectionLostError, CallTimeoutError, DrainingError)
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


class _Cause(NamedTuple):
    """Why there is no link. Neither this nor the log keeps the error itself: the frames of its traceback keep the
    mapped memory of the lost link."""

    kind: type[KVServiceError]
    text: str

    @staticmethod
    def of(error: KVServiceError) -> _Cause:
        return _Cause(type(error), str(error))


class StoreAccess:
    """The link, if there is one. With the sync API its coroutines never suspend, and threads share it."""

    def __init__(self, dialer: Dialer, options: StoreOptions) -> None:
        self._dialer, self._options = dialer, options
        self._state_lock = threading.Lock()
        self._link: StoreLink | None = None
        self._cause = _Cause(ConnectionLostError, "the store was never opened")
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
    def link(self) -> StoreLink | None:
        return self._link

    @property
    def answering(self) -> StoreLink | None:
        """The link, if calls do not fail immediately."""
        return link if (link := self._link) is not self._silent else None

    @property
    def reachable(self) -> bool:
        return (link := self.answering) is not None and link.connection.connected

    async def start(self) -> None:
        """Open the first link. A daemon that is away is an error only with `raises`; every other error is raised."""
        try:
            self._join(await self._open())
        except TLSHandshakeError:
            raise
        except (*_AWAY, UnknownSessionError) as error:
            if self._options.raises:
                raise
            self._cause = _Cause.of(error)
            self._opening = self._dialer.waiting.start(self._reopen())

    async def attempt(self, work: Callable[[StoreLink], Awaitable[None]]) -> bool:
        """Run `work` on the link. Returns False if the daemon is away, or does not answer in time; with `raises`,
        raises the reason instead. Errors of other kinds are raised, and ConnectionLostError if the store is closed."""
        if self._closed:
            raise ConnectionLostError("the store is closed")
        link = self.answering
        if link is None:
            return self._failed(
                DaemonAwayError(f"the store is out of reach; the client goes on trying ({self._cause.text})")
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
        """Close the session. Calls of the store raise ConnectionLostError from now on."""
        with self._state_lock:
            self._closed = True
            link, self._link = self._link, None
            self._silent = self._settling = None
            self._cause = _Cause(ConnectionLostError, "the store is closed")
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
        return await open_link(self._dialer, self._options, self._broke)

    def _join(self, link: StoreLink) -> bool:
        """Use a link from now on. Returns False if the store was closed meanwhile."""
        with self._state_lock:
            if self._closed:
                return False
            self._link = link
        if not link.connection.connected:
            self._lose(link, ConnectionLostError("the connection broke at once"))
        return True

    def _broke(self, error: KVServiceError) -> None:
        """Handle the end of a connection, on any thread. It may be one that is not used yet, or not any more."""
        link = self._link
        if link is not None and not link.connection.connected:
            self._lose(link, error)

    def _settle_later(self, link: StoreLink, error: CallTimeoutError | None = None) -> None:
        """Give back in the background what unanswered calls hold. With the error of a call without an answer, other
        calls fail until then."""
        with self._state_lock:
            if self._link is not link or self._closed:
                return
            if error is not None and self._silent is None:
                self._silent, self._cause = link, _Cause.of(error)
                logger.warning("the block store does not answer, calls fail until it does: %s", self._cause.text)
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
            return True

    def _lose(self, link: StoreLink, error: KVServiceError) -> None:
        """Open another link. Several callers may report the loss; the first report counts."""
        with self._state_lock:
            if self._link is not link or self._closed:
                return
            self._link, self._lost, self._cause = None, link, _Cause.of(error)
            self._silent = self._settling = None
            logger.warning("the block store is out of reach, the client goes on trying: %s", self._cause.text)
            self._opening = self._dialer.waiting.start(self._reopen())

    async def _reopen(self) -> None:
        """Close the lost link, and retry to open another one until it succeeds or the store is closed."""
        if self._lost is not None:
            await self._lost.close(self._dialer, lost=True)
            self._lost = None  # its mapping keeps the memory of a daemon that is gone
        pause_s = PAUSE_S
        while not self._closed:
            try:
                link = await self._open()
            except KVServiceError as error:
                self._report(error)
                await self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                if not self._join(link):
                    await link.close(self._dialer)
                return

    def _report(self, error: KVServiceError) -> None:
        """Log an error that is not the daemon's absence, for example that it has restarted without a store. Once."""
        if not isinstance(error, (*_LOST, CallTimeoutError)) and type(error) is not self._cause.kind:
            logger.warning("the block store cannot be opened again: %s", str(error))
        self._cause = _Cause.of(error)
