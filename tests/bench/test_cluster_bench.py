"""The simulation of a cluster, and its bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_command import invoke

from kvservice.bench.cluster import ClusterSimulation, Service, everything_share, measure, one_cache_share, policies
from kvservice.client import PlacementSettings
from kvservice.planning import ConversationLoad, Trace, TracedRequest, synthetic_trace

NUM_DAEMONS = 4
OURS, ORACLE = "kvservice", "the same, perfect knowledge"


def trace_of(seed: int) -> Trace:
    return synthetic_trace(ConversationLoad(60, 0.3, num_system_prompts=8), seed)


def service_of(trace: Trace) -> Service:
    return Service(512, trace.input_tokens / trace.duration_s / NUM_DAEMONS / 1.5)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_no_policy_finds_more_than_the_bounds(seed: int) -> None:
    trace = trace_of(seed)
    service = service_of(trace)
    settings = PlacementSettings()
    rows = {name: measure(trace, NUM_DAEMONS, service, make) for name, make in policies(0.01, settings).items()}
    one_cache, everything = one_cache_share(trace, NUM_DAEMONS * service.num_blocks), everything_share(trace)
    shares = {name: row["hit_share"] for name, row in rows.items()}
    assert max(shares.values()) <= one_cache <= everything < 1
    assert all(shares[name] > shares["random"] + 0.1 for name in (OURS, ORACLE))
    assert rows[OURS]["queued_mean_s"] < rows["random"]["queued_mean_s"] / 3


def test_knowledge_of_events_that_never_come_in_time_finds_less() -> None:
    trace = trace_of(0)
    shares = [
        measure(trace, NUM_DAEMONS, service_of(trace), policies(delay_s, PlacementSettings())[OURS])["hit_share"]
        for delay_s in (0.0, 1e6)
    ]
    assert shares[0] > shares[1]


def round_robin(simulation: ClusterSimulation) -> Any:
    return policies(0.0, PlacementSettings())["round robin"](simulation)


def test_every_request_is_served_once_and_room_is_respected() -> None:
    trace = trace_of(1)
    simulation = ClusterSimulation(trace, NUM_DAEMONS, service_of(trace))
    served = simulation.run(round_robin(simulation))
    assert len(served) == len(trace.requests)
    for request, one in zip(trace.requests, served, strict=True):
        assert 0 <= one.hit_tokens <= request.input_tokens
        assert 0 <= one.queued_s < one.first_token_s
    for daemon in simulation.daemons:
        assert daemon.used_blocks == daemon.decoding == 0
        assert len(daemon.cached) <= daemon.service.num_blocks
    missing = sum(max(1, r.input_tokens - s.hit_tokens) for r, s in zip(trace.requests, served, strict=True))
    assert sum(daemon.computed_tokens for daemon in simulation.daemons) == missing


def test_prompts_wait_for_the_engine_and_for_room() -> None:
    prompts = ((0, 1), (0, 2), (3, 4))
    trace = Trace("t", 10, tuple(TracedRequest(0.0, 20, 10, blocks, n) for n, blocks in enumerate(prompts)))
    simulation = ClusterSimulation(trace, 1, Service(5, 10.0, output_tokens_per_s=10.0, decode_share=0.0))
    served = simulation.run(round_robin(simulation))
    # The first takes 2 s to compute and 1 s to decode. The second finds a block. The third has no room before 4 s.
    assert [(one.queued_s, one.hit_tokens) for one in served] == [(0.0, 0), (2.0, 10), (4.0, 0)]


def test_the_bounds_of_a_small_trace() -> None:
    prompts = ((1, 2), (3, 4), (1, 2), (3, 4))
    trace = Trace("t", 10, tuple(TracedRequest(float(n), 20, 1, blocks, n) for n, blocks in enumerate(prompts)))
    assert everything_share(trace) == 0.5
    assert [one_cache_share(trace, blocks) for blocks in (1, 2, 3, 4)] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 5, "hash_ids": [n % 3, 10 + n]} for n in range(40)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    plot = tmp_path / "plot.svg"
    done = invoke("cluster", "--trace", str(trace), "--quick", "--plot", str(plot))
    assert done.exit_code == 0, done.output
    for part in ("8 daemons", "kvservice", "bound: one cache", "events late"):
        assert part in done.output
    assert len(list(ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}rect"))) > 36
