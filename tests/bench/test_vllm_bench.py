"""`bench vllm` with engines that are not vLLM: what it asks them for, and what it makes of their answers. The real ones
are in tests/vllm."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bench_command import cells, invoke, measured, shown

from kvservice.bench import PeerMissingError, vllm
from kvservice.bench.vllm import WORKLOADS, Output, RequestBatch, Sizes, from_cache

BLOCK_SIZE = 16
# Seconds of the fake engine for a token that it computes, and for one that it loads.
COMPUTE_S, LOAD_S = 1e-3, 1e-4
SIZES = Sizes(
    chat=RequestBatch(3, 50, 5),
    prompts=RequestBatch(2, 100, 2),
    lengths=(64,),
    documents=RequestBatch(4, 64, 8),
    beside=RequestBatch(2, 128, 1),
    small=RequestBatch(3, 20, 2),
)


@dataclass
class Request:
    name: str
    prompt: list[int]
    max_tokens: int
    streamed: bool
    num_cached: int
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """Time passes with the tokens of each step. What is computed is in the engine's cache, and after so many calls of
    `wait_for_saves` in the store."""

    vocabulary, block_size = 1000, BLOCK_SIZE

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stores: bool = True, num_waits: int = 1) -> None:
        self.stores, self._num_waits = stores, num_waits
        self.now = 0.0
        self.prompts: list[list[int]] = []
        self.running: list[Request] = []
        self.most_running = 0
        self._cache: set[tuple[int, ...]] = set()
        self._store: set[tuple[int, ...]] = set()
        self._unsaved: dict[tuple[int, ...], int] = {}
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def submit(self, prompt: list[int], max_tokens: int, streamed: bool) -> str:
        self.prompts.append(prompt)
        self.running.append(Request(str(len(self.prompts)), prompt, max_tokens, streamed, -1))
        self.most_running = max(self.most_running, len(self.running))
        return self.running[-1].name

    def step(self) -> list[Output]:
        for request in self.running:
            if request.num_cached < 0:
                self._read(request)
            else:
                self.now += COMPUTE_S
            request.tokens.append(sum(request.prompt) + len(request.tokens))
        outputs, running = [], []
        for request in self.running:
            ended = len(request.tokens) == request.max_tokens
            new = request.tokens[-1:] if request.streamed else request.tokens
            if request.streamed or ended:
                outputs.append(Output(request.name, new, request.num_cached, ended))
            running += [] if ended else [request]
        self.running = running
        return outputs

    def _read(self, request: Request) -> None:
        length = len(request.prompt)
        blocks = [tuple(request.prompt[:end]) for end in range(BLOCK_SIZE, length + 1, BLOCK_SIZE)]
        num_cached, num_found = (
            max((len(one) for one in blocks if one in where and len(one) < length), default=0)
            for where in (self._cache, self._store)
        )
        request.num_cached = max(num_cached, num_found)
        self.now += LOAD_S * max(0, num_found - num_cached)
        self.now += COMPUTE_S * (length - request.num_cached)
        self._cache.update(blocks)
        if self.stores:
            self._unsaved = dict.fromkeys(blocks, self._num_waits) | self._unsaved

    def forget(self) -> None:
        self._cache.clear()

    def take_counts(self) -> dict[str, Any]:
        return {}

    def wait_for_saves(self) -> None:
        self._unsaved = {block: left - 1 for block, left in self._unsaved.items()}
        self._store |= {block for block, left in self._unsaved.items() if left <= 0}


EngineFactory = Callable[..., FakeEngine]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EngineFactory:
    return lambda **options: FakeEngine(monkeypatch, **options)


def turn(workload: str, engine: FakeEngine, number: int = 1) -> dict[str, Any]:
    """Return value and share found by row."""
    figures = WORKLOADS[workload](engine, SIZES, number).figures
    return {one.row: (pytest.approx(one.value), pytest.approx(one.found)) for one in figures}


def test_new_prompts_are_computed(engine: EngineFactory) -> None:
    for workload, batch, row in (("chat", SIZES.chat, "3 x 50 + 5"), ("prompts", SIZES.prompts, "2 x 100 + 2")):
        seconds = COMPUTE_S * batch.num * (batch.length + batch.max_tokens - 1)
        assert turn(workload, engine()) == {row: (batch.num_tokens / seconds, 0)}


def test_engines_get_the_same_prompts_and_each_round_others(engine: EngineFactory) -> None:
    for workload in WORKLOADS:
        asked: list[set[tuple[int, ...]]] = []
        for stores, number in ((False, 1), (True, 1), (True, 2)):
            one = engine(stores=stores)
            turn(workload, one, number)
            asked.append({tuple(prompt) for prompt in one.prompts if len(prompt) > SIZES.small.length})
        assert asked[0] == asked[1]
        assert asked[1].isdisjoint(asked[2])


def test_first_tokens_of_prompts_found_and_computed(engine: EngineFactory) -> None:
    """Of 64 tokens vLLM finds 48, of 71 it finds 64: the last token is computed."""
    rows = turn("found", engine())
    for length, cached in ((64, 48), (71, 64)):
        left_s = COMPUTE_S * (length - cached)
        assert rows[f"{length} computed"] == (COMPUTE_S * length, 0)
        assert rows[f"{length} in its cache"] == (left_s, cached / length)
        assert rows[f"{length} in the store"] == (left_s + LOAD_S * cached, cached / length)


def test_what_is_saved_late_is_asked_for_again(engine: EngineFactory) -> None:
    assert turn("found", engine(num_waits=3)) == turn("found", engine())


def test_without_a_store_the_prompt_is_computed_again_once(engine: EngineFactory) -> None:
    without = engine(stores=False)
    assert turn("found", without)["64 in the store"] == (COMPUTE_S * 64, 0)
    assert len(without.prompts) == 3 * (4 + 3)


def test_what_is_never_saved_is_no_hit(engine: EngineFactory) -> None:
    assert turn("found", engine(num_waits=1000))["64 in the store"] == (COMPUTE_S * 64, 0)


def test_prompts_are_asked_again_from_the_engines_own_cache(engine: EngineFactory) -> None:
    """As far as it can have as many tokens of them there: of 64 it computes the last block."""
    asked = engine(stores=False)
    asked_first = WORKLOADS["prompts"](asked, SIZES, 1)
    asked.prompts.clear()
    first, second = asked_first.prompts
    again = from_cache(asked, asked_first, [(1, 48), (0, 95), (0, 0), (1, 100)])
    assert again == [(number, asked_first.answers[number]) for number in (1, 0, 0, 1)]
    assert asked.prompts == [second[:49], second, first[:81], first, first, second[:97], second]
    whole = WORKLOADS["found"](asked, SIZES, 1)
    assert len(whole.prompts[0]) == 64
    assert from_cache(asked, whole, [(0, 64)]) == []


def test_documents_in_turns(engine: EngineFactory) -> None:
    """The first round reads them before its time begins, and later rounds find them."""
    asked = engine()
    for number in (0, 1):
        rows = turn("cycle", asked, number)
        assert rows["4 x 64, all seen"][1] == 64 / 72
        assert rows["4 x 64, half new"][1] == 32 / 72
    seconds = COMPUTE_S * 4 * (8 + 7)
    assert turn("cycle", asked, 2)["4 x 64, all seen"] == (4 * (64 + 8 + 8) / seconds, 64 / 72)
    assert turn("cycle", engine(stores=False), 1)["4 x 64, all seen"][1] == 0


def test_small_requests_beside_loads(engine: EngineFactory) -> None:
    """Three small ones run at any time, and beside them one long one. Where that is computed, all wait for it."""
    rows = {}
    for stores in (False, True):
        beside = engine(stores=stores)
        rows[stores] = turn("beside", beside)
        assert beside.most_running == 4
        assert rows[stores]["alone, p99"][1] == 0
        assert rows[stores]["beside loads of 128, p50"][1] == (128 / 135 if stores else 0)
    p99s = [rows[stores]["beside loads of 128, p99"][0].expected for stores in (False, True)]
    assert p99s[0] > COMPUTE_S * 135 > p99s[1]
    assert rows[False]["alone, p99"] == rows[True]["alone, p99"]


def test_sizes_survive_the_way_to_the_process() -> None:
    for scale in vllm.SCALES.values():
        assert Sizes.of(json.loads(json.dumps(asdict(scale.sizes)))) == scale.sizes
        assert scale.sizes.longest <= scale.model["max_position_embeddings"]


# ---- engines that take turns


class FakeDaemon:
    address = "unix:///nowhere"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, **options: Any) -> None:
        self.options.update(options)

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None: ...


# Tokens a second of the rounds, the first of which warms up, and seconds in the same rounds.
SPEEDS = {"none": [9.0, 10.0, 20.0, 40.0], "kvservice": [1.0, 11.0, 18.0, 48.0], "simple": [1.0, 5.0, 10.0, 20.0]}


class FakeProcess:
    """Answers with SPEEDS. vLLM's own OffloadingConnector does not start, its simple one ends as FAILS says."""

    asked: ClassVar[list[tuple[str, str, int]]] = []
    setups: ClassVar[dict[str, tuple[dict[str, Any], dict[str, str]]]] = {}
    fails: ClassVar[tuple[str, int]] = ("nobody", 0)
    from_cache_answers: ClassVar[list[tuple[int, list[int]]]] = []

    def __init__(self, name: str, program: str, setup: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self._name = name
        assert importlib.util.find_spec(program) is not None
        assert log.parent.is_dir()
        self.setups[name] = setup, environment

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def end(self) -> None: ...

    def answer(self, timeout_s: float) -> dict[str, Any]:
        assert timeout_s > 0
        if self._name == "offloading":
            raise PeerMissingError("It has ended: no GPU")
        return {"vllm": "0.0", "pool_tokens": 1000, "block_size": 16}

    def turn(self, workload: str, number: int, _timeout_s: float) -> dict[str, Any]:
        self.asked.append((workload, self._name, number))
        if self.fails == (self._name, number):
            raise PeerMissingError("It has ended: out of memory")
        speed = SPEEDS[self._name][number]
        found = 0.5 if self._name == "kvservice" else 0.0
        figures = [
            {"row": "speed", "value": speed, "unit": "tokens/s", "found": found},
            {"row": "time", "value": 1 / speed, "unit": "s", "found": found},
        ]
        wrong = self._name == "simple" and number == 0
        answers, num_cached = [[1, 2], [4 if wrong else 3]], [0, 16 if wrong else 0]
        counts = {"num_cached": num_cached, "earlier": [None, None], "preemptions": number}
        return {"figures": figures, "answers": answers} | counts

    def from_cache(
        self, workload: str, wanted: list[tuple[int, int]], _timeout_s: float
    ) -> list[tuple[int, list[int]]]:
        assert (self._name, workload) == ("none", "cycle")
        assert wanted in ([], [(1, 16)])
        return self.from_cache_answers if wanted else []


def installed(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    """Let it look as if vLLM were installed, or not."""
    find_spec = importlib.util.find_spec
    answer = object() if is_installed else None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: answer if name == "vllm" else find_spec(name, *of)
    )


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.bench.engine_turns.EngineProcess", FakeProcess)
    monkeypatch.setattr(vllm, "Daemon", FakeDaemon)
    monkeypatch.setattr(FakeProcess, "asked", [])
    monkeypatch.setattr(FakeProcess, "setups", {})
    installed(monkeypatch, True)


@pytest.mark.usefixtures("fakes")
def test_figures_are_medians_and_ratios_those_of_the_same_round() -> None:
    results = json.loads(invoke("vllm", "--json", "--workload", "chat").stdout)
    speed, seconds = results["rows"]
    assert (speed["workload"], speed["row"], seconds["row"]) == ("chat", "speed", "time")
    for name in ("none", "kvservice", "simple"):
        rounds = SPEEDS[name][1:]
        ratio = statistics.median(one / base for one, base in zip(rounds, SPEEDS["none"][1:], strict=True))
        for row in (speed, seconds):
            assert row["engines"][name]["ratio"] == pytest.approx(ratio)
        assert speed["engines"][name] | {"ratio": 0} == {
            "median": statistics.median(rounds), "ratio": 0, "found": 0.5 * (name == "kvservice"),
            "preemptions": 2, "rounds": rounds,
        }  # fmt: skip
    assert FakeProcess.asked == [("chat", name, number) for number in range(4) for name in SPEEDS]
    assert results["missing"] == {"offloading": "It has ended: no GPU"}
    assert results["engines"] == ["none", "kvservice", "simple"]


@pytest.mark.usefixtures("fakes")
def test_the_table() -> None:
    text = invoke("vllm", "--workload", "found").stdout
    assert cells(text) == [
        ["found", "speed", "20 tokens/s", "1.10 (50%)", "0.50 (0%)"],
        ["found", "time", "50.0 ms", "1.10 (50%)", "0.50 (0%)"],
    ]
    assert "OffloadingConnector: not measured. It has ended: no GPU" in text


@pytest.mark.usefixtures("fakes")
def test_an_engine_that_fails_later_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "fails", ("kvservice", 2))
    results = json.loads(invoke("vllm", "--json", "--workload", "chat", "--workload", "cycle").stdout)
    assert results["engines"] == ["none", "simple"]
    assert results["missing"]["kvservice"] == "It has ended: out of memory"
    assert len(results["rows"]) == 4
    assert [one for one in FakeProcess.asked if one[1] == "kvservice"] == [("chat", "kvservice", n) for n in range(3)]


@pytest.mark.usefixtures("fakes")
def test_without_the_engine_to_compare_with_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "fails", ("none", 1))
    refused = invoke("vllm", "--json")
    assert refused.exit_code == 1
    assert "vLLM without a connector: It has ended: out of memory" in refused.stderr


@pytest.mark.usefixtures("fakes")
def test_tokens_that_differ_are_a_failure() -> None:
    refused = invoke("vllm", "--check", "--workload", "cycle", "--device", "cuda", "--model", "mine")
    assert refused.exit_code == 1
    assert "cycle, simple: 1 of 2 answers differ" in refused.stderr
    assert refused.stderr.count("answers differ") == 1
    assert cells(refused.stdout) == [["cycle", "2 of 2", "2 of 2", "1 of 2"]]
    assert {one[2] for one in FakeProcess.asked} == {0}
    assert all(environment["VLLM_BATCH_INVARIANT"] == "1" for _, environment in FakeProcess.setups.values())
    chosen = ("--workload", "cycle", "--model", "mine")
    assert invoke("vllm", "--check", "--connector", "kvservice", *chosen).exit_code == 0


@pytest.mark.usefixtures("fakes")
def test_tokens_may_be_those_that_vllm_gives_from_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt of which it has as many tokens there as were found."""
    for answers, is_right in (([(1, [4])], True), ([(1, [5])], False), ([], False)):
        monkeypatch.setattr(FakeProcess, "from_cache_answers", answers)
        checked = invoke("vllm", "--check", "--workload", "cycle", "--model", "mine")
        assert (checked.exit_code == 0) == is_right
        shown = "2 of 2, 1 as from its cache" if is_right else "1 of 2"
        assert cells(checked.stdout) == [["cycle", "2 of 2", "2 of 2", shown]]


@pytest.mark.usefixtures("fakes")
def test_stores_get_the_same_memory(tmp_path: Path) -> None:
    options = ("--device", "cuda", "--store-gib", "2", "--pool-gib", "1.5", "--share-store", "read", "--quick")
    invoke("vllm", *options, "--engine", '{"max_num_seqs": 7}', "--logs", str(tmp_path / "logs"))
    setups = {name: setup["llm"] for name, (setup, _) in FakeProcess.setups.items()}
    transfers = {name: llm.get("kv_transfer_config") for name, llm in setups.items()}
    assert transfers["none"] is None
    assert transfers["kvservice"]["kv_connector_extra_config"] == {"address": FakeDaemon.address}
    assert (FakeDaemon.options["store_gib"], FakeDaemon.options["share_store"]) == (2, "read")
    for name, connector in (("offloading", "OffloadingConnector"), ("simple", "SimpleCPUOffloadConnector")):
        assert transfers[name]["kv_connector"] == connector
        assert transfers[name]["kv_connector_extra_config"] == {"cpu_bytes_to_use": 2 << 30}
    for llm in setups.values():
        assert llm["max_num_seqs"] == 7
        assert llm["kv_cache_memory_bytes"] == 3 << 29
        assert llm["load_format"] == "dummy"
    assert invoke("vllm", "--engine", "[]").exit_code == invoke("vllm", "--engine", "{").exit_code == 2


def test_without_vllm_the_bench_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, False)
    refused = invoke("vllm")
    assert refused.exit_code == 1
    assert "vLLM is not installed" in refused.stderr


def test_steps_without_an_engine() -> None:
    """Everything that is asked for again is found to the last token but one."""
    results = measured("vllm", "--no-engine", "--quick")["workloads"]
    assert [one["workload"] for one in results] == ["16 x 512 + 24, new", "16 x 512 + 24, found"]
    assert [one["found"] for one in results] == [0, 10 * 16 * 511]
    for one in results:
        for kind, parts in one["steps"].items():
            everything = parts.pop("all")
            assert everything["wall_p99_s"] >= everything["wall_p50_s"] > 0
            assert everything["cpu_p50_s"] > 0
            assert (parts["admission"]["wall_p50_s"] > 0) == (kind == "prompts")


def test_processes_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real processes, with a package that only looks like vLLM."""
    fake = Path(sys.modules["bench_command"].__file__ or "").with_name("fake_vllm")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fake), *filter(None, [os.environ.get("PYTHONPATH")])]))
    chosen = ("--connector", "kvservice", "--connector", "offloading", "--workload", "prompts")
    results = json.loads(shown("vllm", "--quick", *chosen, "--json"))
    assert results["vllm"] == "0.0.0"
    assert results["pool_tokens"] == 768
    assert results["engines"] == ["none", "kvservice"]
    assert results["missing"] == {"offloading": "It has ended: ValueError: it does not start"}
    assert results["steps"] == {
        "prompts": {
            "kvservice": {
                "p50": 0.001,
                "p99": pytest.approx(0.0111 - 0.0101 / 25),
                "steps": 5,
                "calls": {"wait_for_save": [0.01, 0.002], "get_finished": [0.001, 0.0]},
            }
        }
    }
    (row,) = results["rows"]
    assert row["row"] == "4 x 128 + 4"
    assert all(one["found"] == 0 and one["median"] > 0 for one in row["engines"].values())


@pytest.mark.usefixtures("fakes")
def test_tokens_may_be_those_of_the_same_engine_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same prompt, of which it had as many tokens just computed."""
    turn = FakeProcess.turn
    for cached, is_right in ((16, True), (15, False)):

        def twice(
            self: FakeProcess, workload: str, number: int, timeout_s: float, cached: int = cached
        ) -> dict[str, Any]:
            made = turn(self, workload, number, timeout_s)
            answers = [[1, 2], [3], [4]] if self._name == "simple" else [[1, 2], [3], [3]]
            if self._name == "simple":
                answers[1] = [4]
            return made | {"answers": answers, "num_cached": [0, cached, 16], "earlier": [None, None, 1]}

        monkeypatch.setattr(FakeProcess, "turn", twice)
        monkeypatch.setattr(FakeProcess, "from_cache", lambda *_: [(1, [4])])
        checked = invoke("vllm", "--check", "--workload", "cycle", "--model", "mine")
        assert (checked.exit_code == 0) == is_right
        assert cells(checked.stdout)[0][-1] == (
            "3 of 3, 2 as from its cache" if is_right else "2 of 3, 1 as from its cache"
        )


def test_earlier_answers_to_the_same_prompt(engine: EngineFactory) -> None:
    values = WORKLOADS["found"](engine(), SIZES, 1).as_values()
    # Four prompts are computed, in the engine's own cache, and in the store; then three longer ones.
    first = [None] * 4 + list(range(8))
    assert values["earlier"] == first + [None] * 3 + list(range(12, 18))


@pytest.mark.usefixtures("fakes")
def test_lengths_of_prompts() -> None:
    invoke("vllm", "--workload", "found", "--length", "50", "--length", "70")
    assert all(setup["sizes"]["lengths"] == (50, 70) for setup, _ in FakeProcess.setups.values())
