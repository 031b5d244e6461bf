"""Blocks of the pool that are saved in the block store and loaded from it and from tiers below, instead of computed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life, caller
from fake_tier import FakeTier
from kept_files import HeldFiles, at_every_line
from kv_model import reference_attention
from manual_clock import ManualClock

from kvservice.attention_options import AttentionOptions
from kvservice.blocks import AllocationRequest
from kvservice.config import ServeConfig
from kvservice.config_sources import load_config
from kvservice.errors import InvalidArgumentError
from kvservice.server import spilling
from kvservice.server.pool_namespace import pool_identity
from kvservice.server.store_calls import identity_of
from kvservice.store.namespaces import POOL_KEYS
from kvservice.tiers import TierChain
from kvservice.v1 import blocks_pb2, scheduler_pb2, store_pb2

SIZE = 4
TOKENS = list(range(41))
# Loads are always worth it.
SLOW = {"prefill_tokens_per_s": 1.0}
Start = Callable[..., Life]


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    clock = ManualClock()
    yield clock
    clock.close()


@pytest.fixture
def start(clock: ManualClock) -> Iterator[Start]:
    """Start processes of a daemon. Without `held` each has empty memory, as after a reboot."""
    opened: list[Life] = []

    def start_one(held: HeldFiles | None = None, **options: Any) -> Life:
        opened.append(Life(held or HeldFiles(), clock, **SLOW | options))
        return opened[-1]

    yield start_one
    for life in opened:
        life.kill()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def tier_of(life: Life) -> Any:
    assert life.pool_tier is not None
    return life.pool_tier


def add_tier(life: Life, tier: FakeTier, clock: ManualClock) -> None:
    """Put a tier below the store of a daemon."""
    store = life.core.store
    assert store is not None
    tier._memory = store.memory.map
    object.__setattr__(store, "chain", TierChain(store.blocks, [tier], clock))
    again = type(tier_of(life))(life.config, life.core.engine, store, clock)
    vars(tier_of(life)).update(vars(again))


async def save_all(life: Life) -> None:
    """Save everything that is to be saved."""
    while await tier_of(life).spiller.save_some() != spilling.LOOK_S:
        pass


async def forget(life: Life) -> None:
    """Let the pool evict everything."""
    life.manager.reset_prefix_cache()


async def computed(life: Life, session: Any, tokens: list[int], sequence_id: int = 1) -> Any:
    """Compute a sequence, read it back, and free it. Returns its K/V."""
    kv = await life.compute(session, sequence_id, tokens, seed=tokens[0])
    await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[sequence_id]))
    return kv


async def cached(life: Life, session: Any, tokens: list[int], sequence_id: int, *keys: tuple[int, bytes]) -> int:
    """Allocate a sequence. Returns how many of its tokens are cached."""
    extra = [blocks_pb2.ExtraKey(position=at, key=key) for at, key in keys]
    one = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=tokens, extra_keys=extra)
    response = await life.call(session, "allocate", blocks_pb2.AllocateRequest(sequences=[one]))
    count: int = response.num_cached_tokens[0]
    return count


# ---- saved and loaded


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_evicted_comes_back_byte_by_byte(start: Start, dtype: str) -> None:
    life = start(dtype=dtype)

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


@pytest.mark.parametrize("seed", range(4))
def test_attention_over_loaded_blocks_is_right(start: Start, seed: int) -> None:
    """The output over loaded blocks is that of float64 attention, also with a sliding window and in a fork."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 100, int(rng.integers(9, 60))).tolist()
    window = int(rng.integers(1, 40))
    life = start()

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


def test_blocks_are_saved_before_they_are_evicted(start: Start) -> None:
    life = start(num_blocks=32)

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


def test_a_prefix_that_is_cached_is_continued(start: Start) -> None:
    life = start()

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


def test_prompts_with_other_extra_keys_find_nothing(start: Start) -> None:
    """Tenants whose extra keys differ do not get each other's blocks from below either."""
    life = start()

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


def test_a_pin_brings_its_prefix_back(start: Start) -> None:
    life = start()

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


def test_prompts_that_come_at_once_load_once(start: Start) -> None:
    life = start()

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


# ---- not saved, or not loaded


def test_what_is_faster_to_compute_is_computed(start: Start) -> None:
    life = start(prefill_tokens_per_s=1e9)

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        tier_of(life)._counters.load_speed.add(1, 1.0)
        assert await cached(life, session, TOKENS, 2) == 0
        assert tier_of(life).stats().slower == 10

    run(scenario())


@pytest.mark.parametrize("options", [{"spill": False}, {"store_gib": 0}, {"enable_prefix_caching": False}])
def test_without_one_of_the_parts_there_is_no_tier(start: Start, options: dict[str, Any]) -> None:
    assert start(**options).pool_tier is None


def test_blocks_that_are_too_large_for_the_store_stay_in_the_pool(start: Start) -> None:
    life = start(num_layers=64, num_kv_heads=16, head_size=256, block_size=4, num_blocks=8, max_sequence_tokens=16)

    async def scenario() -> None:
        tier = tier_of(life)
        assert tier.namespace.open() is None
        assert await tier.spiller.save_some() == spilling.LOOK_S

    run(scenario())


def test_a_full_pool_loads_what_fits(start: Start) -> None:
    life = start(num_blocks=16)

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


def test_damaged_bytes_are_not_loaded_and_the_value_is_removed(start: Start) -> None:
    life = start()

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


def test_a_block_that_is_evicted_while_it_is_copied_is_not_saved(start: Start) -> None:
    life = start()

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


# ---- reset


def test_what_is_reset_does_not_come_back(start: Start, clock: ManualClock) -> None:
    life = start(weights="w")
    tier = FakeTier(None)

    async def scenario() -> None:
        add_tier(life, tier, clock)
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        namespace = tier_of(life).namespace.find()
        missing = life.manager.loader.missing(np.array(TOKENS, np.int32), {}, np.zeros(0, np.int64), 100)
        keys = b"".join(life.manager.loader.chain_hashes(np.flatnonzero(life.manager.state.device.indexed)))
        assert missing is not None
        assert (await life.core.store.chain.put(namespace, keys)).all()  # type: ignore[union-attr]
        assert len(tier.values) == 10
        await life.call(session, "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        assert tier.values == {}
        assert await cached(life, session, TOKENS, 2) == 0

    run(scenario())


def test_a_load_that_a_reset_overtakes_is_not_published(start: Start) -> None:
    life = start()

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        right, gate, began = life.core.device.load_blocks, asyncio.Event(), asyncio.Event()

        async def late(*arguments: Any) -> Any:
            began.set()
            await gate.wait()
            return await right(*arguments)

        life.core.device.load_blocks = late  # type: ignore[method-assign]
        loading = asyncio.ensure_future(cached(life, session, TOKENS, 2))
        await began.wait()
        await life.call(session, "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        gate.set()
        assert await loading == 0
        life.manager.check_integrity()

    run(scenario())


# ---- restarts and tiers below


def test_after_a_kill_what_was_saved_is_loaded(start: Start) -> None:
    held = HeldFiles()
    life = start(held)

    async def before() -> Any:
        session = life.open()
        kv = await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        return kv

    kv = run(before())
    life.kill()
    after = start(held)

    async def then() -> None:
        session = after.open()
        assert await cached(after, session, TOKENS, 2) == 40
        np.testing.assert_array_equal(await after.read(session, 2, 40), kv[:, :, :40])

    run(then())
    held.close()


@pytest.mark.parametrize("weights", ["w", ""])
def test_after_a_reboot_named_weights_come_from_the_tier_below(start: Start, clock: ManualClock, weights: str) -> None:
    tier = FakeTier(None)
    life = start(weights=weights)

    async def before() -> Any:
        add_tier(life, tier, clock)
        session = life.open()
        kv = await computed(life, session, TOKENS)
        keys = b"".join(life.manager.loader.chain_hashes(np.flatnonzero(life.manager.state.device.indexed)))
        await save_all(life)
        await life.core.store.chain.put(tier_of(life).namespace.find(), keys)  # type: ignore[union-attr]
        return kv

    kv = run(before())
    rebooted = start(weights=weights)

    async def then() -> None:
        add_tier(rebooted, tier, clock)
        session = rebooted.open()
        assert await cached(rebooted, session, TOKENS, 2) == (40 if weights else 0)
        if weights:
            np.testing.assert_array_equal(await rebooted.read(session, 2, 40), kv[:, :, :40])

    run(then())


def test_a_tier_that_fails_is_a_miss(start: Start, clock: ManualClock) -> None:
    tier = FakeTier(None)
    tier.faults = {"lookup", "get"}
    life = start(weights="w")

    async def scenario() -> None:
        add_tier(life, tier, clock)
        session = life.open()
        assert await cached(life, session, TOKENS, 1) == 0
        assert tier.calls["lookup"] == 1

    run(scenario())


def test_killed_at_every_line_of_a_save_and_a_load(start: Start) -> None:
    held = HeldFiles()
    life = start(held)
    states: dict[tuple[tuple[str, bytes], ...], None] = {}
    files = ("server/spilling.py", "server/pool_loading.py", "blocks/loading.py", "store/store.py")

    async def scenario() -> Any:
        session = life.open()
        kv = await computed(life, session, TOKENS[:21])
        with at_every_line(files, lambda: states.setdefault(held.content())):
            await save_all(life)
            await forget(life)
            assert await cached(life, session, TOKENS[:21], 2) == 20
        return kv

    kv = run(scenario())
    assert len(states) >= 8
    for state in states:
        copies = HeldFiles.of(state)
        again = start(copies)

        async def then(again: Life = again) -> None:
            again.manager.check_integrity()
            session = again.open()
            num_cached = await cached(again, session, TOKENS[:21], 3)
            np.testing.assert_array_equal(await again.read(session, 3, num_cached), kv[:, :, :num_cached])
            assert again.core.store is not None
            assert again.core.store.blocks.totals().num_reserved == 0

        run(then())
        copies.close()
    held.close()


# ---- the scheduler


@pytest.mark.parametrize(
    ("num_others", "expected"), [(41, {10: 1, 11: 41}), (9, {11: 9})], ids=["nothing else can run", "a shorter one can"]
)
def test_a_request_waits_for_its_blocks_and_others_pass_it(
    start: Start, num_others: int, expected: dict[int, int]
) -> None:
    life = start()

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


# ---- whose blocks


def test_every_option_that_the_bytes_depend_on_is_in_the_identity(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text('{"k_scale": 0.5, "v_scale": 0.5}')
    base: dict[str, Any] = {"weights": "w", "store_gib": 1}
    changes: list[dict[str, Any]] = [
        {}, {"weights": "v"}, {"num_layers": 31}, {"num_kv_heads": 4}, {"head_size": 64}, {"dtype": "float16"},
        {"block_size": 32}, {"device": "cuda", "kv_cache_dtype": "fp8_e4m3"},
        {"device": "cuda", "kv_cache_dtype": "fp8_e5m2"},
        {"device": "cuda", "kv_cache_dtype": "fp8_e5m2", "kv_scales": str(scales)}, {"weights": ""},
    ]  # fmt: skip
    identities = [pool_identity(ServeConfig(**base | change)) for change in changes]
    assert len(set(identities)) == len(changes)
    assert [one.outlives_daemon for one in identities] == [True] * (len(changes) - 1) + [False]
    assert pool_identity(ServeConfig(**base | {"pool_gib": 3, "max_sequences": 3})) == identities[0]
    assert all(
        value
        for name, value in dataclasses.asdict(identities[0]).items()
        if name not in ("tenant", "tp_rank", "pp_rank")
    )


def test_a_snapshot_directory_names_the_weights(tmp_path: Path) -> None:
    directory = tmp_path / "models--org--small-model" / "snapshots" / "0123abc"
    directory.mkdir(parents=True)
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}
    (directory / "config.json").write_text(str(config).replace("'", '"'))
    for path in (directory, directory / "config.json"):
        loaded = load_config({"model": str(path)}, {})
        assert loaded.weights == "org/small-model@0123abc"
        assert pool_identity(loaded).model == "org/small-model"
    assert load_config({"model": str(directory), "weights": "mine"}, {}).weights == "mine"
    other = tmp_path / "plain"
    other.mkdir()
    (other / "config.json").write_text((directory / "config.json").read_text())
    loaded = load_config({"model": str(other)}, {})
    assert loaded.weights == ""
    assert pool_identity(loaded).model == "plain"


def test_clients_cannot_open_the_namespace_of_the_pool() -> None:
    message = store_pb2.StoreNamespace(model="m", block_bytes=4096, key_algorithm=POOL_KEYS)
    with pytest.raises(InvalidArgumentError, match="daemon's own") as caught:
        identity_of(message, "")
    assert caught.value.field == "namespace.key_algorithm"


def test_sessions_of_all_callers_share_as_the_pool_does(start: Start) -> None:
    life = start()

    async def scenario() -> None:
        with caller("a"):
            session = life.open("a", tenant="a")
            await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        with caller("b"):
            other = life.open("b", tenant="b")
            assert await cached(life, other, TOKENS, 2) == 40

    run(scenario())


def test_allocate_without_anything_below_is_answered_at_once(start: Start) -> None:
    life = start()

    async def scenario() -> None:
        session = life.open()
        request = AllocationRequest(1, TOKENS)
        slices = life.manager.allocate_in_slices(session.namespace, [request], tier_of(life).before_allocation)
        with pytest.raises(StopIteration):
            next(slices)

    run(scenario())
