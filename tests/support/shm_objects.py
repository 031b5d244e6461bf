"""Shared-memory objects of clients: those of the client library, and one that a test makes itself."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
from footprint import shared_files

OBJECT_BYTES = 1 << 16
PREFIX = f"/dev/shm/kvservice-test-{os.getpid()}"


def shm_objects(*pids: int) -> set[str]:
    """Return the names of the objects of clients in these processes that are not unlinked yet."""
    prefixes = tuple(f"kvservice-{pid}-" for pid in pids)
    return {name for name in os.listdir("/dev/shm") if name.startswith(prefixes)}


class ShmFile:
    """A shared-memory object of this process, with varying bytes."""

    serial = itertools.count()

    def __init__(self) -> None:
        self.key = f"{Path(PREFIX).name}-{next(self.serial)}"
        self.path = Path("/dev/shm", self.key)
        self.content = np.random.default_rng(1).integers(0, 256, OBJECT_BYTES, np.uint8).tobytes()
        self.path.write_bytes(self.content)


def open_shm_files() -> set[str]:
    """Return the objects of this process that it has open."""
    return shared_files(os.getpid(), PREFIX)
