"""Audit of TCP clients: counts and logs accepted connections and refused RPCs, at a bounded cost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from kvservice.auth import Identity
from kvservice.auth.tokens import CAUSES
from kvservice.errors import UnauthenticatedError
from kvservice.logs import LogBudget

logger = logging.getLogger(__name__)

# A refusal is sent after this delay, which slows down callers that retry in a loop. At most MAX_DELAYED_REFUSALS wait
# at a time; further refusals are sent at once.
REFUSAL_DELAY_S = 1.0
MAX_DELAYED_REFUSALS = 64
# The connections that are remembered, so that each is logged once.
MAX_KNOWN_CONNECTIONS = 4096


class Audit:
    """`refusals` counts refused RPCs by cause. `num_connections` counts connections with at least one accepted RPC."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.refusals = dict.fromkeys(CAUSES, 0)
        self.num_connections = 0
        self._sleep = sleep
        self._num_delayed = 0
        # Whether each was logged.
        self._known: OrderedDict[tuple[str, Identity], bool] = OrderedDict()
        self._connection_log = LogBudget(logger, clock)
        self._refusal_log = LogBudget(logger, clock)

    def accepted(self, peer: str, caller: Identity, *, is_check: bool = False) -> None:
        """Record an accepted RPC. `peer` is gRPC's name for the remote end of the connection.

        `is_check` is true for RPCs of the standard services. Their connections are counted but not logged, because
        each health check of an orchestrator opens one.
        """
        connection = peer, caller
        if connection not in self._known:
            self.num_connections += 1
        elif is_check or self._known[connection]:
            return
        self._known[connection] = not is_check
        if len(self._known) > MAX_KNOWN_CONNECTIONS:
            self._known.popitem(last=False)
        if is_check:
            return
        self._connection_log.write(logging.INFO, "%s connected from %s", caller.name or "a client", peer)

    async def refused(self, peer: str, method: str, error: UnauthenticatedError) -> None:
        """Record a refused RPC. Returns when the refusal may be sent, after the delay."""
        cause = error.metadata["cause"]
        self.refusals[cause] += 1
        self._refusal_log.write(logging.WARNING, "%s refused to %s: %s token", repr(method[:100]), peer, cause)
        if self._num_delayed >= MAX_DELAYED_REFUSALS:
            return
        self._num_delayed += 1
        try:
            await self._sleep(REFUSAL_DELAY_S)
        finally:
            self._num_delayed -= 1
