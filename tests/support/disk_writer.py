"""A process that writes to a disk tier until it is killed. Usage: disk_writer.py DIRECTORY NUM_SLABS SEED

It prints what it begins and what has ended, one JSON list a line: ["put" or "remove" or "clear", task, size, numbers,
whether it has ended]. The numbers of a put that has ended are those that are stored.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from random import Random

from disk_rig import MEMORY_BYTES, Disk, keys, opened, options, space

NUM_TASKS = 4
SIZES = (100, 5000, 65536, 300_000)
NUMBERS = range(40)


def report(call: str, task: int, size: int, numbers: list[int], ended: bool) -> None:
    os.write(1, (json.dumps([call, task, size, numbers, ended]) + "\n").encode())


async def write(disk: Disk, task: int, random: Random) -> None:
    """Make calls for the spaces of this task, one after the other."""
    while True:
        size = random.choice(SIZES)
        of = space(size, f"task {task}")
        numbers = random.sample(NUMBERS, random.randint(1, 8))
        call = random.choices(["put", "remove", "clear"], [90, 9, 1])[0]
        report(call, task, size, numbers, False)
        if call == "put":
            numbers = await disk.put(of, numbers, task * (MEMORY_BYTES // NUM_TASKS))
        elif call == "remove":
            await disk.tier.remove(of, keys(numbers))
        else:
            await disk.tier.clear(of)
        report(call, task, size, numbers, True)


async def run(directory: Path, num_slabs: int, random: Random) -> None:
    async with opened(options(directory, num_slabs)) as disk:
        await asyncio.gather(*(write(disk, task, random) for task in range(NUM_TASKS)))


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), Random(int(sys.argv[3]))))
