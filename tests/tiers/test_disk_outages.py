"""A disk that fails for a while under load: its values stay, and the tier works again by itself."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import disk_outage
import pytest
from disk_rig import opened, options, space, with_modules_of

HERE = Path(__file__).parent
# Writes in progress and their probes may evict so many of about 2,000 values.
MOST_LOST = 16


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that makes the disk fail."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("faults") / "disk_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", HERE / "disk_faults.c", "-o", library, "-ldl"], check=True)
    return library


def run(faults: Path, directory: Path, reads: int, writes: int, end: str) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-P", disk_outage.__file__, directory, str(reads), str(writes), end],
        env=os.environ | {"LD_PRELOAD": str(faults), "PYTHONPATH": with_modules_of(disk_outage.__file__)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == (0 if end == "back" else -9), child.stderr
    result: dict[str, Any] = json.loads(child.stdout)
    return result


async def found(directory: Path) -> set[int]:
    """Return the values that a new process finds. The rig compares their bytes."""
    of = space(disk_outage.SIZE)
    async with opened(options(directory, disk_outage.NUM_SLABS)) as disk:
        there = await disk.lookup(of, [*disk_outage.BEFORE, *disk_outage.DURING, *disk_outage.AFTER])
        assert await disk.get(of, there) == there
        assert disk.tier.stats().corrupt == 0
    return set(there)


def test_values_outlast_an_outage(faults: Path, tmp_path: Path) -> None:
    result = run(faults, tmp_path, 1000, 1000, "back")
    assert len(result["before"]) > 1900
    assert len(set(result["before"]) - set(result["during"])) <= MOST_LOST
    assert result["failing"]["state"] == "suspended"
    assert result["failing"]["errors"] > 0
    assert result["well"]["state"] == "open"
    assert result["read"] == result["during"][-200:]
    assert result["after"] == list(disk_outage.AFTER)
    assert result["opening"] == "the disk cannot be read"
    assert set(result["after"]) <= asyncio.run(found(tmp_path))


def test_a_disk_that_takes_no_writes_keeps_its_values(faults: Path, tmp_path: Path) -> None:
    """Its values are read all the time."""
    result = run(faults, tmp_path, 0, 1000, "back")
    assert len(set(result["before"]) - set(result["during"])) <= MOST_LOST
    assert result["stored"] == []
    assert result["well"]["state"] == "open"
    assert result["after"] == list(disk_outage.AFTER)


@pytest.mark.parametrize(("reads", "writes"), [(1000, 1000), (0, 700)], ids=["all fails", "most writes fail"])
def test_a_process_killed_in_an_outage(faults: Path, tmp_path: Path, reads: int, writes: int) -> None:
    """Everything that was found is there. Beside it there may be values whose eviction or write was not complete."""
    result = run(faults, tmp_path, reads, writes, "kill")
    there = asyncio.run(found(tmp_path))
    assert set(result["during"]) <= there
    assert there <= {*disk_outage.BEFORE, *disk_outage.DURING}
