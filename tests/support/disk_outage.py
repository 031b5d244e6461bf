"""A process whose disk fails for a while under load, by tests/tiers/disk_faults.c.

Usage: disk_outage.py DIRECTORY READS WRITES END. Of 1000 calls, so many fail. END is "back": the disk is well again, or
"kill": the process ends by SIGKILL while it fails. It prints a JSON object with lists of values at each stage.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disk_rig import Disk, opened, options, space
from manual_clock import ManualClock

from kvservice.tiers import TierError
from kvservice.tiers.measured import MeasuredTier

# The longest pause of a tier that is left alone, in seconds.
MAX_PAUSE_S = 60.0
NUM_SLABS = 8
SIZE = 4096
# More values than there is room for, those that are put while the disk fails, and those after.
BEFORE, DURING, AFTER = range(2500), range(10_000, 10_400), range(20_000, 21_000)
BATCH = 20


async def put(disk: Disk, tier: MeasuredTier, numbers: Sequence[int]) -> list[int]:
    """Return the values that are stored."""
    stored: list[int] = []
    for first in range(0, len(numbers), BATCH):
        some = numbers[first : first + BATCH]
        done = await tier.put(space(SIZE), disk.values(space(SIZE), some, fill=True))
        stored += [number for number, is_stored in zip(some, done, strict=True) if is_stored]
    return stored


async def read(disk: Disk, tier: MeasuredTier, numbers: Sequence[int]) -> None:
    for first in range(0, len(numbers), BATCH):
        some = numbers[first : first + BATCH]
        await tier.get(space(SIZE), disk.values(space(SIZE), some, fill=False), lambda: None)


async def run(directory: Path, reads: int, writes: int, end: str) -> None:
    library: Any = ctypes.CDLL(None)  # it is preloaded
    async with opened(options(directory, NUM_SLABS)) as disk:
        clock = ManualClock()
        tier = MeasuredTier(disk.tier, clock)
        of = space(SIZE)
        await put(disk, tier, BEFORE)
        result: dict[str, Any] = {"before": await disk.lookup(of, BEFORE)}
        library.disk_faults(1, reads, writes, 0, 0)
        result["stored"] = []
        for first in range(0, len(DURING), BATCH):
            await read(disk, tier, result["before"][first : first + BATCH])
            result["stored"] += await put(disk, tier, DURING[first : first + BATCH])
            clock.advance(MAX_PAUSE_S)
        result["during"] = await disk.lookup(of, BEFORE)
        result["failing"] = dataclasses.asdict(tier.stats())
        if end == "kill":
            print(json.dumps(result), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        library.disk_faults(1, 0, 0, 0, 0)
        for first in (0, BATCH):  # a read and a write that try the tier
            await read(disk, tier, result["during"][:BATCH])
            await put(disk, tier, DURING[first : first + BATCH])
            clock.advance(MAX_PAUSE_S)
        result["well"] = dataclasses.asdict(tier.stats())
        result["read"] = await disk.get(of, result["during"][-200:])
        result["after"] = await put(disk, tier, AFTER)
        clock.close()
    library.disk_faults(1, 1000, 0, 0, 0)
    try:
        async with opened(options(directory, NUM_SLABS)):
            result["opening"] = "open"
    except TierError as error:
        result["opening"] = str(error)
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
