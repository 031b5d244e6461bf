"""Calls that run in slices: other calls run between the slices, and a started operation completes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life

from kvservice.blocks import AllocationRequest
from kvservice.errors import DuplicateSequenceError, QuotaExceededError
from kvservice.v1 import blocks_pb2

# The number of blocks of a long sequence. Each slice frees one sequence of this size.
LONG = 20_000
# The number of short sequences that a slice allocates.
SLICE_SEQUENCES = 128
POOL: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "block_size": 1,
    "num_blocks": 3 * LONG,
    "max_sequence_tokens": LONG,
    "max_sessions": 2,
    "max_sequences": 2 * SLICE_SEQUENCES,
    "store_gib": 0.0,
    "share_store": "off",
}


@pytest.fixture
def life() -> Iterator[Life]:
    lives: list[Life] = []

    async def start() -> None:
        lives.append(Life(**POOL))

    asyncio.run(start())
    yield lives[0]
    lives[0].kill()


def opened(life: Life, num_sequences: int) -> Any:
    session = life.open()
    for n in range(num_sequences):
        tokens = np.arange(n * LONG, (n + 1) * LONG, dtype=np.int32)
        life.manager.allocate(session.namespace, [AllocationRequest(n, tokens)])
    return session


def free(life: Life, session: Any, request: blocks_pb2.FreeRequest) -> asyncio.Task[Any]:
    return asyncio.create_task(life.call(session, "free", request))


def num_free(life: Life) -> int:
    return int(life.manager.stats().free_blocks)


async def comes(condition: Callable[[], bool]) -> None:
    """Let others have their turns until the condition holds."""
    while not condition():
        await asyncio.sleep(0)


def test_others_have_their_turns_between_slices(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 3)
        freeing = free(life, session, blocks_pb2.FreeRequest(sequence_ids=range(3)))
        seen = set()
        while not freeing.done():
            await life.call(session, "match_prefix", blocks_pb2.MatchPrefixRequest(token_ids=[1]))
            seen.add(num_free(life))
            await asyncio.sleep(0)
        assert {LONG, 2 * LONG} <= seen
        assert num_free(life) == 3 * LONG

    asyncio.run(scenario())


def test_a_call_whose_caller_is_gone_is_ended(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 3)
        call = free(life, session, blocks_pb2.FreeRequest(sequence_ids=range(3)))
        await comes(lambda: num_free(life) > 0)
        assert num_free(life) < 3 * LONG
        call.cancel()
        await comes(call.done)
        assert call.cancelled()
        await comes(lambda: num_free(life) == 3 * LONG)
        life.manager.check_integrity()

    asyncio.run(scenario())


def test_a_call_that_is_sent_again_meanwhile_has_the_same_answer(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 3)
        request = blocks_pb2.FreeRequest(request_id=1, sequence_ids=range(3))
        first, again = await asyncio.gather(free(life, session, request), free(life, session, request))
        assert first is again
        assert num_free(life) == 3 * LONG
        assert await free(life, session, request) is first

    asyncio.run(scenario())


def test_a_session_counts_until_all_of_it_is_freed(life: Life) -> None:
    async def scenario() -> None:
        life.open()
        full = opened(life, 3)
        closing = life.sessions.close_in_slices(full)
        next(closing)
        assert len(life.sessions) == 1
        with pytest.raises(QuotaExceededError):
            life.open()
        for _ in closing:
            pass
        assert num_free(life) == 3 * LONG
        life.open()

    asyncio.run(scenario())


def test_a_call_that_is_refused_in_a_later_slice_may_be_sent_again(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 2)
        sequences = [blocks_pb2.SequenceAllocation(sequence_id=n, token_ids=[n]) for n in range(SLICE_SEQUENCES + 1)]
        request = blocks_pb2.AllocateRequest(request_id=1, sequences=sequences)
        with pytest.raises(DuplicateSequenceError) as caught:
            await life.call(session, "allocate", request)
        assert caught.value.field == "sequences[0].sequence_id"
        await free(life, session, blocks_pb2.FreeRequest(sequence_ids=[0, 1]))
        response: Any = await life.call(session, "allocate", request)
        assert len(response.num_blocks) == len(sequences)
        assert await life.call(session, "allocate", request) is response

    asyncio.run(scenario())
