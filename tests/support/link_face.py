"""A face of the client whose clock is the test's: nothing waits in fact, and nothing is at work unseen."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from kvservice.client.face import Connection
from kvservice.client.threads import finish
from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError

ATTACHED = SimpleNamespace(session_id=7)


class FakeFace:
    """See Face in face.py. Whoever waits lets the time pass, and what the test has planned for it happens."""

    def __init__(self) -> None:
        self.now = 100.0
        self.started: list[Coroutine[Any, Any, None]] = []
        self._plans: list[tuple[float, Callable[[], object]]] = []
        # Whose turn it is not.
        self.busy = False

    def plan(self, after_s: float, action: Callable[[], object]) -> None:
        self._plans.append((self.now + after_s, action))

    def work(self) -> None:
        """Do what was started in the background, to its end."""
        while self.started:
            finish(self.started.pop(0))

    def pass_time(self, until: float, done: Callable[[], bool]) -> None:
        """Go to that time, or to that of the planned action after which it is done."""
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
    def __init__(self, face: FakeFace) -> None:
        self._face = face
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, timeout_s: float) -> bool:
        self._face.pass_time(self._face.now + timeout_s, lambda: self._is_set)
        return self._is_set


class FakeTurns:
    def __init__(self, face: FakeFace) -> None:
        self._face = face

    async def take(self, timeout_s: float | None) -> bool:
        if self._face.busy:
            assert timeout_s is not None, "it would wait for ever"
            self._face.now += timeout_s
            return False
        return True

    def give_back(self) -> None:
        pass


class FakeBackground:
    def __init__(self, face: FakeFace) -> None:
        self._face = face

    async def stop(self) -> None:
        self._face.work()


class FakeConnection:
    """See Connection in face.py. `answers` are what it gives to calls, in their order; errors it raises, and those of
    the connection end it. None: there is no answer. Without any more it answers with the call's name,
    and to attach as the daemon does."""

    def __init__(self, face: FakeFace, on_end: Callable[[Connection], None], answers: list[Any]) -> None:
        self.error: KVServiceError | None = None
        self.calls: list[str] = []
        self.ended = False
        # As the blocking face's do.
        self.ends_at_limits = False
        self._face, self._on_end, self._answers = face, on_end, answers

    async def exchange(self, name: str, _request: Any, deadline: float | None) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append(name)
        answer = self._answers.pop(0) if self._answers else ATTACHED if name == "attach" else name
        if answer is None:
            assert deadline is not None, "it would wait for ever"
            self._face.pass_time(deadline, lambda: self.error is not None)
            if self.error is None and self.ends_at_limits:
                self.error = ConnectionLostError("closed here")
            elif self.error is not None:
                raise self.error
            raise CallTimeoutError("no answer in time")
        if isinstance(answer, KVServiceError):
            if answer.status in ("UNAVAILABLE", "UNAUTHENTICATED"):
                self.breaks(answer)
            raise answer
        return answer

    def breaks(self, error: KVServiceError) -> None:
        self.error = error
        self._on_end(self)

    async def end(self) -> None:
        self.ended = True
