"""When the mapped transport waits for the kernels that it has launched on a GPU. The kernels and the GPU are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvservice.client import tensors
from kvservice.client.calls import AttentionCall, AttentionResult, WriteCall
from kvservice.client.session_calls import SessionCalls
from kvservice.client.threads import finish
from kvservice.client.transports import mapped
from kvservice.client.transports.base import Transport
from kvservice.client.transports.mapped import MappedTransport
from kvservice.client.values import StepInfo

LAYERS = 2
STEP = StepInfo(1, 1, 1, np.ones(1, np.int32), np.ones(1, np.int32), 0, (0, 0))


class GpuArray(np.ndarray):
    """Stands for a tensor on the GPU."""


HOST = np.zeros((1, 2, 4), np.float32)
GPU = HOST.view(GpuArray)


class Kernels:
    """Launches that are done when they are waited for."""

    takes_gpu_tensors = True
    is_busy = False

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def write(self, *_: Any) -> None:
        self.is_busy = True

    def attend(self, _tables: Any, _layer: int, query: Any, *_: Any) -> tuple[Any, Any]:
        self.is_busy = True
        self.happened.append("launch")
        return query, None

    def wait(self) -> None:
        self.is_busy = False
        self.happened.append("wait")


class Rest(Transport):
    name = "inline"

    async def attend(self, call: AttentionCall) -> AttentionResult:
        self.context.happened.append("elsewhere")  # type: ignore[attr-defined]
        return call.query, None

    attend_prepared = attend

    async def write(self, call: WriteCall) -> None:
        assert call.step is STEP
        self.context.happened.append("elsewhere")  # type: ignore[attr-defined]

    write_prepared = write


class Rig:
    def __init__(self, *, writable: bool = True) -> None:
        self.happened: list[str] = []

        async def run(work: Callable[..., Any], *args: Any) -> Any:
            return work(*args)

        async def call(name: str, *_: Any) -> None:
            self.happened.append(name)

        async def call_until(_: float | None, name: str, *_rest: Any) -> None:
            self.happened.append(name)

        connection = SimpleNamespace(
            run=run,
            call=call,
            call_until=call_until,
            next_request_id=lambda: 1,
            lock=asyncio.Lock,
            num_restarts=0,
            connected=True,
        )
        info = SimpleNamespace(
            block_size=16,
            num_layers=LAYERS,
            num_kv_heads=2,
            head_size=4,
            dtype="float32",
            kv_cache_dtype="float32",
            device="cuda:0",
        )
        context: Any = SimpleNamespace(info=info, connection=connection, happened=self.happened)
        tables = SimpleNamespace(written=set(), check=lambda: None, step_id=1)
        pool: Any = SimpleNamespace(
            writable=writable,
            num_restarts=0,
            kernels=Kernels(self.happened),
            layout=SimpleNamespace(num_layers=LAYERS),
            tables=lambda step: tables,
        )
        self.transport = MappedTransport(context, pool, Rest(context))
        self.calls = SessionCalls(context, self.transport)

    def attend(self, layer: int, tensor: Any = GPU) -> None:
        finish(self.transport.attend_prepared(AttentionCall(STEP, True, layer, tensor, tensor, tensor)))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensors, mapped):
        monkeypatch.setattr(module, "is_on_gpu", lambda tensor: isinstance(tensor, GpuArray))


def test_the_commit_follows_the_kernels_of_all_layers() -> None:
    rig = Rig()
    for layer in range(LAYERS):
        rig.attend(layer)
    assert rig.happened == ["launch", "launch", "wait", "commit"]


def test_requests_follow_the_kernels() -> None:
    rig = Rig()
    rig.attend(0)
    finish(rig.calls.send("free", None))
    finish(rig.calls.send("append", None))
    assert rig.happened == ["launch", "wait", "free", "append"]


def test_calls_that_are_executed_elsewhere_follow_the_kernels() -> None:
    rig = Rig()
    rig.attend(0, HOST)
    rig.attend(0)
    rig.attend(1, HOST)
    finish(rig.transport.write_prepared(WriteCall(STEP, 1, HOST, HOST)))
    assert rig.happened == ["elsewhere", "launch", "wait", "elsewhere", "elsewhere"]


def test_writes_into_a_read_only_pool_follow_the_kernels_of_the_layer_before() -> None:
    rig = Rig(writable=False)
    for layer in range(LAYERS):
        rig.attend(layer)
    assert rig.happened == ["elsewhere", "launch", "wait", "elsewhere", "launch"]


def test_the_memory_is_released_after_the_kernels() -> None:
    rig = Rig()
    rig.attend(0)
    finish(rig.transport.close())
    assert rig.happened == ["launch", "wait"]
