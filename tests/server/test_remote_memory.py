"""The end of remote regions and of calls that use them, with an engine that does as it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE_S

from kvservice.blocks.slices import Slices
from kvservice.config import ServeConfig
from kvservice.errors import FailedPreconditionError, TransferFailedError
from kvservice.server.attention_calls import AttentionCalls
from kvservice.server.budget import Budget, BudgetedMemory
from kvservice.server.region import REMOTE, Place, RegionTotals
from kvservice.server.regions import Regions
from kvservice.server.remote_memory import SLOWEST_BYTES, TRANSFER_S, RemoteMemory
from kvservice.server.scatter import Places
from kvservice.server.transfer_totals import TransferTotals
from kvservice.transfer import Ticket
from kvservice.v1 import attention_pb2, tensor_pb2

BLOCK_BYTES = 4096
# One block fits into each of the three slots.
BYTE_SIZE = 3 * BLOCK_BYTES
MIB = 1 << 20


class FakeProcess:
    """A replacement for TransferProcess. `waiting` is set when somebody waits for a transfer, which `wait` decides."""

    def __init__(self, wait: Callable[[FakeProcess, float], None]) -> None:
        self._wait = wait
        self.num_started = 0
        self.killed = False
        self.waiting, self.interrupted = threading.Event(), threading.Event()

    def start(self, *_: object) -> Ticket:
        self.num_started += 1
        return Ticket(self.num_started)

    def wait(self, _: Ticket, timeout_s: float) -> None:
        self.waiting.set()
        self._wait(self, timeout_s)

    def interrupt(self) -> None:
        self.interrupted.set()

    def kill(self) -> None:
        self.killed = True


def until_interrupted(process: FakeProcess, _: float) -> None:
    assert process.interrupted.wait(PATIENCE_S)
    raise TransferFailedError("the transfer engine has ended")


class Transfers:
    """A replacement for the daemon's engines. `gate` lets them start."""

    def __init__(self, threads: ThreadPoolExecutor, wait: Callable[[FakeProcess, float], None]) -> None:
        self._threads, self._wait = threads, wait
        self.processes: list[FakeProcess] = []
        self.closed: list[RemoteMemory] = []
        self.gate = asyncio.Event()
        self.clock = lambda: 0.0

    def check(self) -> None: ...

    async def open(self, memory: BudgetedMemory, ports: Sequence[int], address: int) -> RemoteMemory:
        process: Any = FakeProcess(self._wait)
        self.processes.append(process)
        await self.gate.wait()
        segments = [str(port) for port in ports]
        totals = TransferTotals()
        return RemoteMemory(memory, process, segments, address, self._threads, totals, self.closed.append, self.clock)


class Rig:
    """The regions of a session. All its engines behave as `wait` says."""

    def __init__(self, threads: ThreadPoolExecutor, wait: Callable[[FakeProcess, float], None]) -> None:
        config = ServeConfig(transfer_address="127.0.0.1")
        self.budget = Budget(config.max_shared_mib)
        self.transfers = Transfers(threads, wait)
        access: Any = SimpleNamespace(transfers=self.transfers, make_memory=self._make_memory)
        self.regions = Regions(config, RegionTotals(), access)

    def _make_memory(self, name: str, num_bytes: int, field: str) -> Slices[BudgetedMemory]:
        return self.budget.make_in_slices(name, num_bytes, field=field)

    def create(self, byte_size: int = BYTE_SIZE) -> asyncio.Task[None]:
        return asyncio.create_task(self.regions.create_remote("r", byte_size, MIB, [9], 1 << 40))

    async def memory(self, byte_size: int = BYTE_SIZE) -> RemoteMemory:
        self.transfers.gate.set()
        await self.create(byte_size)
        memory = self.regions.status("r", REMOTE)["r"].memory
        assert isinstance(memory, RemoteMemory)
        return memory


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def places(num_blocks: int) -> Places:
    return Places.packed(num_blocks, BLOCK_BYTES)


async def pulling(rig: Rig, num_blocks: int) -> list[int]:
    """Use the region as a call does."""
    with rig.regions.host_region("r", "region") as region:
        memory = region.memory
        assert isinstance(memory, RemoteMemory)
        return await memory.run(lambda: memory.pull(places(num_blocks), BLOCK_BYTES, lambda first, *_: first))


@pytest.mark.parametrize("how", ["removed", "closed"])
def test_a_call_fails_at_once_when_its_region_is_given_up(threads: ThreadPoolExecutor, how: str) -> None:
    async def play() -> None:
        rig = Rig(threads, until_interrupted)
        await rig.memory()
        (process,) = rig.transfers.processes
        calls = [asyncio.create_task(pulling(rig, 5)) for _ in range(2)]
        assert await asyncio.to_thread(process.waiting.wait, PATIENCE_S)
        if how == "removed":
            rig.regions.unregister("r", REMOTE)
        else:
            rig.regions.close()
        assert process.interrupted.is_set()
        assert not rig.transfers.closed, "the calls still use the memory"
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failed, TransferFailedError)
        assert len(rig.transfers.closed) == 1
        assert rig.budget.used_bytes == 0

    asyncio.run(play())


@pytest.mark.parametrize("way", ["pull", "push", "pull_ranges", "push_ranges"])
def test_a_slow_peer_has_time_in_proportion_to_the_bytes(
    threads: ThreadPoolExecutor, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wait ends just in time."""
    now = [0.0]
    num_blocks = 1000

    def slowly(_: FakeProcess, timeout_s: float) -> None:
        took_s = 0.9 * TRANSFER_S
        now[0] += min(took_s, max(timeout_s, 0.0))
        if took_s > timeout_s:
            raise TransferFailedError("no answer in time")

    async def play() -> None:
        rig = Rig(threads, slowly)
        rig.transfers.clock = lambda: now[0]
        in_ranges = way.endswith("ranges")
        memory = await rig.memory(3 * MIB if in_ranges else BYTE_SIZE)
        with pytest.raises(TransferFailedError):
            use(memory, way, num_blocks)
        assert rig.transfers.processes[0].killed
        num_bytes = 3 * MIB if in_ranges else num_blocks * BLOCK_BYTES
        assert now[0] == pytest.approx(TRANSFER_S + num_bytes / SLOWEST_BYTES)
        direction = "in" if "pull" in way else "out"
        assert f"{num_bytes} bytes could not be transferred {direction}: no answer in time" in caplog.text
        rig.regions.close()

    asyncio.run(play())


def use(memory: RemoteMemory, way: str, num_blocks: int) -> None:
    whole = [Place("r", 0, 3 * MIB)]
    if way == "pull":
        memory.pull(places(num_blocks), BLOCK_BYTES, lambda *_: None)
    elif way == "push":
        memory.push(places(num_blocks), BLOCK_BYTES, lambda *_: None)
    elif way == "pull_ranges":
        memory.pull_ranges(whole, len)
    else:
        memory.push_ranges(whole, len)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("pull_ranges", ["start", "start", "wait", "use 4096", "wait", "use 8192"]),
        ("push_ranges", ["start", "start", "use 4096", "use 8192", "wait", "wait"]),
    ],
)
def test_ranges_are_used_while_others_travel(threads: ThreadPoolExecutor, way: str, expected: list[str]) -> None:
    events: list[str] = []

    def use_range(view: np.ndarray) -> int:
        events.append(f"use {len(view)}")
        view[:] = len(events)
        return len(view)

    async def play() -> None:
        rig = Rig(threads, lambda *_: events.append("wait"))
        memory = await rig.memory()
        (process,) = rig.transfers.processes
        start = process.start

        def started(*of: object) -> Ticket:
            events.append("start")
            return start(*of)

        process.start = started  # type: ignore[method-assign]
        ranges = [Place("r", 0, BLOCK_BYTES), Place("r", MIB // 2, 2 * BLOCK_BYTES)]
        assert getattr(memory, way)(ranges, use_range) == [BLOCK_BYTES, 2 * BLOCK_BYTES]
        first, second = memory.packed(ranges)
        assert set(first) == {expected.index("use 4096") + 1}, "the memory itself was used"
        assert set(second) == {expected.index("use 8192") + 1}
        rig.regions.close()

    asyncio.run(play())
    assert events == expected


def test_each_call_has_time_of_its_own(threads: ThreadPoolExecutor) -> None:
    now = [0.0]

    def slowly(_: FakeProcess, timeout_s: float) -> None:
        now[0] += 0.9 * TRANSFER_S
        assert timeout_s == pytest.approx(TRANSFER_S)

    async def play() -> None:
        rig = Rig(threads, slowly)
        rig.transfers.clock = lambda: now[0]
        memory = await rig.memory()
        for _ in range(3):
            assert memory.pull(places(1), BLOCK_BYTES, lambda first, *_: first) == [0]
        rig.regions.close()

    asyncio.run(play())


def test_calls_that_wait_to_create_a_region_start_no_engine_after_the_end(threads: ThreadPoolExecutor) -> None:
    async def play() -> None:
        rig = Rig(threads, until_interrupted)
        creating = [rig.create() for _ in range(4)]
        while not rig.transfers.processes:
            await asyncio.sleep(0)
        rig.regions.close()
        rig.transfers.gate.set()
        for failed in await asyncio.gather(*creating, return_exceptions=True):
            assert isinstance(failed, FailedPreconditionError)
        assert len(rig.transfers.processes) == len(rig.transfers.closed) == 1
        assert rig.budget.used_bytes == 0

    asyncio.run(play())


def test_nothing_is_transferred_for_a_writer_that_has_gone(threads: ThreadPoolExecutor) -> None:
    async def play() -> None:
        rig = Rig(threads, until_interrupted)
        memory = await rig.memory()
        engine: Any = SimpleNamespace(manager=None)
        access = SimpleNamespace(transfers=SimpleNamespace(arrived_damaged=None))
        session: Any = SimpleNamespace(regions=rig.regions, access=access)
        where = tensor_pb2.SharedMemoryPlace(region="r", byte_size=4, checksum=1)
        tensor = tensor_pb2.Tensor(shared_memory=where)
        request = attention_pb2.WriteRequest(key=tensor, value=tensor)
        async with memory.lock:
            writing = asyncio.create_task(AttentionCalls(ServeConfig(), engine).write(session, request))
            while not memory.lock._waiters:
                await asyncio.sleep(0)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        async with memory.lock:  # after the write
            assert rig.transfers.processes[0].num_started == 0
        rig.regions.close()

    asyncio.run(play())
