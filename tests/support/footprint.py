"""System resources of a process: descriptors, shared memory, threads."""

from __future__ import annotations

import collections
import contextlib
import os
from pathlib import Path
from typing import Any

SHARED = ("/memfd:", "/dev/shm/")


def open_files(pid: int) -> collections.Counter[str]:
    """Return the file descriptors of a process by kind."""
    kinds: collections.Counter[str] = collections.Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(descriptor)
            kinds[path if path.startswith(SHARED) else path.partition(":")[0]] += 1
    return kinds


def shared_files(pid: int, prefix: str) -> set[str]:
    """Return the open files of a process with this prefix, each once, although mmap duplicates descriptors."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(descriptor)
            if path.startswith(prefix):
                found.add(f"{path} {descriptor.stat().st_ino}")
    return found


def shared_mappings(pid: int) -> collections.Counter[str]:
    """Return the mappings of shared memory by name and size."""
    found: collections.Counter[str] = collections.Counter()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        extent, *_, path = line.split(maxsplit=5)
        if path.startswith(SHARED):
            begin, end = (int(address, 16) for address in extent.split("-"))
            found[f"{path} of {end - begin}"] += 1
    return found


def num_threads(pid: int) -> int:
    """Return the number of threads without those of gRPC's pool, which grows and shrinks with the load."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            count += (task / "comm").read_text() != "event_engine\n"
    return count


def footprint(pid: int) -> dict[str, Any]:
    return {"files": open_files(pid), "mappings": shared_mappings(pid), "threads": num_threads(pid)}


def children(pid: int) -> list[int]:
    """Return the child processes that still run or have not been waited for."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
