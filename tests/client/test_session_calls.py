"""The calls of a session over a scripted transport: what is opened again after a loss, and what waits for kernels.

Kernels and GPU are fakes. The steps are those of the async API, over blocking primitives.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from each_row import each_row

from kvservice.client import AsyncStep, StepInfo
from kvservice.client.connection import SessionConnection
from kvservice.client.cut_calls import CutCalls
from kvservice.client.step import SessionCalls
from kvservice.client.threads import ThreadWaiting, finish
from kvservice.client.transports.mapped import MappedTransport
from kvservice.errors import ConnectionLostError, InvalidArgumentError, KVServiceError, UnknownRegionError

LAYERS = 2
STEP = StepInfo(1, 1, 1, np.ones(1, np.int32), np.ones(1, np.int32), 0, (0, 0))
TENSOR = np.zeros((1, 2, 4), np.float32)
CALLS: dict[str, Callable[[AsyncStep], Any]] = {
    "attend": lambda step: step.decode(0, TENSOR, TENSOR, TENSOR),
    "write": lambda step: step.write(TENSOR, TENSOR, 0),
}


class Connection:
    """A connection whose process of the daemon tests replace. It notes the calls."""

    lock = staticmethod(ThreadWaiting.lock)
    waiting = ThreadWaiting()

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened
        self.connected, self.num_restarts = True, 0
        self.kernels, self.cut = set[Any](), None
        self.process = SimpleNamespace(check=lambda: None, is_here=True)

    async def ready(self, _: float | None) -> None:
        self.happened.append("ready")
        self.connected, self.num_restarts = True, self.num_restarts + 1

    async def with_one_process(self, work: Any) -> Any:
        return await work()

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    async def call_until(self, _: float | None, name: str, *_rest: Any) -> str:
        self.happened.append(name)
        return name

    def deadline(self, _: float | None) -> None:
        return None

    send: Any = SessionConnection.send
    drain: Any = SessionConnection.drain

    def next_request_id(self) -> int:
        return 1


def context_of(happened: list[str], device: str) -> Any:
    info = {"block_size": 16, "num_layers": LAYERS, "num_kv_heads": 2, "head_size": 4, "dtype": "float32"}
    connection: Any = Connection(happened)
    return SimpleNamespace(
        info=SimpleNamespace(**info, kv_cache_dtype="float32", device=device),
        connection=connection,
        cut=CutCalls(connection),
        regions=SimpleNamespace(forget=lambda: happened.append("forget")),
        remote=SimpleNamespace(close=lambda: happened.append("close remote")),
    )


class Scripted:
    """A transport that raises the errors of its script, one for each call, and notes what happens."""

    name = "inline"

    def __init__(self, happened: list[str], *errors: KVServiceError) -> None:
        self.errors = list(errors)
        self.happened = happened
        self.kernels = Kernels(happened)

    def execute(self, name: str) -> None:
        self.happened.append(name)
        if self.errors:
            raise self.errors.pop(0)

    async def attend(self, call: Any) -> Any:
        self.execute("attend")
        return call.query, None

    async def write(self, _: Any) -> None:
        self.execute("write")

    async def reopen(self) -> None:
        self.happened.append("reopen")

    async def close(self) -> None:
        self.happened.append("close")


class Session:
    """The calls of a session over such a transport, and a step of it."""

    def __init__(self, *errors: KVServiceError) -> None:
        self.happened: list[str] = []
        self.context = context_of(self.happened, "cpu")
        transport: Any = Scripted(self.happened, *errors)
        self.calls = SessionCalls(self.context, transport)
        self.step = AsyncStep(self.calls, (), STEP)


def lost() -> KVServiceError:
    return UnknownRegionError("no such region")


def test_lost_memory_is_opened_again_and_the_call_repeated() -> None:
    with each_row() as row:
        for name, call in CALLS.items():
            with row(name):
                session = Session(lost())
                finish(call(session.step))
                assert session.happened == [name, "forget", "reopen", name]
            with row(f"{name}, twice"):
                session = Session(lost(), lost())
                with pytest.raises(UnknownRegionError):
                    finish(call(session.step))
                assert session.happened == [name, "forget", "reopen", name]


def test_no_other_error_is_repeated() -> None:
    with each_row() as row:
        for name, call in CALLS.items():
            for error in (InvalidArgumentError("bad"), ConnectionLostError("gone")):
                with row(f"{name}, {error}"):
                    session = Session(error)
                    with pytest.raises(type(error)):
                        finish(call(session.step))
                    assert session.happened == [name]


def test_memory_of_an_earlier_process_is_opened_again_before_a_call() -> None:
    with each_row() as row:
        for name, call in CALLS.items():
            with row(name):
                session = Session()
                session.context.connection.num_restarts += 1
                for _ in range(2):
                    finish(call(session.step))
                assert session.happened == ["forget", "reopen", name, name]
            with row(f"{name}, without a connection"):
                session = Session()
                session.context.connection.connected = False
                finish(call(session.step))
                assert session.happened == ["ready", "forget", "reopen", name]


def test_memory_that_another_caller_has_opened_again_is_kept() -> None:
    """Another call finds the memory lost, and opens it again, while this one is refused."""
    session = Session(lost())
    attend, other = session.calls.transport.attend, CALLS["write"]

    async def refused_late(_: Any) -> Any:
        session.calls.transport.attend = attend  # type: ignore[method-assign]
        await other(session.step)
        raise lost()

    session.calls.transport.attend = refused_late  # type: ignore[assignment,method-assign]
    finish(CALLS["attend"](session.step))
    assert session.happened == ["write", "forget", "reopen", "write", "attend"]


def test_requests_wait_for_the_kernels_of_this_process() -> None:
    session = Session()
    transport: Any = session.calls.transport
    transport.kernels.write()
    assert finish(session.context.connection.send("free", None)) == "free"
    assert session.happened == ["wait", "free"]


def test_releasing_closes_the_transport_and_forgets_the_regions() -> None:
    session = Session()
    rest: Any = Scripted(session.happened)
    finish(session.calls.release(rest))
    assert session.happened == ["close", "close remote", "forget"]
    assert session.calls.transport is rest


# ---- a pool that is mapped on a GPU


class OnGpu(torch.Tensor):
    """A tensor in host memory that says that it is on the first GPU."""

    is_cuda = True
    number = 0

    def get_device(self) -> int:
        return self.number


class OnAnotherGpu(OnGpu):
    number = 1


def on_gpu(kind: type[OnGpu] = OnGpu) -> torch.Tensor:
    return torch.zeros(TENSOR.shape).as_subclass(kind)


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


class Elsewhere:
    """The transport for calls that the kernels here do not execute. `queries` are those that it was given."""

    name = "inline"

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened
        self.queries: list[Any] = []

    async def attend(self, call: Any) -> Any:
        self.happened.append("elsewhere")
        self.queries.append(call.query)
        return call.query, None

    async def write(self, call: Any) -> None:
        assert call.step is STEP
        self.happened.append("elsewhere")


class GpuSession:
    """The calls of a session whose pool is mapped on a GPU. The client may write it if it is `writable`."""

    def __init__(self, *, writable: bool = True, takes_gpu_tensors: bool = True) -> None:
        self.happened: list[str] = []
        context = context_of(self.happened, "cuda:0")
        kernels = Kernels(self.happened)
        kernels.takes_gpu_tensors = takes_gpu_tensors
        tables = SimpleNamespace(written=set(), check=lambda: None, step_id=1)
        pool: Any = SimpleNamespace(
            writable=writable,
            num_restarts=0,
            kernels=kernels,
            layout=SimpleNamespace(num_layers=LAYERS),
            tables=lambda _: tables,
        )
        self.context = context
        self.rest = Elsewhere(self.happened)
        rest: Any = self.rest
        self.calls = SessionCalls(context, MappedTransport(context, pool, rest))
        self.step = AsyncStep(self.calls, (), STEP)

    def attend(self, layer: int, tensor: Any = None) -> None:
        given = on_gpu() if tensor is None else tensor
        finish(self.step.decode(layer, given, given, given))


def test_the_commit_follows_the_kernels_of_all_layers() -> None:
    session = GpuSession()
    for layer in range(LAYERS):
        session.attend(layer)
    assert session.happened == ["launch", "launch", "wait", "commit"]


def test_requests_follow_the_kernels() -> None:
    session = GpuSession()
    session.attend(0)
    finish(session.context.connection.send("free", None))
    finish(session.context.connection.send("append", None))
    assert session.happened == ["launch", "wait", "free", "append"]


def test_calls_that_are_executed_elsewhere_follow_the_kernels() -> None:
    session = GpuSession()
    session.attend(0, TENSOR)
    session.attend(0)
    session.attend(1, TENSOR)
    finish(session.step.write(TENSOR, TENSOR, 1))
    assert session.happened == ["elsewhere", "launch", "wait", "elsewhere", "elsewhere"]


def test_writes_into_a_read_only_pool_follow_the_kernels_of_the_layer_before() -> None:
    session = GpuSession(writable=False)
    for layer in range(LAYERS):
        session.attend(layer)
    assert session.happened == ["elsewhere", "launch", "wait", "elsewhere", "launch"]


def test_the_memory_is_released_after_the_kernels() -> None:
    session = GpuSession()
    session.attend(0)
    rest: Any = Scripted(session.happened)
    finish(session.calls.release(rest))
    assert session.happened == ["launch", "wait", "close remote", "forget"]


def test_tensors_of_another_gpu_than_the_pools_go_by_way_of_the_host() -> None:
    session = GpuSession()
    session.attend(0, on_gpu(OnAnotherGpu))
    assert session.happened == ["elsewhere"]
    assert isinstance(session.rest.queries[0], np.ndarray)
    # So do those of the pool's GPU, where the transport takes none.
    session = GpuSession(takes_gpu_tensors=False)
    session.attend(0)
    session.attend(1, TENSOR)
    assert session.happened == ["launch", "launch", "wait", "commit"]
