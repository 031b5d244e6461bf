"""The shapes of `bench attention --device cuda`, with their memory traffic and arithmetic."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

BLOCK_SIZE = 16
# The layers of a measurement together are several times the size of the largest L2 (50 to 60 MB on Hopper), so that no
# layer is in L2 when it is used again.
ROTATION_BYTES = 320 << 20
# Long enough to make the launch of a graph negligible.
GRAPH_S = 2e-3
LEAST_CALLS, MAX_CALLS = 4, 2000

# Estimated rates of a device, only for the length of a graph.
_BYTES_PER_S, _FLOP_PER_S, _CALL_S = 4e12, 5e14, 3e-6

SHORT_NAMES = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}


@dataclass(frozen=True)
class Shape:
    """`contexts` are the lengths of the sequences, including the last `query_len` tokens. `dtype` is the pool's. All
    shapes of a `family` can be selected by its name."""

    kind: Literal["decode", "extend"]
    dtype: str
    contexts: tuple[int, ...]
    lengths: str
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    query_len: int = 1
    block_size: int = BLOCK_SIZE
    family: str = "grid"

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"
        return f"{self.kind} {SHORT_NAMES[self.dtype]} {heads} {self.lengths}"

    @property
    def item_size(self) -> int:
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def num_seqs(self) -> int:
        return len(self.contexts)

    @property
    def num_tokens(self) -> int:
        """Return the query tokens of one call."""
        return self.num_seqs * self.query_len

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(-(-context // self.block_size) for context in self.contexts)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V of one layer, the minimum that a call reads."""
        return sum(self.contexts) * 2 * self.num_kv_heads * self.head_size * self.item_size

    @property
    def flop(self) -> int:
        """Return the multiplications and additions of a call's two products, over the attended keys of each query."""
        query = self.query_len
        pairs = sum(query * (context - query) + query * (query + 1) // 2 for context in self.contexts)
        return 4 * pairs * self.num_heads * self.head_size

    @property
    def num_layers(self) -> int:
        return -(-ROTATION_BYTES // self.kv_bytes)

    @property
    def num_calls(self) -> int:
        """Return the calls of one graph: all layers, repeated until it takes long enough."""
        call_s = max(self.kv_bytes / _BYTES_PER_S, self.flop / _FLOP_PER_S, _CALL_S)
        rounds = max(int(-(-GRAPH_S // (call_s * self.num_layers))), -(-LEAST_CALLS // self.num_layers))
        return self.num_layers * min(rounds, max(1, MAX_CALLS // self.num_layers))


def unequal(num_seqs: int = 64, longest: int = 16384) -> tuple[int, ...]:
    """Return lengths from 1 to `longest`, the same in every run."""
    draw = random.Random(0)
    return (1, longest, *(draw.randint(1, longest) for _ in range(num_seqs - 2)))


DECODE_BATCHES = ((1, 1024), (1, 8192), (1, 131072), (4, 2048), (8, 32768), (16, 1024), (64, 4096), (256, 1024))
DECODE_HEADS = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (16, 1, 128), (32, 4, 64))
EXTEND_BATCHES = ((1, 0, 8192), (8, 7680, 512), (64, 1920, 128), (64, 4088, 8))  # sequences, prefix, new tokens

# Shapes of servers that the grid has not: family, pool types, heads, batches.
_16_BIT, _BOTH = ("bfloat16",), tuple(SHORT_NAMES)
DECODE_FAMILIES = (
    ("few-kv-heads", _BOTH, ((16, 1, 128),), ((32, 512), (400, 160))),
    ("few-kv-heads", _BOTH, ((32, 2, 128),), ((1, 8192), (16, 1024), (32, 512), (64, 4096), (256, 1024), (400, 160))),
    ("short-sequences", _BOTH, ((16, 2, 128), (32, 8, 128), (128, 8, 128), (32, 8, 256)), ((400, 160),)),
    ("head-256", _16_BIT, ((32, 8, 256),), ((1, 8192), (16, 1024), (64, 4096))),
)
EXTEND_FAMILIES = (
    ("short-prompts", _16_BIT, ((32, 8, 128), (32, 32, 128), (16, 1, 128), (32, 8, 64)), ((256, 0, 100), (400, 0, 40))),
    ("prompts", _16_BIT, ((32, 8, 128),), ((2, 0, 2048), (1, 0, 16384), (16, 5, 1000))),
    ("no-groups", _16_BIT, ((32, 32, 128),), ((17, 2011, 65),)),
    ("head-64", _16_BIT, ((32, 8, 64),), ((1, 0, 8192), (8, 0, 1000), (16, 1024, 512), (64, 1920, 128))),
    ("head-256", _16_BIT, ((32, 8, 256),), ((1, 0, 8192), (8, 7680, 512), (64, 1920, 128))),
    (
        "8-bit-extend",
        ("float8_e4m3fn",),
        ((32, 8, 128),),
        ((1, 0, 4096), (8, 7680, 512), (64, 1920, 128), (256, 0, 100)),
    ),
)


def _decode(dtype: str, heads: tuple[int, int, int], num_seqs: int, context: int, family: str = "grid") -> Shape:
    return Shape("decode", dtype, (context,) * num_seqs, f"{num_seqs}x{context}", *heads, family=family)


def _extend(
    dtype: str, heads: tuple[int, int, int], num_seqs: int, prefix: int, query_len: int, family: str = "grid"
) -> Shape:
    contexts, lengths = (prefix + query_len,) * num_seqs, f"{num_seqs}x{query_len} on {prefix}"
    return Shape("extend", dtype, contexts, lengths, *heads, query_len=query_len, family=family)


def _grid() -> Iterator[Shape]:
    for num_seqs, prefix, query_len in EXTEND_BATCHES:
        yield _extend("bfloat16", (32, 8, 128), num_seqs, prefix, query_len)
    for dtype in SHORT_NAMES:
        for heads in DECODE_HEADS:
            for num_seqs, context in DECODE_BATCHES:
                yield _decode(dtype, heads, num_seqs, context)
            yield Shape("decode", dtype, unequal(), "64x1..16384", *heads)


def _families() -> Iterator[Shape]:
    for family, dtypes, all_heads, decodes in DECODE_FAMILIES:
        for dtype, heads, decode in itertools.product(dtypes, all_heads, decodes):
            yield _decode(dtype, heads, *decode, family=family)
    for family, dtypes, all_heads, extends in EXTEND_FAMILIES:
        for dtype, heads, extend in itertools.product(dtypes, all_heads, extends):
            yield _extend(dtype, heads, *extend, family=family)


SHAPES = (*_grid(), *_families())
QUICK = ("extend bf16 32/8x128 64x8 on 4088", "decode bf16 32/8x128 16x1024", "decode e4m3 32/8x128 16x1024")


def select(wanted: str, shapes: tuple[Shape, ...] = SHAPES) -> tuple[Shape, ...]:
    """Return the shapes of which a comma-separated word is the family, or a part of the name; all for the
    empty string."""
    words = [word.strip() for word in wanted.split(",")]
    return tuple(shape for shape in shapes if any(word == shape.family or word in shape.name for word in words))


# ---- shapes drawn at random, so that nobody tunes kernels to a list
#
# Heads are as models have them, batches as servers have them, from one long sequence to hundreds of short ones.


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
