"""The in-process engine on a real GPU: the state machine of the CPU tests, concurrent operations, all cache dtypes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cuda_rig import ON_GPU, TYPES, Rig, attention_in_float64, check_types
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_churn import Churn
from kv_machine import NUM_SESSIONS, KVMachine
from kv_systems import EngineSystem

from kvservice.blocks import AllocationRequest
from kvservice.config import ServeConfig
from kvservice.devices import compute, open_device
from kvservice.engine import CacheEngine
from kvservice.errors import ResourceExhaustedError


@pytest.fixture(params=["on the loop", "in threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select where calls are launched and waited for: on the event loop or in threads."""
    if request.param == "in threads":
        monkeypatch.setattr(compute, "INLINE_S", -1.0)
    return request.param


@pytest.mark.usefixtures("way")
def test_engine() -> None:
    """The machine fails if a block has other bytes than the model expects."""
    config = ServeConfig.model_validate(ON_GPU)

    def machine() -> KVMachine:
        return KVMachine(lambda: EngineSystem(config, NUM_SESSIONS))

    searching = settings(
        max_examples=25,
        stateful_step_count=40,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(cast(Any, machine), settings=searching)


@pytest.mark.usefixtures("way")
def test_operations_that_do_not_wait_for_each_other() -> None:
    """The sequences are long, so that copies are still in flight when the next operation starts."""
    changes: dict[str, Any] = {
        "enable_prefix_caching": False,
        "num_blocks": 160,
        "swap_space_gib": 100 * (1 << 20) / 2**30,
        "num_layers": 2,
        "block_size": 4,
    }
    config = ServeConfig.model_validate(ON_GPU | changes)
    for seed in range(10):
        engine = CacheEngine(config, open_device(config))
        try:
            asyncio.run(Churn(engine, seed).run(200))
        finally:
            engine.device.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.device.close()


@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "cache"), TYPES)
def test_types(tmp_path: Path, head_size: int, dtype: str, cache: str) -> None:
    """check_types compares stored K/V and outputs with float64."""
    check_types(tmp_path, head_size, dtype, cache)


def test_a_call_of_many_heads_and_tokens(rig: Rig) -> None:
    """The call is long enough that a thread waits for it."""
    step = rig.open_step(0, 500)
    query, key, value = rig.normal(500, 8, 32), rig.normal(500, 2, 32), rig.normal(500, 2, 32)
    output = rig.attend(step, 0, query, key, value)
    keys, values = (np.repeat(part, 4, axis=1) for part in (key, value))
    for head in range(0, 8, 4):
        expected = attention_in_float64(query[:, head : head + 4], keys[:, head : head + 2], values[:, head : head + 2])
        np.testing.assert_allclose(output[:, head : head + 4], expected, rtol=0, atol=2e-4)


def test_a_refused_allocation_leaves_the_device_working(rig: Rig) -> None:
    with pytest.raises(ResourceExhaustedError, match="no memory left"):
        rig.device._compute.reserve(lambda: rig.device._compute.allocate(1 << 46))
    step = rig.open_step(0, 5)
    ones = np.ones((5, 2, 32), np.float32)
    output = rig.attend(step, 0, np.ones((5, 4, 32), np.float32), ones, ones)
    np.testing.assert_allclose(output, 1.0, rtol=1e-5)
    assert rig.device.fault is None


def test_a_call_with_a_workspace_of_its_own(rig: Rig) -> None:
    rig.device._workspace_bytes = 0
    step = rig.open_step(0, 300)
    ones = np.ones((300, 2, 32), np.float32)
    for layer in range(2):
        output = rig.attend(step, layer, np.ones((300, 4, 32), np.float32), ones, ones)
        np.testing.assert_allclose(output, 1.0, rtol=1e-5)


def test_batch_invariance_is_bit_by_bit() -> None:
    alone: list[Any] = []
    together: list[Any] = []
    for others in (0, 6):
        rig = Rig(batch_invariant=True, dtype="bfloat16", head_size=128, max_sequences=8, max_message_mib=4)
        try:
            rig.engine.manager.allocate(
                rig.space, [AllocationRequest(n, [n] * (300 if n == 0 else 9 * n)) for n in range(others + 1)]
            )
            step = rig.engine.manager.open_step(rig.space, np.arange(others + 1), None)
            count = len(step.slot_mapping)
            tensors = [rig.normal(300, heads, 128) for heads in (8, 2, 2)]
            more = [rig.normal(count - 300, heads, 128) for heads in (8, 2, 2)]
            output = rig.attend(step, 0, *(np.concatenate(pair) for pair in zip(tensors, more, strict=True)))
            (together if others else alone).append(output[:300].view(np.uint16))
        finally:
            rig.device.close()
    np.testing.assert_array_equal(alone[0], together[0])


def test_forks_of_a_long_prompt() -> None:
    """There are enough long forks to use the shared-prefix (cascade) kernel. The results match an engine on the CPU."""
    num_forks, num_prompt = 128, 1500
    sizes = {"num_blocks": 400, "max_sequences": 200, "max_sequence_tokens": 2000, "max_message_mib": 16}
    model: dict[str, Any] = {
        "dtype": "bfloat16",
        "head_size": 128,
        "block_size": 16,
        "num_layers": 1,
        "num_kv_heads": 8,
    }
    heads = (16, 8, 8)
    outputs = []
    for device in ("cuda", "cpu"):
        rig = Rig(device=device, **sizes, **model)
        try:
            prompt = rig.open_step(0, num_prompt)
            rig.attend(prompt, 0, *(rig.normal(num_prompt, count, 128) for count in heads))
            rig.engine.manager.fork(rig.space, np.zeros(num_forks - 1, np.int64), np.arange(1, num_forks))
            ids = np.arange(num_forks)
            for _ in range(2):
                step = rig.engine.manager.append(rig.space, ids, ids)
                rig.engine.copy_on_write(step)
                tensors = [rig.normal(num_forks, count, 128) for count in heads]
                outputs.append(rig.attend(step, 0, *tensors).astype(np.float32))
            if device == "cuda":
                assert rig.device._compute.tables_of(step).num_common_blocks == num_prompt // 16
        finally:
            rig.device.close()
    for on_gpu, on_cpu in zip(outputs[:2], outputs[2:], strict=True):
        error = np.linalg.norm(on_gpu - on_cpu, axis=-1) / np.linalg.norm(on_cpu, axis=-1)
        assert error.max() <= 3 * 2.0**-8
