"""Concurrent random operations on an engine, as from many clients, with checks of all contents."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import numpy as np
from kv_model import HEAD_SIZE, NUM_HEADS, NUM_LAYERS, ModelSequence, reference_attention

from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest
from kvservice.engine import CacheEngine
from kvservice.errors import OutOfBlocksError, QuotaExceededError


class Churn:
    """Operations on the sequences 0, 1, 2, ... of one namespace, whose tokens are all computed."""

    def __init__(self, engine: CacheEngine, seed: int) -> None:
        self.engine = engine
        self.manager = engine.manager
        self.space = self.manager.open_namespace()
        self.random = random.Random(seed)
        self.queries = np.random.default_rng(seed)
        self.sequences: dict[int, ModelSequence] = {}
        self.newest = -1
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self, num_operations: int) -> None:
        operations = [self.new, self.grow, self.grow, self.fork, self.swap_out, self.swap_in, self.free, self.read]
        for _ in range(num_operations):
            try:
                await self.random.choice(operations)()
            except (OutOfBlocksError, QuotaExceededError):
                await self.free()
            if self.random.random() < 0.1:
                await self.settle()
        for sequence_id in self.ids(swapped=False):
            await self.read_one(sequence_id)
        await self.settle()

    async def settle(self) -> None:
        tasks, self.tasks = self.tasks, []
        await asyncio.gather(*tasks)

    async def begin(self, call: Coroutine[Any, Any, None]) -> None:
        """Run until the operation has been submitted."""
        self.tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0)

    def ids(self, *, swapped: bool) -> list[int]:
        return [sequence_id for sequence_id, one in self.sequences.items() if one.swapped == swapped]

    def some(self, *, swapped: bool = False) -> list[int]:
        ids = self.ids(swapped=swapped)
        return self.random.sample(ids, min(len(ids), self.random.randint(1, 3)))

    async def new(self) -> None:
        self.newest += 1
        tokens = [self.random.randrange(1000) for _ in range(self.random.randint(1, 12))]
        self.manager.allocate(self.space, [AllocationRequest(self.newest, tokens)])
        self.sequences[self.newest] = ModelSequence(tokens, (), 0)
        step = self.manager.open_step(self.space, np.array([self.newest]), None)
        await self.send(step, [self.newest])

    async def grow(self) -> None:
        ids = self.some()
        tokens = [self.random.randrange(1000) for _ in ids]
        lengths = np.array([len(self.sequences[n].tokens) for n in ids])
        if not ids or lengths.max() >= 60:
            return
        step = self.manager.append(self.space, np.array(ids), np.array(tokens, np.int32), None, lengths, 0)
        self.engine.copy_on_write(step)
        for n, token in zip(ids, tokens, strict=True):
            self.sequences[n].tokens.append(token)
        await self.send(step, ids)

    async def send(self, step: Any, ids: list[int]) -> None:
        attend = self.random.random() < 0.7
        spans = [(self.sequences[n], len(self.sequences[n].tokens)) for n in ids]
        counts = step.query_lens.tolist()
        for layer in range(NUM_LAYERS):
            whole = [one.kv(layer, 0, length) for one, length in spans]
            key, value = (
                np.concatenate([both[i][-count:] for both, count in zip(whole, counts, strict=True)]) for i in (0, 1)
            )
            call = self.attend(step, layer, key, value, whole) if attend else self.write(step, layer, key, value)
            await self.begin(call)
        for one, length in spans:
            one.computed = length

    async def write(self, step: Any, layer: int, key: Any, value: Any) -> None:
        await self.engine.write(self.space, step.step_id, layer, key, value)

    async def attend(self, step: Any, layer: int, key: Any, value: Any, whole: list[Any]) -> None:
        query = self.queries.standard_normal((len(key), NUM_HEADS, HEAD_SIZE), np.float32)
        output, _ = await self.engine.attend(
            self.space, step.step_id, layer, query, key, value, AttentionOptions(), False
        )
        ends = np.cumsum(step.query_lens)
        parts = np.split(query, ends[:-1])
        expected = [reference_attention(part, *both) for part, both in zip(parts, whole, strict=True)]
        np.testing.assert_allclose(output, np.concatenate(expected), rtol=0, atol=2e-4)

    async def fork(self) -> None:
        ids = self.some()[:1]
        if ids and len(self.sequences) < 10:
            self.newest += 1
            self.manager.fork(self.space, np.array(ids), np.array([self.newest]))
            parent = self.sequences[ids[0]]
            self.sequences[self.newest] = ModelSequence(list(parent.tokens), (), parent.computed)

    async def swap_out(self) -> None:
        await self.swap(swapped=False)

    async def swap_in(self) -> None:
        await self.swap(swapped=True)

    async def swap(self, *, swapped: bool) -> None:
        ids = self.some(swapped=swapped)
        if ids:
            (self.engine.swap_in if swapped else self.engine.swap_out)(self.space, np.array(ids))
            for n in ids:
                self.sequences[n].swapped = not swapped

    async def free(self) -> None:
        ids = self.some(swapped=self.random.random() < 0.3)
        if ids:
            self.manager.free(self.space, np.array(ids))
            for n in ids:
                del self.sequences[n]

    async def read(self) -> None:
        for n in self.some()[:1]:
            await self.read_one(n)

    async def read_one(self, sequence_id: int) -> None:
        one = self.sequences[sequence_id]
        expected = [one.kv(layer, 0, one.computed) for layer in range(NUM_LAYERS)]
        await self.begin(self.compare(sequence_id, expected, one.computed))

    async def compare(self, sequence_id: int, expected: list[Any], length: int) -> None:
        key, value = await self.engine.read(self.space, [(sequence_id, 0, length)], None)
        np.testing.assert_array_equal(key, np.stack([both[0] for both in expected]))
        np.testing.assert_array_equal(value, np.stack([both[1] for both in expected]))
