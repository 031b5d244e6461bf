"""Shapes drawn at random, so that nobody tunes kernels to a list: heads as models have them, batches as servers have
them, from one long sequence to hundreds of short ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Final

from kvservice.bench.cuda_shapes import SHORT_NAMES, Shape

# Query heads, KV heads.
HEADS: Final = (
    (8, 1),
    (16, 1),
    (16, 2),
    (32, 2),
    (28, 4),
    (32, 4),
    (32, 8),
    (40, 8),
    (64, 8),
    (128, 8),
    (16, 16),
    (32, 32),
)
# 128 is what most models have.
HEAD_SIZES: Final = (64, 128, 128, 128, 256)
MAX_SEQS: Final = 512
MAX_LENGTH: Final = 65536
MAX_QUERY_LEN: Final = 16384
# Most bytes of K and V, and most multiplications and additions, of one call.
MAX_KV_BYTES: Final = 2 << 30
MAX_FLOP: Final = 1 << 44


def random_shapes(count: int, seed: int) -> tuple[Shape, ...]:
    """Return `count` shapes, the same for the same seed; the first of them are those of a smaller count."""
    draw = random.Random(seed)
    return tuple(_shape(draw, number) for number in range(count))


def _shape(draw: random.Random, number: int) -> Shape:
    while True:
        shape = _any_shape(draw, number)
        if shape.kv_bytes <= MAX_KV_BYTES and shape.flop <= MAX_FLOP:
            return shape


def _any_shape(draw: random.Random, number: int) -> Shape:
    num_heads, num_kv_heads = draw.choice(HEADS)
    num_seqs = _log_uniform(draw, MAX_SEQS)
    is_decode = draw.random() < 0.5
    query_len = 1 if is_decode else 1 + _log_uniform(draw, MAX_QUERY_LEN - 1)
    longest = 0 if not is_decode and draw.random() < 0.5 else _log_uniform(draw, MAX_LENGTH)
    prefixes = tuple(_prefixes(draw, num_seqs, longest))
    return Shape(
        "decode" if is_decode else "extend",
        draw.choice(tuple(SHORT_NAMES)),
        tuple(query_len + prefix for prefix in prefixes),
        f"{num_seqs}x{query_len} on {min(prefixes)}..{max(prefixes)} #{number}",
        num_heads,
        num_kv_heads,
        draw.choice(HEAD_SIZES),
        query_len,
    )


def _prefixes(draw: random.Random, num_seqs: int, longest: int) -> Iterator[int]:
    """Yield the tokens before the new ones of each sequence: all the same, or any."""
    equal = draw.random() < 0.5
    for _ in range(num_seqs):
        yield longest if equal else draw.randint(0, longest)


def _log_uniform(draw: random.Random, most: int) -> int:
    """Return a number from 1 to `most`: each power of two has the same chance."""
    return int(math.exp(draw.uniform(0, math.log(most + 1))))
