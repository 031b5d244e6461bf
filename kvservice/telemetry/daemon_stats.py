"""Gauges and counters of the daemon. Unlike the other arrays, the daemon writes them when the observer requests it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlocksStats
from kvservice.blocks.plans import Zeros


class ServerStats(NamedTuple):
    """Figures of the daemon beside those of the block manager: gauges, followed by counters since the start. Fields
    `..._s` are in seconds."""

    sessions: float = 0
    regions: float = 0
    region_bytes: float = 0
    lanes: float = 0
    event_streams: float = 0
    calls_in_flight: float = 0
    draining: float = 0
    open_unix_connections: float = 0
    open_tcp_connections: float = 0

    swap_out_busy_s: float = 0
    swap_in_busy_s: float = 0
    out_of_blocks: float = 0
    sessions_opened: float = 0
    sessions_closed: float = 0
    sessions_lost: float = 0
    stored_events: float = 0
    removed_events: float = 0
    cleared_events: float = 0
    lane_calls: float = 0
    lane_errors: float = 0
    lane_busy_s: float = 0
    tcp_connections: float = 0
    tls_handshakes: float = 0
    missing_tokens: float = 0
    malformed_tokens: float = 0
    unknown_tokens: float = 0
    foreign_sessions: float = 0
    integrity_checks: float = 0
    integrity_failures: float = 0


class DaemonStatsTable:
    """Shared arrays: block_stats int64 and server_stats float64, in the order of the fields of `BlocksStats` and of
    `ServerStats`, and lane_counts int64[buckets + 1], the latency histogram of lanes."""

    def __init__(self, num_lane_buckets: int, zeros: Zeros) -> None:
        self._blocks: npt.NDArray[np.int64] = zeros("block_stats", (len(BlocksStats._fields),), np.int64)
        self._server: npt.NDArray[np.float64] = zeros("server_stats", (len(ServerStats._fields),), np.float64)
        self._lane_counts: npt.NDArray[np.int64] = zeros("lane_counts", (num_lane_buckets,), np.int64)

    def write(self, blocks: BlocksStats, server: ServerStats, lane_counts: list[int]) -> None:
        self._blocks[:] = blocks
        self._server[:] = server
        self._lane_counts[:] = lane_counts
