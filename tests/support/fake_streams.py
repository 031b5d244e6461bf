"""A `Waiting` of the client with a fake clock: waiting takes no real time, and tests run the background work."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

from kvservice.errors import CallTimeoutError, KVServiceError, RestartingError

ATTACHED = SimpleNamespace(session_id=7, daemon_start=1, max_calls=0)
# The answer of a process of the daemon that has taken over.
ATTACHED_BY_NEXT = SimpleNamespace(session_id=7, daemon_start=2, max_calls=0)


T = TypeVar("T")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits for something that is not faked")


class FakeWaiting:
    """See Waiting in connection.py. A wait advances the clock and runs the actions that are planned for that time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.started: list[Coroutine[Any, Any, None]] = []
        self._plans: list[tuple[float, Callable[[], object]]] = []
        # If set, `turns` is exhausted, so calls wait for their turn in vain.
        self.busy = False

    def plan(self, after_s: float, action: Callable[[], object]) -> None:
        self._plans.append((self.now + after_s, action))

    def work(self) -> None:
        """Run the background work to completion."""
        while self.started:
            finish(self.started.pop(0))

    def pass_time(self, until: float, done: Callable[[], bool]) -> None:
        """Advance the clock to `until`, or to the planned action after which `done` is true."""
        for at, action in sorted(self._plans, key=lambda plan: plan[0]):
            if at > until or done():
                break
            self._plans.remove((at, action))
            self.now = max(self.now, at)
            action()
        if not done():
            self.now = max(self.now, until)

    def clock(self) -> float:
        return self.now

    def signal(self) -> FakeSignal:
        return FakeSignal(self)

    def turns(self) -> FakeTurns:
        return FakeTurns(self)

    def start(self, work: Coroutine[Any, Any, None]) -> FakeBackground:
        self.started.append(work)
        return FakeBackground(self)

    def lock(self) -> Any:
        raise NotImplementedError

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)


class FakeSignal:
    def __init__(self, waiting: FakeWaiting) -> None:
        self._waiting = waiting
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, timeout_s: float) -> bool:
        self._waiting.pass_time(self._waiting.now + timeout_s, lambda: self._is_set)
        return self._is_set


class FakeTurns:
    def __init__(self, waiting: FakeWaiting) -> None:
        self._waiting = waiting

    def take_now(self) -> bool:
        return not self._waiting.busy

    async def take(self, timeout_s: float | None) -> bool:
        assert self._waiting.busy, "it is waited for"
        assert timeout_s is not None, "it would wait for ever"
        self._waiting.now += timeout_s
        return False

    def give_back(self) -> None:
        pass


class FakeBackground:
    def __init__(self, waiting: FakeWaiting) -> None:
        self._waiting = waiting

    async def stop(self) -> None:
        self._waiting.work()


class FakeBegunCall:
    """See BegunCall in connection.py. The call is made when its answer is waited for."""

    def __init__(self, stream: FakeStream, name: str, request: Any) -> None:
        self._stream, self._name, self._request = stream, name, request

    async def answer(self, deadline: float | None) -> Any:
        return await self._stream.exchange(self._name, self._request, deadline)

    def drop(self) -> None:
        """Nothing was sent."""


class FakeStream:
    """See SessionStream in connection.py. `answers` are the answers to calls, in order. An error is raised, and a
    connection error also ends the stream. None: the call gets no answer. When there are no more answers, a call is
    answered with its name, and attach as by the daemon."""

    def __init__(self, waiting: FakeWaiting, on_end: Callable[[Any], None], answers: list[Any]) -> None:
        self.max_calls = 1
        self.error: KVServiceError | None = None
        self.calls: list[str] = []
        self.ended = False
        self._waiting, self._on_end, self._answers = waiting, on_end, answers

    async def exchange(self, name: str, _request: Any, deadline: float | None) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append(name)
        answer = self._answers.pop(0) if self._answers else ATTACHED if name == "attach" else name
        if answer is None:
            assert deadline is not None, "it would wait for ever"
            self._waiting.pass_time(deadline, lambda: self.error is not None)
            if self.error is not None:
                raise self.error
            raise CallTimeoutError("no answer in time")
        if isinstance(answer, KVServiceError):
            if answer.status in ("UNAVAILABLE", "UNAUTHENTICATED") and not isinstance(answer, RestartingError):
                self.breaks(answer)
            raise answer
        return answer

    def begin(self, name: str, request: Any) -> FakeBegunCall:
        return FakeBegunCall(self, name, request)

    def post(self, name: str, _request: Any) -> None:
        self.calls.append(name)

    def breaks(self, error: KVServiceError) -> None:
        self.error = error
        self._on_end(self)

    async def end(self) -> None:
        self.ended = True
