"""Replies to a session's latest requests, for clients that send a request again because its reply was lost."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from google.protobuf.message import Message

from kvservice.errors import InvalidArgumentError, ReplyForgottenError
from kvservice.server.slices import Answer

# Of so many requests it is known that they were made: as many as a client of ours has under way at one time.
MAX_REPLIES: Final = 128
# What their replies take in memory, beside the newest of them. Who makes one call at a time needs the newest only; the
# largest, the slots of 131072 tokens, take one MiB.
MAX_REPLY_BYTES: Final = 4 << 20
# What a message takes besides its numbers, and what a number takes.
_OVERHEAD_BYTES: Final = 64
_NUMBER_BYTES: Final = 8


class Replies:
    """By request id."""

    def __init__(self) -> None:
        # The methods, the oldest request first, and the tasks that still work on replies.
        self._requests: dict[int, tuple[str, asyncio.Task[Message] | None]] = {}
        # With their sizes, the oldest first.
        self._replies: dict[int, tuple[Message, int]] = {}
        self._num_bytes = 0

    def find(self, request_id: int, method: str) -> Answer[Message] | None:
        """The reply to a request that was made before; None if it is not known to have been.

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
        return reply[0]

    def remember(self, request_id: int, method: str, reply: Answer[Message]) -> None:
        """What is refused is not remembered, also if a task says so later."""
        if isinstance(reply, asyncio.Task):
            self._requests[request_id] = method, reply
            reply.add_done_callback(functools.partial(self._ended, request_id))
        else:
            self._requests[request_id] = method, None
            self._keep(request_id, reply)
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
        self._keep(request_id, task.result())

    def _keep(self, request_id: int, reply: Message) -> None:
        num_bytes = memory_bytes(reply)
        self._replies[request_id] = reply, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes - num_bytes > MAX_REPLY_BYTES:
            self._forget(next(iter(self._replies)))

    def _forget(self, request_id: int) -> None:
        if (reply := self._replies.pop(request_id, None)) is not None:
            self._num_bytes -= reply[1]


def memory_bytes(message: Message) -> int:
    """About what a reply takes, from the lengths of its fields: to encode a large one takes milliseconds. None that is
    remembered repeats anything but numbers."""
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
