"""Blocks count as unfinished from the submission of an operation until their bytes are written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from constants import set_constants
from fake_cuda import FakeCuda
from kept_files import HeldFiles
from kv_model import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, POOL

from kvservice import ops
from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest, StepPlan
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.kept import KeptState

NUM_TOKENS = 10


class Rig:
    """An engine with one sequence, and the counts of its device."""

    def __init__(self, **changes: Any) -> None:
        config = ServeConfig.model_validate(POOL | {"max_message_mib": 1, "allow_client_shm": "off"} | changes)
        self.keeper = HeldFiles()
        self.kept = KeptState.open(self.keeper.start(), {})
        self.device: Any = open_device(config, self.kept)
        self.engine = CacheEngine(config, self.device)
        self.space = self.engine.manager.open_namespace()
        self.engine.manager.allocate(self.space, [AllocationRequest(1, range(NUM_TOKENS))])
        self.kept.ready()

    def close(self) -> None:
        self.device.close()
        self.keeper.close()

    @property
    def pool(self) -> list[int]:
        """The unfinished blocks of the pool."""
        return self._unfinished("unfinished_device", self.device.num_blocks)

    @property
    def swap(self) -> list[int]:
        return self._unfinished("unfinished_swap", self.device.num_swap_blocks)

    def _unfinished(self, name: str, num_blocks: int) -> list[int]:
        counts = self.kept.arrays.kept(name, (num_blocks,), np.int32, private=True)
        assert (counts >= 0).all()
        return np.flatnonzero(counts).tolist()

    def step(self) -> StepPlan:
        return self.engine.manager.open_step(self.space, np.array([1]), None)

    async def attend(self, step: StepPlan, layer: int, first: int = 0, stop: int = NUM_TOKENS) -> None:
        query = np.ones((stop - first, NUM_HEADS, HEAD_SIZE), np.float32)
        kv = np.ones((stop - first, NUM_KV_HEADS, HEAD_SIZE), np.float32)
        part = (first, stop - first if stop - first < NUM_TOKENS else 0)
        await self.engine.attend(self.space, step.step_id, layer, query, kv, kv, AttentionOptions(), False, part=part)

    async def write(self, step: StepPlan) -> None:
        kv = np.ones((NUM_LAYERS, NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE), np.float32)
        await self.engine.write(self.space, step.step_id, None, kv, kv)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def gpu(fake: FakeCuda) -> Iterator[Rig]:
    rig = Rig(device="cuda")
    yield rig
    fake.error = None
    fake.hold()
    rig.close()


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a thread of the device. A test fails after a minute."""
    pause = threading.Event()
    for _ in range(60_000):
        if true():
            return
        pause.wait(0.001)
    pytest.fail("the thread of the device did nothing")


# ---- the CPU device


def during(monkeypatch: pytest.MonkeyPatch, name: str, seen: Callable[[], Any]) -> list[Any]:
    """Return what `seen` returns before each call of a kernel."""
    results: list[Any] = []
    right = getattr(ops, name)

    def spied(*arguments: Any, **options: Any) -> Any:
        results.append(seen())
        return right(*arguments, **options)

    monkeypatch.setattr(ops, name, spied)
    return results


@pytest.fixture(params=["inline", "in the thread"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the device works: on the event loop, or in its thread."""
    if request.param == "in the thread":
        set_constants(monkeypatch, "kvservice.devices", ON_LOOP_BYTES=-1)
    return request.param


@pytest.mark.usefixtures("way")
def test_copies_count_until_they_are_done(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = during(monkeypatch, "copy_blocks", lambda: (rig.pool, rig.swap))
    rig.device.copy(np.array([0, 1], np.int32), np.array([7, 8], np.int32))
    rig.device.swap_out(np.array([3], np.int32), np.array([5], np.int32))
    rig.device.swap_in(np.array([4], np.int32), np.array([6], np.int32))
    wait_until(lambda: (rig.pool, rig.swap) == ([], []))
    assert {7, 8} <= set(seen[0][0])
    assert 5 in seen[1][1]
    assert seen[2] == ([6], [])


def test_a_step_is_marked_as_complete_when_its_bytes_are_written_or_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its last layer is written in parts, or all layers are written at once."""
    written: list[None] = []
    write_kv = ops.write_kv

    def spied_write(*arguments: Any, **options: Any) -> None:
        write_kv(*arguments, **options)
        written.append(None)

    monkeypatch.setattr(ops, "write_kv", spied_write)
    marked: list[tuple[int, list[int]]] = []
    for name in ("mark_part", "mark_all_layers"):
        monkeypatch.setattr(rig.engine.manager, name, spy(rig, written, marked, getattr(rig.engine.manager, name)))

    async def layers(step: StepPlan, at_once: bool) -> None:
        if at_once:
            await rig.write(step)
            return
        for layer in range(NUM_LAYERS - 1):
            await rig.attend(step, layer)
        await rig.attend(step, NUM_LAYERS - 1, 0, 6)
        await rig.attend(step, NUM_LAYERS - 1, 6, NUM_TOKENS)

    for at_once in (False, True):
        step = rig.engine.manager.reopen(rig.space, [1], [0], [NUM_TOKENS])
        blocks = sorted(set((step.slot_mapping // rig.engine.manager.config.block_size).tolist()))
        del written[:], marked[:]
        asyncio.run(layers(step, at_once))
        num_written, unfinished = marked[-1]
        assert num_written == len(written) or (way == "in the thread" and unfinished == blocks)
        assert all(unfinished == [] for _, unfinished in marked[:-1])
        assert rig.pool == []


def spy(rig: Rig, written: list[Any], marked: list[Any], mark: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that marks layers: it appends the number of kernel calls that have ended, and the unfinished
    blocks."""

    def spied(*arguments: Any) -> Any:
        unfinished = rig.pool  # read first: what it lacks has been written
        marked.append((len(written), unfinished))
        return mark(*arguments)

    return spied


def test_a_cancelled_caller_does_not_end_the_count(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.devices", ON_LOOP_BYTES=-1)
    goes_on = threading.Event()
    during(monkeypatch, "write_kv", lambda: goes_on.wait(60))

    async def cancel() -> None:
        call = asyncio.create_task(rig.write(rig.step()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert rig.pool
        goes_on.set()

    asyncio.run(cancel())
    wait_until(lambda: not rig.pool)


def test_a_fault_leaves_the_blocks_and_is_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the memory is broken")

    monkeypatch.setattr(ops, "copy_blocks", fails)
    with pytest.raises(RuntimeError):
        rig.device.copy(np.array([0], np.int32), np.array([7], np.int32))
    assert rig.pool == [7]
    assert KeptState.open(rig.keeper.start(), {}).refused == "the device failed"


# ---- the CUDA device


def test_on_a_gpu_a_step_counts_until_its_kernels_are_complete(
    gpu: Rig, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, "kvservice.devices", INLINE_S=-1.0)
    seen: list[list[int]] = []
    run = fake.run_one

    def spied() -> bool:
        seen.append(gpu.pool)
        return run()

    step = gpu.step()

    async def layers() -> None:
        for layer in range(NUM_LAYERS - 1):
            await gpu.attend(step, layer)
        assert gpu.pool == []
        monkeypatch.setattr(fake, "run_one", spied)
        await gpu.attend(step, NUM_LAYERS - 1)

    asyncio.run(layers())
    assert seen
    assert all(seen)
    assert gpu.pool == []


def test_on_a_gpu_a_quick_call_is_complete_before_it_is_marked(
    gpu: Rig, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[bool] = []
    right = gpu.engine.manager.mark_part

    def mark(*arguments: Any) -> bool:
        marked.append(all(stream.is_empty for stream in fake.streams.values()))
        return right(*arguments)

    monkeypatch.setattr(gpu.engine.manager, "mark_part", mark)
    step = gpu.step()

    async def layers() -> None:
        for layer in range(NUM_LAYERS):
            await gpu.attend(step, layer)

    asyncio.run(layers())
    assert marked == [True] * NUM_LAYERS


def test_on_a_gpu_copies_count_until_they_are_complete_and_that_is_noticed(gpu: Rig, fake: FakeCuda) -> None:
    """Nothing follows the copies: a thread waits for them. A block counts until all operations on it are complete."""
    fake.hold(*fake.streams)
    gpu.device.copy(np.array([0, 1], np.int32), np.array([7, 8], np.int32))
    gpu.device.swap_out(np.array([3], np.int32), np.array([5], np.int32))
    gpu.device.swap_in(np.array([4, 9], np.int32), np.array([6, 8], np.int32))
    assert (gpu.pool, gpu.swap) == ([6, 7, 8], [5])
    within, _, back = fake.copied[-3:]
    fake.hold(within, back)
    fake_runs(fake)
    wait_until(lambda: gpu.swap == [])
    assert gpu.pool == [6, 7, 8]
    fake.hold(back)
    fake_runs(fake)
    wait_until(lambda: gpu.pool == [6, 8])
    fake.hold()
    fake_runs(fake)
    wait_until(lambda: gpu.pool == [])


def fake_runs(fake: FakeCuda) -> None:
    with fake.lock:
        while fake.run_one():
            pass


def test_on_a_gpu_a_copy_that_fails_faults_the_device(gpu: Rig, fake: FakeCuda) -> None:
    fake.hold(*fake.streams)
    gpu.device.swap_out(np.array([3], np.int32), np.array([5], np.int32))
    fake.error = "an illegal address"
    wait_until(lambda: gpu.device.fault is not None)
    assert gpu.swap == [5]
    assert KeptState.open(gpu.keeper.start(), {}).refused == "the device failed"
