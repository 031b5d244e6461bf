"""A disk that fails: the tier refuses and misses, counts it, and never returns wrong bytes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import disk_faulty
import pytest
from disk_rig import SECTOR, SLAB_BYTES, Disk, opened, options, space, with_modules_of
from each_row import each_row

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that makes the disk fail."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("faults") / "disk_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", HERE / "disk_faults.c", "-o", library, "-ldl"], check=True)
    return library


def run(faults: Path, directory: Path, per_mille: tuple[int, ...], **environment: str) -> dict[str, Any]:
    seed = random.SystemRandom().randrange(2**32)
    path = with_modules_of(disk_faulty.__file__)
    child = subprocess.run(
        [sys.executable, "-P", disk_faulty.__file__, directory, str(seed), *map(str, per_mille)],
        env=os.environ | {"LD_PRELOAD": str(faults), "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, f"seed {seed}\n{child.stderr}"
    return {**json.loads(child.stdout), "stderr": child.stderr}


def check_after_restart(directory: Path, result: dict[str, Any]) -> None:
    """What was found is found again. What else is found was put, and is right."""

    async def check() -> None:
        async with opened(options(directory, disk_faulty.NUM_SLABS)) as disk:
            for size in disk_faulty.SIZES:
                found = await disk.lookup(space(size), disk_faulty.NUMBERS)
                assert set(result["found"][str(size)]) <= set(found) <= set(result["possible"][str(size)])
                assert await disk.get(space(size), found) == found
            assert disk.tier.stats().corrupt == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    "per_mille",
    [(50, 0, 0, 0), (0, 50, 0, 0), (0, 0, 50, 0), (0, 0, 0, 500), (30, 30, 30, 300)],
    ids=["reads fail", "writes fail", "the disk is full", "transfers are short", "everything"],
)
def test_faults_now_and_then(faults: Path, tmp_path: Path, per_mille: tuple[int, ...]) -> None:
    result = run(faults, tmp_path, per_mille)
    stats = result["stats"]
    assert stats["state"] == "open"
    assert stats["corrupt"] == 0
    assert (stats["errors"] > 0) == (sum(per_mille[:3]) > 0)
    assert result["after"] == list(disk_faulty.NUMBERS)
    check_after_restart(tmp_path, result)


def test_a_disk_that_takes_no_writes_fails_as_a_whole(faults: Path, tmp_path: Path) -> None:
    """It fails if no call fails, or if a value that was found is lost after a restart."""
    with each_row() as row:
        for per_mille in ((0, 1000, 0, 0), (0, 0, 1000, 0)):
            with row(per_mille):
                (directory := tmp_path / str(per_mille[1])).mkdir()
                check_a_disk_without_writes(faults, directory, per_mille)


def check_a_disk_without_writes(faults: Path, tmp_path: Path, per_mille: tuple[int, ...]) -> None:
    result = run(faults, tmp_path, per_mille)
    assert result["failed"]["put"] > 0
    assert result["failed"]["remove"] > 0
    check_after_restart(tmp_path, result)


def test_a_disk_that_cannot_be_read_fails_as_a_whole(faults: Path, tmp_path: Path) -> None:
    result = run(faults, tmp_path, (1000, 0, 0, 0))
    assert result["stats"]["errors"] > 0
    check_after_restart(tmp_path, result)


def test_without_o_direct_the_page_cache_is_used(faults: Path, tmp_path: Path) -> None:
    result = run(faults, tmp_path, (0, 0, 0, 0), NO_DIRECT="1")
    assert "the file system has no O_DIRECT, so the page cache is used" in result["stderr"]
    check_after_restart(tmp_path, result)


def test_without_preallocation_the_files_are_sparse(faults: Path, tmp_path: Path) -> None:
    """`check_after_restart` fails if an acknowledged value is lost or wrong."""
    result = run(faults, tmp_path, (0, 0, 0, 0), FALLOCATE_ERROR=str(errno.EOPNOTSUPP))
    check_after_restart(tmp_path, result)


def test_files_that_do_not_fit_are_not_grown(faults: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="No space left on device"):
        run(faults, tmp_path, (0, 0, 0, 0), FALLOCATE_ERROR=str(errno.ENOSPC))
    assert sum(path.stat().st_size for path in tmp_path.glob("data-*")) == 0


async def filled(directory: Path) -> None:
    async with opened(options(directory, 3)) as disk:
        await disk.put(space(5000), range(50))
        await disk.put(space(SLAB_BYTES), [1])


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0x10]))


async def found(directory: Path) -> tuple[list[int], list[int], Disk]:
    async with opened(options(directory, 3)) as disk:
        return await disk.get(space(5000), range(50)), await disk.get(space(SLAB_BYTES), [1]), disk


def test_a_damaged_value_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(filled(tmp_path))
    flip(tmp_path / "data-0", 7 * 2 * SECTOR + 100)
    small, large, disk = asyncio.run(found(tmp_path))
    assert (small, large) == ([n for n in range(50) if n != 7], [1])
    assert disk.tier.stats().corrupt == 1
    assert f"values in {tmp_path} that are removed because they were damaged: 1" in caplog.text
    caplog.clear()
    small, large, disk = asyncio.run(found(tmp_path))
    assert (small, disk.tier.stats().corrupt) == ([n for n in range(50) if n != 7], 0)
    assert "damaged" not in caplog.text


def test_bytes_behind_a_value_do_not_matter(tmp_path: Path) -> None:
    asyncio.run(filled(tmp_path))
    flip(tmp_path / "data-0", 7 * 2 * SECTOR + 5000)
    small, large, _ = asyncio.run(found(tmp_path))
    assert (small, large) == (list(range(50)), [1])


def test_a_damaged_record_is_a_miss(tmp_path: Path) -> None:
    with each_row() as row:
        for place in (0, 16, 40, 48, 56, 64, 72, 80, 88, 127):
            with row(place):
                (directory := tmp_path / str(place)).mkdir()
                asyncio.run(filled(directory))
                flip(directory / "records", SECTOR + 7 * 128 + place)
                small, large, disk = asyncio.run(found(directory))
                assert (small, large) == ([n for n in range(50) if n != 7], [1])
                assert disk.tier.stats().corrupt == 0


def test_the_values_of_a_slab_with_a_damaged_header_are_gone(tmp_path: Path) -> None:
    with each_row() as row:
        for place in (0, 8, 16, 25, 32):
            with row(place):
                (directory := tmp_path / str(place)).mkdir()
                asyncio.run(filled(directory))
                flip(directory / "records", place)
                small, large, _ = asyncio.run(found(directory))
                assert (small, large) == ([], [1])


def test_swapped_records_do_not_count(tmp_path: Path) -> None:
    """A sector that was written to another place says so."""
    asyncio.run(filled(tmp_path))
    records = tmp_path / "records"
    data = bytearray(records.read_bytes())
    first, second = slice(SECTOR, 2 * SECTOR), slice(2 * SECTOR, 3 * SECTOR)
    data[first], data[second] = data[second], data[first]
    records.write_bytes(data)
    small, large, disk = asyncio.run(found(tmp_path))
    assert (small, large, disk.tier.stats().corrupt) == ([], [1], 0)


def test_every_flipped_byte_is_a_miss_or_does_not_matter(tmp_path: Path) -> None:
    """Random bytes anywhere: the rig compares all bytes that are found."""
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    asyncio.run(filled(tmp_path))
    paths = [tmp_path / "records", tmp_path / "data-0", tmp_path / "data-1"]
    for _ in range(20):
        for path in paths:
            flip(path, draw.randrange(min(path.stat().st_size, 60 * 2 * SECTOR)))
        asyncio.run(found(tmp_path))
