"""The figures of the schedulers. The daemon writes them, like its gauges, when the observer asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Zeros
from kvservice.scheduler import Latencies, SchedulerFigures
from kvservice.scheduler.stats import WIDTH

_NUM_FIGURES = len(SchedulerFigures._fields)
# Rows of the histograms.
FIRST_TOKEN, BETWEEN_TOKENS = range(2)


class SchedulerTable:
    """Writes shared arrays in the order of the fields of `SchedulerFigures`.

    schedulers int64[max_sessions, 1 + figures] are in the rows of their sessions, with 0 in the first column if the
    session has none. scheduler_totals int64[figures] are over open and closed schedulers. token_counts
    int64[2, buckets + 1] and token_seconds float64[2] are the histograms of `Latencies`.
    """

    def __init__(self, max_sessions: int, zeros: Zeros) -> None:
        self._rows: npt.NDArray[np.int64] = zeros("schedulers", (max_sessions, 1 + _NUM_FIGURES), np.int64)
        self._totals: npt.NDArray[np.int64] = zeros("scheduler_totals", (_NUM_FIGURES,), np.int64)
        self._counts: npt.NDArray[np.int64] = zeros("token_counts", (2, WIDTH), np.int64)
        self._seconds: npt.NDArray[np.float64] = zeros("token_seconds", (2,), np.float64)
        self._written: set[int] = set()

    def write(self, figures: Mapping[int, SchedulerFigures], totals: SchedulerFigures, latencies: Latencies) -> None:
        """Write the figures of the schedulers by the rows of their sessions."""
        for row in self._written - figures.keys():
            self._rows[row, 0] = 0
        for row, values in figures.items():
            self._rows[row] = 1, *values
        self._written = set(figures)
        self._totals[:] = totals
        for row, histogram in ((FIRST_TOKEN, latencies.first_token), (BETWEEN_TOKENS, latencies.between_tokens)):
            self._counts[row] = histogram.counts
            self._seconds[row] = histogram.seconds


class SchedulerReading(NamedTuple):
    """A reading of the shared arrays: `totals` over open and closed schedulers, and the number of open ones.
    `token_counts` int64[2, buckets + 1] and `token_seconds` float64[2] are as in `SchedulerTable`."""

    num_open: int
    totals: SchedulerFigures
    token_counts: npt.NDArray[np.int64]
    token_seconds: npt.NDArray[np.float64]


def read_schedulers(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[int, SchedulerFigures], SchedulerReading]:
    """Return the figures by the rows of the sessions, and the figures of all schedulers together."""
    table = arrays["schedulers"]
    rows = np.flatnonzero(table[:, 0]).tolist()
    figures = {row: SchedulerFigures(*values[1:]) for row, values in zip(rows, table[rows].tolist(), strict=True)}
    totals = SchedulerFigures(*arrays["scheduler_totals"].tolist())
    counts, seconds = arrays["token_counts"].copy(), arrays["token_seconds"].copy()
    return figures, SchedulerReading(len(figures), totals, counts, seconds)
