"""Simulates which values that leave memory are worth writing to a disk: `kvservice bench tiers`.

A trace is a list of requests, each the keys of its blocks, which are chains: a block is of use only with those before
it. Memory and disk evict the least recently used value. For each rule of admission: the share of blocks that a request
finds, in memory and on the disk, and the share of blocks that are written to the disk.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from kvservice.tiers.links import AdmissionRule, AdmitAll, AdmitReused

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


def run(trace: str | None, seed: int) -> dict[str, Any]:
    traces = {"conversations": conversations(seed)}
    if trace is not None:
        traces[Path(trace).name] = read_trace(Path(trace))
    return {name: list(simulate(requests)) for name, requests in traces.items()}


def render(results: dict[str, Any], console: Console) -> None:
    for name, rows in results.items():
        table = Table(title=f"{name}: shares of the blocks that requests name")
        for column in ("disk, values", "rule", "found in memory", "found on disk", "written", "hits per write"):
            table.add_column(column, justify="left" if column == "rule" else "right")
        for row in rows:
            shares = [f"{row[part]:.1%}" for part in ("in_memory", "on_disk", "written")]
            table.add_row(f"{row['disk_values']:,}", row["rule"], *shares, f"{row['hits_per_write']:.2f}")
        console.print(table)
