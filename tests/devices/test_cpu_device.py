"""The engine with the CPU device: options, and swapping without blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from kv_model import POOL

from kvservice import ops
from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest, SessionNamespace
from kvservice.blocks.plans import PADDING_BLOCK
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


# ---- a long prefill and the calls of others

NUM_TOKENS = 400


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    """Return an engine with blocks for one prefill of NUM_TOKENS and a few tokens of others."""
    changes = {"num_blocks": 106, "max_sequence_tokens": 512, "num_layers": 1, "num_kv_heads": 4, "head_size": 128}
    config = ServeConfig.model_validate(POOL | changes | {"watermark": 0.0})
    opened = CacheEngine(config, open_device(config))
    yield opened
    opened.device.close()


@dataclass
class Gate:
    """Holds the writes of NUM_TOKENS until it is open. `written` has the number of tokens of each write."""

    held: threading.Event = field(default_factory=threading.Event)
    open: threading.Event = field(default_factory=threading.Event)
    written: list[int] = field(default_factory=list)

    def write_kv(self, pool: Any, layer: int, slots: Any, key: Any, value: Any) -> None:
        if len(key) == NUM_TOKENS:
            self.held.set()
            self.open.wait(60)
        WRITE_KV(pool, layer, slots, key, value)
        self.written.append(len(key))


WRITE_KV = ops.write_kv


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(ops, "write_kv", made.write_kv)
    yield made
    made.open.set()


def begun(engine: CacheEngine, space: SessionNamespace, ids: list[int]) -> asyncio.Task[Any]:
    """Begin a step over all tokens of sequences that are not computed. Its task returns the output."""
    step = engine.manager.open_step(space, np.array(ids), None)
    random = np.random.default_rng(0)
    shapes = [(len(step.slot_mapping), heads, 128) for heads in (8, 4, 4)]
    query, key, value = (random.standard_normal(shape, np.float32) for shape in shapes)
    call = engine.attend(space, step.step_id, 0, query, key, value, AttentionOptions(), False)
    return asyncio.get_running_loop().create_task(call)


@pytest.mark.timeout(120)
def test_a_long_prefill_delays_no_other_session(engine: CacheEngine, gate: Gate) -> None:
    """Not even one whose block tables are padded with a block of the prefill, and all outputs are the same."""
    manager = engine.manager

    async def outputs() -> list[Any]:
        spaces = manager.open_namespace(), manager.open_namespace()
        manager.allocate(spaces[0], [AllocationRequest(0, range(NUM_TOKENS))])
        (long,) = manager.describe(spaces[0], [0], include_blocks=True)
        assert long.block_ids is not None
        assert gate.open.is_set() or PADDING_BLOCK in long.block_ids
        manager.allocate(spaces[1], [AllocationRequest(n, range(n, n + 4 * n)) for n in (1, 3)])
        prefill = begun(engine, spaces[0], [0])
        assert await asyncio.to_thread(gate.held.wait, 60)
        others = await begun(engine, spaces[1], [1, 3])
        gate.open.set()
        results = [(await prefill)[0], others[0]]
        for space in spaces:
            manager.close_namespace(space)
        manager.reset_prefix_cache()
        return results

    beside = asyncio.run(outputs())
    alone = asyncio.run(outputs())  # the gate is open
    assert gate.written[:2] == [16, NUM_TOKENS]
    for output, expected in zip(beside, alone, strict=True):
        np.testing.assert_array_equal(output.view(np.uint32), expected.view(np.uint32))


@pytest.mark.timeout(120)
def test_blocks_of_a_long_prefill_are_used_again_only_after_it(engine: CacheEngine, gate: Gate) -> None:
    """Its session has freed them while it was computed."""
    manager = engine.manager

    async def run() -> None:
        spaces = manager.open_namespace(), manager.open_namespace()
        manager.allocate(spaces[0], [AllocationRequest(0, range(NUM_TOKENS))])
        prefill = begun(engine, spaces[0], [0])
        assert await asyncio.to_thread(gate.held.wait, 60)
        manager.free(spaces[0], [0])
        manager.allocate(spaces[1], [AllocationRequest(1, range(1000, 1040))])
        other = begun(engine, spaces[1], [1])
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(prefill, other)

    asyncio.run(run())
    assert gate.written == [NUM_TOKENS, 40]
