"""Moves bytes between hosts with Mooncake's Transfer Engine, between memories that were made for that.

    process    starts the process of the engine, and gives it work
    child      that process: it maps one memory and nothing else
    protocol   the messages between the two
    library    whether the engine is installed, and how its process is started

The engine checks no credentials: whoever reaches its ports may read and write all memory that is registered with it. So
each memory has a process of its own, which maps nothing else, and which is killed when the memory is given up. A late
transfer then has no target. The daemon's engines call those of clients, and do not listen.
"""

from kvservice.transfer.library import Endpoint, is_installed
from kvservice.transfer.process import Ticket, TransferProcess
from kvservice.transfer.protocol import MAX_ENGINES, MAX_RANGES, READ, WRITE, Operation, Range

__all__ = [
    "MAX_ENGINES",
    "MAX_RANGES",
    "READ",
    "WRITE",
    "Endpoint",
    "Operation",
    "Range",
    "Ticket",
    "TransferProcess",
    "is_installed",
]
