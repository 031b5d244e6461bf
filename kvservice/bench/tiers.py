"""Tiers below the block store: which values are worth writing to one, simulated; the disk tier against fio; and the
Mooncake tier against Mooncake's library."""

from __future__ import annotations

import asyncio
import contextlib
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
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from kvservice import _ext
from kvservice._ext import store_checksums
from kvservice.bench import medians, table, take_turns
from kvservice.bench.store import (
    BATCH_BYTES,
    BATCH_BYTES_QUICK,
    HOST,
    LOCAL_BYTES,
    ROUNDS,
    ROUNDS_QUICK,
    SIZES,
    BlockBatch,
    BlockWay,
    MooncakePeer,
    check,
    mooncake_processes,
    puts_and_gets,
    rate,
)
from kvservice.errors import KVServiceError
from kvservice.mooncake import MooncakeOptions
from kvservice.owned import OwnedFolder, OwnedProcess
from kvservice.pool.sealed import SealedMemory
from kvservice.tiers import Space, Values
from kvservice.tiers.disk import DiskOptions, DiskTier
from kvservice.tiers.links import AdmissionRule, AdmitAll, AdmitReused
from kvservice.tiers.mooncake import MooncakeTier

# ---- which values that leave memory are worth writing to a disk
#
# A trace is a list of requests, each the keys of its blocks, which are chains: a block is of use only with those before
# it. Memory and disk evict the least recently used value. For each rule of admission: the share of blocks that a
# request finds, in memory and on the disk, and the share of blocks that are written to the disk.


# Values of memory and of the disk, as shares of the different values of the trace.
MEMORY_SHARE: Final = 0.03
DISK_SHARES: Final = (0.1, 0.3, 1.0)

Trace = list[list[int]]


class Rule(Protocol):
    """Decides whether a value that leaves memory is written. `victim` is the one that the disk would evict."""

    def admit(self, key: int, uses: int, victim: int | None) -> bool: ...

    def note(self, key: int) -> None:
        """Note that a request names a key."""


class Admitted:
    """A rule of the daemon."""

    def __init__(self, rule: AdmissionRule) -> None:
        self._rule = rule

    def admit(self, key: int, uses: int, victim: int | None) -> bool:
        del victim
        packed = sha256(key.to_bytes(8, "little")).digest()
        return bool(self._rule.admit(packed, np.array([uses], np.uint64))[0])

    def note(self, key: int) -> None:
        pass


class Frequent:
    """TinyLFU (Einziger et al., 2017), with exact counts: a value is written if requests named it more often than the
    one that the disk would evict for it. Counts are halved now and then."""

    def __init__(self, num_values: int) -> None:
        self._counts: Counter[int] = Counter()
        self._left = self._period = 10 * num_values

    def admit(self, key: int, uses: int, victim: int | None) -> bool:
        del uses
        return victim is None or self._counts[key] > self._counts[victim]

    def note(self, key: int) -> None:
        self._counts[key] += 1
        self._left -= 1
        if not self._left:
            self._left = self._period
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})


RULES: Final[dict[str, Callable[[int], Rule]]] = {
    "all": lambda _: Admitted(AdmitAll()),
    "reused": lambda _: Admitted(AdmitReused()),
    "frequent": Frequent,
}


@dataclass
class RuleOutcome:
    """Numbers of blocks: that requests named, that they found in memory and on the disk, and that were written."""

    named: int = 0
    in_memory: int = 0
    on_disk: int = 0
    written: int = 0


class RuleSimulation:
    """Memory over a disk, with sizes in values."""

    def __init__(self, memory: int, disk: int, rule: Rule) -> None:
        self._most_in_memory, self._most_on_disk, self._rule = memory, disk, rule
        # The number of uses since it was stored, by key, in the order of use.
        self._memory: OrderedDict[int, int] = OrderedDict()
        self._disk: OrderedDict[int, None] = OrderedDict()
        self.outcome = RuleOutcome()

    def request(self, keys: list[int]) -> None:
        """Find leading blocks, and store the others after they were computed."""
        self.outcome.named += len(keys)
        leading = True
        for key in keys:
            self._rule.note(key)
            if leading:
                leading = self._find(key)
        for key in reversed(keys):  # the first block counts as the most recently used
            if key in self._memory:
                self._memory.move_to_end(key)
            else:
                self._store(key, 0)

    def _find(self, key: int) -> bool:
        if key in self._memory:
            self.outcome.in_memory += 1
            self._memory[key] += 1
            self._memory.move_to_end(key)
            return True
        if key not in self._disk:
            return False
        self.outcome.on_disk += 1
        self._disk.move_to_end(key)
        self._store(key, 1)
        return True

    def _store(self, key: int, uses: int) -> None:
        self._memory[key] = uses
        if len(self._memory) > self._most_in_memory:
            self._write(*self._memory.popitem(last=False))

    def _write(self, key: int, uses: int) -> None:
        if key in self._disk:
            return
        is_full = len(self._disk) >= self._most_on_disk
        victim = next(iter(self._disk)) if is_full else None
        if not self._rule.admit(key, uses, victim):
            return
        if victim is not None:
            del self._disk[victim]
        self._disk[key] = None
        self.outcome.written += 1


def conversations(seed: int, num_conversations: int = 6000) -> Trace:
    """Return requests of conversations with several turns. They begin with one of 20 system prompts, some of which are
    more frequent. A quarter of the requests are single prompts that nobody continues."""
    rng, keys = random.Random(seed), iter(range(1 << 62))
    systems = [[next(keys) for _ in range(rng.randint(1, 8))] for _ in range(20)]
    arrivals: list[tuple[float, int, list[int]]] = []
    for number in range(num_conversations):
        start_s = rng.uniform(0, 36_000)
        history = list(rng.choices(systems, [1 / (1 + i) for i in range(20)])[0])
        turns = 1 if rng.random() < 0.5 else 1 + int(rng.expovariate(1 / 5))
        for _ in range(turns):
            history = history + [next(keys) for _ in range(1 + int(rng.expovariate(1 / 6)))]
            arrivals.append((start_s, number, history))
            start_s += rng.lognormvariate(4.5, 1.2)
    return [history for _, _, history in sorted(arrivals, key=lambda arrival: arrival[:2])]


def read_trace(path: Path) -> Trace:
    """Read a trace of Mooncake: a JSON object a line, whose `hash_ids` are the keys of blocks."""
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines() if line]


def simulate(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a row for each size of the disk and rule."""
    num_values = len({key for keys in trace for key in keys})
    memory = max(1, int(MEMORY_SHARE * num_values))
    for share in DISK_SHARES:
        disk = max(1, int(share * num_values))
        for name, make_rule in RULES.items():
            simulation = RuleSimulation(memory, disk, make_rule(disk))
            for keys in trace:
                simulation.request(keys)
            found = simulation.outcome
            yield {
                "disk_values": disk,
                "rule": name,
                "in_memory": found.in_memory / found.named,
                "on_disk": found.on_disk / found.named,
                "written": found.written / found.named,
                "hits_per_write": found.on_disk / max(1, found.written),
            }


def run_rules(trace: str | None, seed: int) -> dict[str, Any]:
    traces = {"conversations": conversations(seed)}
    if trace is not None:
        traces[Path(trace).name] = read_trace(Path(trace))
    return {name: list(simulate(requests)) for name, requests in traces.items()}


def render_rules(results: dict[str, Any], console: Console) -> None:
    for name, rows in results.items():
        table = Table(title=f"{name}: shares of the blocks that requests name")
        for column in ("disk, values", "rule", "found in memory", "found on disk", "written", "hits per write"):
            table.add_column(column, justify="left" if column == "rule" else "right")
        for row in rows:
            shares = [f"{row[part]:.1%}" for part in ("in_memory", "on_disk", "written")]
            table.add_row(f"{row['disk_values']:,}", row["rule"], *shares, f"{row['hits_per_write']:.2f}")
        console.print(table)


# ---- reads and writes of the disk tier, against fio on the same files, and the start with a million values
#
# Every round writes new values in place of the least recently used ones, reads them in random order, and lets fio read
# and write as many bytes at random places of the same files, with as many requests in flight. Values that fio has
# overwritten are not read any more.


DISK_SIZES = {"64k": 64 << 10, "256k": 256 << 10, "2m": 2 << 20}
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


async def measure_disk(options: DiskBenchOptions, memory: BenchMemory, size: int) -> dict[str, list[float]]:
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


def run_disk(options: DiskBenchOptions) -> dict[str, Any]:
    if shutil.which("fio") is None:
        raise FioMissingError("There is no fio.")
    memory = BenchMemory()

    async def run_all() -> dict[str, Any]:
        results: dict[str, Any] = {
            name: figures(await measure_disk(options, memory, size)) for name, size in DISK_SIZES.items()
        }
        results["start"] = await measure_start(options, memory)
        return results

    return asyncio.run(run_all())


def render_disk(results: dict[str, Any], console: Console) -> None:
    columns = ("read", "fio io_uring", "fio psync", "of the best", "write", "fio io_uring", "fio psync", "of the best")
    made = table(f"disk tier, GB/s, {DEPTH} requests in flight", ["values of"], columns)
    for name in DISK_SIZES:
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


# ---- puts and gets of the Mooncake tier, against the library's own on registered memory, in the same Mooncake Store
#
# Both have one client on the loopback interface, over TCP. The tier's figures include its child process, the trailer of
# each object, and the check of all checksums after a get.


MOONCAKE_LABELS = {"library": "the library alone", "tier": "the tier"}


class MooncakeTierWay:
    """Values in memory like a block store's: the first half is put, the second half is read into."""

    def __init__(self, runner: asyncio.Runner, batch: BlockBatch, options: MooncakeOptions) -> None:
        self.batch, self._runner = batch, runner
        count, block_bytes = batch.values.shape
        self._memory = SealedMemory("bench-store", 2 * batch.values.nbytes, read_only=False)
        np.frombuffer(self._memory.map, np.uint8)[: batch.values.nbytes] = batch.values.reshape(-1)
        self._space = Space(block_bytes.to_bytes(16, "little"), block_bytes, "bench")
        offsets = [
            struct.pack(f"<{count}Q", *range(at, at + batch.values.nbytes, block_bytes))
            for at in (0, batch.values.nbytes)
        ]
        keys = b"".join(batch.keys)
        self._put = Values(keys, offsets[0], _ext.store_checksums(self._memory.address, offsets[0], block_bytes, 2))
        self._get = Values(keys, offsets[1])
        runner.run(self._open(options))

    def put(self) -> None:
        assert all(self._runner.run(self._tier.put(self._space, self._put))), "there is room"

    def get(self) -> None:
        got = self._runner.run(self._tier.get(self._space, self._get))
        assert all(got.found), "they were put"
        assert got.checksums == self._put.checksums

    def empty(self) -> None:
        self._runner.run(self._tier.clear(self._space))

    def close(self) -> None:
        self._runner.run(self._tier.close())

    async def _open(self, options: MooncakeOptions) -> None:
        self._tier = MooncakeTier.open(options, self._memory.fd, self._memory.num_bytes)
        while self._tier.stats().state != "open":
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def mooncake_ways(runner: asyncio.Runner, block_bytes: int, num_bytes: int) -> Iterator[dict[str, BlockWay]]:
    """Raises PeerMissingError."""
    with mooncake_processes() as (store, master, metadata, _):
        check(store.setup(HOST, metadata, 0, LOCAL_BYTES, "tcp", "", master))
        library = MooncakePeer(store, BlockBatch(block_bytes, num_bytes))
        tier = MooncakeTierWay(runner, BlockBatch(block_bytes, num_bytes), MooncakeOptions(master, HOST, metadata))
        try:
            yield {"library": library, "tier": tier}
        finally:
            tier.close()


def run_mooncake(quick: bool = False) -> dict[str, Any]:
    """Return `<way>_<put|get>_<size>_s`, and `batch_bytes`. Raises PeerMissingError."""
    num_bytes = BATCH_BYTES_QUICK if quick else BATCH_BYTES
    results: dict[str, Any] = {"batch_bytes": num_bytes}
    with asyncio.Runner() as runner:
        for size, block_bytes in SIZES.items():
            with mooncake_ways(runner, block_bytes, num_bytes) as opened:
                contenders = puts_and_gets(opened, size)
                results |= medians(take_turns(contenders, ROUNDS_QUICK if quick else ROUNDS, warm_ups=1))
    return results


def render_mooncake(results: dict[str, Any], console: Console) -> None:
    rows = table("Values, GB/s; in brackets: in units of the library", ("block", "way"), ("put", "get"))
    for size in SIZES:
        rows.add_section()
        for way, label in MOONCAKE_LABELS.items():
            rows.add_row(
                f"{size.upper()}iB",
                label,
                *(rate(results, way, f"{call}_{size}_s", "library") for call in ("put", "get")),
            )
    console.print(rows)
