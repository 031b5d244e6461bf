"""Data shared by daemon and observer: memory that the daemon writes and the observer reads, and a pair of sockets.

arrays      named arrays in one memory file
tables      what stands in them: latency of calls, sessions and tenants, and figures that are written on request: of the
            daemon, the schedulers, the block store and its engines, the tiers below it, transfers between hosts, and
            other parts that a daemon may lack
reading     what the observer reads from the arrays: `Reader` makes a `Reading`, with the figures of each part
link        requests and replies over a socket
"""

from kvservice.telemetry.arrays import Arrays, SharedArrays, open_arrays
from kvservice.telemetry.link import MAX_SEARCH_LENGTH, Asker, answer_all, open_link
from kvservice.telemetry.reading import Reader, Reading
from kvservice.telemetry.tables import (
    ATTACHED,
    BUCKETS_S,
    LANE,
    REGION_BYTES,
    REGIONS,
    STATUSES,
    WIDTH,
    CallTable,
    DaemonStatsTable,
    EngineTable,
    FiguresTable,
    SavedStats,
    SchedulerReading,
    SchedulerTable,
    ServerStats,
    SessionRow,
    SessionTable,
    StoreTable,
    TierTable,
    TransferReading,
    TransferStats,
    TransferTable,
    keys,
    names_of,
)
from kvservice.tiers.protocol import SpillStats

__all__ = [
    "ATTACHED",
    "BUCKETS_S",
    "LANE",
    "MAX_SEARCH_LENGTH",
    "REGIONS",
    "REGION_BYTES",
    "STATUSES",
    "WIDTH",
    "Arrays",
    "Asker",
    "CallTable",
    "DaemonStatsTable",
    "EngineTable",
    "FiguresTable",
    "Reader",
    "Reading",
    "SavedStats",
    "SchedulerReading",
    "SchedulerTable",
    "ServerStats",
    "SessionRow",
    "SessionTable",
    "SharedArrays",
    "SpillStats",
    "StoreTable",
    "TierTable",
    "TransferReading",
    "TransferStats",
    "TransferTable",
    "answer_all",
    "keys",
    "names_of",
    "open_arrays",
    "open_link",
]
