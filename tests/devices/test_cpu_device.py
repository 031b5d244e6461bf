"""The engine with the CPU device: options, and swapping without blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kv_model import POOL

from kvservice import ops
from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine

CONTEXT = 2000


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = ops.num_threads()
    ops.set_num_threads(4)
    yield
    ops.set_num_threads(before)


def decode(batch_invariant: bool, others: int) -> Any:
    """Return the output bits of a sequence in a batch with other sequences."""
    changes = {"max_sequence_tokens": 2048, "num_blocks": 5000, "num_layers": 1, "num_kv_heads": 4, "head_size": 128}
    config = ServeConfig.model_validate(POOL | changes | {"batch_invariant": batch_invariant})
    engine = CacheEngine(config, open_device(config))
    space = engine.manager.open_namespace()
    ids = np.arange(others + 1)
    engine.manager.allocate(space, [AllocationRequest(n, range(CONTEXT * n, CONTEXT * (n + 1))) for n in ids.tolist()])
    random = np.random.default_rng(0)

    async def run() -> Any:
        for n in ids.tolist():
            step = engine.manager.open_step(space, np.array([n]), None)
            kv = random.standard_normal((2, CONTEXT, 4, 128), np.float32)
            await engine.write(space, step.step_id, 0, kv[0], kv[1])
        step = engine.manager.append(space, ids, np.zeros(others + 1, np.int32), None, np.full(others + 1, CONTEXT))
        tensors = [np.random.default_rng(1).standard_normal((1, h, 128), np.float32) for h in (8, 4, 4)]
        more = [random.standard_normal((others, h, 128), np.float32) for h in (8, 4, 4)]
        both = [np.concatenate(pair) for pair in zip(tensors, more, strict=True)]
        query, key, value = both
        return (await engine.attend(space, step.step_id, 0, query, key, value, AttentionOptions(), False))[0][0]

    try:
        return asyncio.run(run()).view(np.uint32)
    finally:
        engine.device.close()


@pytest.mark.usefixtures("four_threads")
def test_batch_invariance_is_bit_by_bit() -> None:
    alone = decode(True, 0)
    np.testing.assert_array_equal(decode(True, 5), alone)
    assert (decode(False, 5) != decode(False, 0)).any(), "else the option would be for nothing"


def test_a_sequence_without_blocks_is_swapped_without_a_swap_tier() -> None:
    config = ServeConfig.model_validate(POOL | {"swap_space_gib": 0})
    engine = CacheEngine(config, open_device(config))
    try:
        space = engine.manager.open_namespace()
        engine.manager.allocate(space, [AllocationRequest(1, range(3))])
        engine.manager.truncate(space, [1], [0])
        assert engine.manager.can_swap_out(space, [1])
        assert len(engine.swap_out(space, np.array([1])).src) == 0
        assert engine.manager.describe(space)[0].swapped
        engine.swap_in(space, np.array([1]))
        assert not engine.manager.describe(space)[0].swapped
        assert engine.device.fault is None
    finally:
        engine.device.close()
