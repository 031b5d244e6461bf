"""The time that a caller waits for blocks which are not in memory."""

from __future__ import annotations

import math
import time

from kvservice.client.requests import wait_time
from kvservice.client.store.link import StoreLink

# What is left when the time has passed: 0 would stand for no limit.
_OVER_S = 1e-6
# The part of a request's time limit that it may wait for blocks, so that its answer comes in time.
_PART = 0.5


class Patience:
    """The waiting time of one call of the store, which may take several requests."""

    def __init__(self, max_wait_s: float, timeout_s: float | None) -> None:
        """`max_wait_s` is 0 if the caller sets no limit, `timeout_s` is the caller's time limit of each request. Raises
        InvalidArgumentError naming max_wait_s."""
        self._until = time.monotonic() + max_wait_s if wait_time(max_wait_s, "max_wait_s") else math.inf
        self._timeout_s = timeout_s

    def left_s(self, link: StoreLink) -> float:
        """Return the `max_wait_s` of the next request."""
        limit_s = link.connection.limit_s(self._timeout_s)
        left_s = max(self._until - time.monotonic(), _OVER_S)
        if limit_s is not None:
            left_s = min(left_s, _PART * limit_s)
        return 0.0 if math.isinf(left_s) else left_s
