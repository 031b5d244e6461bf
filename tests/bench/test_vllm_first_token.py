"""The times to vLLM's first token are of what they claim to be of. vLLM itself is in tests/vllm."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.bench.vllm_first_token import measure

BLOCK_SIZE, REPEATS = 32, 5


class FakeEngine:
    """Requests take these seconds and find these tokens, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: list[tuple[float, int]]) -> None:
        self.left: Iterator[tuple[float, int]] = iter(rows)
        self.resets, self.now = 0, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self, prompts: list[dict[str, Any]], sampling: dict[str, Any], use_tqdm: bool) -> list[Any]:
        (prompt,) = prompts
        assert len(prompt["prompt_token_ids"]) == 4 * BLOCK_SIZE
        assert sampling["max_tokens"] == 1
        assert not use_tqdm
        seconds, num_cached = next(self.left)
        self.now += seconds
        return [SimpleNamespace(num_cached_tokens=num_cached)]


def test_a_prompt_is_sent_again_until_all_its_blocks_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(8.0, 0), (7.0, 0), (5.0, 3 * BLOCK_SIZE), (2.0, 4 * BLOCK_SIZE - 1)]
    engine = FakeEngine(monkeypatch, requests * REPEATS)
    row = measure(engine, 4 * BLOCK_SIZE)
    assert row == {"tokens": 4 * BLOCK_SIZE, "recomputed_s": 8.0, "loaded_s": 2.0, "ratio": 4.0}
    assert engine.resets == 3 * REPEATS
    assert list(engine.left) == []


def test_a_new_prompt_that_is_found_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        measure(FakeEngine(monkeypatch, [(1.0, BLOCK_SIZE)]), 4 * BLOCK_SIZE)
