"""The disk tier: what it keeps, what it refuses, and what it finds after a restart."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_rig import MEMORY_BYTES, SECTOR, SLAB_BYTES, TOTAL_SLAB_BYTES, Disk, keys, opened, options, space
from each_row import each_row
from odd_entries import ODD_ENTRIES, make_odd_entry
from waiting import PATIENCE_S

from kvservice.errors import InvalidArgumentError
from kvservice.tiers import DiskOptions, DiskTier, TierError, Values

SIZES = (1, 100, SECTOR - 1, SECTOR, SECTOR + 1, 5000, 65536, 100_001, SLAB_BYTES)


def test_values_come_back_also_after_a_restart(tmp_path: Path) -> None:
    """It fails if a value is missing or has other bytes, or if it is not counted."""
    with each_row() as row:
        for size in SIZES:
            with row(size):
                (directory := tmp_path / str(size)).mkdir()
                check_values_come_back(directory, size)


def check_values_come_back(tmp_path: Path, size: int) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            assert await disk.put(space(size), range(5)) == list(range(5))
            assert await disk.lookup(space(size), range(6)) == list(range(5))
            assert await disk.get(space(size), range(6)) == list(range(5))
            stats = disk.tier.stats()
            assert (stats.num_values, stats.used_bytes, stats.written_values, stats.read_values) == (5, 5 * size, 5, 5)
        async with opened(options(tmp_path)) as disk:
            assert await disk.get(space(size), range(6)) == list(range(5))
            assert disk.tier.stats().used_bytes == 5 * size

    asyncio.run(run())


def test_the_log_says_what_is_found_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            await disk.put(space(100), range(5))
        async with opened(options(tmp_path)) as disk:
            await disk.tier.remove(space(100), keys([1]))

    with caplog.at_level("INFO", logger="kvservice.tiers"):
        asyncio.run(run())
    place = re.escape(f"the disk tier in {tmp_path} is")
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    expected = [
        rf"{place} open after \d+\.\d\d s: 0\.01 GiB, 0 values are found",
        f"{place} closed, 5 values are kept",
        rf"{place} open after \d+\.\d\d s: 0\.01 GiB, 5 values are found",
        f"{place} closed, 4 values are kept",
    ]
    assert len(lines) == len(expected)
    assert all(map(re.fullmatch, expected, lines))


def test_a_directory_that_is_taken_away_gets_no_values(tmp_path: Path) -> None:
    """It fails if a put counts as stored meanwhile, or if values are lost afterwards."""
    with each_row() as row:
        for is_replaced in (False, True):
            with row(is_replaced):
                check_a_directory_taken_away(tmp_path / str(is_replaced), is_replaced)


def check_a_directory_taken_away(tmp_path: Path, is_replaced: bool) -> None:
    folder, elsewhere = tmp_path / "values", tmp_path / "elsewhere"
    folder.mkdir(parents=True)

    async def run() -> None:
        async with opened(options(folder, check_s=0)) as disk:
            assert await disk.put(space(100), range(3)) == [0, 1, 2]
            folder.rename(elsewhere)
            if is_replaced:
                shutil.copytree(elsewhere, folder)
            with pytest.raises(TierError, match="not the directory that was opened" if is_replaced else "No such file"):
                await disk.put(space(100), range(3, 5))
            assert await disk.get(space(100), range(5)) == [0, 1, 2]
            if is_replaced:
                shutil.rmtree(folder)
            elsewhere.rename(folder)
            assert await disk.put(space(100), range(3, 5)) == [3, 4]

    asyncio.run(run())


class HangingDisk:
    """A look at the directory of a tier waits until `go_on` is set. `begun` counts the looks."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        stat = os.stat

        def held(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if str(path) == str(directory / "lock"):
                self.begun.release()
                assert self.go_on.wait(PATIENCE_S)
            return stat(path, *args, **options)

        monkeypatch.setattr(os, "stat", held)


def test_a_disk_that_hangs_holds_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes wait for it together. One that is cancelled leaves it to the others."""

    async def run() -> None:
        async with opened(options(tmp_path, check_s=0)) as disk:
            hanging = HangingDisk(tmp_path, monkeypatch)
            writes = [asyncio.create_task(disk.put(space(100), [number], first=SECTOR * number)) for number in range(3)]
            assert await asyncio.to_thread(hanging.begun.acquire, timeout=PATIENCE_S)
            writes[0].cancel()
            await asyncio.wait(writes[:1])
            assert not writes[1].done()
            assert not hanging.begun.acquire(blocking=False)
            hanging.go_on.set()
            assert [await write for write in writes[1:]] == [[1], [2]]

    asyncio.run(run())


def test_a_write_that_waits_for_the_directory_fails_when_the_tier_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with opened(options(tmp_path, check_s=0)) as disk:
            hanging = HangingDisk(tmp_path, monkeypatch)
            write = asyncio.create_task(disk.put(space(100), [1]))
            assert await asyncio.to_thread(hanging.begun.acquire, timeout=PATIENCE_S)
            await disk.tier.close()
            hanging.go_on.set()
            with pytest.raises(TierError, match="is closed"):
                await write

    asyncio.run(run())


def test_spaces_do_not_share_values(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            await disk.put(space(5000), [1, 2])
            await disk.put(space(5000, "other"), [2, 3])
            await disk.put(space(6000), [4])
            assert await disk.get(space(5000), [1, 2, 3, 4]) == [1, 2]
            await disk.tier.clear(space(5000))
            assert await disk.lookup(space(5000), [1, 2, 3, 4]) == []
            assert await disk.get(space(5000, "other"), [1, 2, 3, 4]) == [2, 3]
            assert await disk.get(space(6000), [4]) == [4]
            assert disk.tier.stats().removed == 2

    asyncio.run(run())


def test_removed_values_do_not_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            await disk.put(space(100), range(40))
            await disk.put(space(SECTOR), range(3))
            assert await disk.tier.remove(space(100), keys([3, 7, 7, 99])) == 2
            await disk.tier.clear(space(SECTOR))
            assert await disk.lookup(space(100), [3, 4, 7]) == [4]
        async with opened(options(tmp_path)) as disk:
            assert await disk.get(space(100), range(40)) == [n for n in range(40) if n not in (3, 7)]
            assert await disk.lookup(space(SECTOR), range(3)) == []

    asyncio.run(run())


def test_a_value_that_is_put_again_is_not_written_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            assert await disk.put(space(100), [1, 1, 2]) == [1, 1, 2]
            assert await disk.put(space(100), [1, 2]) == [1, 2]
            assert disk.tier.stats().written_values == 2

    asyncio.run(run())


def test_the_least_recently_used_values_are_evicted(tmp_path: Path) -> None:
    size = SLAB_BYTES // 32

    async def run() -> None:
        async with opened(options(tmp_path, num_slabs=2)) as disk:
            for number in range(64):
                await disk.put(space(size), [number])
            there = await disk.lookup(space(size), range(64))
            assert there == list(range(64 - len(there), 64))
            assert await disk.get(space(size), [there[0]]) == [there[0]]
            for number in range(100, 130):
                assert await disk.put(space(size), [number]) == [number]
            order = [*there[1:], there[0], *range(100, 130)]  # of their last use
            left = await disk.lookup(space(size), order)
            assert left == order[-len(left) :]
            # An eighth of the slots is freed ahead.
            assert 56 <= len(left) <= 64

    asyncio.run(run())


def test_a_stride_takes_a_slab_of_another_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path, num_slabs=1)) as disk:
            await disk.put(space(SECTOR), range(100))
            assert await disk.put(space(SLAB_BYTES), [1]) == [1]
            assert await disk.lookup(space(SECTOR), range(100)) == []
            assert await disk.put(space(100), [1]) == [1]
            assert await disk.lookup(space(SLAB_BYTES), [1]) == []
            assert disk.tier.stats().evicted == 101

    asyncio.run(run())


def test_values_larger_than_a_slab_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            assert await disk.put(space(SLAB_BYTES + 1), [1, 2]) == []
            assert await disk.put(space(SLAB_BYTES), [1, 2]) == [1, 2]
            assert disk.tier.stats().refused == 2

    asyncio.run(run())


def test_a_full_queue_drops_values(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path, max_queued=3)) as disk:
            assert await disk.put(space(100), range(4)) == [0, 1, 2]
            assert disk.tier.stats().dropped == 1
            assert await disk.put(space(100), [3]) == [3]
            assert await disk.get(space(100), range(4)) == [0, 1, 2]
            assert disk.tier.stats().dropped == 2

    asyncio.run(run())


def test_a_directory_serves_one_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)):
            with pytest.raises(TierError, match="is in use by another process"):
                Disk(options(tmp_path))
        async with opened(options(tmp_path)) as disk:
            assert disk.tier.stats().state == "open"

    asyncio.run(run())


def test_another_format_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)):
            pass
        meta = tmp_path / "meta"
        before = meta.read_bytes()
        for place, message in ((8, "has format 0, this version reads format 1"), (0, "is not of a disk tier")):
            damaged = bytearray(before)
            damaged[place] ^= 1
            meta.write_bytes(damaged)
            with pytest.raises(TierError, match=message):
                Disk(options(tmp_path))
        meta.write_bytes(before[:16] + b"\x01" + before[17:])
        with pytest.raises(TierError, match="is damaged"):
            Disk(options(tmp_path))
        meta.write_bytes(before)
        async with opened(options(tmp_path)):
            pass

    asyncio.run(run())


def test_the_files_keep_their_size_of_slabs(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            await disk.put(space(SLAB_BYTES), [1])
        async with opened(DiskOptions(tmp_path, 4 * TOTAL_SLAB_BYTES, slab_bytes=SECTOR)) as disk:
            assert await disk.get(space(SLAB_BYTES), [1]) == [1]

    asyncio.run(run())


def test_capacity_can_change(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path, num_slabs=4)) as disk:
            for number in range(4):
                await disk.put(space(SLAB_BYTES), [number])
        async with opened(options(tmp_path, num_slabs=3)) as disk:
            assert disk.tier.stats().capacity_bytes == 3 * SLAB_BYTES
            assert await disk.get(space(SLAB_BYTES), range(4)) == [0, 1, 2]
        async with opened(options(tmp_path, num_slabs=9)) as disk:
            assert await disk.get(space(SLAB_BYTES), range(4)) == [0, 1, 2]
            for number in range(10, 15):
                assert await disk.put(space(SLAB_BYTES), [number]) == [number]
            assert await disk.get(space(SLAB_BYTES), [*range(4), *range(10, 15)]) == [0, 1, 2, *range(10, 15)]
        assert sum(path.stat().st_size for path in tmp_path.glob("data-*")) == 9 * SLAB_BYTES

    asyncio.run(run())


def test_removals_wait_until_the_tier_is_open(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            await disk.put(space(100), [1])
        disk = Disk(options(tmp_path))
        assert await disk.tier.remove(space(100), keys([1])) == 1
        assert await disk.lookup(space(100), [1]) == []
        await disk.tier.close()

    asyncio.run(run())


def test_a_closed_tier_refuses_calls(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            await disk.put(space(100), [1])
        await disk.tier.close()
        for call in (disk.get(space(100), [1]), disk.put(space(100), [1]), disk.lookup(space(100), [1])):
            with pytest.raises(TierError, match="closed"):
                await call

    asyncio.run(run())


def test_a_cancelled_call_ends_when_the_memory_is_free(tmp_path: Path) -> None:
    """Afterwards the memory is overwritten, and every value that is stored is whole."""
    of = space(SLAB_BYTES // 16)

    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            calls = [asyncio.ensure_future(disk.put(of, range(100)))]
            await asyncio.sleep(0)
            calls[0].cancel()
            calls[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls[0]
            disk.memory[:] = bytes(MEMORY_BYTES)
            there = await disk.lookup(of, range(100))
            assert await disk.get(of, there) == there
            await disk.put(of, [7])
            reading = asyncio.ensure_future(disk.get(of, [7] * 50))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert disk.tier.stats().corrupt == 0

    asyncio.run(run())


OUT_OF_RANGE = [
    ("capacity_bytes", TOTAL_SLAB_BYTES - 1),
    ("slab_bytes", SECTOR - 1),
    ("num_threads", 0),
    ("num_threads", 257),
    ("max_queued", 0),
]


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        with each_row() as row:
            for field, value in OUT_OF_RANGE:
                with row((field, value)):
                    settings = {"capacity_bytes": TOTAL_SLAB_BYTES, "slab_bytes": SLAB_BYTES} | {field: value}
                    with pytest.raises(InvalidArgumentError) as refused:
                        DiskTier(DiskOptions(tmp_path, **settings), 4096, 4096)
                    assert refused.value.field == field

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_the_smallest_and_the_most_threads_work(tmp_path: Path) -> None:
    async def run() -> None:
        for num_threads, numbers in ((1, range(50)), (256, range(50, 100))):
            async with opened(options(tmp_path, num_slabs=1, num_threads=num_threads)) as disk:
                assert await disk.put(space(100), numbers) == list(numbers)
                assert await disk.get(space(100), numbers) == list(numbers)

    asyncio.run(run())


def test_places_outside_the_memory_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(options(tmp_path)) as disk:
            for offset in (MEMORY_BYTES - 99, 1 << 63):
                values = Values(keys([1]), offset.to_bytes(8, "little"), bytes(8))
                for call in (disk.tier.put(space(100), values), disk.tier.get(space(100), values)):
                    with pytest.raises(InvalidArgumentError, match="not in the memory"):
                        await call
            values = Values(keys([1]), (MEMORY_BYTES - 100).to_bytes(8, "little"), bytes(8))
            assert await disk.tier.put(space(100), values) == b"\x01"

    asyncio.run(run())


def test_what_is_not_a_regular_file_is_named_and_left_alone(tmp_path: Path) -> None:
    """It fails if the entry is not named, or has changed."""
    with each_row() as row:
        for name in ("lock", "meta", "meta.new", "data-0", "records"):
            for kind in ODD_ENTRIES:
                with row((name, kind)):
                    check_odd_entry(tmp_path / f"{name} {kind}" / "values", name, kind)


def check_odd_entry(directory: Path, name: str, kind: str) -> None:
    directory.mkdir(parents=True)
    target = make_odd_entry(directory / name, kind)
    before = target.read_bytes(), os.lstat(directory / name)

    async def run() -> None:
        with pytest.raises(TierError, match=rf"/values/{name}: is not a regular file"):
            async with opened(options(directory)):
                pass

    asyncio.run(run())
    assert (target.read_bytes(), os.lstat(directory / name)) == before


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(TierError, match="/missing/kv: No such file or directory"):
            Disk(options(tmp_path / "missing" / "kv"))

    asyncio.run(run())


def test_a_file_system_without_room_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        disk = Disk(DiskOptions(tmp_path, 1 << 50))
        with pytest.raises(TierError, match=r"needs \d+ MiB more, its file system has \d+ MiB"):
            await disk.tier.opened()
        with pytest.raises(TierError):
            await disk.lookup(space(100), [1])
        assert disk.tier.stats().state == "failed"
        await disk.tier.close()

    asyncio.run(run())
