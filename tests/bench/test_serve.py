"""The benchmark of serving: its traces and figures, and that every way gives the same tokens."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from each_row import each_row
from rich.console import Console

pytest.importorskip("transformers", reason="transformers is not installed")

from kvservice.bench import PeerMissingError, serve
from kvservice.bench.plot import Panel, write_svg
from kvservice.bench.serve import LibraryBatching, ScheduleRecord, Served, equality, figures, median_run, progress
from kvservice.bench.serve_inputs import ServeTrace, make_trace, read_trace
from kvservice.client import PreemptedSequence
from kvservice.errors import InvalidArgumentError

SYSTEM_PROMPT = 128
TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def prompts(trace: ServeTrace) -> list[list[int]]:
    return [request.prompt.tolist() for request in trace.requests]


def test_traces_are_seeded_and_half_of_their_prompts_begin_with_a_system_prompt() -> None:
    trace = make_trace("chat", seed=1)
    assert prompts(trace) == prompts(make_trace("chat", seed=1))
    assert prompts(trace) != prompts(make_trace("chat", seed=2))
    shared = [request for request in trace.requests if request.shared]
    assert 16 < len(shared) < 48
    assert len({tuple(request.prompt[:SYSTEM_PROMPT]) for request in shared}) == 2
    assert {request.arrival_s for request in trace.requests} == {0.0}


def test_documents_are_longer_than_chats_and_arrivals_have_the_rate() -> None:
    chats, documents = make_trace("chat", requests=200), make_trace("document", requests=200, rate=50.0)
    assert documents.prompt_tokens > 3 * chats.prompt_tokens
    assert documents.output_tokens < chats.output_tokens
    arrivals = [request.arrival_s for request in documents.requests]
    assert arrivals == sorted(arrivals)
    assert 3 < arrivals[-1] < 5
    mixed = make_trace("mixed", requests=200)
    assert chats.prompt_tokens < mixed.prompt_tokens < documents.prompt_tokens
    assert max(chats.longest, documents.longest) <= 2048


def test_a_trace_is_read_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    rows = [{"prompt": [1, 2, 3], "out": 9, "arrival_s": 2}, {"prompt": [4], "out": 2, "shared": True}]
    path.write_text(json.dumps({"requests": rows}))
    trace = read_trace(str(path))
    assert prompts(trace) == [[4], [1, 2, 3]]
    assert (trace.name, len(trace), trace.prompt_tokens, trace.output_tokens, trace.longest) == (
        "mine.json",
        2,
        4,
        11,
        12,
    )
    assert [request.num_tokens for request in trace.cut(5, 5).requests] == [2, 5]
    assert prompts(trace.cut(9)) == [[4]]


def test_the_trace_of_the_figures_is_as_described() -> None:
    trace = read_trace(str(Path(__file__).with_name("data") / "serve.json"))
    assert (len(trace), trace.prompt_tokens, trace.output_tokens) == (64, 19_628, 4_598)
    shared = [request.prompt[:SYSTEM_PROMPT].tolist() for request in trace.requests if request.shared]
    assert len(shared) == 32
    assert shared.count(shared[0]) == 32


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    wrong = (
        "", "[]", "{}", '{"requests": []}', '{"requests": [1]}', '{"requests": [{"prompt": [1]}]}',
     '{"requests": [{"prompt": [], "out": 1}]}', '{"requests": [{"prompt": [1024], "out": 1}]}',
     '{"requests": [{"prompt": [1], "out": 2048}]}', '{"requests": [{"prompt": [1], "out": 0}]}',
     '{"requests": [{"prompt": [1], "out": 1, "arrival_s": -1}]}',
     '{"requests": [{"prompt": [1], "out": 1, "arrival_s": NaN}]}',
    )  # fmt: skip
    with each_row() as row:
        for content in wrong:
            path.write_text(content)
            with row(content):
                with pytest.raises(InvalidArgumentError) as refused:
                    read_trace(str(path))
                assert refused.value.field == "trace"


def trace_of(*rows: tuple[int, float]) -> ServeTrace:
    """Return a trace of requests with these output lengths and arrivals."""
    made = make_trace("chat", requests=len(rows))
    requests = (
        replace(request, prompt=np.arange(3, dtype=np.int32), num_tokens=num_tokens, arrival_s=arrival_s)
        for request, (num_tokens, arrival_s) in zip(made.requests, rows, strict=True)
    )
    return replace(made, requests=tuple(requests))


def test_figures_count_from_the_arrival_and_only_tokens_that_were_asked_for() -> None:
    trace = trace_of((3, 0.0), (2, 1.0))
    served = Served([[1, 2, 3, 9], [4, 5]], [[1.0, 1.5, 2.5, 99.0], [3.0, 5.0]])
    row = figures(trace, served)
    assert row["seconds"] == 5.0
    assert row["output_tokens_per_s"] == 1.0
    assert row["first_token_p50_s"] == 1.5
    assert row["first_token_p99_s"] == pytest.approx(1.99)
    assert row["between_tokens_p50_s"] == 1.0
    assert row["between_tokens_p99_s"] == pytest.approx(1.98)


def test_a_request_that_was_not_served_to_its_end_is_no_figure() -> None:
    with pytest.raises(AssertionError):
        figures(trace_of((3, 0.0)), Served([[1, 2]], [[1.0, 2.0]]))


def test_equal_tokens_are_those_before_the_first_difference() -> None:
    trace, reference = trace_of((4, 0.0), (2, 0.0)), Served([[1, 2, 3, 4], [5, 6]], [])
    assert equality(trace, reference, reference) == {"same_requests": 1.0, "same_tokens": 1.0}
    other = Served([[1, 9, 3, 4], [5, 6, 7]], [])
    assert equality(trace, other, reference) == {"same_requests": 0.5, "same_tokens": 0.5}


def test_the_median_run_is_one_of_the_runs_and_names_all_rates() -> None:
    runs = [{"output_tokens_per_s": rate, "run": number} for number, rate in enumerate((3.0, 1.0, 2.0, 9.0))]
    assert median_run(runs) == {"output_tokens_per_s": 2.0, "run": 2, "rates": [3.0, 1.0, 2.0, 9.0]}


def test_progress_has_few_points_and_ends_with_the_last_token() -> None:
    assert progress(Served([[1], [2, 3]], [[2.0], [1.0, 4.0]])) == [(0.0, 0), (1.0, 1), (2.0, 2), (4.0, 3)]
    many = progress(Served([[0] * 1000], [[float(at) for at in range(1000)]]))
    assert len(many) == 101
    assert many[-1] == (999.0, 1000)


def test_a_plot_has_a_line_for_each_name(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    panel = Panel("one & <two>", "tokens", {"first": [(0.0, 0.0), (2.0, 10.0)], "empty": []})
    write_svg(str(path), [panel, panel])
    text = [element.text for element in ElementTree.parse(path).iter() if element.tag.endswith("text")]
    assert text.count("one & <two>") == 2
    assert text.count("first") == text.count("empty") == 2
    lines = [element.get("points") for element in ElementTree.parse(path).iter() if element.get("stroke-width") == "2"]
    assert lines == ["70.0,260.0 630.0,36.0", "", "70.0,260.0 630.0,36.0", ""]


def batch_of(*rows: tuple[int, int, int], preempted: tuple[PreemptedSequence, ...] = (), stalled: int = 0) -> Any:
    """Return a batch with a step of rows (sequence, first position, end)."""
    ids, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T
    step = SimpleNamespace(context_lens=ends, query_lens=ends - starts, num_tokens=int((ends - starts).sum()))
    return SimpleNamespace(step=step if rows else None, sequence_ids=ids, preempted=preempted, num_stalled=stalled)


def test_a_record_of_a_schedule_tells_cached_from_recomputed_tokens() -> None:
    record = ScheduleRecord()
    record.add(batch_of((1, 0, 8), (2, 4, 7)))
    record.add(batch_of((1, 8, 9), (2, 7, 8), stalled=1))
    record.add(batch_of(preempted=(PreemptedSequence(1, 9, False), PreemptedSequence(2, 8, True)), stalled=1))
    # Sequence 1 finds one block of four tokens again, sequence 2 all that it had.
    record.add(batch_of((1, 4, 10), (2, 8, 9)))
    details = record.details(trace_of((3, 0.0), (3, 0.0), (3, 0.0)))
    assert (details["steps"], details["preemptions"], details["swapped"], details["stalled_steps"]) == (3, 2, 1, 2)
    assert details["recomputed_tokens"] == 5
    assert details["prefix_hit_share"] == 4 / 9
    assert details["tokens_per_step"] == (11 + 2 + 7) / 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with a tiny model, in float32, of requests that arrive one after the other."""
    plot = tmp_path_factory.mktemp("plot") / "serve.svg"
    options = serve.ServeOptions(
        dtypes=("float32",), rate=1000.0, num_blocks=256, quick=True, plot=str(plot), model=TINY
    )
    measured = serve.run(options)
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    return measured


def test_every_way_gives_the_tokens_of_one_request_at_a_time(results: dict[str, Any]) -> None:
    measured = results["dtypes"]["float32"]
    assert len(measured["contenders"]) == 6
    assert measured["missing"] == {}
    for name, row in measured["contenders"].items():
        assert (row["same_requests"], row["same_tokens"]) == (1.0, 1.0), name
        assert 0 < row["first_token_p50_s"] <= row["first_token_p99_s"] <= row["seconds"], name
        assert row["progress"][-1] == (row["seconds"], results["output_tokens"]), name


def test_the_engine_tells_its_schedule(results: dict[str, Any]) -> None:
    row = results["dtypes"]["float32"]["contenders"][serve.ENGINE]
    assert 8 <= row["steps"] <= 64
    assert 0 < row["prefix_hit_share"] < 1
    assert (row["preemptions"], row["recomputed_tokens"]) == (0, 0)
    assert 0 < row["model_share"] < 1
    assert 0 < max(used for _, used, *_ in row["usage"]) <= 256


def test_results_are_printed(results: dict[str, Any]) -> None:
    text = io.StringIO()
    missing = {"missing": {"another": "It is not installed."}}
    measured = results | {"dtypes": {"float32": results["dtypes"]["float32"] | missing}}
    serve.render(json.loads(json.dumps(measured)), Console(file=text, width=200))
    for name in results["dtypes"]["float32"]["contenders"]:
        assert f"│ {name} " in text.getvalue()
    assert text.getvalue().count(f"│ {serve.ENGINE} ") == 2
    assert "another: not measured. It is not installed." in text.getvalue()


def test_a_way_that_does_not_run_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Served:
        raise PeerMissingError("It needs another device.")

    monkeypatch.setattr(LibraryBatching, "serve", fail)
    trace = make_trace("chat", requests=2, vocabulary=64).cut(2, 2)
    measured = serve.measure("bfloat16", trace, serve.ServeOptions(num_blocks=256, quick=True, model=TINY))
    assert measured["missing"] == {"the library's continuous batching": "It needs another device."}
    assert len(measured["contenders"]) == 5
