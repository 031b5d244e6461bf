"""How much memory can be had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvservice.errors import ResourceExhaustedError

CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that can be had without swapping, and within the container's limit. Asked first: a memory file that is too
    large ends in a kill, not in an error."""
    return min([_host_available_bytes(), *_cgroup_available_bytes()])


def _host_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise ResourceExhaustedError("/proc/meminfo does not tell the available memory")


def _cgroup_available_bytes() -> Iterator[int]:
    """What the limits of control groups, version 2 and 1, leave: none where there is no limit."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            yield int((CGROUPS / limit).read_text()) - int((CGROUPS / usage).read_text())
