"""The model of a KV pool, in plain lists, with which the real pool is compared.

K and V of a token are random numbers whose seed depends on the token and everything before it, including the extra
keys, as in a transformer. So a block that is shared by mistake has the wrong content.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Keys = tuple[tuple[int, bytes], ...]

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 2, 4, 32, 4
# The pool of all state machines. It is small, so that it is full soon.
POOL: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "num_blocks": 20,
    "swap_space_gib": 12 * 4096 / 2**30,
    "watermark": 0.05,
    "max_sequences": 12,
    "max_sequence_tokens": 60,
    "max_pinned_fraction": 0.2,
}


@dataclass
class ModelSequence:
    tokens: list[int]
    keys: Keys
    computed: int
    swapped: bool = False

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    def kv(self, layer: int, start: int, stop: int) -> tuple[Array, Array]:
        """Return K and V of token positions start <= p < stop: float32 [stop - start, NUM_KV_HEADS, HEAD_SIZE] each."""
        parts = [_kv(seed, layer) for seed in _seeds(tuple(self.tokens), self.keys)[start:stop]]
        both = np.stack(parts) if parts else np.zeros((0, 2, NUM_KV_HEADS, HEAD_SIZE), np.float32)
        return both[:, 0], both[:, 1]


@dataclass
class ModelStep:
    """A step of `counts[i]` tokens of sequence `ids[i]` from position `starts[i]` on."""

    handle: Any
    ids: list[int]
    starts: list[int]
    counts: list[int]
    written: set[int] = field(default_factory=set)
    # The arguments of the append that opened it.
    appended: tuple[list[int], list[int], list[int]] | None = None

    @property
    def left(self) -> list[int]:
        return [layer for layer in range(NUM_LAYERS) if layer not in self.written]


@functools.lru_cache(4096)
def _seeds(tokens: tuple[int, ...], keys: Keys) -> list[bytes]:
    seed, seeds = b"", []
    for position, token in enumerate(tokens):
        here = b"".join(key for at, key in sorted(keys) if at == position)
        seed = hashlib.sha256(seed + token.to_bytes(4, "big") + here).digest()
        seeds.append(seed)
    return seeds


@functools.lru_cache(16384)
def _kv(seed: bytes, layer: int) -> Array:
    source = np.random.default_rng([layer, int.from_bytes(seed[:16], "big")])
    return source.standard_normal((2, NUM_KV_HEADS, HEAD_SIZE), np.float32)


def reference_attention(query: Array, key: Array, value: Array) -> Array:
    """Compute causal attention in float64. The queries [n, NUM_HEADS, HEAD_SIZE] are at the last n key positions."""
    group = NUM_HEADS // NUM_KV_HEADS
    keys, values = (np.repeat(part.astype(np.float64), group, axis=1) for part in (key, value))
    scores = np.einsum("qhd,khd->hqk", query.astype(np.float64), keys) / np.sqrt(HEAD_SIZE)
    positions = np.arange(len(key))
    future = positions[None, :] > positions[len(key) - len(query) :][:, None]
    scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values)
