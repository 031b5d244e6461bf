"""A cache of replies to the latest requests of a session, for clients that retry because a reply was lost.

Kept memory has a part of them, for retries after a restart of the daemon.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from google.protobuf.message import Message

from kvservice.errors import InvalidArgumentError, ReplyForgottenError
from kvservice.server.kept_replies import MAX_REPLIES, RING_BYTES, KeptReply, ReplyRing
from kvservice.server.loop import Answer

# The limit on the memory of the remembered replies, without the newest one. A client that makes one call at a time
# needs only the newest. The largest replies, with the slots of 131072 tokens, take one MiB.
MAX_REPLY_BYTES: Final = 4 << 20
# The estimated size of a message without its numbers, and the size of a number.
_OVERHEAD_BYTES: Final = 64
_NUMBER_BYTES: Final = 8


class Replies:
    """The latest requests of a session and their replies, by request id."""

    def __init__(self, ring: ReplyRing) -> None:
        """`ring` has the requests that an earlier process executed."""
        self._ring = ring
        # The method of each request, and the task that still computes its reply or None, the oldest request first.
        self._requests: dict[int, tuple[str, asyncio.Task[Message] | None]] = {}
        # The replies with their sizes in bytes, the oldest first.
        self._replies: dict[int, tuple[Message | KeptReply, int]] = {}
        self._num_bytes = 0
        for kept in ring:
            self._requests[kept.request_id] = kept.method, None
            if kept.data is not None:
                self._store(kept.request_id, kept, len(kept.data))

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
        that the request ran; `settle` follows when that has ended."""
        num_bytes = memory_bytes(reply)
        self._ring.put(request_id, method, reply.SerializeToString() if num_bytes <= RING_BYTES else None)
        self._enter(request_id, method, None)
        self._store(request_id, reply, num_bytes)

    def settle(self) -> None:
        self._ring.settle()

    def remember(self, request_id: int, method: str, reply: Answer[Message]) -> None:
        """Remember a reply. A task that fails is forgotten, because failed requests are not remembered."""
        if isinstance(reply, asyncio.Task):
            self._enter(request_id, method, reply)
            reply.add_done_callback(functools.partial(self._ended, request_id))
        else:
            self._enter(request_id, method, None)
            self._store(request_id, reply, memory_bytes(reply))

    def _enter(self, request_id: int, method: str, task: asyncio.Task[Message] | None) -> None:
        """Add a request, and forget the oldest one if there are too many."""
        self._requests[request_id] = method, task
        if len(self._requests) > MAX_REPLIES:
            oldest = next(iter(self._requests))
            del self._requests[oldest]
            self._forget(oldest)

    def _ended(self, request_id: int, task: asyncio.Task[Message]) -> None:
        method, current = self._requests.get(request_id, ("", None))
        if current is not task:
            return
        if task.cancelled() or task.exception() is not None:
            del self._requests[request_id]
            return
        self._requests[request_id] = method, None
        if request_id not in self._replies:  # its operation ended before the task did
            reply = task.result()
            self._store(request_id, reply, memory_bytes(reply))

    def _store(self, request_id: int, reply: Message | KeptReply, num_bytes: int) -> None:
        self._replies[request_id] = reply, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes - num_bytes > MAX_REPLY_BYTES:
            self._forget(next(iter(self._replies)))

    def _forget(self, request_id: int) -> None:
        if (reply := self._replies.pop(request_id, None)) is not None:
            self._num_bytes -= reply[1]


def memory_bytes(message: Message) -> int:
    """Estimate the memory of a reply from the lengths of its fields, because encoding a large reply takes milliseconds.
    All repeated fields of remembered replies are numbers."""
    num_bytes = _OVERHEAD_BYTES
    for _, value in message.ListFields():
        if isinstance(value, Message):
            num_bytes += memory_bytes(value)
        elif isinstance(value, str | bytes):
            num_bytes += len(value)
        elif hasattr(value, "__len__"):
            num_bytes += _NUMBER_BYTES * len(value)
        else:
            num_bytes += _NUMBER_BYTES
    return num_bytes
