"""A cache of replies to the latest requests of a session, for clients that retry because a reply was lost.

Kept memory has a part of them, for retries after a restart of the daemon.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvservice.blocks.plans import ArrayMemory
from kvservice.errors import InvalidArgumentError, ReplyForgottenError
from kvservice.server.loop import Answer
from kvservice.v1 import session_pb2

# The limit on the memory of the remembered replies, without the newest one. A client that makes one call at a time
# needs only the newest. The largest replies, with the slots of 131072 tokens, take one MiB.
MAX_REPLY_BYTES: Final = 4 << 20
# The estimated size of a message without its numbers, and the size of a number.
_OVERHEAD_BYTES: Final = 64
_NUMBER_BYTES: Final = 8
# The exact size of a reply matters from here on: as many of them as are remembered are within the limit.
_SMALL_BYTES: Final = 32 << 10


class Replies:
    """The latest requests of a session and their replies, by request id."""

    def __init__(self, ring: ReplyRing) -> None:
        """`ring` has the requests that an earlier process executed."""
        self._ring = ring
        # Says that the operation of the latest request that was kept has ended.
        self.end_latest = ring.end_latest
        # The method of each request, and the task that still computes its reply or None, the oldest request first.
        self._requests: dict[int, tuple[str, asyncio.Task[Message] | None]] = {}
        # The replies with their sizes in bytes, the oldest first.
        self._replies: dict[int, tuple[Message | KeptReply, int]] = {}
        self._num_bytes = 0
        for kept in ring:
            data = kept.data
            self._enter(kept.request_id, kept.method, reply=None if data is None else (kept, len(data)))

    def __contains__(self, request_id: int) -> bool:
        """Return whether a request is known."""
        return request_id in self._requests

    def find(self, request_id: int, method: str) -> Answer[Message] | None:
        """Return the reply to an earlier request, or None if the request is not known.

        Raises ReplyForgottenError, and InvalidArgumentError for the id of another method's request.
        """
        if (request := self._requests.get(request_id)) is None:
            return None
        known_method, task = request
        if known_method != method:
            raise InvalidArgumentError(f"{request_id} was used for {known_method}", field="request_id")
        if task is not None:
            return task
        if (reply := self._replies.get(request_id)) is None:
            raise ReplyForgottenError(
                f"request {request_id} was done before, and its reply is not remembered any more", field="request_id"
            )
        message = reply[0]
        return message.message() if isinstance(message, KeptReply) else message

    def keep(self, request_id: int, method: str, reply: Message) -> None:
        """Remember a request that was executed, and its reply, in kept memory too. It counts there with the operation
        that the request ran; `end_latest` follows when that has ended."""
        data = reply.SerializeToString()
        num_bytes = _OVERHEAD_BYTES + _NUMBER_BYTES * len(data)  # at most: a number has at least one byte there
        if num_bytes > _SMALL_BYTES:
            num_bytes = memory_bytes(reply)
        self._ring.put(request_id, method, data if num_bytes <= RING_BYTES else None)
        self._enter(request_id, method, reply=(reply, num_bytes))

    def remember(self, request_id: int, method: str, reply: Answer[Message]) -> None:
        """Remember a reply. A task that fails is forgotten, because failed requests are not remembered."""
        if isinstance(reply, asyncio.Task):
            self._enter(request_id, method, task=reply)
            reply.add_done_callback(functools.partial(self._ended, request_id))
        else:
            self._enter(request_id, method, reply=(reply, memory_bytes(reply)))

    def _enter(
        self,
        request_id: int,
        method: str,
        task: asyncio.Task[Message] | None = None,
        reply: tuple[Message | KeptReply, int] | None = None,
    ) -> None:
        """Set a request, and its reply with the size if it is there. The oldest of both are forgotten if there are too
        many."""
        self._requests[request_id] = method, task
        if len(self._requests) > MAX_REPLIES:
            oldest = next(iter(self._requests))
            del self._requests[oldest]
            self._forget(oldest)
        if reply is not None:
            self._replies[request_id] = reply
            self._num_bytes += reply[1]
            while self._num_bytes - reply[1] > MAX_REPLY_BYTES:
                self._forget(next(iter(self._replies)))

    def _ended(self, request_id: int, task: asyncio.Task[Message]) -> None:
        method, current = self._requests.get(request_id, ("", None))
        if current is not task:
            return
        if task.cancelled() or task.exception() is not None:
            del self._requests[request_id]
            return
        if request_id in self._replies:  # its operation ended before the task did
            self._requests[request_id] = method, None
        else:
            reply = task.result()
            self._enter(request_id, method, reply=(reply, memory_bytes(reply)))

    def _forget(self, request_id: int) -> None:
        if (reply := self._replies.pop(request_id, None)) is not None:
            self._num_bytes -= reply[1]


def memory_bytes(message: Message) -> int:
    """Estimate the memory of a reply from the lengths of its fields, because encoding a large reply takes milliseconds.
    All repeated fields of remembered replies are numbers or messages."""
    num_bytes = _OVERHEAD_BYTES
    for _, value in message.ListFields():
        if isinstance(value, Message):
            num_bytes += memory_bytes(value)
        elif isinstance(value, str | bytes):
            num_bytes += len(value)
        elif hasattr(value, "__len__"):
            is_numbers = not isinstance(next(iter(value)), Message)
            num_bytes += _NUMBER_BYTES * len(value) if is_numbers else sum(map(memory_bytes, value))
        else:
            num_bytes += _NUMBER_BYTES
    return num_bytes


# ---- in kept memory: the latest requests of each session, for clients that repeat them after a restart
#
#     reply_entries  uint64[max_sessions, 128, columns]    request NUMBER is in entry NUMBER % 128
#     reply_bytes    uint8[max_sessions, ring bytes]       serialized replies, a ring
#     reply_pending  uint64[1]                             1 + the place of the entry whose operation has not ended, or
#                                                          0
#
# An entry counts when its NUMBER, which is not 0, is stored. That happens last. If recovery undoes the operation, the
# entry goes with it.

# The number of requests that are remembered. The Python client has at most this many in flight.
MAX_REPLIES: Final = 128
# Room for the replies of one session. The reply to an append of 1024 sequences fits. More than 4096 sessions have less
# room each, so that all of them have at most a GiB.
RING_BYTES: Final = 256 << 10
ALL_RING_BYTES: Final = 1 << 30
# METHOD is the number of the method's field in Call and Reply, which never changes.
NUMBER, REQUEST_ID, METHOD, START, SIZE, _NUM_COLUMNS = range(6)
_FORGOTTEN: Final = 0xFFFFFFFFFFFFFFFF
_METHOD_NUMBERS: Final[dict[str, int]] = {
    field.name: field.number for field in session_pb2.Call.DESCRIPTOR.oneofs_by_name["call"].fields
}
_METHODS: Final = {number: name for name, number in _METHOD_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class KeptReply:
    """A request of an earlier process, and its serialized reply, None if there was no room for it."""

    request_id: int
    method: str
    data: bytes | None

    def message(self) -> Message:
        assert self.data is not None, "there is a reply"
        field = session_pb2.Reply.DESCRIPTOR.fields_by_name[self.method]
        kind: Any = field.message_type
        return GetMessageClass(kind).FromString(self.data)


class KeptReplies:
    """The replies of all sessions, by the number of the session's row."""

    def __init__(self, max_sessions: int, memory: ArrayMemory) -> None:
        shape = (max_sessions, MAX_REPLIES, _NUM_COLUMNS)
        self._entries: npt.NDArray[np.uint64] = memory.kept("reply_entries", shape, np.uint64, private=True)
        ring_bytes = min(RING_BYTES, ALL_RING_BYTES // max_sessions)
        self._bytes: npt.NDArray[np.uint8] = memory.kept(
            "reply_bytes", (max_sessions, ring_bytes), np.uint8, private=True
        )

        pending: npt.NDArray[np.uint64] = memory.kept("reply_pending", (1,), np.uint64, private=True)
        self._pending: Any = pending.data

    def clear(self, row: int) -> None:
        """Forget all requests of this row, for a new session."""
        self._entries[row, :, NUMBER] = 0

    def ring(self, row: int) -> ReplyRing:
        """Return the ring of this row, with the requests of an earlier process if there are any."""
        return ReplyRing(self._entries[row], self._bytes[row], self._pending, row * MAX_REPLIES)

    def recover(self, *, undone: bool) -> None:
        """Forget the latest request if its operation did not end and is about to be `undone`."""
        if undone and (place := self._pending[0]):
            row, slot = divmod(place - 1, MAX_REPLIES)
            self._entries[row, slot, NUMBER] = 0
        self._pending[0] = 0


class ReplyRing:
    """The replies of one session."""

    def __init__(
        self, entries: npt.NDArray[np.uint64], ring: npt.NDArray[np.uint8], pending: Any, first_place: int
    ) -> None:
        """`first_place` is the place of the first entry, see KeptReplies; `pending` is that of all rings."""
        self._pending, self._first_place = pending, first_place
        # Updating an element of a memoryview takes a quarter of NumPy's time.
        self._entries: Any = entries.reshape(-1).data
        self._ring: Any = ring.data
        self._num_bytes = len(ring)
        # Entry, start and end of the replies in the ring, the oldest first.
        self._live: deque[tuple[int, int, int]] = deque()
        self._number = self._end = 0
        for row in sorted(entries.tolist()):
            if row[NUMBER]:
                self._number = row[NUMBER]
                if row[SIZE] not in (0, _FORGOTTEN):
                    self._end = row[START] + row[SIZE]
                    self._live.append((row[NUMBER] % MAX_REPLIES, row[START], self._end))

    def __iter__(self) -> Iterator[KeptReply]:
        """Iterate over the requests, the oldest first."""
        for number in range(self._number - MAX_REPLIES + 1, self._number + 1):
            at = number % MAX_REPLIES * _NUM_COLUMNS
            stored, request_id, method, start, size = self._entries[at : at + _NUM_COLUMNS].tolist()
            if number > 0 and stored == number:
                data = None if size == _FORGOTTEN else bytes(self._ring[start : start + size])
                yield KeptReply(request_id, _METHODS[method], data)

    def put(self, request_id: int, method: str, reply: bytes | None) -> None:
        """Store a request and its reply, until its operation is undone or `end_latest` is called. The oldest request is
        forgotten, and so are the oldest replies for which there is no room. The request is stored without a reply if
        `reply` is None or larger than the ring."""
        entries, live = self._entries, self._live
        number = self._number = self._number + 1
        slot = number % MAX_REPLIES
        at = slot * _NUM_COLUMNS
        self._pending[0] = self._first_place + slot + 1
        entries[at] = 0
        if live and live[0][0] == slot:
            live.popleft()
        start, size = 0, _FORGOTTEN
        if reply == b"":
            size = 0
        elif reply is not None and len(reply) <= self._num_bytes:
            start, size = self._end, len(reply)
            if start + size > self._num_bytes:
                self._forget(start, self._num_bytes)  # what is there is older than what is at the start
                start = 0
            self._end = start + size
            self._forget(start, self._end)
            self._ring[start : self._end] = reply
            live.append((slot, start, self._end))
        entries[at + REQUEST_ID] = request_id
        entries[at + METHOD] = _METHOD_NUMBERS[method]
        entries[at + START] = start
        entries[at + SIZE] = size
        entries[at] = number

    def end_latest(self) -> None:
        """Say that the operation of the latest request has ended."""
        self._pending[0] = 0

    def _forget(self, start: int, end: int) -> None:
        """Forget the oldest replies as long as they are in this range."""
        live = self._live
        while live and live[0][1] < end and start < live[0][2]:
            self._entries[live.popleft()[0] * _NUM_COLUMNS + SIZE] = _FORGOTTEN
