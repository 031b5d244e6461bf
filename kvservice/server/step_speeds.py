"""The measured speeds of an engine: they decide whether preempted sequences are swapped or computed again."""

from __future__ import annotations

from typing import Final

from kvservice.engine import CacheEngine
from kvservice.scheduler import ScheduledBatch, Speeds

# Steps with fewer tokens, or without a part of a prompt, do not show how fast prompts are computed.
_MIN_TOKENS: Final = 64
# The weight of the latest step.
_WEIGHT: Final = 1 / 8


class SpeedMeter:
    """Measures the speeds of one engine by the times of its calls. A speed that the client has fixed stays."""

    def __init__(self, engine: CacheEngine, speeds: Speeds, *, swap_is_fixed: bool, compute_is_fixed: bool) -> None:
        self._engine, self._speeds = engine, speeds
        self._swap_is_fixed, self._compute_is_fixed = swap_is_fixed, compute_is_fixed
        # The tokens of each batch that is not reported, or 0 if its step does not count.
        self._tokens: dict[int, int] = {}
        self._called_at_s = 0.0

    def called(self, reported: list[int], now_s: float) -> None:
        """Note a call that reports these batches. The engine computed them since the last call."""
        num_tokens = [self._tokens.pop(number, 0) for number in reported]
        if num_tokens and min(num_tokens) > 0 and not self._compute_is_fixed:
            token_s = (now_s - self._called_at_s) / sum(num_tokens)
            self._speeds.compute_token_s += _WEIGHT * (token_s - self._speeds.compute_token_s)
        self._called_at_s = now_s
        if not self._swap_is_fixed:
            self._speeds.swap_block_s = self._engine.swap_block_s

    def made(self, batch: ScheduledBatch) -> None:
        """Note a batch that was made."""
        if batch.step is not None:
            counts = batch.num_tokens >= _MIN_TOKENS and batch.num_decodes < len(batch.step.sequence_ids)
            self._tokens[batch.number] = batch.num_tokens if counts else 0

    def forget(self, unreported: tuple[int, ...]) -> None:
        """Forget all batches except the unreported ones, because the others were taken back."""
        self._tokens = {number: self._tokens[number] for number in unreported if number in self._tokens}
