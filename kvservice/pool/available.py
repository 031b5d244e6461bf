"""Amount of memory available to this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvservice.errors import ResourceExhaustedError

MEMORY_INFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping and within the limits of the process's control groups
    (its container or service). Check this before an allocation: a memory file that is too large gets the process
    killed instead of raising an error."""
    return min([_host_available_bytes(), *_cgroup_available_bytes()])


def _host_available_bytes() -> int:
    for line in MEMORY_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise ResourceExhaustedError(f"{MEMORY_INFO} has no line MemAvailable")


def _cgroup_available_bytes() -> Iterator[int]:
    """Yield the remaining bytes under each control-group limit, version 2 and 1. Groups without a limit yield
    nothing."""
    for group in _groups(CGROUPS, ""):
        yield from _left(group, "memory.max", "memory.current", "inactive_file")
    for group in _groups(CGROUPS / "memory", "memory"):
        yield from _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the process's control group and its ancestors. In a container its own group appears as the root, under any
    name."""
    yield root
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            parts = Path(path).parts[1:]
            if controller in controllers.split(",") and ".." not in parts:
                yield from (root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


def _left(group: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        limit_bytes = int((group / limit).read_text())
        yield limit_bytes - int((group / usage).read_text()) + _droppable_bytes(group, cache)


def _droppable_bytes(group: Path, name: str) -> int:
    """Return the bytes of inactive page cache. They count as used memory, but the kernel drops them on demand."""
    with contextlib.suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
