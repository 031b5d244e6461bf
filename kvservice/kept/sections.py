"""Numbers of the sections of the kept table. A number is never used again for other values."""

from __future__ import annotations

from enum import IntEnum


class Section(IntEnum):
    """The sections, each with its content and its keys."""

    SESSIONS = 1
    """Sessions by their row number."""
    LOST_SEQUENCES = 2
    """Sequences that did not survive a restart, by namespace number."""
    EXTRA_KEYS = 3
    """Extra keys of block hashes by row."""
    PINS = 4
    STEPS = 5
    """Live steps at the end of a process that ended in order."""
    STORE_NAMESPACES = 6
    STORE_LEASES = 7
    STORE_RESERVATIONS = 8
    FACTS = 9
    REPLIES = 10
    """Geometry of the reply memory by session."""
    RESTARTS = 11
    FILES = 12
    """Names, sizes and arrays of the kept files."""
    STORE_OPENINGS = 13
    """Namespaces of the block store that sessions have open, by the id that the session has for them."""
    STORE_WRITERS = 14
    """Processes that can write to the memory of the block store."""
    STORE_SESSION_WRITERS = 15
    """The names of such processes by session."""
