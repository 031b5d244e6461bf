"""`bench sglang` with a package that only looks like SGLang. The workloads are tested in test_vllm_bench.py."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bench_command import cells, invoke, shown

from kvservice.bench import sglang
from kvservice.bench.sglang import IN_FLIGHT, SGLangEngine, Sizes

FAKE = Path(sys.modules["bench_command"].__file__ or "").with_name("fake_sglang")
POOL_TOKENS, PAGE_SIZE = sglang.POOL_TOKENS, sglang.PAGE_SIZE
VOCABULARY = 1000


@pytest.fixture
def fake_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, here and in processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)


EngineFactory = Callable[[str], SGLangEngine]


@pytest.fixture
def engine(fake_sglang: None) -> Iterator[EngineFactory]:  # noqa: ARG001
    """An engine with a cache, in this process."""
    with contextlib.ExitStack() as stack:

        def make(cache: str) -> SGLangEngine:
            options = sglang.engine_options(cache, "model", "unix:///nowhere", sglang.SGLangBenchOptions())
            one = SGLangEngine(options, cache, VOCABULARY)
            stack.callback(one._loop.close)
            return one

        yield make


def found(one: SGLangEngine, prompt: list[int]) -> int:
    name = one.submit(prompt, 1, True)
    (output,) = one.step()
    assert (output.request, output.tokens, output.ended) == (name, [len(prompt)], True)
    return output.num_cached


@pytest.mark.parametrize(("cache", "num_kept"), [("none", 0), ("hicache", 1984), ("kvservice", 1984)])
def test_what_is_forgotten_is_in_the_store(engine: EngineFactory, cache: str, num_kept: int) -> None:
    """A prompt of 2,048 tokens is found to its last page but one."""
    one = engine(cache)
    prompt = list(range(2048))
    assert one.stores == bool(num_kept)
    assert found(one, prompt) == 0
    assert found(one, prompt) == 1984
    for _ in range(2):
        one.forget()
        assert found(one, prompt) == num_kept


def test_so_many_requests_run_at_one_time(engine: EngineFactory) -> None:
    one = engine("none")
    names = {one.submit(list(range(each, each + 100)), 5, False) for each in range(3 * IN_FLIGHT)}
    outputs: list[Any] = []
    while len(outputs) < len(names):
        outputs += one.step()
    assert {output.request for output in outputs} == names
    assert all(output.tokens == list(range(100, 105)) for output in outputs)
    assert one._engine.tokenizer_manager.most_running == IN_FLIGHT


def test_an_engine_that_is_never_idle_or_fails_is_an_error(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine("hicache")
    for message in ("Attach failed", "scheduler is not idle"):

        async def refuse(*_: object, message: str = message, **_named: object) -> Any:
            return type("Refused", (), {"message": message})

        monkeypatch.setattr(one._manager, "attach_hicache_storage", refuse)
        monkeypatch.setattr("kvservice.bench.sglang_engine.SAVE_S", 0.0)
        with pytest.raises(TimeoutError, match=message):
            one.wait_for_saves()


def test_stores_get_the_same_memory() -> None:
    options = sglang.SGLangBenchOptions(host_gb=3, store_gb=10, engine={"max_running_requests": 7})
    none, hicache, ours = (
        sglang.engine_options(name, "model", "unix:///here", options) for name in ("none", *sglang.CACHES)
    )
    assert "hicache_size" not in none
    assert not none.get("enable_hierarchical_cache")
    assert (hicache["hicache_size"], ours["hicache_size"]) == (10, 3)
    assert "hicache_storage_backend" not in hicache
    extra = json.loads(ours["hicache_storage_backend_extra_config"])
    assert extra["kvservice"] == {"address": "unix:///here"}
    module = importlib.util.find_spec(extra["module_path"])
    assert module is not None
    for each in (none, hicache, ours):
        assert each["max_running_requests"] == 7
        assert each["load_format"] == "dummy"
        assert each["context_length"] > 32_768


def test_the_host_pool_has_room_beside_what_is_on_the_device() -> None:
    """SGLang saves nothing otherwise, and looks for no more in the storage than half of the host pool."""
    config = sglang.LLAMA_3B
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    host_tokens = sglang.HOST_GB * sglang.GB // token_bytes
    sizes = sglang.SGLangBenchOptions().sizes
    in_flight = IN_FLIGHT * (sizes.documents.length + sizes.documents.max_tokens)
    assert host_tokens - POOL_TOKENS > in_flight
    assert host_tokens // 2 > in_flight
    documents = sizes.documents.num * sizes.documents.length
    assert documents > 2 * POOL_TOKENS
    assert documents * token_bytes < (sglang.STORE_GB - sglang.HOST_GB) * sglang.GB


def test_sizes_survive_the_way_to_the_process() -> None:
    for options in (sglang.SGLangBenchOptions(), sglang.SGLangBenchOptions(check=True, quick=True)):
        assert Sizes.of(json.loads(json.dumps(asdict(options.sizes)))) == options.sizes


def test_options() -> None:
    assert sglang.SGLangBenchOptions().workloads == ("found", "prompts", "cycle")
    assert sglang.SGLangBenchOptions(check=True).workloads == ("found",)
    assert len(sglang.SGLangBenchOptions(rounds=3).turns) == 3
    assert len(sglang.SGLangBenchOptions(rounds=3, check=True).turns) == 1
    assert invoke("sglang", "--host-gb", "9", "--store-gb", "9").exit_code == 2
    assert invoke("sglang", "--engine", "[]").exit_code == 2


def test_without_sglang_the_bench_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "sglang" else find_spec(name))
    refused = invoke("sglang")
    assert refused.exit_code == 1
    assert "SGLang is not installed" in refused.stderr


@pytest.mark.usefixtures("fake_sglang")
def test_processes_of_engines() -> None:
    """The real processes and a real daemon. All rounds count."""
    sizes = ("--host-gb", "1", "--store-gb", "2")
    results = json.loads(shown("sglang", *sizes, "--rounds", "2", "--json"))
    assert results["sglang"] == "0.0.0"
    assert results["engines"] == ["none", "hicache", "kvservice"]
    assert results["missing"] == {}
    rows = {row["row"]: row["engines"] for row in results["rows"]}
    assert all(len(one["rounds"]) == 2 for row in rows.values() for one in row.values())
    lengths = ("2,048", "8,192", "32,768")
    for length in lengths:
        tokens = int(length.replace(",", ""))
        share = (tokens - PAGE_SIZE) / tokens
        shares = {name: one["found"] for name, one in rows[f"{length} in the store"].items()}
        assert shares == {"none": 0, "hicache": share, "kvservice": share}
        assert all(one["found"] == share for one in rows[f"{length} in its cache"].values())
        assert all(one["found"] == 0 for one in rows[f"{length} computed"].values())
    # Four of the shortest and one of each other length, each of them three times.
    cached = results["cached_tokens"]["found"]["kvservice"]
    assert [len(one) for one in cached] == [18, 18]
    assert cached[0][-3:] == [0, 32_768 - PAGE_SIZE, 32_768 - PAGE_SIZE]
    assert list(rows)[-3:] == ["64 x 2,048 + 8", "48 x 2,048, all seen", "48 x 2,048, half new"]


@pytest.mark.usefixtures("fake_sglang")
def test_an_engine_that_does_not_start_is_left_out_and_says_why() -> None:
    chosen = ("--cache", "hicache", "--workload", "prompts", "--quick", "--engine", '{"random_seed": 1}')
    text = shown("sglang", *chosen)
    assert "HiCache: not measured. It has ended: ValueError: it does not start" in text
    assert [row[:2] for row in cells(text)] == [["prompts", "64 x 2,048 + 8"]]
    assert "24 GB of host memory for each: HiCache's own, or 8 GB of it and 16 GB of kvservice below" in text
