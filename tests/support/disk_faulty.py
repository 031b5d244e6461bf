"""A process whose disk fails now and then, by tests/tiers/disk_faults.c. Usage: disk_faulty.py DIRECTORY SEED FAULTS...

FAULTS are four numbers of 1000 calls each: reads and writes that fail, writes that find the disk full, and transfers
that are short. It prints a JSON object: the values that are there afterwards, the stats, and how many calls failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from disk_rig import Disk, keys, opened, options, space

from kvservice.tiers import TierError

SIZES = (100, 4096, 5000, 65536, 300_000)
NUMBERS = range(30)
NUM_SLABS = 60
CALLS = 300


class FaultyRun:
    """Random calls. A value may be there if it was put since it was last removed."""

    def __init__(self, disk: Disk, draw: Random) -> None:
        self.disk, self.draw = disk, draw
        self.possible: dict[int, set[int]] = {size: set() for size in SIZES}
        self.failed: Counter[str] = Counter()

    async def call(self) -> None:
        size = self.draw.choice(SIZES)
        of, numbers = space(size), self.draw.sample(NUMBERS, self.draw.randint(1, 8))
        call = self.draw.choices(["put", "get", "remove", "clear"], [50, 40, 9, 1])[0]
        if call == "put":
            self.possible[size] |= set(numbers)
        try:
            if call == "put":
                await self.disk.put(of, numbers)
            elif call == "get":
                assert set(await self.disk.get(of, numbers)) <= self.possible[size]
            elif call == "remove":
                await self.disk.tier.remove(of, keys(numbers))
                self.possible[size] -= set(numbers)
            else:
                await self.disk.tier.clear(of)
                self.possible[size].clear()
        except TierError:
            self.failed[call] += 1

    async def there(self) -> dict[int, list[int]]:
        found = {size: await self.disk.lookup(space(size), NUMBERS) for size in SIZES}
        for size, numbers in found.items():
            assert set(numbers) <= self.possible[size]
            assert await self.disk.get(space(size), numbers) == numbers
        return found


async def run(directory: Path, seed: int, faults: list[int]) -> dict[str, Any]:
    library: Any = ctypes.CDLL(None)  # it is preloaded
    draw = Random(seed)
    async with opened(options(directory, NUM_SLABS)) as disk:
        run = FaultyRun(disk, draw)
        for _ in range(10):
            await run.call()
        library.disk_faults(seed % 2**31, *faults)
        for _ in range(CALLS):
            await run.call()
        library.disk_faults(1, 0, 0, 0, 0)
        await disk.tier.remove(space(100), keys([0]))  # records that could not be written are written now
        run.possible[100].discard(0)
        found = await run.there()
        stored = await disk.put(space(7000), NUMBERS)
        stats = dataclasses.asdict(disk.tier.stats())
    possible = {size: sorted(numbers) for size, numbers in run.possible.items()}
    return {"found": found, "possible": possible, "after": stored, "stats": stats, "failed": run.failed}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:]))))))
