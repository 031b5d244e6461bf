"""Calls that are cut short: their callers are cancelled or interrupted, or do not wait longer, or lose the connection.
The daemon may have executed them, or execute them later.

    cut ── the session has no other call in flight ──▶ asked again ── executed ──▶ undone, or the handle is corrected
                                                           └── refused: nothing has changed

A request that is asked again, with the same request id, has the answer of the first time. What the call has made is
removed then, because nobody can name it. What cannot be undone, such as `truncate`, has been done, and the handles get
the new lengths. That is to settle a call. The calls that follow wait until it is settled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from kvservice.client.connection import UNANSWERED, Correct, SessionConnection
from kvservice.errors import KVServiceError, ReplyForgottenError, RestartingError, UnauthenticatedError
from kvservice.v1 import blocks_pb2, scheduler_pb2

# How often those who wait look whether the connection is there, in seconds.
LOOK_S: Final = 0.1
# Pause before the daemon is asked again after a failure, in seconds.
RETRY_S: Final = 0.05

# After these errors everything is repeated.
ASKED_AGAIN: Final = (*UNANSWERED, RestartingError, UnauthenticatedError)

# Sends a request that undoes something, and returns the response. None: the daemon has refused it, because what it
# names has gone, also because it was sent before. It has no request id, so that the daemon goes on remembering the
# requests of calls in flight.
Ask = Callable[[str, Any], Awaitable[Any]]
# Undoes a request. Its answer is None if the daemon does not remember it.
Undo = Callable[[Ask, Any, Any], Awaitable[Any]]


async def _free_allocated(ask: Ask, request: blocks_pb2.AllocateRequest, _: object) -> None:
    await ask("free", blocks_pb2.FreeRequest(sequence_ids=[one.sequence_id for one in request.sequences]))


async def _free_children(ask: Ask, request: blocks_pb2.ForkRequest, _: object) -> None:
    await ask("free", blocks_pb2.FreeRequest(sequence_ids=request.child_ids))


async def _truncate_back(ask: Ask, request: blocks_pb2.AppendRequest | blocks_pb2.OpenAheadRequest, _: object) -> None:
    """Take the tokens back, with their slots. That ends the step, too."""
    sequences = list(zip(request.sequence_ids, request.expected_lengths, strict=True))
    undone = await ask(
        "truncate", blocks_pb2.TruncateRequest(sequence_ids=request.sequence_ids, lengths=request.expected_lengths)
    )
    if undone is None and len(sequences) > 1:  # one of them has gone meanwhile
        for sequence_id, length in sequences:
            await ask("truncate", blocks_pb2.TruncateRequest(sequence_ids=[sequence_id], lengths=[length]))


async def _unpin(ask: Ask, _: object, pin: blocks_pb2.PinResponse | None) -> None:
    if pin is not None:
        await ask("unpin", blocks_pb2.UnpinRequest(pin_id=pin.pin_id))


async def _close_step_ahead(ask: Ask, _: object, step: blocks_pb2.StepResponse | None) -> None:
    """A commit cannot be undone, but nobody has the next step that it may have opened."""
    if step is not None and step.step_id:
        await ask("commit_ahead", blocks_pb2.CommitAheadRequest(step_id=step.step_id))


async def _abort_added(ask: Ask, request: scheduler_pb2.AddRequestsRequest, _: object) -> Any:
    ids = [one.request_id for one in request.requests]
    return await ask("abort_requests", scheduler_pb2.AbortRequestsRequest(request_ids=ids))


# The calls of sessions and schedulers that change something. None: the call is completed, and there is nothing to undo.
UNDO: Final[dict[str, Undo | None]] = {
    "allocate": _free_allocated,
    "append": _truncate_back,
    # A step holds nothing. It ends with the next operation on one of its sequences.
    "open_step": None,
    "open_ahead": _truncate_back,
    "commit_ahead": _close_step_ahead,
    "commit": None,
    "fork": _free_children,
    "truncate": None,
    "swap_out": None,
    "swap_in": None,
    "free": None,
    "pin": _unpin,
    "unpin": None,
    "reset_prefix_cache": None,
    # A session has one scheduler, which anybody who opens it with the same settings gets.
    "open_scheduler": None,
    "add_requests": _abort_added,
    "abort_requests": None,
    # The scheduler's next call brings what this one has answered.
    "schedule": None,
}

# Calls that their owners settle: the table of a session's regions drops a region that it did not get, a lane is closed
# before another one is opened, a mapping that nobody has ends, and the link of a store gives leases and reservations
# back, or ends its session with them. The client closes a session whose opening it has not seen.
SETTLED_BY_THEIR_OWNER: Final = frozenset(
    (
        "open",
        "create_region",
        "register_region",
        "register_cuda_region",
        "unregister_region",
        "open_lane",
        "close_lane",
        "map_pool",
        "unmap_pool",
        "store_open_namespace",
        "store_acquire",
        "store_reserve",
        "store_commit",
        "store_remove",
        "store_clear",
        "store_map_store",
    )
)


class CutCall(NamedTuple):
    """A call that was sent. `correct` gets its answer, None if the daemon does not remember it, and what its undoing
    has returned."""

    name: str
    request: Any
    correct: Correct | None


class CutCalls:
    """The calls of a session that were cut short. `pending` says whether there are any; the other calls wait for
    `settled` then. `in_flight` are the requests, by `id`, of calls that were sent before; `idle` is set when one ends.

    No more calls than the daemon remembers are sent before one that was cut short is asked again."""

    settles = UNDO

    def __init__(self, connection: SessionConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._calls: deque[CutCall] = deque()
        self._none_left, self.idle = connection.waiting.signal(), connection.waiting.signal()
        self.pending = False
        self.in_flight: set[int] = set()

    def add(self, name: str, request: Any, correct: Correct | None = None) -> None:
        """Settle a call in the background."""
        with self._lock:
            self._calls.append(CutCall(name, request, correct))
            if not self.pending:
                self._connection.start(self._settle_all())
                self.pending = True
                self._none_left.clear()

    async def settled(self, deadline: float | None) -> None:
        """Wait until there are none. Raises the errors of SessionConnection.check."""
        while self.pending:
            self._connection.check(deadline)
            await self._none_left.wait(self._connection.left_s(deadline, LOOK_S))

    async def _settle_all(self) -> None:
        try:
            await self._settle()
        except BaseException:
            with self._lock:
                self._end()
            raise

    async def _settle(self) -> None:
        connection = self._connection
        while True:
            while self.in_flight and not connection.ended:
                self.idle.clear()
                if self.in_flight:
                    await self.idle.wait(LOOK_S)
            with self._lock:
                # Nobody asks again once the session has ended, or belongs to another client.
                if connection.ended or not self._calls:
                    self._end()
                    return
                call = self._calls[0]
            try:
                await self._finish(call)
            except ASKED_AGAIN:
                await connection.pause(RETRY_S)
                continue
            self._calls.popleft()

    def _end(self) -> None:
        self._calls.clear()
        self.pending = False
        self._none_left.set()

    async def _finish(self, call: CutCall) -> None:
        """Raises the errors of a call that is not answered. Then everything is repeated."""
        answer = undone = None
        try:
            answer = await self._connection.call_until(None, call.name, call.request)
        except ReplyForgottenError:
            pass
        except ASKED_AGAIN:
            raise
        except KVServiceError:  # it was refused, and has changed nothing
            return
        if (undo := UNDO.get(call.name)) is not None:
            undone = await undo(self._ask, call.request, answer)
        if call.correct is not None:
            call.correct(answer, undone)

    async def _ask(self, name: str, request: Any) -> Any:
        try:
            return await self._connection.call_until(None, name, request)
        except ASKED_AGAIN:
            raise
        except KVServiceError:
            return None
