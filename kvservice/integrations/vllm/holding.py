"""The blocks of vLLM's pool that are being saved, and those that wait for it.

Only a part of the pool is held. Other blocks wait, and are held later if vLLM still has them in its prefix cache. A
step may offer hundreds of blocks, so their keys stay together in bytes. Nothing here is done by numpy: it would take
longer in a step that has not called it for a while, and gives the interpreter lock away for larger arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvservice.client.store.values import KEY_BYTES, some_keys

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

    def part(self, first: int, stop: int) -> Offer:
        """Return those from `first` to `stop`."""
        part = slice(first, stop)
        hashes, ids = some_keys(self.hashes, part), self.block_ids[part]
        return Offer(some_keys(self.keys, part), hashes, ids, self.groups[part], self.is_shared)

    def at(self, places: Sequence[int]) -> Offer:
        """Return those at some places."""
        if len(places) == len(self.block_ids):
            return self
        keys, hashes = (b"".join([of[KEY_BYTES * i : KEY_BYTES * i + KEY_BYTES] for i in places]) for of in self[:2])
        ids, groups = [self.block_ids[i] for i in places], bytes([self.groups[i] for i in places])
        return Offer(keys, hashes, ids, groups, self.is_shared)

    def without(self, block_ids: set[int]) -> Offer:
        """Return those that are not among these."""
        return self.at([i for i, block_id in enumerate(self.block_ids) if block_id not in block_ids])


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
        # more: the number of its part is there for each block that does.
        self._waiting: dict[int, Offer] = {}
        self._part_of: dict[int, int] = {}
        self._num_parts = 0

    @property
    def holds(self) -> bool:
        return bool(self._saves)

    @property
    def waits(self) -> bool:
        return bool(self._part_of)

    def is_cached(self, block_id: int, block_hash: bytes, group: int) -> bool:
        """Whether a block has what belongs to this hash: vLLM's prefix cache has it, wherever it was used before."""
        return bool(self._pool.blocks[block_id].block_hash == self._name_of(block_hash, group))

    def choose(self, offers: Sequence[Offer]) -> tuple[bytes, list[int], int]:
        """Return keys and numbers of the blocks for which there is room, first those that wait for it, then these; and
        how many that waited are not there any more. The others wait. Shared ones that are held already are left out.
        It would be harmless, but useless, to hold and save a block twice."""
        block_ids, room, num_gone = _block_ids(offers), min(self._room(), HELD_AT_ONCE), 0
        self._end_waiting(block_ids)
        if any(offer.is_shared for offer in offers):
            seen, distinct = self._held(), set(block_ids)
            if len(distinct) < len(block_ids) or not seen.isdisjoint(distinct):
                offers = [_new(offer, seen) for offer in offers]
                block_ids = _block_ids(offers)
        if self.waits and room:
            waited, num_gone = self._waited(min(room, AT_ONCE))
            offers = [*waited, *offers]
            block_ids = _block_ids(offers)
        if len(block_ids) > room:
            offers = self._fitting(offers, room)
            block_ids = _block_ids(offers)
        return b"".join([offer.keys for offer in offers]), block_ids, num_gone

    def _fitting(self, offers: Sequence[Offer], room: int) -> list[Offer]:
        """Return the first `room` blocks, and let the others wait."""
        chosen = []
        for offer in offers:
            chosen.append(offer.part(0, room))
            self.wait(offer.part(room, len(offer.block_ids)))
            room -= len(chosen[-1].block_ids)
        return chosen

    def _held(self) -> set[int]:
        return set(itertools.chain.from_iterable([ids for _, ids, _ in self._saves.values()]))

    def _waited(self, most: int) -> tuple[list[Offer], int]:
        """Take some of the first `most` blocks that wait; see `choose`. As many blocks stay free as may be held for
        saves alone, or half of all."""
        num_free, num_blocks = int(self._pool.get_num_free_blocks()), int(self._pool.num_gpu_blocks)
        num_spare, num_gone = max(num_free - min(self.most, num_blocks // 2), 0), 0
        waited: list[Offer] = []
        for number, part in list(self._waiting.items()):
            stop = 0
            taken: list[int] = []
            stay: list[int] = []
            for place, block_id in enumerate(part.block_ids):
                if not most:
                    break
                stop = place + 1
                if self._part_of.get(block_id) != number:
                    continue  # it does not wait any more
                most -= 1
                is_free = not self._pool.blocks[block_id].ref_cnt
                if not self._has(part, place):
                    num_gone += 1
                elif is_free and not num_spare:
                    stay.append(place)
                    continue
                else:
                    num_spare -= is_free
                    taken.append(place)
                del self._part_of[block_id]
            if taken:
                waited.append(part.at(taken))
            left = _joined(part.at(stay), part.part(stop, len(part.block_ids)))
            if left.block_ids:
                self._waiting[number] = left
            else:
                del self._waiting[number]
            if not most:
                break
        return waited, num_gone

    def wait(self, offer: Offer) -> None:
        """Let blocks wait for room."""
        if offer.block_ids:
            self._end_waiting(offer.block_ids)
            self._num_parts += 1
            self._waiting[self._num_parts] = offer
            self._part_of.update(dict.fromkeys(offer.block_ids, self._num_parts))

    def taken(self, block_ids: Iterable[int]) -> int:
        """A request has these blocks now. Those of them with its tokens need not wait: it offers them itself. Returns
        how many waited and are not there any more."""
        numbers = {block_id: self._part_of[block_id] for block_id in block_ids if block_id in self._part_of}
        num_gone = 0
        for number in set(numbers.values()):
            part = self._waiting[number]
            for place, block_id in enumerate(part.block_ids):
                if numbers.get(block_id) == number:
                    num_gone += not self._has(part, place)
        self._end_waiting(numbers)
        return num_gone

    def forget_waiting(self) -> None:
        self._waiting.clear()
        self._part_of.clear()

    def _end_waiting(self, block_ids: Iterable[int]) -> None:
        """Let none of these blocks wait any more."""
        if self._part_of:
            for block_id in block_ids:
                self._part_of.pop(block_id, None)
        if not self._part_of:
            self._waiting.clear()

    def _has(self, offer: Offer, place: int) -> bool:
        block_hash = offer.hashes[KEY_BYTES * place : KEY_BYTES * (place + 1)]
        return self.is_cached(offer.block_ids[place], block_hash, offer.groups[place])

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


def _new(offer: Offer, seen: set[int]) -> Offer:
    """Return what is not among those seen before, and is among them from now on."""
    new = offer.without(seen)
    seen.update(new.block_ids)
    return new


def _joined(first: Offer, second: Offer) -> Offer:
    groups = first.groups + second.groups
    ids = first.block_ids + second.block_ids
    return Offer(first.keys + second.keys, first.hashes + second.hashes, ids, groups, first.is_shared)


def _num_unused(blocks: Sequence[Any]) -> int:
    """Return how many held blocks nothing else uses."""
    return [block.ref_cnt for block in blocks].count(1)
