"""`bench vllm` with a real vLLM on the CPU, where vLLM's own offloading does not run."""

from __future__ import annotations

import pytest
from bench_command import measured

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.third]


def test_every_engine_gives_the_same_tokens_and_finds_what_was_asked_before() -> None:
    workloads = ("chat", "found", "cycle")
    chosen = [argument for workload in workloads for argument in ("--workload", workload)]
    results = measured("vllm", "--check", "--connector", "kvservice", "--connector", "offloading", *chosen)
    assert results["engines"] == ["none", "kvservice"]
    assert results["missing"].keys() == {"offloading"}
    assert results["equal"].keys() == set(workloads)
    for by_name in results["equal"].values():
        assert len({tuple(counts) for counts in by_name.values()}) == 1
        assert all(equal == total > 0 == from_cache for equal, total, from_cache in by_name.values())
    rows = {(row["workload"], row["row"]): row["engines"] for row in results["rows"]}
    for length in (256, 263):
        stored = rows["found", f"{length:,} in the store"]
        assert stored["none"]["found"] == 0
        assert stored["kvservice"]["found"] >= (length - 1) // 32 * 32 / length
        assert rows["found", f"{length:,} computed"]["kvservice"]["found"] == 0
    seen, half = (rows["cycle", f"12 x 128, {what}"] for what in ("all seen", "half new"))
    # How much depends on how fast blocks are saved: while many are held, others are not saved.
    assert seen["kvservice"]["found"] > seen["none"]["found"]
    assert half["kvservice"]["found"] < 0.6
    (chat,) = (engines for (workload, _), engines in rows.items() if workload == "chat")
    assert all(one["found"] < 0.1 for one in chat.values())
    assert chat["none"]["preemptions"] > 0
