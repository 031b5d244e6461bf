"""The blocks of vLLM's pool that are being saved, and those that wait for it.

Only a part of the pool is held. Other blocks wait, and are held later if vLLM still has them in its prefix cache. A
step may offer hundreds of blocks, so they are in arrays: Python would take longer for them than the step has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.client.store.values import KEY_BYTES
from kvservice.integrations.vllm.steps import BlockIds

# How many times as many blocks may be held while requests use them, too. vLLM schedules a step while another computes,
# and hears of a save one step later: the blocks of three steps are held, each of which fills a fifth of a small pool.
# Blocks for which there is no room cost the scheduler three times as much.
SHARED = 8
# The most blocks that one call begins to hold: the tokens of a large step. Of a long prompt that vLLM had itself, the
# others wait.
HELD_AT_ONCE = 1024
# The most of these that waited: vLLM is asked for each.
AT_ONCE = 64
# One block of a save stands for so many: looking at all held blocks would take 0.2 ms of each step.
COUNTED_AS_ONE = 8
# How long vLLM waits for held blocks instead of preempting.
DELAY_S = 1.0

NameOf = Callable[[Any, int], Any]
"""Returns how vLLM calls a block of a group in its prefix cache, from its hash."""


class Offer(NamedTuple):
    """Full blocks of a request that may be saved: their keys and the hashes for which vLLM has them in a group, each
    one after the other. A byte is the number of a group. `is_shared`: other requests may offer some of them, too."""

    keys: bytes
    hashes: bytes
    block_ids: list[int]
    groups: bytes
    is_shared: bool


# Full blocks that may be saved, see Offer.
_KEY = np.dtype(f"V{KEY_BYTES}")
FULL_BLOCK = np.dtype([("key", _KEY), ("hash", _KEY), ("block_id", np.int64), ("group", np.uint8)])
FullBlocks = npt.NDArray[Any]


def full_blocks(offers: Sequence[Offer]) -> FullBlocks:
    """Return the blocks of all offers."""
    block_ids = _block_ids(offers)
    blocks = np.empty(len(block_ids), FULL_BLOCK)
    blocks["key"] = np.frombuffer(b"".join([offer.keys for offer in offers]), _KEY)
    blocks["hash"] = np.frombuffer(b"".join([offer.hashes for offer in offers]), _KEY)
    blocks["block_id"] = block_ids
    blocks["group"] = np.frombuffer(b"".join([offer.groups for offer in offers]), np.uint8)
    return blocks


class PoolBlocks:
    """Blocks of vLLM's pool: references to those that are being saved, by the number of the save that reads them, and
    others that wait until there is room to hold them, the oldest first."""

    def __init__(self, pool: Any, name_of: NameOf, most: float, clock: Callable[[], float]) -> None:
        """Nothing more is held if this part of the pool's blocks would be free otherwise, or a few times as many are
        held together with requests. `pool` is vLLM's BlockPool, in which `name_of` are the hashes of cached blocks."""
        self._pool, self._name_of, self._clock = pool, name_of, clock
        num_blocks = int(pool.num_gpu_blocks)
        self.most = int(num_blocks * most)
        self._most_shared = int(num_blocks * min(SHARED * most, 1.0))
        # By the number of a save: vLLM's blocks, their numbers, and when it began.
        self._saves: dict[int, tuple[list[Any], list[int], float]] = {}
        self._num_held = 0
        # Blocks that wait, in the parts in which they came, by the number of the part. Some of a part do not wait any
        # more. By the number of a block that waits: its part, counted from 1; otherwise 0.
        self._waiting: dict[int, FullBlocks] = {}
        self._part_of = np.zeros(num_blocks, np.int64)
        self._num_parts = self._num_waiting = 0

    @property
    def holds(self) -> bool:
        return bool(self._saves)

    @property
    def waits(self) -> bool:
        return self._num_waiting > 0

    def is_cached(self, block_id: int, block_hash: bytes, group: int) -> bool:
        """Whether a block has what belongs to this hash: vLLM's prefix cache has it, wherever it was used before."""
        return bool(self._pool.blocks[block_id].block_hash == self._name_of(block_hash, group))

    def choose(self, offers: Sequence[Offer]) -> tuple[bytes, list[int], int]:
        """Return keys and numbers of the blocks for which there is room, first those that wait for it, then these; and
        how many that waited are not there any more. The others wait. Shared ones that are held already are left out.
        It would be harmless, but useless, to hold and save a block twice."""
        block_ids, room = _block_ids(offers), min(self._room(), HELD_AT_ONCE)
        is_new = not any(offer.is_shared for offer in offers) or self._are_new(block_ids)
        if is_new and not self.waits and len(block_ids) <= room:
            return b"".join([offer.keys for offer in offers]), block_ids, 0
        blocks, num_gone = full_blocks(offers), 0
        if not is_new:
            _, first = np.unique(blocks["block_id"], return_index=True)
            blocks = blocks[np.sort(first)]
            held = self._held()
            blocks = blocks[np.array([block_id not in held for block_id in blocks["block_id"].tolist()], np.bool_)]
        if self.waits:
            self._end_waiting(blocks["block_id"])
            if room:
                waited, num_gone = self._waited(min(room, AT_ONCE))
                blocks = np.concatenate([waited, blocks])
        self.wait(blocks[room:])
        blocks = blocks[:room]
        return blocks["key"].tobytes(), blocks["block_id"].tolist(), num_gone

    def _are_new(self, block_ids: list[int]) -> bool:
        """Whether none of these is held, and none occurs twice."""
        distinct = set(block_ids)  # numpy would take longer than that in a step that has not called it for a while
        return len(distinct) == len(block_ids) and self._held().isdisjoint(distinct)

    def _held(self) -> set[int]:
        return set(itertools.chain.from_iterable([ids for _, ids, _ in self._saves.values()]))

    def _waited(self, most: int) -> tuple[FullBlocks, int]:
        """Take at most so many blocks that wait; see `choose`. As many blocks stay free as may be held for saves alone,
        or half of all."""
        number, part = next(iter(self._waiting.items()))
        while not len(part := part[self._part_of[part["block_id"]] == number]):
            del self._waiting[number]
            number, part = next(iter(self._waiting.items()))
        blocks = part[:most]
        used = self._blocks(blocks["block_id"].tolist())
        pairs = zip(used, blocks["hash"].tolist(), blocks["group"].tolist(), strict=True)
        is_there = np.array([block.block_hash == self._name_of(key, group) for block, key, group in pairs], np.bool_)
        is_spare = np.array([not block.ref_cnt for block in used], np.bool_) & is_there
        num_free, num_blocks = int(self._pool.get_num_free_blocks()), int(self._pool.num_gpu_blocks)
        num_spare = max(num_free - min(self.most, num_blocks // 2), 0)
        stays = is_spare & (np.cumsum(is_spare) > num_spare)
        self._waiting[number] = np.concatenate([blocks[stays], part[most:]])
        self._end_waiting(blocks["block_id"][~stays])
        return blocks[is_there & ~stays], int((~is_there).sum())

    def wait(self, blocks: FullBlocks) -> None:
        """Let blocks wait for room."""
        if len(blocks):
            self._end_waiting(blocks["block_id"])
            self._num_parts += 1
            self._waiting[self._num_parts] = blocks
            self._part_of[blocks["block_id"]] = self._num_parts
            self._num_waiting += len(np.unique(blocks["block_id"]))

    def taken(self, block_ids: BlockIds) -> int:
        """A request has these blocks now. Those of them with its tokens need not wait: it offers them itself. Returns
        how many waited and are not there any more."""
        block_ids = block_ids[self._part_of[block_ids] > 0]
        num_gone = 0
        for number in set(self._part_of[block_ids].tolist()):
            part = self._waiting[number]
            is_taken = np.isin(part["block_id"], block_ids) & (self._part_of[part["block_id"]] == number)
            named = part[["block_id", "hash", "group"]][is_taken].tolist()
            num_gone += sum(not self.is_cached(block_id, block_hash, group) for block_id, block_hash, group in named)
        self._end_waiting(block_ids)
        return num_gone

    def forget_waiting(self) -> None:
        self._waiting.clear()
        self._part_of[:] = self._num_waiting = 0

    def _end_waiting(self, block_ids: BlockIds) -> None:
        """Let none of these blocks wait any more."""
        waiting = block_ids[self._part_of[block_ids] > 0]
        if len(waiting):
            self._num_waiting -= len(np.unique(waiting))
            self._part_of[waiting] = 0
        if not self._num_waiting:
            self._waiting.clear()

    def _room(self) -> int:
        """Return how many more blocks may be held."""
        shared = max(self._most_shared - self._num_held, 0)
        if not shared or self._num_held < self.most:
            return shared
        num_unused = 0
        for blocks, _, _ in self._saves.values():
            num_unused += min(COUNTED_AS_ONE * _num_unused(blocks[::COUNTED_AS_ONE]), len(blocks))
        return shared if num_unused < self.most else 0

    def hold(self, number: int, block_ids: list[int]) -> None:
        """Hold blocks."""
        blocks = self._blocks(block_ids)
        self._pool.touch(blocks)
        self._saves[number] = blocks, block_ids, self._clock()
        self._num_held += len(blocks)

    def free(self, number: int) -> None:
        """Give the blocks of a save back, if they have not been given back before."""
        if (save := self._saves.pop(number, None)) is not None:
            blocks, _, _ = save
            self._num_held -= len(blocks)
            # As vLLM does it: the last block of a prefix is the first to be evicted.
            self._pool.free_blocks(blocks[::-1])

    def numbers(self, older_than_s: float = 0.0) -> list[int]:
        """Return the saves that have held blocks so long."""
        now = self._clock()
        return [number for number, (_, _, began) in self._saves.items() if now - began >= older_than_s]

    @property
    def delays_others(self) -> bool:
        """Whether a block would be free now if it were not held, and will be soon."""
        now = self._clock()
        return any(now - began < DELAY_S and _num_unused(blocks) for blocks, _, began in self._saves.values())

    def _blocks(self, block_ids: list[int]) -> list[Any]:
        return list(map(self._pool.blocks.__getitem__, block_ids))


def _block_ids(offers: Sequence[Offer]) -> list[int]:
    return list(itertools.chain.from_iterable([offer.block_ids for offer in offers]))


def _num_unused(blocks: Sequence[Any]) -> int:
    """Return how many held blocks nothing else uses."""
    return [block.ref_cnt for block in blocks].count(1)
