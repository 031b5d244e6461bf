"""The times to vLLM's first token are of what they claim to be of. vLLM itself is in tests/vllm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvservice.bench import vllm_first_token
from kvservice.bench.vllm_first_token import BLOCK_SIZE, measure


class FakeEngine:
    def __init__(self) -> None:
        self.resets = 0

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def answers(monkeypatch: pytest.MonkeyPatch, *rows: tuple[float, int]) -> Iterator[tuple[float, int]]:
    """Let requests take these seconds and find these tokens, one after the other."""
    monkeypatch.setattr(vllm_first_token, "REPEATS", 1)
    left = iter(rows)

    def first_token(engine: Any, prompt: list[int]) -> tuple[float, int]:
        assert isinstance(engine, FakeEngine)
        assert len(prompt) == 4 * BLOCK_SIZE
        return next(left)

    monkeypatch.setattr(vllm_first_token, "first_token", first_token)
    return left


def test_a_prompt_is_sent_again_until_all_its_blocks_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    left = answers(monkeypatch, (8.0, 0), (7.0, 0), (5.0, 2 * BLOCK_SIZE), (2.0, 3 * BLOCK_SIZE))
    engine = FakeEngine()
    row = measure(engine, 4 * BLOCK_SIZE)
    assert row == {"tokens": 4 * BLOCK_SIZE, "recomputed_s": 8.0, "loaded_s": 2.0, "ratio": 4.0}
    assert engine.resets == 3
    assert list(left) == []


def test_a_new_prompt_that_is_found_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, (1.0, BLOCK_SIZE))
    with pytest.raises(AssertionError):
        measure(FakeEngine(), 4 * BLOCK_SIZE)
