"""The figures of transfers between hosts. Like the daemon's gauges, they are written when the observer asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Zeros
from kvservice.telemetry.calls import WIDTH
from kvservice.telemetry.figures import FiguresTable, read_figures

# Rows of the histogram: from clients to the daemon, and from the daemon to clients.
DIRECTIONS: Final = ("in", "out")


class TransferStats(NamedTuple):
    """Engines that run, remote regions and the daemon's memory for them, transfers in progress; counters since the
    start of transfers that ended well and that failed, of their bytes, of engines that did not start, of blocks that
    arrived damaged, and of calls whose blocks came in messages instead, with their bytes."""

    engines: int = 0
    regions: int = 0
    region_bytes: int = 0
    running_in: int = 0
    running_out: int = 0
    done_in: int = 0
    done_out: int = 0
    failed_in: int = 0
    failed_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    engine_failures: int = 0
    damaged_blocks: int = 0
    fallbacks: int = 0
    fallback_bytes: int = 0


class TransferTable:
    """Shared arrays: the figures, as in `FiguresTable`; transfer_counts int64[2, buckets + 1] and transfer_seconds
    float64[2], the histograms of the durations in the order of `DIRECTIONS`, with the buckets of calls."""

    def __init__(self, zeros: Zeros) -> None:
        self._figures = FiguresTable("transfers", TransferStats, zeros)
        shape = (len(DIRECTIONS), WIDTH)
        self._counts: npt.NDArray[np.int64] = zeros("transfer_counts", shape, np.int64)
        self._seconds: npt.NDArray[np.float64] = zeros("transfer_seconds", shape[:1], np.float64)

    def write(self, stats: TransferStats, counts: npt.NDArray[np.int64], seconds: npt.NDArray[np.float64]) -> None:
        self._figures.write(stats)
        self._counts[:] = counts
        self._seconds[:] = seconds


class TransferReading(NamedTuple):
    """A reading of the shared arrays, which are as in `TransferTable`."""

    stats: TransferStats
    counts: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]


def read_transfers(arrays: Mapping[str, npt.NDArray[Any]]) -> TransferReading | None:
    """Return the figures, or None if the daemon has no transfers."""
    stats = read_figures(arrays, "transfers", TransferStats)
    if stats is None:
        return None
    return TransferReading(stats, arrays["transfer_counts"].copy(), arrays["transfer_seconds"].copy())
