"""Blocks of the pool that are saved in the block store and loaded from it, instead of being computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from kv_model import reference_attention
from manual_clock import ManualClock
from spill_rig import LOOK_S, SIZE, TOKENS, Start, cached, computed, forget, run, save_all, tier_of

from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest
from kvservice.errors import InvalidArgumentError
from kvservice.v1 import blocks_pb2, scheduler_pb2

# ---- saved and loaded


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_evicted_comes_back_byte_by_byte(start_spilling: Start, dtype: str) -> None:
    life = start_spilling(dtype=dtype)

    async def scenario() -> None:
        session = life.open()
        await life.allocate(session, 1, TOKENS)
        step = await life.call(session, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1]))
        shape = (2, 2, len(TOKENS), 2, 32)
        kv = np.random.default_rng(3).normal(size=shape).astype(life.core.engine.tensor_dtype)
        await life.core.engine.write(session.namespace, step.step_id, None, kv[0], kv[1])
        before = await life.read(session, 1, 40)
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        await save_all(life)
        await forget(life)
        assert await cached(life, session, TOKENS, 2) == 40
        np.testing.assert_array_equal(before, await life.read(session, 2, 40))
        life.manager.check_integrity()
        stats = tier_of(life).stats()
        assert (stats.saved_blocks, stats.loaded_blocks, stats.hit_tokens, stats.loading) == (10, 10, 40, 0)
        assert stats.saved_bytes == stats.loaded_bytes == 10 * life.config.layout.block_bytes
        assert (stats.refused, stats.torn, stats.corrupt, stats.slower, stats.crowded) == (0, 0, 0, 0, 0)

    run(scenario())


def test_attention_over_loaded_blocks_is_right(start_spilling: Start) -> None:
    """The output over loaded blocks is that of float64 attention, also with a sliding window and in a fork."""
    with each_row() as row:
        for seed in range(4):
            with row(seed):
                check_attention(start_spilling, seed)


def check_attention(start_spilling: Start, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 100, int(rng.integers(9, 60))).tolist()
    window = int(rng.integers(1, 40))
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        kv = await computed(life, session, tokens)
        await save_all(life)
        await forget(life)
        num_cached = await cached(life, session, tokens, 2)
        assert num_cached == (len(tokens) - 1) // SIZE * SIZE
        await life.call(session, "fork", blocks_pb2.ForkRequest(parent_ids=[2], child_ids=[3]))
        for sequence_id, options in ((2, AttentionOptions()), (3, AttentionOptions(sliding_window=window))):
            opened = blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id])
            step = await life.call(session, "open_step", opened)
            count = len(tokens) - num_cached
            query = rng.standard_normal((count, 4, 32), np.float32)
            key, value = (part[0, num_cached:] for part in kv)
            output, _ = await life.core.engine.attend(
                session.namespace, step.step_id, 0, query, key, value, options, False
            )
            first = len(tokens) - window if options.sliding_window else 0
            for i in range(count):
                stop = num_cached + i + 1
                begin = max(0, stop - window) if first or options.sliding_window else 0
                expected = reference_attention(query[i : i + 1], kv[0, 0, begin:stop], kv[1, 0, begin:stop])
                np.testing.assert_allclose(output[i : i + 1], expected, rtol=1e-4, atol=1e-5)

    run(scenario())


def test_blocks_are_saved_before_they_are_evicted(start_spilling: Start) -> None:
    life = start_spilling(num_blocks=32)

    async def scenario() -> None:
        session = life.open()
        kv = await computed(life, session, TOKENS)
        for i in range(1, 9):
            await computed(life, session, [1000 * i + token for token in TOKENS], i + 1)
            await save_all(life)
        assert life.manager.match_prefix(TOKENS) == 0, "it was evicted"
        assert await cached(life, session, TOKENS, 100) == 40
        np.testing.assert_array_equal(await life.read(session, 100, 40), kv[:, :, :40])

    run(scenario())


def test_a_prefix_that_is_cached_is_continued(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        kv = await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        assert await cached(life, session, TOKENS[:13], 2) == 12
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[2]))
        assert await cached(life, session, TOKENS, 3) == 40
        assert tier_of(life).stats().loaded_blocks == 10
        np.testing.assert_array_equal(await life.read(session, 3, 40), kv[:, :, :40])

    run(scenario())


def test_prompts_with_other_extra_keys_find_nothing(start_spilling: Start) -> None:
    """Tenants whose extra keys differ do not get each other's blocks from below either."""
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        assert await cached(life, session, TOKENS, 1, (0, b"tenant a")) == 0
        step = await life.call(session, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1]))
        await life.write(session, step.step_id, len(TOKENS))
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[1]))
        await save_all(life)
        await forget(life)
        assert await cached(life, session, TOKENS, 2) == 0
        assert await cached(life, session, TOKENS, 3, (0, b"tenant b")) == 0
        assert await cached(life, session, TOKENS, 4, (0, b"tenant a"), (9, b"image")) == 8
        assert await cached(life, session, TOKENS, 5, (0, b"tenant a")) == 40

    run(scenario())


def test_a_pin_brings_its_prefix_back(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS[:40])
        await save_all(life)
        await forget(life)
        pin = await life.call(session, "pin", blocks_pb2.PinRequest(token_ids=TOKENS[:40], ttl_s=60))
        assert pin.num_pinned_tokens == 40
        with pytest.raises(InvalidArgumentError, match="token_ids"):
            await life.call(session, "pin", blocks_pb2.PinRequest(token_ids=[0] * 1000, ttl_s=60))

    run(scenario())


def test_prompts_that_come_at_once_load_once(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session, other = life.open(), life.open("other")
        await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        both = await asyncio.gather(cached(life, session, TOKENS, 2), cached(life, other, [*TOKENS, 7], 2))
        assert list(both) == [40, 40]
        assert tier_of(life).stats().loaded_blocks == 10
        life.manager.check_integrity()

    run(scenario())


def test_allocate_without_anything_below_is_answered_at_once(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        request = AllocationRequest(1, TOKENS)
        slices = life.manager.allocate_in_slices(session.namespace, [request], tier_of(life).before_allocation)
        with pytest.raises(StopIteration):
            next(slices)

    run(scenario())


# ---- not saved, or not loaded


def test_what_is_faster_to_compute_is_computed(start_spilling: Start, clock: ManualClock) -> None:
    life = start_spilling(prefill_tokens_per_s=1e9)

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        load = life.core.device.load_blocks

        async def slowly(*arguments: Any) -> Any:
            clock.advance(1000.0)
            return await load(*arguments)

        life.core.device.load_blocks = slowly  # type: ignore[method-assign]
        assert await cached(life, session, TOKENS, 3) == 40, "the speed of loads is not known"
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[3]))
        await forget(life)
        assert await cached(life, session, TOKENS, 2) == 0
        assert tier_of(life).stats().slower == 10

    run(scenario())


def test_without_one_of_the_parts_there_is_no_tier(start_spilling: Start) -> None:
    without: list[dict[str, Any]] = [{"spill": False}, {"store_gib": 0}, {"enable_prefix_caching": False}]
    assert [start_spilling(**options).pool_tier for options in without] == [None] * 3


def test_blocks_that_are_too_large_for_the_store_stay_in_the_pool(start_spilling: Start) -> None:
    life = start_spilling(
        num_layers=64, num_kv_heads=16, head_size=256, block_size=4, num_blocks=8, max_sequence_tokens=16
    )

    async def scenario() -> None:
        tier = tier_of(life)
        assert tier.namespace.open() is None
        assert await tier.spiller.save_some() == LOOK_S

    run(scenario())


def test_an_idle_pool_is_looked_at_ever_less_often_until_a_prompt_arrives(
    start_spilling: Start, clock: ManualClock
) -> None:
    life = start_spilling()

    async def looks(seconds: float) -> int:
        before = len(seen)
        until = clock.now + seconds
        while clock.now < until:
            clock.advance(0.01)
            for _ in range(4):  # the spiller runs
                await asyncio.sleep(0)
        return len(seen) - before

    async def scenario() -> None:
        session, tier = life.open(), tier_of(life)
        save_some = tier.spiller.save_some

        async def counted() -> float:
            seen.append(clock.now)
            return await save_some()

        tier.spiller.save_some = counted
        task = asyncio.create_task(tier.run())
        assert await looks(10.0) < 12
        assert await looks(10.0) <= 6
        await computed(life, session, TOKENS)
        assert await looks(0.1) >= 2, "it is looked at soon after the pool has changed"
        task.cancel()
        await asyncio.wait([task])

    seen: list[float] = []
    run(scenario())


def test_a_full_pool_loads_what_fits(start_spilling: Start) -> None:
    life = start_spilling(num_blocks=16)

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        await life.allocate(session, 2, [1000 + token for token in range(40)])
        missing = life.manager.loader.missing(np.array(TOKENS, np.int32), {}, np.zeros(0, np.int64), 100)
        assert missing is not None
        await tier_of(life).pool_loader.start([missing], 0, 1.0)
        stats = tier_of(life).stats()
        assert (stats.loaded_blocks, stats.crowded) == (6, 4)
        life.manager.check_integrity()

    run(scenario())


def test_damaged_bytes_are_not_loaded_and_the_value_is_removed(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        kv = await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        store, namespace = life.core.store, tier_of(life).namespace.find()
        assert store is not None
        missing = life.manager.loader.missing(np.array(TOKENS, np.int32), {}, np.zeros(0, np.int64), 100)
        assert missing is not None
        pinned = store.blocks.acquire(namespace, missing.chain_hashes[6])
        memory = np.frombuffer(store.memory.map, np.uint8)
        memory[int.from_bytes(pinned.offsets, "little") + 100] ^= 4
        store.blocks.release(pinned.slots)
        assert await cached(life, session, TOKENS, 2) == 24
        np.testing.assert_array_equal(await life.read(session, 2, 24), kv[:, :, :24])
        assert tier_of(life).stats().corrupt == 1
        assert not store.blocks.lookup(namespace, missing.chain_hashes[6])[0]

    run(scenario())


def test_a_block_that_is_evicted_while_it_is_copied_is_not_saved(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS)
        right = life.core.device.save_blocks
        gate = asyncio.Event()

        async def late(*arguments: Any) -> Any:
            result = await right(*arguments)
            await gate.wait()
            return result

        life.core.device.save_blocks = late  # type: ignore[method-assign]
        saving = asyncio.ensure_future(tier_of(life).spiller.save_some())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        life.manager.reset_prefix_cache()
        gate.set()
        await saving
        stats = tier_of(life).stats()
        assert (stats.saved_blocks, stats.torn) == (0, 10)
        assert life.core.store is not None
        assert life.core.store.blocks.totals().num_reserved == 0

    run(scenario())


# ---- the scheduler


@pytest.mark.parametrize(
    ("num_others", "expected"), [(41, {10: 1, 11: 41}), (9, {11: 9})], ids=["nothing else can run", "a shorter one can"]
)
def test_a_request_waits_for_its_blocks_and_others_pass_it(
    start_spilling: Start, num_others: int, expected: dict[int, int]
) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        await life.call(session, "open_scheduler", scheduler_pb2.OpenSchedulerRequest())
        requests = [
            scheduler_pb2.ScheduledRequest(request_id=10, token_ids=TOKENS, max_tokens=4, width=1),
            scheduler_pb2.ScheduledRequest(
                request_id=11, token_ids=[500 + n for n in range(num_others)], max_tokens=4, width=1
            ),
        ]
        await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=requests))
        batch = await life.call(session, "schedule", scheduler_pb2.ScheduleRequest())
        assert dict(zip(batch.sequence_ids, batch.step.query_lens, strict=True)) == expected
        await tier_of(life).close()
        assert tier_of(life).stats().hit_tokens == 40

    run(scenario())
