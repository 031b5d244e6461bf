"""Calls whose answer does not come: they reach their limit, are cancelled, or lose their connection. The daemon may
execute them later, and must then find their own tensors."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from each_row import each_row

from kvservice.client import AsyncKVClient, KVClient, Session
from kvservice.errors import CallTimeoutError, ConnectionLostError
from kvservice.launch import Daemon

LAYERS, HEADS, HEAD_SIZE, NUM_TOKENS = 2, 2, 32, 60
SHAPE = (NUM_TOKENS, HEADS, HEAD_SIZE)
INTERRUPTIONS = [CallTimeoutError("no answer"), ConnectionLostError("cut"), asyncio.CancelledError()]
fresh_tokens = itertools.count()


def prompt() -> list[int]:
    """Return tokens that are not in the prefix cache."""
    return [next(fresh_tokens) for _ in range(NUM_TOKENS)]


def full(value: float) -> np.ndarray:
    return np.full(SHAPE, value, np.float32)


class LateDaemon:
    """Stands between a session and its connection. The first call named `name` is interrupted, and executed only when
    the session waits for the answer to another call. `loses_posts`: calls that nobody waits for do not arrive."""

    def __init__(self, kv: Session, name: str, interruption: BaseException, *, loses_posts: bool = False) -> None:
        connection = kv._core.context.connection
        self._call_until, self._post = connection.call_until, connection.post
        self._name, self._interruption, self._loses_posts = name, interruption, loses_posts
        self._late: list[tuple[str, Any]] = []
        connection.call_until = self.call_until  # type: ignore[method-assign, assignment]
        connection.post = self.post  # type: ignore[method-assign]

    async def call_until(self, deadline: float | None, name: str, request: Any, *_: object) -> Any:
        if name == self._name:
            self._name = ""
            self._late.append((name, request))
            raise self._interruption
        while self._late:
            await self._call_until(None, *self._late.pop(0))
        return await self._call_until(deadline, name, request)

    def post(self, name: str, request: Any) -> None:
        if self._loses_posts:
            return
        if self._late:
            self._late.append((name, request))
        else:
            self._post(name, request)


@pytest.fixture(params=["region", "lane"])
def kv(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Session]:
    with KVClient(daemon.address, transport=request.param) as client, client.session() as session:
        yield session
        session.reset_prefix_cache()


@pytest.mark.parametrize(
    ("kv", "method"), [("region", "extend"), ("region", "write"), ("lane", "write")], indirect=["kv"]
)
def test_a_call_that_is_executed_late_finds_its_own_tensors(kv: Session, method: str) -> None:
    """The K/V of both calls are read and compared."""
    with each_row() as row:
        for interruption in INTERRUPTIONS:
            with row(type(interruption).__name__):
                check_late_call(kv, method, interruption)


def check_late_call(kv: Session, method: str, interruption: BaseException) -> None:
    late, next_one = (kv.open_step([kv.allocate(prompt())]) for _ in range(2))
    LateDaemon(kv, method, interruption)
    with pytest.raises(type(interruption)):
        call(late, method, 2)
    output = call(next_one, method, 5)
    assert output is None or np.allclose(output, 5)
    for step, value in ((late, 2), (next_one, 5)):
        call(step, method, value, layer=1)
        for tensor in kv.read(step.sequences[0], 0, NUM_TOKENS):
            assert (tensor == value).all()
        kv.free(step.sequences)


def call(step: Any, method: str, value: float, layer: int = 0) -> Any:
    if method == "write":
        return step.write(full(value), full(value), layer)
    return step.extend(layer, full(1), full(value), full(value))


def test_the_memory_of_unanswered_calls_does_not_pile_up(kv: Session) -> None:
    for loses_posts in [*5 * [False], *5 * [True]]:
        LateDaemon(kv, "write", CallTimeoutError("no answer"), loses_posts=loses_posts)
        late, next_one = (kv.open_step([kv.allocate(prompt())]) for _ in range(2))
        with pytest.raises(CallTimeoutError):
            call(late, "write", 2)
        call(next_one, "write", 5)
        assert len(kv.regions()) == 1
        kv.free([*late.sequences, *next_one.sequences])


def test_a_region_whose_creation_is_interrupted_is_not_left_behind(kv: Session) -> None:
    """The caller does not wait for the daemon again."""
    for interruption in INTERRUPTIONS:
        LateDaemon(kv, "create_region", interruption)
        with pytest.raises(type(interruption)):
            kv.create_region(1 << 20)
        assert kv.regions() == []


class SlowLane:
    """A lane that gives out its first answer only after `finish`, and says when a thread waits for it."""

    def __init__(self, lane: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._lane, self._loop = lane, loop
        self._loop_thread = threading.get_ident()
        self.waits, self.finish = asyncio.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    def wait(self, number: int, timeout_s: float) -> Any:
        if not self.finish.is_set():
            if threading.get_ident() == self._loop_thread:
                return None
            self._loop.call_soon_threadsafe(self.waits.set)
            assert self.finish.wait(60)
            while (answer := self._lane.wait(number, 60)) is None:
                pass
            return answer
        return self._lane.wait(number, timeout_s)


@pytest.mark.parametrize("in_region", [False, True])
def test_a_lane_goes_on_after_a_call_that_was_cancelled_while_a_thread_received_its_answer(
    daemon: Daemon, in_region: bool
) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(daemon.address, transport="lane") as client, client.session() as kv:
            memory = await kv.create_region(1 << 20)
            transport: Any = kv.calls.transport
            lane = transport._lane = SlowLane(transport._lane, asyncio.get_running_loop())
            step = await kv.open_step([await kv.allocate(prompt())])
            out = memory.array(SHAPE) if in_region else None
            inputs = [memory.array(SHAPE, offset=n << 16) for n in (1, 2, 3)] if in_region else [full(2)] * 3
            for one in inputs:
                one[:] = 2
            task = asyncio.create_task(step.extend(0, *inputs, out=out))
            await lane.waits.wait()
            task.cancel()
            await asyncio.sleep(0)
            lane.finish.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            for one in inputs:
                one[:] = 5
            assert np.allclose(await step.extend(1, *inputs, out=out), 5)
            key, _ = await kv.read(step.sequences[0], 0, NUM_TOKENS)
            assert (key[0] == 2).all()
            assert (key[1] == 5).all()
            await kv.free(step.sequences)
            await kv.reset_prefix_cache()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_lane_goes_on_after_an_interrupt_that_takes_the_answer_with_it(daemon: Daemon) -> None:
    class Interrupted:
        def __init__(self, lane: Any) -> None:
            self._lane, self._raises = lane, True

        def __getattr__(self, name: str) -> Any:
            return getattr(self._lane, name)

        def wait(self, number: int, timeout_s: float) -> Any:
            answer = self._lane.wait(number, timeout_s)
            if answer is not None and self._raises:
                self._raises = False
                raise KeyboardInterrupt
            return answer

    with KVClient(daemon.address, transport="lane") as client, client.session() as kv:
        transport: Any = kv._core.calls.transport
        transport._lane = Interrupted(transport._lane)
        step = kv.open_step([kv.allocate(prompt())])
        with pytest.raises(KeyboardInterrupt):
            call(step, "extend", 2)
        assert np.allclose(call(step, "extend", 5, layer=1), 5)
        assert (kv.read(step.sequences[0], 0, NUM_TOKENS)[0][0] == 2).all()
        kv.free(step.sequences)
        kv.reset_prefix_cache()
