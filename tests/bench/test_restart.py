"""The benchmark of restarts: its parts add up, and its table has them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvservice.bench import restart
from kvservice.bench.restart import Round, appending, summarized

ROUNDS = [Round(1.5, 1.2, 0.2, 0), Round(0.9, 0.8, 0.1, 1), Round(1.0, 0.9, 0.3, 0)]


def test_the_parts_of_a_round_add_up_to_its_time() -> None:
    parts = ROUNDS[0].parts
    assert parts == pytest.approx({"start_s": 1.0, "take_over_s": 0.2, "reconnect_s": 0.3})
    assert sum(parts.values()) == pytest.approx(ROUNDS[0].total_s)


def test_medians_and_maxima() -> None:
    results = summarized(ROUNDS, [0.3, 0.5, 0.4], [1e-3, 2e-3, 9e-3])
    assert (results["kill_to_append_s"], results["kill_to_append_max_s"]) == (1.0, 1.5)
    assert (results["upgrade_pause_s"], results["upgrade_pause_max_s"]) == (0.4, 0.5)
    assert (results["take_over_s"], results["append_s"]) == (0.2, 2e-3)
    assert results["lost_sequences"] == 1


def test_appends_go_on_until_the_upgrade_is_done() -> None:
    numbers = iter(range(1_000_000_000))
    with appending(lambda: float(next(numbers))) as seconds:
        while len(seconds) < 3:
            pass
    after = len(seconds)
    assert seconds == [float(number) for number in range(after)]
    assert len(seconds) == after, "the thread has ended"


def test_the_table() -> None:
    console = Console(file=io.StringIO(), width=200)
    held = {"device": "cpu", "num_blocks": 100_000, "pool_bytes": 100_000 << 12, "rounds": 3}
    results = held | {"sequences": 186, "cached_blocks": 47_360} | summarized(ROUNDS, [0.25], [1e-3])
    restart.render(results, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Restarts of a daemon, cpu, 3 rounds" in text
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert cells[0] == ["SIGKILL to the first answered append", "1", "1.5"]
    assert cells[2] == ["take-over of the state", "0.2", ""]
    assert cells[4] == ["upgrade, the longest call of a client", "0.25", "0.25"]
    pool = "The pool: 100,000 blocks, 0.4 GiB; 186 sequences, 47,360 cached blocks; lost sequences: 1."
    assert pool in text
