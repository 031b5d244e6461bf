"""The pool and the tiers below it: blocks are saved in the block store, and loaded from there before they are computed.

Allocate, Pin, Schedule ─▶ PoolTier ─▶ PoolLoader ─▶ TierChain or BlockStore ─▶ Device.load_blocks ─▶ Loader
cached blocks ─▶ Spiller ─▶ Device.save_blocks ─▶ BlockStore ─▶ what its tiers do with values
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvservice.blocks import BlockManager, Loader, MissingBlocks, PoolCopy, SessionNamespace, Slices
from kvservice.blocks.allocation import NewSequence
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.blocks.slices import Waits, finish
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.engine import CacheEngine
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.server.loop import Clock, SystemClock, uninterrupted
from kvservice.server.tiering.store import ServerStore
from kvservice.store import BlockStore, NamespaceIdentity, StoredNamespace
from kvservice.store.index import DONE, KEY_BYTES, PRESENT
from kvservice.store.namespaces import POOL_KEYS
from kvservice.store.store import Pinned
from kvservice.tiers import TierChain
from kvservice.tiers.links import flags_of
from kvservice.tiers.measured import Speed
from kvservice.tiers.protocol import SpillStats

logger = logging.getLogger(__name__)

# Estimates of an engine that nobody has measured, rather fast than slow: tokens of prompts, and bytes of K/V that it
# computes in a second.
_TOKENS_PER_S: Final = 50_000
_BYTES_PER_S: Final = 4e9
# Sequences of one request whose missing blocks are looked up.
_MAX_SEQUENCES: Final = 256


class PromptLoad(NamedTuple):
    """A load of a prompt's missing blocks: the hash of the first one, and its end."""

    chain_hash: bytes
    done: asyncio.Future[object]


class PoolTier:
    """Both directions, and what handlers and the daemon need of them."""

    def __init__(
        self, config: ServeConfig, engine: CacheEngine, store: ServerStore, clock: Clock | None = None
    ) -> None:
        manager, clock = engine.manager, clock or SystemClock()
        self._loader, self._store = manager.loader, store
        self._fixed_token_s = 1 / config.prefill_tokens_per_s if config.prefill_tokens_per_s else 0.0
        self._estimated_token_s = max(1 / _TOKENS_PER_S, config.layout.token_bytes / _BYTES_PER_S)
        self._counters = SpillCounters()
        self.namespace = PoolNamespace(pool_identity(config), store.blocks)
        memory = store.memory.address
        self.spiller = Spiller(
            manager,
            engine.device,
            store.blocks,
            memory,
            self.namespace,
            self._counters,
            clock,
        )
        self.pool_loader = PoolLoader(
            manager.loader,
            engine.device,
            store.blocks,
            memory,
            store.chain,
            self.namespace,
            self._counters,
            clock,
        )

    def before_allocation(
        self, session: SessionNamespace, sequences: Sequence[NewSequence]
    ) -> Awaitable[object] | None:
        """Load missing blocks of new sequences. Returns what to wait for before they are allocated, or None."""
        self.spiller.note_arrival()
        missing: list[MissingBlocks] = []
        for new in sequences[:_MAX_SEQUENCES]:
            if len(new.found):
                self.spiller.note_used(new.found)
            one = self._loader.missing(new.tokens, new.extra, new.found, MAX_BLOCKS, session.quota)
            if one is not None:
                missing.append(one)
        if not missing:
            return None
        required = sum(new.required - len(new.found) for new in sequences)
        num_kept = max(required - sum(map(len, missing)), 0)
        return self.pool_loader.start(missing, num_kept, self._fixed_token_s or self._estimated_token_s)

    def before_admission(
        self, session: SessionNamespace, tokens: Int32Array, chain_hashes: list[bytes], token_s: float
    ) -> PromptLoad | None:
        """Load missing blocks of a prompt whose chain hashes are known, and whose engine computes a token in `token_s`
        seconds. Returns None if there is nothing to load."""
        self.spiller.note_arrival()
        self.spiller.note_used(self._loader.find(chain_hashes))
        missing = self._loader.missing_of(tokens, chain_hashes, MAX_BLOCKS, session.quota)
        if missing is None:
            return None
        done = self.pool_loader.start([missing], 0, self._fixed_token_s or token_s)
        return None if done is None else PromptLoad(missing.chain_hashes[0], done)

    def before_pin(
        self, session: SessionNamespace, tokens: Int32Array, extra_keys: Sequence[tuple[int, bytes]]
    ) -> Awaitable[object] | None:
        """Load missing blocks of a prefix. Returns what to wait for, or None. Raises InvalidArgumentError."""
        missing = self._loader.missing_prefix(tokens, extra_keys, MAX_BLOCKS, session.quota)
        token_s = self._fixed_token_s or self._estimated_token_s
        return None if missing is None else self.pool_loader.start([missing], 0, token_s)

    def reset(self, reset_pool: Slices[int]) -> Waits[int]:
        """Reset the prefix cache of the pool, and remove all its blocks from the tiers below, so that none comes
        back."""
        self.pool_loader.reset()
        namespace, chain = self.namespace.open(), self._store.chain
        begun = [] if chain is None or namespace is None else chain.begin_clear(namespace)
        num_freed = yield from reset_pool
        if namespace is not None:
            yield from self._store.blocks.clear_in_slices(namespace)
        self.pool_loader.reset()
        self._loader.forget_copied()
        if chain is not None:
            yield asyncio.ensure_future(chain.finish_clear(begun))
        return num_freed

    async def run(self) -> None:
        """Save blocks until the task is cancelled."""
        await self.spiller.run()

    async def flush(self, limit_s: float) -> None:
        """Save all cached blocks that may outlive the daemon, for at most so many seconds."""
        if self.namespace.identity.outlives_daemon:
            await self.spiller.flush(limit_s)

    async def close(self) -> None:
        """Wait for the loads in progress."""
        await self.pool_loader.close()

    def stats(self) -> SpillStats:
        """Return counters and gauges."""
        return replace(
            self._counters.stats,
            queued=self.spiller.num_queued,
            loading=self.pool_loader.num_loading,
            save_bytes_per_s=self._counters.save_speed.bytes_per_s,
            load_bytes_per_s=self._counters.load_speed.bytes_per_s,
        )


def open_pool_tier(
    config: ServeConfig, engine: CacheEngine, store: ServerStore | None, clock: Clock | None = None
) -> PoolTier | None:
    """Return the pool's tier. Returns None without a store or a prefix cache, or if the option is off."""
    if store is None or not config.spill or not config.enable_prefix_caching:
        return None
    tier = PoolTier(config, engine, store, clock)
    if store.chain is not None and not tier.namespace.identity.outlives_daemon:
        logger.warning("computed blocks of the pool stay in memory, and go to no tier below: weights has no name")
    return tier


# ---- loading
#
# missing blocks ─▶ in the store's memory, or brought up ─▶ allocated in the pool ─▶ copied, checksums ─▶ found by all

# Blocks of one prompt that are looked up at once.
MAX_BLOCKS: Final = 8192
# A wait of a prompt for a tier, however long computing would take.
MAX_WAIT_S: Final = 30.0


class PoolLoader:
    """Loads missing blocks of prompts, if that takes less time than computing them, by measured speeds."""

    def __init__(
        self,
        loader: Loader,
        device: Device,
        blocks: BlockStore,
        memory: int,
        chain: TierChain | None,
        namespace: PoolNamespace,
        counters: SpillCounters,
        clock: Clock,
    ) -> None:
        """`memory` is the address of the store's memory."""
        self._loader, self._device, self._blocks, self._memory = loader, device, blocks, memory
        self._chain = chain if namespace.identity.outlives_daemon else None
        self._namespace, self._counters, self._clock = namespace, counters, clock
        # The loads in progress, by the hash of their first block.
        self._in_progress: dict[bytes, asyncio.Task[None]] = {}
        self.num_loading = 0
        # Blocks that were loaded before a reset are not published after it.
        self._num_resets = 0

    def reset(self) -> None:
        """Let no load in progress publish its blocks."""
        self._num_resets += 1

    def start(self, missing: Sequence[MissingBlocks], num_kept: int, token_s: float) -> asyncio.Future[object] | None:
        """Load what is missing if that is faster than computing it, at `token_s` seconds for a token. Returns what to
        wait for, or None. `num_kept` blocks stay available."""
        if (namespace := self._namespace.find() if self._chain is None else self._namespace.open()) is None:
            return None
        tasks = [task for one in missing if (task := self._start(namespace, one, num_kept, token_s)) is not None]
        return asyncio.ensure_future(asyncio.wait(tasks)) if tasks else None

    def _start(
        self, namespace: StoredNamespace, missing: MissingBlocks, num_kept: int, token_s: float
    ) -> asyncio.Task[None] | None:
        first = missing.chain_hashes[0]
        if (task := self._in_progress.get(first)) is not None:
            return task
        keys = b"".join(missing.chain_hashes)
        in_memory, _ = self._blocks.lookup(namespace, keys, counted=False)
        if not in_memory and self._chain is None:
            return None
        num_blocks, size = in_memory or len(missing), missing.tokens.shape[1]
        copy_s = self._counters.load_speed.seconds(num_blocks * namespace.block_bytes)
        spare_s = min(num_blocks * size * token_s - copy_s, MAX_WAIT_S)
        if spare_s <= 0:
            self._counters.stats.slower += len(missing)
            return None
        task = asyncio.get_running_loop().create_task(self._load(namespace, missing, keys, num_kept, spare_s))
        self._in_progress[first] = task
        task.add_done_callback(lambda _: self._in_progress.pop(first))
        return task

    async def _load(
        self, namespace: StoredNamespace, missing: MissingBlocks, keys: bytes, num_kept: int, spare_s: float
    ) -> None:
        async with self._brought_up(namespace, keys, spare_s) as pinned:
            if pinned.num_blocks:
                await uninterrupted(self._fill(namespace, missing.first(pinned.num_blocks), pinned, num_kept))

    @contextlib.asynccontextmanager
    async def _brought_up(self, namespace: StoredNamespace, keys: bytes, max_wait_s: float) -> AsyncIterator[Pinned]:
        """Pin the first blocks in the store, within the context."""
        if self._chain is None:
            pinned = self._blocks.acquire(namespace, keys, True, counted=False)
        else:
            pinned = await self._chain.bring_up(namespace, keys, leading_only=True, max_wait_s=max_wait_s)
        try:
            yield pinned
        finally:
            self._blocks.release(pinned.slots)

    async def _fill(self, namespace: StoredNamespace, missing: MissingBlocks, pinned: Pinned, num_kept: int) -> None:
        """Copy pinned values into blocks of the pool, and publish them."""
        load = self._loader.begin_load(missing, num_kept)
        if load is None or len(load) < len(missing):
            self._counters.stats.crowded += len(missing) - (0 if load is None else len(load))
        if load is None:
            return
        count, resets, began_s = len(load), self._num_resets, self._clock.time()
        self.num_loading += count
        try:
            addresses = np.frombuffer(pinned.offsets, np.uint64)[:count] + np.uint64(self._memory)
            checksums = np.frombuffer(self._blocks.checksums(pinned.slots[: 8 * count]), np.uint64)
            right = await self._device.load_blocks(addresses, load.blocks.astype(np.int32), checksums)
        finally:
            self.num_loading -= count
        num_right = int(np.logical_and.accumulate(right).sum())
        num_loaded = self._loader.end_load(load, num_right if resets == self._num_resets else 0)
        self._counters.loaded(num_loaded, num_loaded * namespace.block_bytes, self._clock.time() - began_s)
        self._counters.stats.hit_tokens += num_loaded * missing.tokens.shape[1]
        if num_right < count:
            self._remove_corrupt(namespace, load.missing.chain_hashes, pinned.slots, ~right)

    def _remove_corrupt(
        self, namespace: StoredNamespace, chain_hashes: list[bytes], slots: bytes, wrong: BoolArray
    ) -> None:
        keys = np.frombuffer(b"".join(chain_hashes), np.uint8).reshape(-1, KEY_BYTES)[wrong]
        self._counters.stats.corrupt += len(keys)
        wrong_slots = np.frombuffer(slots, np.uint64)[: len(wrong)][wrong]
        self._blocks.remove_corrupt(namespace, keys.tobytes(), wrong_slots.tobytes())

    async def close(self) -> None:
        """Wait for all loads in progress."""
        while self._in_progress:
            await asyncio.wait(list(self._in_progress.values()))


# ---- blocks of the pool are saved in the block store, in this order:
#
# 1. those that are evicted soon,
# 2. those that a prompt has found again,
# 3. other cached blocks, slowly and only while the store need not evict anything for them.
#
# Nothing waits for that, and the blocks stay free to be evicted or written. A copy that was overtaken by that is thrown
# away (kvservice.blocks.loading).


# The most bytes of blocks that a batch saves, unless one block is larger.
BATCH_BYTES: Final = 8 << 20
# Pauses: between looks at the pool, at first and at most while nothing changes in it, and between two of them if
# prompts arrive; after a batch, as a multiple of its time, if blocks are not short; and after the store had no room.
LOOK_S, UNCHANGED_LOOK_S, BUSY_LOOK_S, USED_PAUSE, IDLE_PAUSE, NO_ROOM_S = 0.05, 2.0, 0.002, 1.0, 4.0, 1.0
# The share of the pool's blocks that are free or have copies, so that allocations evict blocks with a copy.
CLEAN_SHARE: Final = 1 / 4
# The share of the store that blocks without a reason fill.
IDLE_ROOM: Final = 7 / 8
# The time after which it is looked up again whether the store still has a copy.
FORGET_S: Final = 10.0
# Blocks that were used again and wait for their copies.
MAX_QUEUED: Final = 1 << 16


class Spiller:
    """Saves blocks of the pool in the block store, in the background."""

    def __init__(
        self,
        manager: BlockManager,
        device: Device,
        blocks: BlockStore,
        memory: int,
        namespace: PoolNamespace,
        counters: SpillCounters,
        clock: Clock,
    ) -> None:
        """`memory` is the address of the store's memory."""
        self._loader, self._state, self._device = manager.loader, manager, device
        self._blocks, self._memory, self._namespace = blocks, memory, namespace
        self._counters, self._clock = counters, clock
        self._used: deque[Int64Array] = deque()
        self.num_queued = 0
        self._forget_at_s = 0.0
        self._arrival = asyncio.Event()
        # The generation of the pool's state in which no cached block lacked a copy.
        self._idle_generation = -1

    def note_used(self, blocks: Int64Array) -> None:
        """Note that a prompt has found these cached blocks."""
        if self.num_queued + len(blocks) > MAX_QUEUED:
            self._counters.stats.dropped += len(blocks)
            return
        self.num_queued += len(blocks)
        self._used.append(blocks)

    async def run(self) -> None:
        """Save blocks until the task is cancelled."""
        look_s, seen = LOOK_S, -1
        while True:
            seconds = await self.save_some()
            if seconds == LOOK_S:
                if self._state.generation == seen:
                    look_s = min(2 * look_s, UNCHANGED_LOOK_S)
                else:
                    look_s, seen = LOOK_S, self._state.generation
                    await self._pause(BUSY_LOOK_S, asyncio.Event())
                await self._pause(look_s, self._arrival)
                self._arrival.clear()
            else:
                await self._pause(seconds, asyncio.Event())

    async def _pause(self, seconds: float, over: asyncio.Event) -> None:
        """Wait for so many seconds, or until the event."""
        timer = self._clock.call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    def note_arrival(self) -> None:
        """Note that a prompt needs blocks."""
        self._arrival.set()

    async def flush(self, limit_s: float) -> None:
        """Save all cached blocks, those that were used last first, for at most so many seconds or until the store has
        no room."""
        until_s = self._clock.time() + limit_s
        most = max(1, BATCH_BYTES // self._namespace.identity.block_bytes)
        refused, namespace = self._counters.stats.refused, self._namespace.open()
        while namespace is not None and self._counters.stats.refused == refused and self._clock.time() < until_s:
            blocks = self._loader.coldest(self._state.config.num_blocks)[-most:]
            if not len(blocks):
                return
            await self._save(namespace, blocks)

    async def save_some(self) -> float:
        """Save a batch of blocks. Returns the seconds until the next one."""
        blocks, pause = self._next_blocks()
        if not len(blocks):
            return LOOK_S
        namespace = self._namespace.open()
        if namespace is None:
            return NO_ROOM_S
        began_s, refused = self._clock.time(), self._counters.stats.refused
        await self._save(namespace, blocks)
        if self._counters.stats.refused > refused:
            return NO_ROOM_S
        return pause * (self._clock.time() - began_s)

    def _next_blocks(self) -> tuple[Int64Array, float]:
        """Return the blocks to save next, and the pause after them as a multiple of the time that this takes."""
        if (now := self._clock.time()) >= self._forget_at_s:
            self._forget_at_s = now + FORGET_S
            self._loader.forget_copied()
        most = max(1, BATCH_BYTES // self._namespace.identity.block_bytes)
        wanted = int(CLEAN_SHARE * self._state.config.num_blocks) - self._state.device.num_free
        cold = self._loader.coldest(wanted) if wanted > 0 else np.zeros(0, np.int64)
        if len(cold):
            return cold[:most], 0.0 if 2 * len(cold) > wanted else USED_PAUSE
        while self._used:
            blocks = self._used.popleft()
            self.num_queued -= len(blocks)
            if len(blocks := self._loader.uncopied(blocks)):
                if len(rest := blocks[most:]):
                    self._used.appendleft(rest)
                    self.num_queued += len(rest)
                return blocks[:most], USED_PAUSE
        return self._idle_blocks()[:most], IDLE_PAUSE

    def _idle_blocks(self) -> Int64Array:
        """Return cached blocks that lack copies, if the store has plenty of room."""
        nothing = np.zeros(0, np.int64)
        room = IDLE_ROOM * self._blocks.config.capacity_bytes - self._blocks.totals().used_bytes
        if room < BATCH_BYTES or self._state.generation == self._idle_generation:
            return nothing
        blocks = self._loader.coldest(self._state.config.num_blocks, never_copied=True)
        if not len(blocks):
            self._idle_generation = self._state.generation
        return blocks

    async def _save(self, namespace: StoredNamespace, blocks: Int64Array) -> None:
        keys = b"".join(self._loader.chain_hashes(blocks))
        known = flags_of(self._blocks.lookup(namespace, keys, counted=False)[1], len(blocks))
        if known.any():
            self._blocks.touch(namespace, keys)
            self._loader.mark_copied(blocks[known])
        copy = self._loader.begin_copy(blocks[~known])
        if len(copy):
            await uninterrupted(self._copy(namespace, copy))

    async def _copy(self, namespace: StoredNamespace, copy: PoolCopy) -> None:
        """Copy blocks into the store. Those that left the pool meanwhile are not published."""
        reserved = self._blocks.reserve(namespace, b"".join(copy.chain_hashes))
        statuses = np.frombuffer(reserved.statuses, np.uint8)
        room: BoolArray = statuses == DONE
        self._counters.stats.refused += int(np.count_nonzero((statuses != DONE) & (statuses != PRESENT)))
        began_s = self._clock.time()
        addresses = np.frombuffer(reserved.offsets, np.uint64) + np.uint64(self._memory)
        checksums = await self._device.save_blocks(copy.blocks[room].astype(np.int32), addresses)
        whole = self._loader.end_copy(copy, room | (statuses == PRESENT))[room]
        slots, keys = np.frombuffer(reserved.slots, np.uint64), np.frombuffer(reserved.keys, "V32")
        self._blocks.abort(slots[~whole].tobytes())
        self._blocks.commit(namespace, slots[whole].tobytes(), keys[whole].tobytes(), checksums[whole].tobytes())
        num_saved = int(np.count_nonzero(whole))
        self._counters.stats.torn += len(whole) - num_saved
        self._counters.saved(num_saved, num_saved * namespace.block_bytes, self._clock.time() - began_s)


# ---- the namespace of the block store for blocks of the daemon's own pool

# The name of the model if the configuration names none.
UNNAMED = "pool"


def pool_identity(config: ServeConfig) -> NamespaceIdentity:
    """Return the identity of the pool's blocks: everything that their bytes depend on besides their chain hashes.
    Tenants are in the chain hashes, as extra keys, because that is how the pool keeps them apart."""
    layout = config.layout
    sizes = f"{layout.num_layers} layers, {layout.num_kv_heads} heads of {layout.head_size}"
    return NamespaceIdentity(
        model=_model_name(config),
        weights=config.weights,
        dtype=f"{config.dtype}, cache {layout.dtype}, scales {_digest(config.kv_scales)}",
        layout=f"{POOL_KEYS}, {sizes}, blocks of {layout.block_size}",
        block_bytes=layout.block_bytes,
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        key_algorithm=POOL_KEYS,
        tenant="",
    )


def _model_name(config: ServeConfig) -> str:
    """Return the name of the model: what precedes the revision of a snapshot, or the name of its directory."""
    name, _, revision = config.weights.partition("@")
    if revision:
        return name
    path = Path(config.model)
    return (path.parent if path.suffix else path).absolute().name or UNNAMED if config.model else UNNAMED


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else "1"


class PoolNamespace:
    """The namespace, which is opened when it is first needed and stays open."""

    def __init__(self, identity: NamespaceIdentity, blocks: BlockStore) -> None:
        self.identity = identity
        self._blocks = blocks
        self._namespace: StoredNamespace | None = None

    def find(self) -> StoredNamespace | None:
        """Return the namespace if it is open, or if it was kept with the store."""
        if self._namespace is None and any(one.identity == self.identity for one in self._blocks):
            self._namespace = self._blocks.open(self.identity)
        return self._namespace

    def open(self) -> StoredNamespace | None:
        """Open the namespace. Returns None if the store has no place for it, or if its blocks are too large."""
        if self.find() is None:
            try:
                finish(self._blocks.make_place(self.identity))
                self._namespace = self._blocks.open(self.identity)
            except (InvalidArgumentError, QuotaExceededError):
                return None
        return self._namespace


# ---- counters


@dataclass
class SpillCounters:
    """What is counted for SpillStats, and the speeds of copies."""

    stats: SpillStats = field(default_factory=SpillStats)
    save_speed: Speed = field(default_factory=Speed)
    load_speed: Speed = field(default_factory=Speed)

    def saved(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.stats.saved_blocks += num_blocks
        self.stats.saved_bytes += num_bytes
        self.stats.save_s += seconds
        if num_bytes:
            self.save_speed.add(num_bytes, seconds)

    def loaded(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.stats.loaded_blocks += num_blocks
        self.stats.loaded_bytes += num_bytes
        self.stats.load_s += seconds
        if num_bytes:
            self.load_speed.add(num_bytes, seconds)
