"""The calls of a session over a scripted transport: what is opened again after a loss, and what waits for kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvservice.client.calls import AttentionCall, AttentionResult, SharedMemoryLostError, WriteCall
from kvservice.client.process import OwnProcess
from kvservice.client.session_calls import SessionCalls
from kvservice.client.threads import ThreadWaiting, finish
from kvservice.client.transports.base import Transport
from kvservice.client.values import StepInfo
from kvservice.errors import ConnectionLostError, InvalidArgumentError, KVServiceError, UnknownRegionError

STEP = StepInfo(1, 1, 1, np.ones(1, np.int32), np.ones(1, np.int32), 0, None)
TENSOR = np.zeros((1, 2, 4), np.float32)
CALLS: dict[str, Any] = {
    "attend": AttentionCall(STEP, True, 0, TENSOR, TENSOR, TENSOR),
    "write": WriteCall(STEP, 0, TENSOR, TENSOR),
}
LOST = [SharedMemoryLostError("the lane is closed"), UnknownRegionError("no such region")]


class Scripted(Transport):
    """Raises the errors of its script, one for each call, and notes what happens."""

    name = "inline"

    def __init__(self, context: Any, *errors: KVServiceError) -> None:
        super().__init__(context)
        self.errors = list(errors)
        self.happened: list[str] = context.happened

    def _execute(self, name: str) -> None:
        self.happened.append(name)
        if self.errors:
            raise self.errors.pop(0)

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        self._execute("attend")
        return call.query, None

    async def write_prepared(self, _: WriteCall) -> None:
        self._execute("write")

    async def drain(self) -> None:
        self.happened.append("drain")

    async def reopen(self) -> None:
        self.happened.append("reopen")

    async def close(self) -> None:
        self.happened.append("close")


class Connection:
    """A connection whose process of the daemon tests replace."""

    lock = ThreadWaiting.lock

    def __init__(self, call: Any, happened: list[str]) -> None:
        self.call, self._happened = call, happened
        self.process, self.connected, self.num_restarts = OwnProcess(), True, 0

    async def ready(self, _: float | None) -> None:
        self._happened.append("ready")
        self.connected, self.num_restarts = True, self.num_restarts + 1

    async def with_one_process(self, work: Any) -> Any:
        return await work()


def calls_of(*errors: KVServiceError) -> tuple[SessionCalls, list[str]]:
    happened: list[str] = []

    async def call(name: str, _request: Any, _timeout_s: float | None) -> str:
        happened.append(name)
        return name

    context: Any = SimpleNamespace(
        info=SimpleNamespace(device="cpu", dtype="float32"),
        connection=Connection(call, happened),
        regions=SimpleNamespace(forget=lambda: happened.append("forget")),
        remote=SimpleNamespace(close=lambda: happened.append("close remote")),
        happened=happened,
    )
    return SessionCalls(context, Scripted(context, *errors)), happened


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", CALLS)
def test_lost_memory_is_opened_again_and_the_call_repeated(name: str, lost: KVServiceError) -> None:
    calls, happened = calls_of(lost)
    finish(getattr(calls, name)(CALLS[name]))
    assert happened == [name, "forget", "reopen", name]


@pytest.mark.parametrize("name", CALLS)
def test_a_second_loss_is_the_callers(name: str) -> None:
    calls, happened = calls_of(*LOST)
    with pytest.raises(UnknownRegionError):
        finish(getattr(calls, name)(CALLS[name]))
    assert happened == [name, "forget", "reopen", name]


@pytest.mark.parametrize("error", [InvalidArgumentError("bad"), ConnectionLostError("gone")])
@pytest.mark.parametrize("name", CALLS)
def test_no_other_error_is_repeated(name: str, error: KVServiceError) -> None:
    calls, happened = calls_of(error)
    with pytest.raises(type(error)):
        finish(getattr(calls, name)(CALLS[name]))
    assert happened == [name]


@pytest.mark.parametrize("name", CALLS)
def test_memory_of_an_earlier_process_is_opened_again_before_a_call(name: str) -> None:
    calls, happened = calls_of()
    calls.context.connection.num_restarts += 1
    for _ in range(2):
        finish(getattr(calls, name)(CALLS[name]))
    assert happened == ["forget", "reopen", name, name]


@pytest.mark.parametrize("name", CALLS)
def test_shared_memory_is_not_used_without_a_connection(name: str) -> None:
    calls, happened = calls_of()
    calls.context.connection.connected = False  # type: ignore[misc]
    finish(getattr(calls, name)(CALLS[name]))
    assert happened == ["ready", "forget", "reopen", name]


def test_memory_that_another_caller_has_opened_again_is_kept() -> None:
    calls, happened = calls_of(LOST[0])
    opened = calls._num_opened
    finish(calls.attend(CALLS["attend"]))
    finish(calls._reopen(opened))
    assert happened == ["attend", "forget", "reopen", "attend"]


def test_requests_wait_for_the_kernels_of_this_process() -> None:
    calls, happened = calls_of()
    assert finish(calls.send("free", None)) == "free"
    assert happened == ["drain", "free"]


def test_releasing_closes_the_transport_and_forgets_the_regions() -> None:
    calls, happened = calls_of()
    used = calls.transport
    finish(calls.release())
    assert happened == ["close", "close remote", "forget"]
    assert calls.transport is not used
    assert calls.transport.name == "inline"
