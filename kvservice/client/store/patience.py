"""The time that a caller waits for blocks which are not in memory."""

from __future__ import annotations

import math
import time

from kvservice.client.requests import wait_time

# What is left when the time has passed: 0 would stand for no limit.
_OVER_S = 1e-6


class Patience:
    """The waiting time of one call of the store, which may take several requests."""

    def __init__(self, max_wait_s: float) -> None:
        """0: no limit. Raises InvalidArgumentError naming max_wait_s."""
        self._until = time.monotonic() + max_wait_s if wait_time(max_wait_s, "max_wait_s") else math.inf

    @property
    def left_s(self) -> float:
        """The `max_wait_s` of the next request."""
        return 0.0 if math.isinf(self._until) else max(self._until - time.monotonic(), _OVER_S)
