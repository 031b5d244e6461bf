"""The prompts of `kvservice demo --tiers`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvservice.demo.model import VOCABULARY

# Larger blocks than the other demo's, so that few of them fill the smallest block store.
LARGE_BLOCK_SIZE = 64
NUM_TOKENS = 32
# The blocks that the block store of the demo has room for.
STORE_BLOCKS = 64


def make_prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=num_tokens))


@dataclass(eq=False)
class Story:
    """A prompt and the tokens generated for it, the last of which is not appended in the daemon. `num_found` tokens of
    its latest sequence did not need to be computed."""

    name: str
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    num_found: int = 0
