"""K/V of a sequence between a client over TCP and the daemon's pool, written and read as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvservice.client import KVClient, Session
from kvservice.pool.layout import TENSOR_DTYPES

LAYERS, KV_HEADS, HEAD_SIZE, DTYPE = 8, 8, 128, "bfloat16"
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * TENSOR_DTYPES[DTYPE].itemsize
# The transports of the session, by the names of the ways.
WAYS = {"kv_transfer": "transfer", "kv_inline": "inline"}
LABELS = {"kv_transfer": "Transfer Engine, through the staging region", "kv_inline": "messages"}


def pool_options(num_bytes: int) -> dict[str, Any]:
    """Return the daemon's options for sequences of all ways with so many bytes of K/V each."""
    num_tokens = num_bytes // TOKEN_BYTES
    return {
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": DTYPE,
        "num_blocks": len(WAYS) * (num_tokens // 16 + 16),
        "enable_prefix_caching": False,
        "max_sequence_tokens": max(num_tokens, 1024),
        "max_request_tokens": max(num_tokens, 65536),
    }


class SequenceWay:
    """A sequence with `num_bytes` of K/V. `key` and `value` are written; `found` are those that were read."""

    def __init__(self, kv: Session, num_bytes: int) -> None:
        self.kv = kv
        self._num_tokens = num_bytes // TOKEN_BYTES
        shape = (2, LAYERS, self._num_tokens, KV_HEADS, HEAD_SIZE)
        bits = np.random.default_rng(0).integers(0, 1 << 14, shape, np.uint16)
        self.key, self.value = bits.view(TENSOR_DTYPES[DTYPE])
        self.found = self.key, self.value
        self._sequence = kv.allocate(range(self._num_tokens))

    def empty(self) -> None:
        """Begin with a new sequence."""
        self.kv.free([self._sequence])
        self._sequence = self.kv.allocate(range(self._num_tokens))
        self._step = self.kv.open_step([self._sequence])

    def put(self) -> None:
        self._step.write(self.key, self.value)

    def get(self) -> None:
        self.found = self.kv.read(self._sequence, 0, self._num_tokens)


@contextlib.contextmanager
def sequence_ways(address: str, num_bytes: int) -> Iterator[dict[str, SequenceWay]]:
    """Yield the ways by name."""
    with contextlib.ExitStack() as cleanup:
        opened = {}
        for name, transport in WAYS.items():
            client = cleanup.enter_context(KVClient(address, transport=transport))
            opened[name] = SequenceWay(cleanup.enter_context(client.session()), num_bytes)
        yield opened
