"""The simulation of rules for writing to a disk, and the ratios of the benchmark of the disk tier."""

from __future__ import annotations

import json
from pathlib import Path

from kvservice.bench import tiers
from kvservice.bench.tiers import RULES, Frequent, RuleSimulation


def simulated(rule: str, *requests: list[int], memory: int = 2, disk: int = 10) -> tuple[int, int, int]:
    """Return the blocks found in memory and on the disk, and those written."""
    simulation = RuleSimulation(memory, disk, RULES[rule](disk))
    for keys in requests:
        simulation.request(keys)
    found = simulation.outcome
    return found.in_memory, found.on_disk, found.written


def test_everything_that_leaves_memory_is_found_on_the_disk() -> None:
    assert simulated("all", [1, 2], [3, 4], [1, 2]) == (0, 2, 4)


def test_values_that_nobody_used_again_are_not_written() -> None:
    assert simulated("reused", [1, 2], [3, 4], [5, 6]) == (0, 0, 0)
    assert simulated("reused", [1, 2], [1, 2], [3, 4], [1, 2]) == (2, 2, 2)


def test_values_that_are_stored_again_count_as_reused() -> None:
    assert simulated("reused", [1, 2], [3, 4], [1, 2], [3, 4], [1, 2]) == (0, 2, 4)


def test_a_block_is_of_no_use_without_those_before_it() -> None:
    assert simulated("all", [1, 2], [9, 2], memory=10) == (0, 0, 0)


def test_frequent_values_replace_others() -> None:
    for often, is_written in ((1, False), (3, True)):
        rule = Frequent(10)
        for key in (7, 7, *([8] * often)):
            rule.note(key)
        assert rule.admit(8, 0, 7) is is_written
        assert rule.admit(8, 0, None)


def test_the_results_of_a_trace_file(tmp_path: Path) -> None:
    """All rules are the same where the disk has room for everything, but for `reused`."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"hash_ids": [0, number % 7, number % 5 + 10]} for number in range(200)]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    rows = list(tiers.simulate(tiers.read_trace(trace)))
    assert len(rows) == len(RULES) * len(tiers.DISK_SHARES)
    largest = {row["rule"]: row for row in rows[-len(RULES) :]}
    assert largest["all"]["on_disk"] == largest["frequent"]["on_disk"] >= largest["reused"]["on_disk"]
    assert largest["all"]["written"] >= largest["reused"]["written"]


def test_conversations_are_the_same_for_a_seed() -> None:
    assert tiers.conversations(3, 50) == tiers.conversations(3, 50) != tiers.conversations(4, 50)


def test_ratios_are_those_of_each_round() -> None:
    """The better way of fio counts in each round."""
    speeds = {f"fio_{engine}_{what}": [2.0, 1.0, 4.0] for engine in tiers.ENGINES for what in ("read", "write")}
    speeds |= {"read": [1.0, 1.0, 1.0], "write": [2.0, 2.0, 2.0], "fio_psync_read": [1.0, 2.0, 5.0]}
    figures = tiers.figures(speeds)
    assert (figures["read_of_fio"], figures["write_of_fio"]) == (0.5, 1.0)
    assert figures["fio_psync_read_bytes_per_s"] == 2.0
