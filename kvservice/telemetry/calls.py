"""Latency of calls: one histogram per method, status and transport, updated in place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Zeros

BUCKETS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WIDTH = len(BUCKETS_S) + 1
TRANSPORTS = ("unary", "stream")
# gRPC's names of the status codes with which a call can end.
STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip

Key = tuple[str, str, str]


def keys(methods: Sequence[str]) -> Iterator[Key]:
    """Return (method, status, transport) in the order of the rows."""
    return product(methods, STATUSES, TRANSPORTS)


class CallTable:
    """Histograms of call latency: `counts` int64[methods * statuses * transports, buckets + 1], and `seconds`, the sum
    over the calls of each row, float64[rows]."""

    def __init__(self, methods: Sequence[str], zeros: Zeros) -> None:
        self._rows = {key: row for row, key in enumerate(keys(methods))}
        self.counts: npt.NDArray[np.int64] = zeros("call_counts", (len(self._rows), WIDTH), np.int64)
        self.seconds: npt.NDArray[np.float64] = zeros("call_seconds", (len(self._rows),), np.float64)
        # Updating an element of a memoryview takes a quarter of NumPy's time.
        self._counts: Any = self.counts.reshape(-1).data
        self._seconds: Any = self.seconds.data

    def observe(self, method: str, status: str, transport: str, seconds: float) -> None:
        row = self._rows[method, status, transport]
        self._counts[row * WIDTH + bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds[row] += seconds
