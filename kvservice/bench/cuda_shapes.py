"""The shapes of `bench attention --device cuda`, with their memory traffic and arithmetic."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
    """`contexts` are the lengths of the sequences, including the last `query_len` tokens. `dtype` is the pool's."""

    kind: Literal["decode", "extend"]
    dtype: str
    contexts: tuple[int, ...]
    lengths: str
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    query_len: int = 1
    block_size: int = BLOCK_SIZE

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


def _shapes() -> Iterator[Shape]:
    for num_seqs, prefix, query_len in EXTEND_BATCHES:
        lengths = f"{num_seqs}x{query_len} on {prefix}"
        yield Shape("extend", "bfloat16", (prefix + query_len,) * num_seqs, lengths, query_len=query_len)
    for dtype in SHORT_NAMES:
        for heads in DECODE_HEADS:
            for num_seqs, context in DECODE_BATCHES:
                yield Shape("decode", dtype, (context,) * num_seqs, f"{num_seqs}x{context}", *heads)
            yield Shape("decode", dtype, unequal(), "64x1..16384", *heads)


SHAPES = tuple(_shapes())
QUICK = ("extend bf16 32/8x128 64x8 on 4088", "decode bf16 32/8x128 16x1024", "decode e4m3 32/8x128 16x1024")


def select(wanted: str, shapes: tuple[Shape, ...] = SHAPES) -> tuple[Shape, ...]:
    """Return the shapes whose name contains one of the comma-separated words, all for the empty string."""
    words = [word.strip() for word in wanted.split(",")]
    return tuple(shape for shape in shapes if any(word in shape.name for word in words))
