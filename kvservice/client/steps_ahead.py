"""Decode steps that are committed while the next ones are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Batch
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.client.blocking import Session, Step
from kvservice.client.pools.mapped import MappedPool
from kvservice.client.pools.tables import MappedStep
from kvservice.client.requests import int_list
from kvservice.client.values import Sequence
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    PoolNotSharedError,
    StaleStepError,
)

MAX_TOKEN_ID = 2**31 - 1
# After these nobody knows whether the daemon has executed a call.
UNKNOWN_OUTCOME = (CallTimeoutError, ConnectionLostError)


@dataclass(frozen=True)
class _Commit:
    """A commit of the oldest `num_steps` known steps. Made again, with the same id, it is executed once."""

    request_id: int
    step: Step
    num_steps: int
    token_ids: list[int]
    room: int  # tokens of each sequence in the next step; 0 opens none


class StepsAhead:
    """One run of decode steps of the same sequences, each of which gets one token in each step.

    There are slots for twice `num_steps` tokens. When `num_steps` of them are known, and another step is taken or none
    can be, a thread commits them, and the answer brings slots for the next ones. So `take` waits only if the commit
    takes longer than `num_steps` steps, and the end of a run is one call, not two.

    Raises the errors of `Session.open_ahead`, InvalidArgumentError if a sequence would have more than `max_tokens`
    tokens, and StaleStepError if the daemon was restarted since the pool was mapped.
    """

    def __init__(
        self,
        session: Session,
        pool: MappedPool,
        commits: ThreadPoolExecutor,
        sequences: Batch[Sequence],
        num_steps: int,
        max_tokens: int,
    ) -> None:
        if not isinstance(num_steps, int) or num_steps < 1:
            raise InvalidArgumentError(f"{num_steps} is not a whole number from 1 on", field="num_steps")
        self.sequences = tuple(sequences)
        self._session, self._pool, self._commits = session, pool, commits
        self._num_steps, self._max_tokens = num_steps, max_tokens
        # Steps since the last commit: how many were taken, and the tokens of those of them that are known.
        self._num_taken = 0
        self._tokens: list[list[int]] = []
        # The commit whose outcome is not known, and its call if it is on its way.
        self._unanswered: _Commit | None = None
        self._pending: Future[Step | None] | None = None
        # A step failed: nobody knows which of its layers were written.
        self._has_failed = False
        room = self._room(0)
        if room <= 0:
            raise InvalidArgumentError(
                f"one has {max_tokens} tokens or more, the most of this graph", field="sequences"
            )
        self._use(self._asked(session.open_ahead, sequences, room))
        self._changed = False  # whoever begins has these tables

    def _use(self, step: Step) -> None:
        self._step, self._changed = step, True
        self.tables: MappedStep = self._pool.step(step)

    def _room(self, num_known: int) -> int:
        """Return for how many tokens to open slots after `num_known` more of each sequence."""
        longest = max((sequence.length for sequence in self.sequences), default=0)
        return min(2 * self._num_steps, self._max_tokens - longest - num_known)

    @property
    def num_slots(self) -> int:
        """The number of steps since the last commit that have slots."""
        return self.tables.max_query_len

    def take(self) -> bool:
        """Take the slots of the next step. Returns whether the tables are others than for the step before.

        Raises StaleStepError and ConnectionLostError as `MappedStep.check`; InvalidArgumentError at `max_tokens`;
        FailedPreconditionError if the tokens of too many steps are unknown; and the error of a commit that failed. Then
        nothing has changed, and the commit is made again with the next call that needs it.
        """
        if self._has_failed:
            raise FailedPreconditionError("an earlier step failed: end this run, and begin another")
        self._check_open()
        self._adopt(wait=False)
        if len(self._tokens) >= self._num_steps or self._num_taken == self.num_slots:
            self._commit_known()
        if self._num_taken == self.num_slots:
            self._adopt(wait=True)
        if self._num_taken == self.num_slots:
            if self._tokens:
                raise InvalidArgumentError(f"one would have more than {self._max_tokens} tokens", field="sequences")
            raise FailedPreconditionError(f"the tokens of {self._num_taken} steps are not known: call written()")
        self._check_now()
        self._num_taken += 1
        changed, self._changed = self._changed, False
        return changed

    def fail(self) -> None:
        """Say that the step that was taken last failed. Its tokens are not committed, and no other step is taken."""
        self._num_taken -= 1
        self._has_failed = True

    def written(self, token_ids: Iterable[int]) -> None:
        """Say which tokens the oldest step wrote whose tokens are not known yet: one of each sequence. Raises
        InvalidArgumentError, and the errors of `take`."""
        self._check_open()
        if not isinstance(token_ids, Iterable):
            raise InvalidArgumentError(f"is {type(token_ids).__name__}, must be a list", field="token_ids")
        tokens = int_list(np.array(token_ids if isinstance(token_ids, np.ndarray) else list(token_ids)), "token_ids")
        if any(not 0 <= token <= MAX_TOKEN_ID for token in tokens):
            raise InvalidArgumentError(f"has tokens that are not from 0 to {MAX_TOKEN_ID}", field="token_ids")
        if len(tokens) != len(self.sequences):
            raise InvalidArgumentError(
                f"has {len(tokens)} tokens for {len(self.sequences)} sequences", field="token_ids"
            )
        if len(self._tokens) == self._num_taken:
            raise FailedPreconditionError("all steps have their tokens already")
        self._check_now()
        self._tokens.append(tokens)
        if len(self._tokens) >= self._num_steps and self._num_taken == self.num_slots:
            self._commit_known()

    def _check_open(self) -> None:
        if self._unanswered is not None and self._unanswered.room == 0:
            raise FailedPreconditionError("the end of this run is not answered yet: call end() again")

    def _check_now(self) -> None:
        """Check the step. A commit ends it before its answer is here: the answer is waited for then."""
        try:
            self.tables.check()
        except StaleStepError:
            if self._unanswered is None:
                raise
            self.check()

    def check(self) -> None:
        """Raise StaleStepError or ConnectionLostError if the results of the steps until now may be wrong. Waits for a
        commit that is on its way, and raises its error."""
        self._adopt(wait=True)
        self.tables.check()

    def close(self) -> None:
        """Commit the tokens that are known, and end the step. Raises StaleStepError, and the errors of
        `Session.commit_ahead`. After a CallTimeoutError call it again."""
        if self._unanswered is None or self._unanswered.room > 0:
            self._settle()
            # Without a connection the commit waits for one, and the daemon knows whether the step has ended.
            with contextlib.suppress(ConnectionLostError):
                self.tables.check()
            self._unanswered = self._commit_of(len(self._tokens), 0)
        self._adopt(wait=True)

    def _settle(self) -> None:
        """Wait for a commit whose outcome is not known. Raises CallTimeoutError and ConnectionLostError; the commit at
        the end raises other errors again, if they still hold."""
        try:
            try:
                self._adopt(wait=True)
            except ConnectionLostError:
                self._adopt(wait=True)  # once more, because it waits for a connection
        except UNKNOWN_OUTCOME:
            raise
        except KVServiceError:
            pass

    def _commit_known(self) -> None:
        """Begin to commit the known tokens, unless a commit is on its way or no sequence can grow after them."""
        if self._pending is not None:
            return
        if self._unanswered is None:
            count = len(self._tokens)
            room = self._room(count)
            if count == 0 or room <= 0:
                return
            self.tables.check()
            # All tokens with slots in flight have them after the commit too: `room` is at least as many.
            self._unanswered = self._commit_of(count, room)
        self._send(self._unanswered)

    def _commit_of(self, num_steps: int, room: int) -> _Commit:
        tokens = self._by_sequence(num_steps)
        return _Commit(self._session.next_request_id(), self._step, num_steps, tokens, room)

    def _send(self, commit: _Commit) -> None:
        self._pending = self._commits.submit(
            self._asked,
            self._session.commit_ahead,
            commit.step,
            commit.token_ids,
            num_steps=commit.room,
            request_id=commit.request_id,
        )

    @staticmethod
    def _asked(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make a call of the session, which had mapped the pool."""
        try:
            return call(*args, **options)
        except PoolNotSharedError as error:
            raise StaleStepError("the daemon was restarted, and its pool is another", field="step_id") from error

    def wait(self) -> None:
        """Wait for a commit that is on its way, whatever comes of it. It changes the lengths of the sequences."""
        self._commits.submit(int).result()

    def _by_sequence(self, count: int) -> list[int]:
        return np.array(self._tokens[:count], np.int64).reshape(count, len(self.sequences)).T.ravel().tolist()

    def _adopt(self, *, wait: bool) -> None:
        """Go on with the step that a commit has opened, if there was one and its answer is here."""
        if wait and self._unanswered is not None and self._pending is None:
            self._send(self._unanswered)  # again
        pending, commit = self._pending, self._unanswered
        if pending is None or commit is None or not (wait or pending.done()):
            return
        try:
            step = pending.result()
        except KVServiceError as error:
            self._pending = None
            if not isinstance(error, UNKNOWN_OUTCOME):
                self._unanswered = None  # it was not executed
            raise
        # After an interrupt the call is still on its way, and is not made again: its tokens would count twice.
        self._pending = self._unanswered = None
        self._num_taken -= commit.num_steps
        del self._tokens[: commit.num_steps]
        if step is not None:
            self._use(step)
