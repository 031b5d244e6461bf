"""Steps that a lane of a real daemon completes are committed before any later call, and without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvservice.client import BlockStored, KVClient, Sequence, Session
from kvservice.launch import Daemon

BLOCK_SIZE = 4
POOL: dict[str, Any] = {
    "num_layers": 2, "num_kv_heads": 1, "head_size": 32, "dtype": "float32", "block_size": BLOCK_SIZE,
    "num_blocks": 64, "swap_space_gib": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[KVClient]:
    with Daemon(event_token_ids=True, **POOL) as daemon, KVClient(daemon.address, transport="lane") as connected:
        yield connected


def compute(kv: Session, tokens: list[int]) -> Sequence:
    """Compute a sequence of these tokens over the lane."""
    sequence = kv.allocate(tokens)
    step = kv.open_step([sequence])
    ones = np.ones((len(tokens), 1, 32), np.float32)
    for layer in range(2):
        step.extend(layer, ones, ones, ones)
    return sequence


def test_a_call_finds_the_steps_committed_that_its_client_saw_completed(client: KVClient) -> None:
    with client.session("one") as kv, client.session("other") as other:
        assert kv.transport == "lane"
        for n in range(100, 200):
            tokens = [n] * BLOCK_SIZE
            sequence = compute(kv, tokens)
            caller = (kv, other)[n % 2]  # a client may also be told by another one
            assert caller.match_prefix([*tokens, 0]) == BLOCK_SIZE
            (described,) = kv.describe()
            assert described.num_computed_tokens == BLOCK_SIZE
            kv.free([sequence])


def test_a_step_is_committed_without_another_call(client: KVClient) -> None:
    """The stream of events makes no call that would let the daemon look for completed steps."""
    with client.session() as kv:
        kv.reset_prefix_cache()
        compute(kv, [7] * BLOCK_SIZE)
        stored = (event for batch in client.events(start_number=1) for event in batch.events)
        wanted = tuple([7] * BLOCK_SIZE)
        assert next(event for event in stored if isinstance(event, BlockStored) and event.token_ids == wanted)
