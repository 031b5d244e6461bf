"""Replies in kept memory: what a process that takes over finds of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon_lives import Life
from each_row import each_row
from kept_files import HeldFiles, at_every_line
from manual_clock import ManualClock
from sleeping import FEW

from kvservice.errors import InvalidArgumentError, ReplyForgottenError
from kvservice.kept import KeptArrays, KeptState
from kvservice.server.sessions.replies import ALL_RING_BYTES, MAX_REPLIES, RING_BYTES, KeptReplies, ReplyRing
from kvservice.v1 import blocks_pb2

LARGEST_ID = (1 << 64) - 1


@pytest.fixture
def arrays() -> KeptArrays:
    return KeptState.fresh().arrays


def put(ring: ReplyRing, request_id: int, reply: bytes | None, method: str = "append") -> None:
    ring.put(request_id, method, reply)
    ring.end_latest()


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


def test_the_ring_never_returns_another_replys_bytes() -> None:
    """Replies of random sizes, also by rings that were taken over in between. What is found of a reply is the reply,
    and the newest ones are found as long as they fit together."""
    with each_row() as row:
        for seed in range(20):
            with row(seed):
                check_random_replies(KeptState.fresh().arrays, seed)


def check_random_replies(arrays: KeptArrays, seed: int) -> None:
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


def test_a_reply_is_whole_or_unknown_wherever_the_process_ends() -> None:
    """The process ends at each line of storing a reply that takes the place of others, first before its operation
    ended."""
    held = HeldFiles()
    state = KeptState.open(held.start(), {})
    replies = KeptReplies(2, state.arrays)
    state.ready()
    before = _filled(replies)
    ring = replies.ring(0)
    new = bytes(range(256)) * (RING_BYTES // 1024)
    contents: list[Any] = []

    def note() -> None:
        if (content := held.content()) not in contents[-1:]:
            contents.append(content)

    with at_every_line(["server/sessions/replies.py"], note):
        ring.put(1000, "append", new)
    note()
    held.close()
    assert len(contents) > 6
    for content in contents:
        copy = HeldFiles.of(content)
        later = KeptReplies(2, KeptState.open(copy.start(), {}).arrays)
        later.recover(undone=True)
        found = {kept.request_id: kept.data for kept in later.ring(0)}
        assert 1000 not in found
        assert all(data in (None, before[request_id]) for request_id, data in found.items())
        assert len(found) >= MAX_REPLIES - 1
        copy.close()


def _filled(replies: KeptReplies) -> dict[int, bytes]:
    ring, before = replies.ring(0), {}
    for request_id in range(1, 200):
        before[request_id] = b"%d" % request_id * (RING_BYTES // 400)
        put(ring, request_id, before[request_id])
    return before


# ---- the replies of a session


def step(number: int) -> blocks_pb2.StepResponse:
    return blocks_pb2.StepResponse(step_id=number, context_lens=[number])


@pytest.fixture
def next_process(clock: ManualClock) -> Iterator[Callable[[], Any]]:
    """Return a function that starts the next process of a daemon. It returns the replies of a session."""
    held = HeldFiles()
    lives: list[Life] = []
    token = b""

    def start() -> Any:
        nonlocal token
        if lives:
            lives[-1].kill()
        lives.append(life := Life(held, clock, **FEW))
        session = life.attach(token) if token else life.open(detachable=True)
        token = session.token
        return session.replies

    yield start
    lives[-1].kill()
    held.close()


def test_a_repeated_request_gets_the_earlier_processs_reply(next_process: Callable[[], Any]) -> None:
    replies = next_process()
    for request_id in (7, 8):
        replies.keep(request_id, "append", step(request_id))
        replies.end_latest()
    too_large = blocks_pb2.StepResponse(slot_mapping=range(RING_BYTES // 4))
    replies.keep(9, "open_step", too_large)
    replies.end_latest()
    later = next_process()
    assert later.find(6, "append") is None
    assert later.find(7, "append") == step(7)
    assert later.find(8, "append") == step(8)
    with pytest.raises(ReplyForgottenError):
        later.find(9, "open_step")
    with pytest.raises(InvalidArgumentError, match="used for append"):
        later.find(7, "fork")


def test_the_earlier_processs_requests_are_the_oldest(next_process: Callable[[], Any]) -> None:
    replies = next_process()
    replies.keep(1, "append", step(1))
    replies.end_latest()
    later = next_process()
    for request_id in range(2, MAX_REPLIES + 1):
        later.remember(request_id, "append", step(request_id))
    assert later.find(1, "append") == step(1)
    later.remember(MAX_REPLIES + 1, "append", step(0))
    assert later.find(1, "append") is None
