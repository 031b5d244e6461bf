"""A model of `_ext.StoreIndex`: the same interface and the same decisions, with dicts and lists and no shared memory.

Tests compare the native class with it. It takes the same slot, victim and slab in each case, so that all results can be
compared, except that versions start at 1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import pairwise

from kvservice.errors import InvalidArgumentError

KEY_BYTES = 32
RECORD_BYTES = 64
PAGE_BYTES = 4096
DONE, PRESENT, BEING_WRITTEN, NO_ROOM = 1, 2, 3, 4
INDEX_BITS = 32


@dataclass(frozen=True)
class Stats:
    """The attributes of `_ext.StoreStats`."""

    num_blocks: int
    num_leased: int
    num_reserved: int
    num_condemned: int
    num_slabs: int
    num_busy_slabs: int
    used_bytes: int
    num_evicted: int
    num_unoffered: int
    num_offered: int


@dataclass(eq=False)
class Block:
    """A slot in use: reserved until it is committed, condemned if its key was removed while it was leased."""

    slab: Slab
    index: int
    key: bytes
    version: int
    checksum: int = 0
    reserved: bool = True
    condemned: bool = False
    pins: int = 0
    used: int = 0
    last_use: int = 0  # as the kept memory has it, which a lease does not change
    uses: int = 0
    used_since_pin: bool = False
    offered: bool = False

    @property
    def number(self) -> int:
        return self.slab.number << INDEX_BITS | self.index

    @property
    def evictable(self) -> bool:
        return not self.reserved and self.pins == 0

    @property
    def order(self) -> tuple[bool, int]:
        """The order of eviction: blocks that were offered go first."""
        return not (self.offered and self.evictable), self.used

    @property
    def offset(self) -> int:
        space = self.slab.space
        return self.slab.start + space.first_block + self.index * space.block_stride


@dataclass(eq=False)
class Slab:
    number: int
    start: int
    space: Namespace
    free: list[int]  # the last one is used first
    blocks: dict[int, Block] = field(default_factory=dict)
    newest: int = 0  # when a block of it was last used, or it last became idle

    @property
    def idle(self) -> bool:
        return all(block.evictable for block in self.blocks.values())


@dataclass(eq=False)
class Namespace:
    number: int
    block_bytes: int
    max_blocks: int
    first_block: int
    block_stride: int
    blocks_per_slab: int
    found: dict[bytes, Block] = field(default_factory=dict)  # reserved ones too
    slabs: list[Slab] = field(default_factory=list)
    with_room: list[Slab] = field(default_factory=list)  # the last one is used first
    num_evicted: int = 0
    num_unoffered: int = 0

    def blocks(self) -> list[Block]:
        return [block for slab in self.slabs for block in slab.blocks.values()]

    def present(self, key: bytes) -> Block | None:
        block = self.found.get(key)
        return None if block is None or block.reserved else block


class StoreModel:
    """See `_ext.StoreIndex` for the methods. `address`, `seed` and `kept` are not used: `recover` of a model in use
    takes the place of a restart."""

    def __init__(self, address: int, num_bytes: int, slab_bytes: int, seed: int, kept: int) -> None:
        del address, seed, kept
        self.slab_bytes = slab_bytes
        self.num_slabs = num_bytes // slab_bytes
        self.num_ready = self.num_slabs
        self.free_slabs = list(reversed(range(self.num_slabs)))  # the last one is used first
        self.spaces: dict[int, Namespace] = {}
        self.next_number = 1
        self.version = 0
        self.tick = 0
        self.recording = False
        self.removed: list[tuple[int, bytes]] = []
        self.closed_evictions = self.closed_unoffered = 0
        self.generation = 0

    def recover(self, namespaces: list[tuple[int, int, int]]) -> tuple[bytes, bytes]:
        sizes = {number: (block_bytes, quota_bytes) for number, block_bytes, quota_bytes in namespaces}
        for number in self.spaces.keys() - sizes.keys():
            self.free_slabs += [slab.number for slab in self.spaces.pop(number).slabs]
        self.free_slabs.sort(reverse=True)
        self.tick = self.closed_evictions = self.closed_unoffered = 0
        self.record_removed(False)
        for space in self.spaces.values():
            block_bytes, quota_bytes = sizes[space.number]
            space.max_blocks, space.num_evicted, space.num_unoffered = quota_bytes // block_bytes, 0, 0
            space.with_room = sorted((slab for slab in space.slabs if slab.free), key=lambda slab: slab.number)
            for slab in space.slabs:
                self.recover_slab(slab)
        blocks = [block for space in self.spaces.values() for block in space.blocks()]
        reserved, condemned = ([b.number for b in blocks if b.reserved], [b.number for b in blocks if b.condemned])
        return pack(reserved), pack(condemned)

    def recover_slab(self, slab: Slab) -> None:
        slab.free.sort(reverse=True)
        slab.newest = 0
        for block in slab.blocks.values():
            block.pins, block.used, block.offered = int(block.condemned), block.last_use, False
            if not block.reserved and not block.condemned:
                slab.newest = max(slab.newest, block.used)
        self.tick = max(self.tick, slab.newest)

    # Namespaces.

    def open(self, block_bytes: int, quota_bytes: int) -> int:
        if not 1 <= block_bytes <= self.slab_bytes - PAGE_BYTES:
            raise InvalidArgumentError("does not fit a slab", field="block_bytes")
        stride = round_up(block_bytes, PAGE_BYTES if block_bytes >= PAGE_BYTES else RECORD_BYTES)
        per_slab = self.slab_bytes // (stride + RECORD_BYTES)
        while round_up(per_slab * RECORD_BYTES, PAGE_BYTES) + per_slab * stride > self.slab_bytes:
            per_slab -= 1
        first_block = round_up(per_slab * RECORD_BYTES, PAGE_BYTES)
        number, self.next_number = self.next_number, self.next_number + 1
        max_blocks = quota_bytes // block_bytes
        self.spaces[number] = Namespace(number, block_bytes, max_blocks, first_block, stride, per_slab)
        return number

    def close(self, namespace: int) -> None:
        if self.spaces[namespace].slabs:
            raise RuntimeError("the namespace has blocks")
        space = self.spaces.pop(namespace)
        self.closed_evictions += space.num_evicted
        self.closed_unoffered += space.num_unoffered

    def set_ready(self, num_bytes: int) -> None:
        self.num_ready = num_bytes // self.slab_bytes
        used = {slab.number for space in self.spaces.values() for slab in space.slabs}
        self.free_slabs = [slab for slab in reversed(range(self.num_ready)) if slab not in used]

    def set_quota(self, namespace: int, quota_bytes: int) -> None:
        self.spaces[namespace].max_blocks = quota_bytes // self.spaces[namespace].block_bytes

    def geometry(self, namespace: int) -> tuple[int, int, int]:
        space = self.spaces[namespace]
        return space.first_block, space.block_stride, space.blocks_per_slab

    # Reading.

    def lookup(self, namespace: int, keys: bytes) -> tuple[int, bytes]:
        space = self.spaces[namespace]
        found = [space.present(key) is not None for key in split(keys)]
        return (found.index(False) if False in found else len(found)), bitmap(found)

    def needed(self, namespace: int, keys: bytes) -> tuple[int, int]:
        space, distinct = self.spaces[namespace], set(split(keys))
        found = [block for key in distinct if (block := space.present(key)) is not None]
        return len(distinct - space.found.keys()), sum(block.pins == 0 for block in found)

    def acquire(
        self, namespace: int, keys: bytes, leading_only: bool, counted: bool = True
    ) -> tuple[bytes, bytes, bytes, bytes]:
        blocks = [self.spaces[namespace].present(key) for key in split(keys)]
        if leading_only and None in blocks:
            first = blocks.index(None)
            blocks[first:] = [None] * (len(blocks) - first)
        leased = [block for block in blocks if block is not None]
        for block in leased:
            self.pin(block)
            block.uses += counted
        return (
            bitmap([block is not None for block in blocks]),
            pack([block.number for block in leased]),
            pack([block.offset for block in leased]),
            pack([block.version for block in leased]),
        )

    def lease(self, slots: bytes) -> None:
        for slot in unpack(slots):
            block = self.block(slot)
            if block.reserved:
                raise RuntimeError("the block is reserved")
            self.pin(block)

    def pin(self, block: Block) -> None:
        block.pins += 1
        block.used_since_pin = True
        if block.pins == 1:
            block.used = self.next_tick()

    def coldest(
        self, namespace: int, most: int, newest_first: bool = False
    ) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        blocks = [block for block in self.spaces[namespace].blocks() if block.evictable and not block.offered]
        blocks = sorted(blocks, key=lambda block: block.used, reverse=newest_first)[:most]
        for block in blocks:
            self.pin(block)
            block.used_since_pin, block.offered = False, True
        return (
            pack([block.number for block in blocks]),
            b"".join(block.key for block in blocks),
            pack([block.offset for block in blocks]),
            pack([block.checksum for block in blocks]),
            pack([block.uses for block in blocks]),
        )

    def release(self, slots: bytes) -> None:
        for slot in reversed(unpack(slots)):
            block = self.block(slot)
            if block.pins == 0:
                raise RuntimeError("the block is not leased")
            block.pins -= 1
            if block.pins:
                continue
            if block.condemned:
                self.free(block)
                self.settle(block.slab)
            elif block.used_since_pin:
                self.use(block)
            else:
                block.used = block.last_use

    def checksums(self, slots: bytes) -> bytes:
        return pack([self.block(slot).checksum for slot in unpack(slots)])

    def places(self, slots: bytes) -> tuple[bytes, bytes]:
        blocks = [self.block(slot) for slot in unpack(slots)]
        return b"".join(block.key for block in blocks), pack([block.offset for block in blocks])

    # Writing.

    def reserve(self, namespace: int, keys: bytes) -> tuple[bytes, bytes, bytes]:
        space = self.spaces[namespace]
        self.touch(namespace, keys)
        statuses = []
        reserved = []
        for key in split(keys):
            known = space.found.get(key)
            if known is not None:
                statuses.append(BEING_WRITTEN if known.reserved else PRESENT)
                continue
            slab = self.find_room(space)
            if slab is None:
                statuses.append(NO_ROOM)
                continue
            statuses.append(DONE)
            reserved.append(self.fill(slab, key))
        return (
            bytes(statuses),
            pack([block.number for block in reserved]),
            pack([block.offset for block in reserved]),
        )

    def commit(self, slots: bytes, checksums: bytes) -> None:
        pairs = list(zip(unpack(slots), unpack(checksums), strict=True))
        for slot, checksum in reversed(pairs):
            block = self.reserved_block(slot)
            block.reserved = False
            block.checksum = checksum
            self.use(block)

    def abort(self, slots: bytes) -> None:
        for slot in unpack(slots):
            block = self.reserved_block(slot)
            del block.slab.space.found[block.key]
            self.free(block)
            self.settle(block.slab)

    def condemn(self, slots: bytes) -> None:
        for slot in unpack(slots):
            block = self.reserved_block(slot)
            del block.slab.space.found[block.key]
            block.reserved, block.condemned, block.pins = False, True, 1

    def touch(self, namespace: int, keys: bytes) -> int:
        blocks = [self.spaces[namespace].present(key) for key in split(keys)]
        for block in reversed(blocks):
            if block is None:
                continue
            block.uses += 1
            block.used_since_pin = True
            if block.pins == 0:
                self.use(block)
        return len(blocks) - blocks.count(None)

    def remove(self, namespace: int, keys: bytes) -> int:
        blocks = [self.spaces[namespace].present(key) for key in dict.fromkeys(split(keys))]
        return self.drop_all([block for block in blocks if block is not None])

    def clear(self, namespace: int, most: int) -> int:
        blocks = [block for block in self.spaces[namespace].found.values() if not block.reserved]
        blocks.sort(key=lambda block: (block.pins > 0, block.order))
        return self.drop_all(blocks[:most])

    def evict_blocks(self, namespace: int, most: int) -> int:
        count = 0
        while count < most and (block := self.oldest(self.spaces[namespace])) is not None:
            self.evict(block)
            self.settle(block.slab)
            count += 1
        return count

    def empty_slabs(self, namespace: int, most_slabs: int, most_blocks: int) -> tuple[int, int]:
        slabs = num_blocks = 0
        for slab in sorted(self.spaces[namespace].slabs, key=lambda slab: slab.newest):
            if slab.idle and slabs < most_slabs and num_blocks < most_blocks:
                slabs, num_blocks = slabs + 1, num_blocks + len(slab.blocks)
                self.empty(slab)
        return slabs, num_blocks

    # Reports.

    def record_removed(self, enabled: bool) -> None:
        self.recording = enabled
        self.removed.clear()

    def take_removed(self) -> list[tuple[int, bytes]]:
        grouped: list[tuple[int, bytes]] = []
        for number, key in self.removed:
            if grouped and grouped[-1][0] == number:
                grouped[-1] = (number, grouped[-1][1] + key)
            else:
                grouped.append((number, key))
        self.removed.clear()
        return grouped

    def stats(self, namespace: int) -> Stats:
        space = self.spaces[namespace]
        blocks = space.blocks()
        return Stats(
            num_blocks=sum(not block.reserved and not block.condemned for block in blocks),
            num_leased=sum(block.pins > 0 for block in blocks),
            num_reserved=sum(block.reserved for block in blocks),
            num_condemned=sum(block.condemned for block in blocks),
            num_slabs=len(space.slabs),
            num_busy_slabs=sum(not slab.idle for slab in space.slabs),
            used_bytes=len(blocks) * space.block_bytes,
            num_evicted=space.num_evicted,
            num_unoffered=space.num_unoffered,
            num_offered=sum(block.evictable and block.offered for block in blocks),
        )

    def totals(self) -> Stats:
        each = [self.stats(number) for number in self.spaces]
        return Stats(
            num_blocks=sum(stats.num_blocks for stats in each),
            num_leased=sum(stats.num_leased for stats in each),
            num_reserved=sum(stats.num_reserved for stats in each),
            num_condemned=sum(stats.num_condemned for stats in each),
            num_slabs=sum(stats.num_slabs for stats in each),
            num_busy_slabs=sum(stats.num_busy_slabs for stats in each),
            used_bytes=sum(stats.used_bytes for stats in each),
            num_evicted=sum(stats.num_evicted for stats in each) + self.closed_evictions,
            num_unoffered=sum(stats.num_unoffered for stats in each) + self.closed_unoffered,
            num_offered=sum(stats.num_offered for stats in each),
        )

    @property
    def num_free_slabs(self) -> int:
        return len(self.free_slabs)

    def check(self, most: int) -> bool:
        """Check all of the model."""
        del most
        slabs = [slab for space in self.spaces.values() for slab in space.slabs]
        used = [slab.number for slab in slabs]
        behind = [slab for slab in range(self.num_ready, self.num_slabs) if slab not in used]
        assert sorted(used + self.free_slabs + behind) == list(range(self.num_slabs))
        for slab in slabs:
            assert slab.blocks
            assert sorted([*slab.blocks, *slab.free]) == list(range(slab.space.blocks_per_slab))
            assert (slab in slab.space.with_room) == bool(slab.free)
        ranges = sorted(
            (block.offset, block.offset + slab.space.block_bytes) for slab in slabs for block in slab.blocks.values()
        )
        assert all(first[1] <= second[0] for first, second in pairwise(ranges))
        return True

    # What the methods share.

    def block(self, slot: int) -> Block:
        number, index = slot >> INDEX_BITS, slot & ((1 << INDEX_BITS) - 1)
        for space in self.spaces.values():
            for slab in space.slabs:
                if slab.number == number and index in slab.blocks:
                    return slab.blocks[index]
        raise RuntimeError("no block has this slot")

    def reserved_block(self, slot: int) -> Block:
        block = self.block(slot)
        if not block.reserved:
            raise RuntimeError("the block is not reserved")
        return block

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    def use(self, block: Block) -> None:
        """Make a block the most recently used, and its slab too."""
        block.used = block.last_use = block.slab.newest = self.next_tick()
        block.offered = False

    def find_room(self, space: Namespace) -> Slab | None:
        """Return a slab of the namespace with a free slot, after an eviction if necessary."""
        if len(space.blocks()) > space.max_blocks and (surplus := self.oldest(space)) is not None:
            self.evict(surplus)
            self.settle(surplus.slab)
        own = self.oldest(space)
        if len(space.blocks()) < space.max_blocks:
            if not space.with_room and not self.free_slabs:
                self.empty_another_slab(space, own)
            if not space.with_room and self.free_slabs:
                self.assign(self.free_slabs.pop(), space)
            if space.with_room:
                return space.with_room[-1]
        if own is None:
            return None
        self.evict(own)
        return own.slab

    def oldest(self, space: Namespace) -> Block | None:
        return min((block for block in space.blocks() if block.evictable), key=lambda block: block.order, default=None)

    def empty_another_slab(self, space: Namespace, own: Block | None) -> None:
        """Evict the slab of another namespace that was least recently used, unless the block `own` is older."""
        others = [slab for other in self.spaces.values() if other is not space for slab in other.slabs if slab.idle]
        oldest = min(others, key=lambda slab: slab.newest, default=None)
        if oldest is None or (own is not None and own.last_use < oldest.newest):
            return
        self.empty(oldest)

    def empty(self, slab: Slab) -> None:
        """Evict all blocks of a slab, and give it back."""
        for _, block in sorted(slab.blocks.items()):
            self.evict(block)
        self.settle(slab)

    def assign(self, number: int, space: Namespace) -> None:
        slab = Slab(number, number * self.slab_bytes, space, list(reversed(range(space.blocks_per_slab))))
        space.slabs.append(slab)
        space.with_room.append(slab)

    def fill(self, slab: Slab, key: bytes) -> Block:
        self.version += 1
        block = Block(slab, slab.free.pop(), key, self.version)
        slab.blocks[block.index] = block
        slab.space.found[key] = block
        if not slab.free:
            slab.space.with_room.remove(slab)
        return block

    def evict(self, block: Block) -> None:
        block.slab.space.num_evicted += 1
        block.slab.space.num_unoffered += not block.offered
        self.drop(block)

    def drop_all(self, blocks: list[Block]) -> int:
        for block in blocks:
            self.drop(block)
            self.settle(block.slab)
        return len(blocks)

    def drop(self, block: Block) -> None:
        """Remove the key of a committed block, and free its slot unless it is leased."""
        space = block.slab.space
        del space.found[block.key]
        if self.recording:
            self.removed.append((space.number, block.key))
        if block.pins:
            block.condemned = True
        else:
            self.free(block)

    def free(self, block: Block) -> None:
        self.version += 1
        slab = block.slab
        was_busy = not block.evictable or block.condemned
        del slab.blocks[block.index]
        slab.free.append(block.index)
        if len(slab.free) == 1:
            slab.space.with_room.append(slab)
        if was_busy and slab.idle:
            slab.newest = self.next_tick()

    def settle(self, slab: Slab) -> None:
        """Give a slab back if it has no blocks."""
        if not slab.blocks:
            slab.space.with_room.remove(slab)
            slab.space.slabs.remove(slab)
            if slab.number < self.num_ready:
                self.free_slabs.append(slab.number)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise InvalidArgumentError("is not a multiple of 32 bytes long", field="keys")
    return [keys[begin : begin + KEY_BYTES] for begin in range(0, len(keys), KEY_BYTES)]


def bitmap(bits: list[bool]) -> bytes:
    packed = bytearray(-(-len(bits) // 8))
    for i, bit in enumerate(bits):
        packed[i // 8] |= bit << (i % 8)
    return bytes(packed)


def pack(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)
