"""Replies in kept memory: what a process that takes over finds of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvservice.errors import InvalidArgumentError, ReplyForgottenError
from kvservice.kept import KeptArrays, KeptState
from kvservice.server.kept_replies import ALL_RING_BYTES, MAX_REPLIES, RING_BYTES, KeptReplies, ReplyRing
from kvservice.server.replies import Replies
from kvservice.v1 import blocks_pb2

LARGEST_ID = (1 << 64) - 1


@pytest.fixture
def arrays() -> KeptArrays:
    return KeptState.fresh().arrays


def put(ring: ReplyRing, request_id: int, reply: bytes | None, method: str = "append") -> None:
    ring.put(request_id, method, reply)
    ring.settle()


def taken_over(arrays: KeptArrays, row: int = 0, *, undone: bool = False) -> dict[int, bytes | None]:
    """Return the requests that another process finds, in their order, and the replies."""
    replies = KeptReplies(2, arrays)
    replies.recover(undone=undone)
    return {kept.request_id: kept.data for kept in replies.ring(row)}


def test_replies_are_found_again_in_their_order(arrays: KeptArrays) -> None:
    replies = KeptReplies(2, arrays)
    mine, other = replies.ring(0), replies.ring(1)
    for request_id in (5, LARGEST_ID, 3):
        put(mine, request_id, b"%d" % request_id)
    put(other, 5, b"other")
    assert list(taken_over(arrays).items()) == [(5, b"5"), (LARGEST_ID, b"%d" % LARGEST_ID), (3, b"3")]
    assert taken_over(arrays, row=1) == {5: b"other"}
    put(replies.ring(0), 4, b"")
    assert list(taken_over(arrays).items())[-1] == (4, b""), "a ring that was taken over goes on"
    replies.clear(0)
    assert taken_over(arrays) == {}
    assert taken_over(arrays, row=1) == {5: b"other"}


def test_so_many_requests_are_kept(arrays: KeptArrays) -> None:
    ring = KeptReplies(2, arrays).ring(0)
    for request_id in range(1, 3 * MAX_REPLIES):
        put(ring, request_id, b"%d" % request_id)
    newest = range(2 * MAX_REPLIES, 3 * MAX_REPLIES)
    assert taken_over(arrays) == {request_id: b"%d" % request_id for request_id in newest}


def test_a_reply_that_does_not_fit_is_forgotten_and_its_request_is_not(arrays: KeptArrays) -> None:
    ring = KeptReplies(2, arrays).ring(0)
    put(ring, 1, b"1")
    put(ring, 2, bytes(RING_BYTES + 1))
    put(ring, 3, None)
    assert taken_over(arrays) == {1: b"1", 2: None, 3: None}
    largest = bytes(RING_BYTES)
    put(ring, 4, largest)
    assert taken_over(arrays) == {1: None, 2: None, 3: None, 4: largest}


@pytest.mark.parametrize("seed", range(20))
def test_the_ring_never_returns_another_replys_bytes(arrays: KeptArrays, seed: int) -> None:
    """Replies of random sizes, also by rings that were taken over in between. What is found of a reply is the reply,
    and the newest ones are found as long as they fit together."""
    rng = random.Random(seed)
    put_replies: dict[int, bytes] = {}
    ring = KeptReplies(2, arrays).ring(0)
    largest = rng.choice([100, RING_BYTES // 50, RING_BYTES // 3, RING_BYTES])
    for request_id in range(1, 400):
        data = rng.randbytes(rng.randrange(largest + 1))
        put(ring, request_id, data)
        put_replies[request_id] = data
        if rng.random() < 0.05:
            ring = KeptReplies(2, arrays).ring(0)
    found = taken_over(arrays)
    assert list(found) == [*put_replies][-MAX_REPLIES:]
    assert all(data in (None, put_replies[request_id]) for request_id, data in found.items())
    newest = [data for data in found.values() if data is not None]
    assert [*found.values()][-len(newest) :] == newest, "the oldest are forgotten first"
    if len(newest) < MAX_REPLIES:
        assert sum(map(len, newest)) > RING_BYTES - 2 * largest or largest > RING_BYTES // 2


def test_more_sessions_have_less_room_each() -> None:
    arrays = KeptState.fresh().arrays
    ring_bytes = ALL_RING_BYTES // 65536
    ring = KeptReplies(65536, arrays).ring(65535)
    for request_id, size in enumerate((ring_bytes + 1, ring_bytes)):
        put(ring, request_id, bytes(size))
    found = {kept.request_id: kept.data for kept in KeptReplies(65536, arrays).ring(65535)}
    assert found == {0: None, 1: bytes(ring_bytes)}


def test_a_reply_counts_with_its_operation(arrays: KeptArrays) -> None:
    """The process ends before the operation does, right after, and when the ring knows that."""
    ring = KeptReplies(2, arrays).ring(0)
    put(ring, 1, b"1")
    ring.put(2, "append", b"2")
    assert taken_over(arrays, undone=False) == {1: b"1", 2: b"2"}
    ring.put(3, "append", b"3")
    assert taken_over(arrays, undone=True) == {1: b"1", 2: b"2"}
    assert taken_over(arrays, undone=True) == {1: b"1", 2: b"2"}, "recovery may run twice"


class _Killed(BaseException):
    """The process ends here."""


class _Doomed:
    """A memoryview that ends the process at one of its stores."""

    def __init__(self, view: Any, fuse: list[int]) -> None:
        self._view, self._fuse = view, fuse

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._fuse[0] -= 1
        if self._fuse[0] < 0:
            raise _Killed
        self._view[key] = value


def test_a_reply_is_whole_or_unknown_wherever_the_process_ends() -> None:
    """The process ends at each store of a reply that takes the place of others, first before its operation ended."""
    stores = 0
    while True:
        replies = KeptReplies(2, KeptState.fresh().arrays)
        before = _filled(replies)
        ring = replies.ring(0)
        fuse = [stores]
        for name in ("_entries", "_ring", "_pending"):
            setattr(ring, name, _Doomed(getattr(ring, name), fuse))
        new = bytes(range(256)) * (RING_BYTES // 1024)
        try:
            ring.put(1000, "append", new)
            finished = True
        except _Killed:
            finished = False
        replies.recover(undone=True)
        found = {kept.request_id: kept.data for kept in replies.ring(0)}
        assert 1000 not in found
        assert all(data in (None, before[request_id]) for request_id, data in found.items())
        assert len(found) >= MAX_REPLIES - 1
        if finished:
            break
        stores += 1
    assert stores > 6


def _filled(replies: KeptReplies) -> dict[int, bytes]:
    ring, before = replies.ring(0), {}
    for request_id in range(1, 200):
        before[request_id] = b"%d" % request_id * (RING_BYTES // 400)
        put(ring, request_id, before[request_id])
    return before


# ---- the replies of a session


def step(number: int) -> blocks_pb2.StepResponse:
    return blocks_pb2.StepResponse(step_id=number, context_lens=[number])


def test_a_repeated_request_gets_the_earlier_processs_reply(arrays: KeptArrays) -> None:
    replies = Replies(KeptReplies(2, arrays).ring(0))
    for request_id in (7, 8):
        replies.keep(request_id, "append", step(request_id))
        replies.settle()
    too_large = blocks_pb2.StepResponse(slot_mapping=range(RING_BYTES // 4))
    replies.keep(9, "open_step", too_large)
    replies.settle()
    later = Replies(KeptReplies(2, arrays).ring(0))
    assert later.find(6, "append") is None
    assert later.find(7, "append") == step(7)
    assert later.find(8, "append") == step(8)
    with pytest.raises(ReplyForgottenError):
        later.find(9, "open_step")
    with pytest.raises(InvalidArgumentError, match="used for append"):
        later.find(7, "fork")


def test_the_earlier_processs_requests_are_the_oldest(arrays: KeptArrays) -> None:
    replies = Replies(KeptReplies(2, arrays).ring(0))
    replies.keep(1, "append", step(1))
    replies.settle()
    later = Replies(KeptReplies(2, arrays).ring(0))
    for request_id in range(2, MAX_REPLIES + 1):
        later.remember(request_id, "append", step(request_id))
    assert later.find(1, "append") == step(1)
    later.remember(MAX_REPLIES + 1, "append", step(0))
    assert later.find(1, "append") is None
