"""The cache of replies for repeated requests: which replies it has, and when it forgets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon_lives import Life
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from manual_clock import ManualClock
from raw_wire import SERVICES, is_of_session

from kvservice.errors import InvalidArgumentError, OutOfBlocksError, ReplyForgottenError
from kvservice.server.sessions.replies import memory_bytes
from kvservice.v1 import blocks_pb2, scheduler_pb2

# So many requests are remembered, and so many bytes of replies beside the newest one.
MAX_REPLIES, MAX_REPLY_BYTES = 128, 4 << 20
SMALL = blocks_pb2.FreeResponse()
# 64 for the message, 16 for a field of two numbers.
NUM_LARGE = 16
LARGE_BYTES = MAX_REPLY_BYTES // NUM_LARGE


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    running = Life(clock=clock, store_gib=0.0, share_store="off")
    yield running
    running.kill()


@pytest.fixture
def no_replies(life: Life) -> Callable[[], Any]:
    """Return a function that opens a session, and returns the replies that the daemon remembers for it."""
    return lambda: life.open().replies


def reply_of(num_bytes: int) -> Message:
    """Return a reply of which the daemon says that it takes so much memory."""
    reply = blocks_pb2.StepResponse()
    reply.slot_mapping.extend(range((num_bytes - 64) // 8))
    return reply


def is_kept(replies: Any, request_id: int, method: str) -> bool:
    try:
        return replies.find(request_id, method) is not None
    except ReplyForgottenError:
        return False


def kept(replies: Any, request_ids: range, method: str = "append") -> list[int]:
    return [request_id for request_id in request_ids if is_kept(replies, request_id, method)]


def test_a_reply_is_the_same_again(no_replies: Callable[[], Any]) -> None:
    replies, reply = no_replies(), reply_of(1024)
    assert replies.find(1, "append") is None
    replies.remember(1, "append", reply)
    assert replies.find(1, "append") == reply
    with pytest.raises(InvalidArgumentError, match="used for append") as caught:
        replies.find(1, "fork")
    assert caught.value.field == "request_id"


def test_so_many_small_ones_are_remembered(no_replies: Callable[[], Any]) -> None:
    replies = no_replies()
    for request_id in range(1, MAX_REPLIES + 1):
        replies.remember(request_id, "free", SMALL)
    assert kept(replies, range(1, MAX_REPLIES + 1), "free") == [*range(1, MAX_REPLIES + 1)]
    replies.remember(MAX_REPLIES + 1, "free", SMALL)
    assert replies.find(1, "free") is None, "as of one that was never made"
    assert kept(replies, range(2, MAX_REPLIES + 2), "free") == [*range(2, MAX_REPLIES + 2)]


def test_so_much_is_remembered_beside_the_newest(no_replies: Callable[[], Any]) -> None:
    replies = no_replies()
    for request_id in range(1, NUM_LARGE + 1):
        replies.remember(request_id, "append", reply_of(LARGE_BYTES))
    replies.remember(NUM_LARGE + 1, "append", reply_of(2 * MAX_REPLY_BYTES))
    assert kept(replies, range(1, NUM_LARGE + 2)) == [*range(1, NUM_LARGE + 2)], "they fill the limit"
    replies.remember(NUM_LARGE + 2, "append", SMALL)
    assert kept(replies, range(1, NUM_LARGE + 3)) == [NUM_LARGE + 2], "the largest is the newest no more"


def test_a_byte_more_and_the_oldest_is_forgotten(no_replies: Callable[[], Any]) -> None:
    replies = no_replies()
    replies.remember(1, "append", reply_of(LARGE_BYTES + 8))
    for request_id in range(2, NUM_LARGE + 1):
        replies.remember(request_id, "append", reply_of(LARGE_BYTES))
    assert len(kept(replies, range(1, NUM_LARGE + 1))) == NUM_LARGE
    replies.remember(NUM_LARGE + 1, "append", SMALL)
    assert kept(replies, range(1, NUM_LARGE + 2)) == [*range(2, NUM_LARGE + 2)]
    for request_id in range(NUM_LARGE + 2, NUM_LARGE + 2 + MAX_REPLIES):
        replies.remember(request_id, "append", SMALL)
    replies.remember(1000, "append", reply_of(MAX_REPLY_BYTES))
    newest = range(NUM_LARGE + 3, NUM_LARGE + 2 + MAX_REPLIES)
    assert kept(replies, newest) == [*newest], "what was forgotten is not counted any more"


def work(result: Any) -> asyncio.Task[Any]:
    """Return a task that has its result, or raises it, in a later turn."""

    async def later() -> Any:
        await asyncio.sleep(0)
        if isinstance(result, Exception):
            raise result
        return result

    return asyncio.ensure_future(later())


def test_a_task_is_remembered_while_it_works_and_its_reply_after(no_replies: Callable[[], Any]) -> None:
    async def scenario() -> None:
        replies, large = no_replies(), reply_of(2 * MAX_REPLY_BYTES)
        task = work(large)
        replies.remember(1, "append", task)
        replies.remember(2, "append", reply_of(LARGE_BYTES))
        assert replies.find(1, "append") is task
        await task
        assert replies.find(1, "append") is large
        assert kept(replies, range(1, 3)) == [1, 2]
        replies.remember(3, "append", SMALL)
        assert kept(replies, range(1, 4)) == [3], "it was the newest, and its size counts"

    asyncio.run(scenario())


def test_what_a_task_refuses_is_not_remembered(no_replies: Callable[[], Any]) -> None:
    async def scenario() -> None:
        replies = no_replies()
        error = OutOfBlocksError("none", tier="device", required=1, free=0, total=1)
        task = work(error)
        replies.remember(1, "allocate", task)
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert replies.find(1, "allocate") is None

    asyncio.run(scenario())


def test_replies_that_are_remembered_repeat_numbers_and_messages_only() -> None:
    """Therefore the lengths of the fields determine the memory of a reply."""
    methods = [method for service in SERVICES for method in service.methods if is_of_session(method)]
    remembered = [method.output_type for method in methods if "request_id" in method.input_type.fields_by_name]
    assert blocks_pb2.StepResponse.DESCRIPTOR in remembered
    repeated = [field for one in remembered for field in one.fields if field.is_repeated]
    assert not [field.full_name for field in repeated if field.cpp_type == FieldDescriptor.CPPTYPE_STRING]
    failed = scheduler_pb2.ScheduleResponse()
    for number in range(2):
        failed.failed.add(request_id=number).error.message = "x" * 1000
    assert memory_bytes(failed) > 2000


def test_a_request_whose_reply_is_forgotten_is_not_done_again(life: Life) -> None:
    async def scenario() -> None:
        session = life.open()
        await life.allocate(session, 1, [1])

        async def append(request_id: int) -> Any:
            request = blocks_pb2.AppendRequest(request_id=request_id, sequence_ids=[1], token_ids=[2])
            return await life.call(session, "append", request)

        def length() -> int:
            return int(life.manager.describe(session.namespace, [1])[0].length)

        first = await append(1)
        assert await append(1) is first
        for request_id in (2, 3):
            session.replies.remember(request_id, "append", reply_of(MAX_REPLY_BYTES))
        assert length() == 2
        with pytest.raises(ReplyForgottenError, match=r"^request_id: request 1 was done before"):
            await append(1)
        assert length() == 2
        await append(4)
        assert length() == 3

    asyncio.run(scenario())
