"""Reads and writes of the disk tier, against fio on the same files, and the start with a million values.

Every round writes new values in place of the least recently used ones, reads them in random order, and lets fio read
and write as many bytes at random places of the same files, with as many requests in flight. Values that fio has
overwritten are not read any more.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import random
import secrets
import shutil
import statistics
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvservice._ext import store_checksums
from kvservice.bench.harness import table
from kvservice.errors import KVServiceError
from kvservice.owned import OwnedFolder, OwnedProcess
from kvservice.tiers import Space, Values
from kvservice.tiers.disk import DiskOptions, DiskTier

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "2m": 2 << 20}
MEMORY_BYTES = 256 << 20
# So many calls at a time, each with a part of the memory.
NUM_CALLS = 4
DEPTH = 16
ENGINES = {
    "io_uring": ["--ioengine=io_uring", f"--iodepth={DEPTH}"],
    "psync": ["--ioengine=psync", f"--numjobs={DEPTH}", "--thread", "--group_reporting"],
}
START_VALUE_BYTES = 4096


class FioMissingError(KVServiceError):
    """fio is not installed."""


@dataclass(frozen=True)
class DiskBenchOptions:
    """`directory` is on the disk to measure. Each round moves `round_bytes` in each way."""

    directory: Path
    rounds: int = 5
    round_bytes: int = 1 << 30
    num_values: int = 1_000_000


class BenchMemory:
    """Memory like the block store's, in parts for calls at a time."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, MEMORY_BYTES)
        for at in range(0, MEMORY_BYTES, 1 << 20):
            self.memory[at : at + (1 << 20)] = random.randbytes(1 << 20)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def offsets(self, part: int, size: int) -> bytes:
        """Return the places of the values in a part."""
        count = MEMORY_BYTES // NUM_CALLS // size
        first = part * (MEMORY_BYTES // NUM_CALLS)
        return struct.pack(f"<{count}Q", *range(first, first + count * size, size))


class DiskWay:
    """The disk tier, with values of one size."""

    def __init__(self, tier: DiskTier, memory: BenchMemory, size: int) -> None:
        self.tier = tier
        self.space = Space(secrets.token_bytes(16), size, "bench")
        self.size = size
        self.memory = memory
        self.offsets = [memory.offsets(part, size) for part in range(NUM_CALLS)]
        self.keys: list[bytes] = []

    async def write(self, num_bytes: int) -> float:
        """Store new values. Returns the bytes per second."""
        per_call = len(self.offsets[0]) // 8
        checksums = [store_checksums(self.memory.address, offsets, self.size, 2) for offsets in self.offsets]
        batches = [os.urandom(32 * per_call) for _ in range(num_bytes // (per_call * self.size))]
        self.keys = [batch[at : at + 32] for batch in batches for at in range(0, len(batch), 32)]

        async def put(part: int) -> int:
            stored = 0
            while batches:
                values = Values(batches.pop(), self.offsets[part], checksums[part])
                stored += sum(await self.tier.put(self.space, values))
            return stored

        return await self._run(put)

    async def read(self) -> float:
        """Read the values that were written last, in random order. Returns the bytes per second."""
        keys = random.sample(self.keys, len(self.keys))
        per_call = len(self.offsets[0]) // 8
        batches = [b"".join(keys[at : at + per_call]) for at in range(0, len(keys), per_call)]

        async def get(part: int) -> int:
            found = 0
            while batches:
                result = await self.tier.get(self.space, Values(batches.pop(), self.offsets[part]))
                found += sum(result.found)
            return found

        return await self._run(get)

    async def _run(self, call: Callable[[int], Awaitable[int]]) -> float:
        start = time.perf_counter()
        done = sum(await asyncio.gather(*(call(part) for part in range(NUM_CALLS))))
        seconds = time.perf_counter() - start
        assert done == len(self.keys), "a value was not stored or not found"
        return done * self.size / seconds


async def fio(files: list[Path], direction: str, engine: str, size: int, num_bytes: int) -> float:
    """Return the bytes per second of fio at random places of the files."""
    jobs = DEPTH if engine == "psync" else 1
    command = ["fio", "--name=disk", f"--filename={':'.join(map(str, files))}", f"--rw=rand{direction}", f"--bs={size}"]
    command += ["--direct=1", "--norandommap", "--randrepeat=0", f"--io_size={num_bytes // jobs}", *ENGINES[engine]]
    command += ["--output-format=json"]
    process = OwnedProcess(command, stdout=subprocess.PIPE)
    output, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, "fio failed"
    return float(json.loads(output)["jobs"][0][direction]["bw_bytes"])


async def measure(options: DiskBenchOptions, memory: BenchMemory, size: int) -> dict[str, list[float]]:
    """Return the bytes per second of each round and way, at one size."""
    speeds: dict[str, list[float]] = {}
    with OwnedFolder("kvservice-bench-", options.directory) as directory:
        capacity_bytes = options.round_bytes * 9 // 8 + (256 << 20)
        settings = DiskOptions(directory, capacity_bytes, num_threads=DEPTH)
        tier = DiskTier(settings, memory.address, MEMORY_BYTES)
        await tier.opened()
        way = DiskWay(tier, memory, size)
        files = sorted(path for path in directory.glob("data-*") if path.stat().st_size > 0)
        await way.write(capacity_bytes)  # every slot was written once
        for _ in range(options.rounds):
            round_speeds = {"write": await way.write(options.round_bytes), "read": await way.read()}
            for direction in ("read", "write"):
                for engine in ENGINES:
                    speed = await fio(files, direction, engine, size, options.round_bytes)
                    round_speeds[f"fio_{engine}_{direction}"] = speed
            for name, speed in round_speeds.items():
                speeds.setdefault(name, []).append(speed)
        await tier.close()
    return speeds


async def measure_start(options: DiskBenchOptions, memory: BenchMemory) -> dict[str, float]:
    """Store small values, and return the seconds until a tier on the same files finds all of them."""
    with OwnedFolder("kvservice-bench-", options.directory) as directory:
        settings = DiskOptions(directory, options.num_values * START_VALUE_BYTES * 9 // 8 + (1 << 30))
        tier = DiskTier(settings, memory.address, MEMORY_BYTES)
        await tier.opened()
        way = DiskWay(tier, memory, START_VALUE_BYTES)
        per_call = len(way.offsets[0]) // 8
        speed = await way.write(-(-options.num_values // per_call) * per_call * START_VALUE_BYTES)
        stored = tier.stats().num_values
        await tier.close()
        seconds = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            tier = DiskTier(settings, memory.address, MEMORY_BYTES)
            await tier.opened()
            seconds.append(time.perf_counter() - start)
            assert tier.stats().num_values == stored, "values are lost"
            await tier.close()
    return {
        "num_values": stored,
        "start_s": statistics.median(seconds),
        "written_values_per_s": speed / START_VALUE_BYTES,
    }


def figures(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Return medians, and the medians of the ratios of rounds to the better way of fio."""
    result = {f"{name}_bytes_per_s": statistics.median(samples) for name, samples in speeds.items()}
    for direction in ("read", "write"):
        best = [max(pair) for pair in zip(*(speeds[f"fio_{engine}_{direction}"] for engine in ENGINES), strict=True)]
        ratios = [own / other for own, other in zip(speeds[direction], best, strict=True)]
        result[f"{direction}_of_fio"] = statistics.median(ratios)
    return result


def run(options: DiskBenchOptions) -> dict[str, Any]:
    if shutil.which("fio") is None:
        raise FioMissingError("There is no fio.")
    memory = BenchMemory()

    async def run_all() -> dict[str, Any]:
        results: dict[str, Any] = {name: figures(await measure(options, memory, size)) for name, size in SIZES.items()}
        results["start"] = await measure_start(options, memory)
        return results

    return asyncio.run(run_all())


def render(results: dict[str, Any], console: Console) -> None:
    columns = ("read", "fio io_uring", "fio psync", "of the best", "write", "fio io_uring", "fio psync", "of the best")
    made = table(f"disk tier, GB/s, {DEPTH} requests in flight", ["values of"], columns)
    for name in SIZES:
        row = results[name]
        cells = []
        for direction in ("read", "write"):
            ways = (direction, f"fio_io_uring_{direction}", f"fio_psync_{direction}")
            cells += [f"{row[f'{way}_bytes_per_s'] / 1e9:.2f}" for way in ways]
            cells.append(f"{row[f'{direction}_of_fio']:.2f}")
        made.add_row(name, *cells)
    console.print(made)
    start = results["start"]
    console.print(f"start with {start['num_values']:,} values: {start['start_s']:.2f} s")
    console.print(f"values of 4 KiB written: {start['written_values_per_s']:,.0f} a second")
