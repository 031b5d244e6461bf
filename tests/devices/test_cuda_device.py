"""The CUDA device except the order of its streams: sizes, failures, options. With `fake_cuda`, it needs no GPU."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_cuda
import numpy as np
import pytest
from constants import set_constants
from cuda_rig import TYPES, check_types
from each_row import each_row
from fake_cuda import DeadlockError, FakeCuda
from kv_model import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, POOL

from kvservice.attention_options import AttentionOptions, BlockSparse
from kvservice.blocks import AllocationRequest
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.errors import InternalError, InvalidArgumentError, KVServiceError, ResourceExhaustedError

BLOCK_BYTES = 4096
# The driver maps memory that other processes can open in pieces of this size.
GRANULE_BYTES = 2 << 20
CUDA: dict[str, Any] = POOL | {"device": "cuda", "max_message_mib": 1, "allow_client_shm": "off"}


def config_of(**changes: Any) -> ServeConfig:
    return ServeConfig.model_validate(CUDA | changes)


class Rig:
    """Return an engine on the fake device, and a namespace."""

    def __init__(self, **changes: Any) -> None:
        self.device: Any = open_device(config_of(**changes))
        self.engine = CacheEngine(config_of(**changes), self.device)
        self.space = self.engine.manager.open_namespace()

    def allocate(self, sequence_id: int, num_tokens: int = 5) -> None:
        self.engine.manager.allocate(self.space, [AllocationRequest(sequence_id, range(num_tokens))])

    def open_step(self, sequence_id: int) -> Any:
        return self.engine.manager.open_step(self.space, np.array([sequence_id]), None)

    async def attend(self, step: Any, layer: int, **options: Any) -> Any:
        count = len(step.slot_mapping)
        query = np.ones((count, NUM_HEADS, HEAD_SIZE), np.float32)
        kv = np.full((count, NUM_KV_HEADS, HEAD_SIZE), 3.0, np.float32)
        chosen = AttentionOptions(**options)
        return (await self.engine.attend(self.space, step.step_id, layer, query, kv, kv, chosen, True))[0]

    def compute(self, sequence_id: int) -> None:
        async def layers() -> None:
            step = self.open_step(sequence_id)
            for layer in range(NUM_LAYERS):
                np.testing.assert_allclose(await self.attend(step, layer), 3.0, rtol=1e-6)

        asyncio.run(layers())


@pytest.fixture
def rig(fake: FakeCuda) -> Iterator[Rig]:
    rig = Rig()
    yield rig
    fake.error = None
    fake.hold()
    rig.device.close()


# ---- memory allocated at the start


def test_the_pool_takes_its_share_of_what_the_workspaces_leave(fake: FakeCuda) -> None:
    device = open_device(config_of(num_blocks=None, gpu_memory_utilization=0.5))
    free = fake.total_bytes - (fake.used_bytes - device.memory_bytes["pool"])
    assert device.memory_bytes["workspaces"] > 2 << 20
    assert device.num_blocks == free // 2 // GRANULE_BYTES * GRANULE_BYTES // BLOCK_BYTES
    device.close()


def test_a_size_that_is_given_wins(fake: FakeCuda) -> None:
    device = open_device(config_of(num_blocks=None, pool_gib=100 * BLOCK_BYTES / 2**30))
    assert device.num_blocks == 100
    assert device.memory_bytes["pool"] == 100 * BLOCK_BYTES
    assert device.memory_bytes["swap"] == device.num_swap_blocks * BLOCK_BYTES == 12 * BLOCK_BYTES
    device.close()
    assert fake.used_bytes == 0


TOO_MUCH: list[tuple[Any, ...]] = [
    ({"num_blocks": 1 << 20}, "num_blocks"),
    ({"num_blocks": None, "pool_gib": 5.0}, "pool_gib"),
    ({"num_blocks": None, "gpu_memory_utilization": 1e-6}, "gpu_memory_utilization"),
]


def test_more_than_there_is_is_refused_with_the_numbers(fake: FakeCuda) -> None:
    with each_row() as row:
        for changes, field in TOO_MUCH:
            with row((changes, field)):
                with pytest.raises(ResourceExhaustedError) as refused:
                    open_device(config_of(**changes))
                assert refused.value.field == field
                numbers = refused.value.metadata
                assert int(numbers["total"]) == fake.total_bytes
                assert 0 < int(numbers["free"]) < fake.total_bytes
                for name in ("wanted", "free", "total"):
                    assert numbers[name] in refused.value.message


def test_memory_that_others_take_meanwhile(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "memory_info", lambda _: (1 << 40, 1 << 40))
    with pytest.raises(ResourceExhaustedError, match="the GPU has") as refused:
        open_device(config_of(num_blocks=1 << 20))
    assert refused.value.field == "num_blocks"


def test_no_memory_for_the_workspaces(fake: FakeCuda) -> None:
    fake.total_bytes = 1 << 20
    with pytest.raises(ResourceExhaustedError, match="workspaces"):
        open_device(config_of())


def test_a_swap_tier_that_cannot_be_page_locked(fake: FakeCuda) -> None:
    with pytest.raises(ResourceExhaustedError, match="page-locked") as refused:
        open_device(config_of(swap_space_gib=(fake.lockable_bytes + 2 * BLOCK_BYTES) / 2**30))
    assert refused.value.field == "swap_space_gib"


def test_a_device_that_is_not_there(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="cuda:1: CUDA devices there are: 1") as refused:
        open_device(config_of(device="cuda:1"))
    assert refused.value.field == "device"
    monkeypatch.setattr(fake, "device_count", lambda: 0)
    with pytest.raises(InvalidArgumentError, match="there is no CUDA device"):
        open_device(config_of())


def test_a_device_that_does_not_work(fake: FakeCuda) -> None:
    fake.error = "an illegal memory access was encountered"
    with pytest.raises(InvalidArgumentError, match="cuda:0 cannot be used: an illegal") as refused:
        open_device(config_of())
    assert refused.value.field == "device"
    # Kernels of other GPUs.
    fake.error, fake.error_code = "no kernel image is available", 209
    with pytest.raises(InvalidArgumentError, match="for other GPUs than cuda:0; `KVSERVICE_CUDA=on pip") as refused:
        open_device(config_of())
    assert refused.value.field == "device"


def test_a_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvservice._cuda", None)
    with pytest.raises(InvalidArgumentError, match="built without CUDA; `KVSERVICE_CUDA=on pip install") as refused:
        open_device(config_of())
    assert refused.value.field == "device"


# ---- out of memory at run time


@pytest.mark.parametrize("inline_s", [1.0, -1.0])
def test_a_call_without_memory_is_refused_and_can_be_sent_again(
    rig: Rig, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, inline_s: float
) -> None:
    set_constants(monkeypatch, "kvservice.devices", INLINE_S=inline_s)
    rig.allocate(0)
    step = rig.open_step(0)
    total, fake.total_bytes = fake.total_bytes, fake.used_bytes
    for _ in range(2):
        with pytest.raises(ResourceExhaustedError, match="no memory left"):
            asyncio.run(rig.attend(step, 0))
    fake.total_bytes = total
    np.testing.assert_allclose(asyncio.run(rig.attend(step, 0)), 3.0, rtol=1e-6)
    assert rig.device.fault is None


def test_a_call_that_wants_a_larger_workspace_gets_one_of_its_own(
    rig: Rig, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cuda.Attention, "wanted_workspace_bytes", lambda self: 4 << 20)
    rig.allocate(0)
    before = fake.used_bytes
    rig.compute(0)
    fake.streams[fake.launched[-1].stream].synchronize()
    assert {call.workspace_bytes for call in fake.launched[-NUM_LAYERS:]} == {4 << 20}
    assert fake.used_bytes < before + (1 << 20)
    total, fake.total_bytes = fake.total_bytes, fake.used_bytes + 8192
    rig.allocate(1)
    step = rig.open_step(1)
    with pytest.raises(ResourceExhaustedError, match="no memory left"):
        asyncio.run(rig.attend(step, 0))
    fake.total_bytes = total
    np.testing.assert_allclose(asyncio.run(rig.attend(step, 0)), 3.0, rtol=1e-6)


def test_steps_give_their_tables_back(rig: Rig, fake: FakeCuda) -> None:
    for sequence_id in range(6):
        rig.allocate(sequence_id)
        rig.compute(sequence_id)
        rig.engine.manager.free(rig.space, np.array([sequence_id]))
        if sequence_id == 2:
            before = fake.used_bytes
    fake.streams[fake.launched[-1].stream].synchronize()
    assert fake.used_bytes <= before


# ---- device failures


@pytest.mark.parametrize("inline_s", [1.0, -1.0])
def test_a_failure_is_reported_once_and_nothing_is_done_after_it(
    rig: Rig, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, inline_s: float
) -> None:
    set_constants(monkeypatch, "kvservice.devices", INLINE_S=inline_s)
    told: list[int] = []
    rig.device.on_fault = lambda: told.append(1)
    rig.allocate(0)
    rig.allocate(1)
    step = rig.open_step(0)
    fake.error = "an illegal memory access was encountered"
    with pytest.raises(InternalError, match="the device failed"):
        asyncio.run(rig.attend(step, 0))
    for call in (lambda: rig.attend(step, 0), lambda: rig.engine.read(rig.space, [(1, 0, 0)], None)):
        with pytest.raises(InternalError, match="the device failed"):
            asyncio.run(call())
    with pytest.raises(InternalError):
        rig.engine.swap_out(rig.space, np.array([0]))
    assert told == [1]
    assert isinstance(rig.device.fault, fake.CudaError)
    (record,) = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert "its content is lost: an illegal memory access" in record.getMessage()
    assert not record.exc_info
    rig.device.close()


def test_calls_in_flight_get_the_failure(rig: Rig, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.devices", INLINE_S=-1.0)
    for sequence_id in range(4):
        rig.allocate(sequence_id)

    def synchronize(_: Any) -> None:
        """An earlier launch has failed, which shows when a later call is awaited."""
        fake.error = "the launch timed out and was terminated"
        with fake.call():
            pass

    async def all_at_once() -> list[Any]:
        steps = [rig.open_step(sequence_id) for sequence_id in range(4)]
        calls = [rig.attend(step, layer) for step in steps for layer in range(NUM_LAYERS)]
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(fake_cuda.Event, "synchronize", synchronize)
    assert {type(outcome) for outcome in asyncio.run(all_at_once())} == {InternalError}


# ---- waits between calls


def hold_swapping(rig: Rig, fake: FakeCuda) -> None:
    """Hold the stream that swaps out, which the swap of a block shows."""
    rig.device.swap_out(np.array([19], np.int32), np.array([11], np.int32))
    fake.streams[fake.copied[-1]].synchronize()
    fake.hold(fake.copied[-1])


def test_computing_goes_on_beside_a_swap_of_other_blocks(fake: FakeCuda) -> None:
    rig = Rig(enable_prefix_caching=False, watermark=0.0)
    for sequence_id, num_tokens in ((0, 5), (1, 39), (2, 6)):
        rig.allocate(sequence_id, num_tokens)
    rig.compute(0)
    rig.compute(2)
    hold_swapping(rig, fake)
    rig.engine.swap_out(rig.space, np.array([0]))
    rig.compute(1)
    rig.engine.manager.free(rig.space, np.array([2]))
    rig.allocate(3, 40)  # all remaining blocks, including those that the swap still reads
    step = rig.open_step(3)
    with pytest.raises(DeadlockError):
        asyncio.run(rig.attend(step, 0))


def test_blocks_that_a_swap_only_reads_can_be_read_meanwhile(fake: FakeCuda) -> None:
    rig = Rig()
    for sequence_id in (0, 1):
        rig.allocate(sequence_id, 9)  # two full shared blocks, and one token
        rig.compute(sequence_id)
    hold_swapping(rig, fake)
    rig.engine.swap_out(rig.space, np.array([0]))
    tokens, lengths = np.array([7], np.int32), np.array([9])
    step = rig.engine.manager.append(rig.space, np.array([1]), tokens, None, lengths)
    assert not len(step.copies)
    np.testing.assert_allclose(asyncio.run(rig.attend(step, 0)), 3.0, rtol=1e-6)


def test_a_cancelled_caller_does_not_cancel_the_work(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.devices", INLINE_S=-1.0)
    rig.allocate(0)

    async def cancelled() -> Any:
        step = rig.open_step(0)
        task = asyncio.create_task(rig.attend(step, 0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.attend(step, 1)
        return await rig.engine.read(rig.space, [(0, 0, 5)], None)

    key, value = asyncio.run(cancelled())
    assert key.shape == (NUM_LAYERS, 5, NUM_KV_HEADS, HEAD_SIZE)
    assert (key == 3.0).all()
    assert (value == 3.0).all()


# ---- dtypes and options


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("dtype", "cache"), TYPES)
def test_types(tmp_path: Path, dtype: str, cache: str) -> None:
    """check_types compares stored K/V and outputs with float64."""
    check_types(tmp_path, 32, dtype, cache)


def test_options_reach_the_kernel(fake: FakeCuda) -> None:
    rig = Rig(batch_invariant=True)
    rig.allocate(0)
    step = rig.open_step(0)
    sparse = BlockSparse(vert_stride=0, local_blocks=2, block_size=8, head_sliding_step=1, tp_rank=3)
    slopes = np.array([0.1, 0.2, 0.3, 0.4])
    asyncio.run(
        rig.attend(step, 1, scale=0.5, sliding_window=3, logits_soft_cap=7.0, block_sparse=sparse, alibi_slopes=slopes)
    )
    call = fake.launched[-1]
    assert (call.scale, call.sliding_window, call.soft_cap) == (0.5, 3, 7.0)
    assert call.sparse == (0, 2, 8, 1, 3)
    assert (call.layer, call.batch_invariant, call.max_query_len) == (1, True, 5)
    assert call.alibi_slopes != 0
    rig.device.close()


BAD_PATTERNS: list[tuple[Any, ...]] = [
    ({"block_size": 6}, "block_size"),
    ({"block_size": 0}, "block_size"),
    ({"vert_stride": -1}, "vert_stride"),
    ({"local_blocks": -1}, "local_blocks"),
    ({"local_blocks": 0}, "local_blocks"),
    ({"tp_rank": -1}, "tp_rank"),
]


def test_sparse_patterns_that_cannot_be(rig: Rig) -> None:
    with each_row() as row:
        for changes, field in BAD_PATTERNS:
            with row((changes, field)):
                sparse = BlockSparse(**({"vert_stride": 2, "local_blocks": 1, "block_size": 8} | changes))
                with pytest.raises(InvalidArgumentError) as refused:
                    rig.engine.check_options(AttentionOptions(block_sparse=sparse), 4)
                assert refused.value.field == f"options.block_sparse.{field}"


def test_the_cpu_has_no_sparse_patterns_and_no_eight_bits() -> None:
    config = ServeConfig.model_validate(POOL)
    device = open_device(config)
    with pytest.raises(InvalidArgumentError, match="CPU") as refused:
        device.check_options(AttentionOptions(block_sparse=BlockSparse(2, 1, 8)))
    assert refused.value.field == "options.block_sparse"
    device.close()
    with pytest.raises(InvalidArgumentError) as refused:
        open_device(ServeConfig.model_validate(POOL | {"kv_cache_dtype": "fp8_e5m2"}))
    assert refused.value.field == "kv_cache_dtype"


def test_forks_share_what_is_before_their_new_tokens(fake: FakeCuda, rig: Rig) -> None:
    with each_row() as row:
        for tail in (1, 3, 4):
            with row(tail):
                block_size = rig.engine.layout.block_size
                rig.allocate(0, 4 * block_size + tail)
                rig.compute(0)
                rig.engine.manager.fork(rig.space, np.array([0, 0]), np.array([1, 2]))
                step = rig.engine.manager.append(rig.space, np.arange(3), np.arange(3))
                rig.engine.copy_on_write(step)
                asyncio.run(rig.attend(step, 0))
                assert fake.launched[-1].num_common_blocks == 4 + tail // block_size
                alone = rig.engine.manager.append(rig.space, np.array([2]), np.array([7]))
                asyncio.run(rig.attend(alone, 0))
                assert fake.launched[-1].num_common_blocks == 0
                rig.engine.manager.free(rig.space, np.arange(3))
                rig.engine.manager.reset_prefix_cache()


def test_the_real_module_is_what_the_fake_stands_for() -> None:
    """Read the functions and their arguments from the stub file."""
    import ast

    import kvservice

    stub = ast.parse((Path(kvservice.__file__).parent / "_cuda.pyi").read_text())
    names = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    fake = FakeCuda()
    assert isinstance(fake, ModuleType)
    not_without_a_gpu = {
        "device_facts", "IpcAllocation", "IpcMemory",
        "CudaLaneExecutor", "BlockStage", "StreamMark", "advance_tables",
    }  # fmt: skip
    assert {name for name in names if not hasattr(fake, name)} == not_without_a_gpu
    attention = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Attention")
    attributes = {ast.unparse(node.target) for node in attention.body if isinstance(node, ast.AnnAssign)}
    rig_of_its_own = sys.modules.get("kvservice._cuda")
    sys.modules["kvservice._cuda"] = fake
    try:
        rig = Rig()
        rig.allocate(0)
        rig.compute(0)
        used = set(vars(fake.launched[-1])) - {"cuda"}
        rig.device.close()
    finally:
        if rig_of_its_own is None:
            del sys.modules["kvservice._cuda"]
        else:
            sys.modules["kvservice._cuda"] = rig_of_its_own
    assert used <= attributes


def test_errors_are_of_the_tree(fake: FakeCuda) -> None:
    fake.total_bytes = 1 << 20
    with pytest.raises(KVServiceError):
        open_device(config_of())
