"""Who generates what in the demo, and what happens to whom."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvservice.demo.model import VOCABULARY

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Part:
    """A prompt and the fate of the sequences that are generated from it. Steps are counted from 0."""

    name: str
    prompt: tuple[int, ...]
    starts_at_step: int
    num_tokens: int = 32
    # One sequence for each seed, forked after the prompt is computed. None: the likeliest tokens.
    seeds: tuple[int | None, ...] = (None,)
    # In the swap tier from the first of these steps to the second.
    swapped_steps: tuple[int, int] | None = None
    # Half way, this many tokens are given back and generated again.
    num_tokens_again: int = 0


def _prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=num_tokens))


def parts() -> list[Part]:
    shared = _prompt(71, 3 * BLOCK_SIZE)
    return [
        Part("plain", _prompt(72, 37), starts_at_step=0),
        Part("prefix", shared + _prompt(73, 9), starts_at_step=0),
        Part("same prefix", shared + _prompt(74, 14), starts_at_step=3),
        # 43 tokens end in the middle of a block, which the first two writers must copy.
        Part("samples", _prompt(75, 43), starts_at_step=5, seeds=(101, 102, 103)),
        Part("swapped", _prompt(76, 52), starts_at_step=7, swapped_steps=(20, 30)),
        Part("rewound", _prompt(77, 25), starts_at_step=9, num_tokens_again=8),
    ]
