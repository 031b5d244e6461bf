"""What a start of the daemon kept of the process before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RestartReport:
    """One start of the daemon. The counts are 0 unless the state was taken over."""

    outcome: Literal["first start", "taken over", "refused"] = "first start"
    reason: str = ""
    """Why the state was refused."""
    ended: str = ""
    """How the process before ended: "signal 9", "status 70", "upgrade", or empty if that is unknown."""
    num_restarts: int = 0
    """Starts after the first one, of the same keeper."""
    down_s: float = 0.0
    """Seconds from the end of the process before until this one served."""
    take_over_s: float = 0.0
    """Seconds from the start of this process until it served."""
    sessions_kept: int = 0
    sequences_kept: int = 0
    sequences_lost: int = 0
    cached_blocks_kept: int = 0
    pins_kept: int = 0
    steps_kept: int = 0
    steps_lost: int = 0
    store_values_kept: int = 0
