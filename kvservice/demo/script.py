"""Script of the demo: its prompts, and the operations on their sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvservice.demo.model import VOCABULARY

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Part:
    """A prompt and the operations on the sequences generated from it. Steps are counted from 0."""

    name: str
    prompt: tuple[int, ...]
    starts_at_step: int
    num_tokens: int = 32
    # One sequence per seed, forked after the prompt is computed. None selects the likeliest tokens.
    seeds: tuple[int | None, ...] = (None,)
    # The sequence is in the swap tier from the first of these steps to the second.
    swapped_steps: tuple[int, int] | None = None
    # After half of the tokens, this many are truncated and generated again.
    num_tokens_again: int = 0


def _prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=num_tokens))


def parts() -> list[Part]:
    shared = _prompt(71, 3 * BLOCK_SIZE)
    return [
        Part("plain", _prompt(72, 37), starts_at_step=0),
        Part("prefix", shared + _prompt(73, 9), starts_at_step=0),
        Part("same prefix", shared + _prompt(74, 14), starts_at_step=3),
        # 43 tokens end in the middle of a block, so the first two writers must copy it.
        Part("samples", _prompt(75, 43), starts_at_step=5, seeds=(101, 102, 103)),
        Part("swapped", _prompt(76, 52), starts_at_step=7, swapped_steps=(20, 30)),
        Part("rewound", _prompt(77, 25), starts_at_step=9, num_tokens_again=8),
    ]
