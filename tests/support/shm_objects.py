"""POSIX shared-memory objects that clients have not yet unlinked."""

from __future__ import annotations

import os


def shm_objects(*pids: int) -> set[str]:
    """Return the names of the objects of clients in these processes."""
    prefixes = tuple(f"kvservice-{pid}-" for pid in pids)
    return {name for name in os.listdir("/dev/shm") if name.startswith(prefixes)}
