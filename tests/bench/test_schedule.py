"""The benchmark of the scheduler: its traces, and that it prints what it measures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvservice.bench import schedule
from kvservice.bench.pressure import make_trace
from kvservice.errors import InvalidArgumentError


def test_traces_are_seeded() -> None:
    assert make_trace(1) == make_trace(1)
    assert make_trace(1) != make_trace(2)
    trace = make_trace(1, requests=50, arrivals_per_step=5.0)
    assert len(trace) == 50
    assert trace.arrival_step == sorted(trace.arrival_step)
    assert trace.arrival_step[-1] < 30
    assert all(8 <= length <= 2048 for length in trace.prompt_len)


def test_a_quick_run_measures_everything_and_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "TRACES", ((1.0, 1),))
    monkeypatch.setattr(schedule, "make_trace", lambda seed, **_: make_trace(seed, requests=20))
    trace = tmp_path / "mine.json"
    trace.write_text(json.dumps({"arrival_step": [3, 1], "prompt_len": [9, 20], "output_len": [2, 5]}))
    results = schedule.run(str(trace), quick=True)
    assert all(results[name] > 0 for name in schedule.COSTS)
    mine = results["traces"]["mine.json"]
    assert (mine["needed_tokens"], mine["recomputed_tokens"], mine["steps"]) == (34, 0, 5)
    assert (mine["wait_mean"], mine["wait_max"]) == (0, 0)
    text = io.StringIO()
    schedule.render(json.loads(json.dumps(results)), Console(file=text, width=200))
    assert "mine.json" in text.getvalue()
    assert "admit 8 prompts" in text.getvalue()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"arrival_step": [1], "prompt_len": [1], "output_len": []}',
     '{"arrival_step": [1], "prompt_len": [0], "output_len": [1]}',
     '{"arrival_step": [], "prompt_len": [], "output_len": []}'],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError) as refused:
        schedule.read_trace(str(path))
    assert refused.value.field == "trace"
