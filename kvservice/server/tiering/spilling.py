"""Blocks of the pool are saved in the block store, in this order:

1. those that are evicted soon,
2. those that a prompt has found again,
3. other cached blocks, slowly and only while the store need not evict anything for them.

Nothing waits for that, and the blocks stay free to be evicted or written. A copy that was overtaken by that is thrown
away (kvservice.blocks.loading).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvservice.blocks import BlockManager, PoolCopy
from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.blocks.slices import finish
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.server.loop import Clock, uninterrupted
from kvservice.store import BlockStore, NamespaceIdentity, StoredNamespace
from kvservice.store.index import DONE, PRESENT
from kvservice.store.namespaces import POOL_KEYS
from kvservice.tiers.links import flags_of
from kvservice.tiers.measured import Speed

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
            self._counters.dropped += len(blocks)
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
        refused, namespace = self._counters.refused, self._namespace.open()
        while namespace is not None and self._counters.refused == refused and self._clock.time() < until_s:
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
        began_s, refused = self._clock.time(), self._counters.refused
        await self._save(namespace, blocks)
        if self._counters.refused > refused:
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
        self._counters.refused += int(np.count_nonzero((statuses != DONE) & (statuses != PRESENT)))
        began_s = self._clock.time()
        addresses = np.frombuffer(reserved.offsets, np.uint64) + np.uint64(self._memory)
        checksums = await self._device.save_blocks(copy.blocks[room].astype(np.int32), addresses)
        whole = self._loader.end_copy(copy, room | (statuses == PRESENT))[room]
        slots, keys = np.frombuffer(reserved.slots, np.uint64), np.frombuffer(reserved.keys, "V32")
        self._blocks.abort(slots[~whole].tobytes())
        self._blocks.commit(namespace, slots[whole].tobytes(), keys[whole].tobytes(), checksums[whole].tobytes())
        num_saved = int(np.count_nonzero(whole))
        self._counters.torn += len(whole) - num_saved
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
    """The counters of SpillStats, and the speeds of copies."""

    saved_blocks: int = 0
    saved_bytes: int = 0
    save_s: float = 0.0
    refused: int = 0
    torn: int = 0
    dropped: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    hit_tokens: int = 0
    slower: int = 0
    crowded: int = 0
    corrupt: int = 0
    save_speed: Speed = field(default_factory=Speed)
    load_speed: Speed = field(default_factory=Speed)

    def saved(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.saved_blocks += num_blocks
        self.saved_bytes += num_bytes
        self.save_s += seconds
        if num_bytes:
            self.save_speed.add(num_bytes, seconds)

    def loaded(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.loaded_blocks += num_blocks
        self.loaded_bytes += num_bytes
        self.load_s += seconds
        if num_bytes:
            self.load_speed.add(num_bytes, seconds)
