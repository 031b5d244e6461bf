"""Processes that write to a disk tier are killed at any moment. Set KVSERVICE_DISK_KILLS to 100 for a long run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from random import Random

import disk_writer
import pytest
from disk_rig import opened, options, space, with_modules_of

KILLS = int(os.environ.get("KVSERVICE_DISK_KILLS", "4"))

# A value: its task, its size and its number.
Value = tuple[int, int, int]
ALL = [(task, size) for task in range(disk_writer.NUM_TASKS) for size in disk_writer.SIZES]


class Expected:
    """The values that must be there, and those that may be."""

    def __init__(self) -> None:
        self.stored: set[Value] = set()
        self.possible: set[Value] = set()

    def see(self, line: str) -> None:
        call, task, size, numbers, ended = json.loads(line)
        values = {(task, size, number) for number in numbers}
        if call == "clear":
            values = {(task, size, number) for number in disk_writer.NUMBERS}
        if call == "put":
            self.possible |= values
            self.stored |= values if ended else set()
        else:
            self.stored -= values
            self.possible -= values if ended else set()


def kill_a_writer(directory: Path, num_slabs: int, seed: int, num_lines: int, expected: Expected) -> None:
    """Kill it when it has printed so many lines, and take what it printed into account."""
    command = [sys.executable, "-P", disk_writer.__file__, str(directory), str(num_slabs), str(seed)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": with_modules_of(disk_writer.__file__)},
    ) as child:
        assert child.stdout is not None
        for _ in range(num_lines):
            expected.see(child.stdout.readline())
        child.kill()
        for line in child.stdout:
            if line.endswith("\n"):
                expected.see(line)


async def found(directory: Path, num_slabs: int) -> set[Value]:
    """Return the values that are found, after a look at their bytes."""
    values = set()
    async with opened(options(directory, num_slabs)) as disk:
        for task, size in ALL:
            of = space(size, f"task {task}")
            there = await disk.lookup(of, disk_writer.NUMBERS)
            assert await disk.get(of, there) == there
            values |= {(task, size, number) for number in there}
        assert disk.tier.stats().corrupt == 0
        assert disk.tier.stats().num_values == len(values)
    return values


@pytest.mark.timeout(60 + 30 * KILLS)
@pytest.mark.parametrize("num_slabs", [130, 12], ids=["everything fits", "values are evicted"])
def test_killed_writers_leave_whole_values(tmp_path: Path, num_slabs: int) -> None:
    """What was acknowledged is there, unless it was evicted. What was removed is not. What is there is right."""
    seed = random.SystemRandom().randrange(2**32)
    draw = Random(seed)
    expected = Expected()
    for _ in range(KILLS):
        kill_a_writer(tmp_path, num_slabs, draw.randrange(2**32), draw.randint(1, 300), expected)
        there = asyncio.run(found(tmp_path, num_slabs))
        assert there <= expected.possible, f"seed {seed}"
        if num_slabs > 100:
            assert expected.stored <= there, f"seed {seed}"
        expected.stored = set(there)
        expected.possible = set(there)
