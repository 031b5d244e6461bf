"""Kept values by key, which hold what has no fixed size: extra keys, pins, lost sequences and saved steps; and the
tables of extra keys and of pins."""

from __future__ import annotations

import heapq
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from kvservice import plain_json
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.pool import CachingBlockPool
from kvservice.blocks.slices import SLICE_BLOCKS
from kvservice.errors import QuotaExceededError, ResourceExhaustedError

_BLOCK_AND_SIZE: Final = struct.Struct("<qI")
_DEADLINE: Final = struct.Struct("<d")
_PIN_ID_BITS: Final = 40
# Pins name, together, each of the blocks that may be pinned at most so often on average.
PINS_PER_BLOCK: Final = 16
# Most bytes of the extra keys that the sequences of a session have together, and those of all sessions.
MAX_SESSION_KEY_BYTES: Final = 64 << 20
MAX_KEY_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class KeptMaps:
    """Maps whose changes survive the process one by one. A plain dict ends with the process.

    extra_keys: by row. pins: by number of the namespace and id of the pin. lost: ids of lost sequences, by number of
    the namespace. steps: saved live steps, by number of the namespace. writers: the processes that fetched the pool for
    writing, by number of the namespace. quarantine: blocks that wait for some of them, see quarantine.py.

    reserve(num_bytes, num_values) makes room for values, so that to set them does not fail. It raises
    ResourceExhaustedError.
    """

    extra_keys: MutableMapping[int, bytes] = field(default_factory=dict)
    pins: MutableMapping[int, bytes] = field(default_factory=dict)
    lost: MutableMapping[int, bytes] = field(default_factory=dict)
    steps: MutableMapping[int, bytes] = field(default_factory=dict)
    writers: MutableMapping[int, bytes] = field(default_factory=dict)
    quarantine: MutableMapping[int, bytes] = field(default_factory=dict)
    reserve: Callable[[int, int], object] = lambda *_: None


def extra_keys_bytes(by_block: Mapping[int, bytes]) -> int:
    """Return the size of what `pack_extra_keys` returns."""
    return sum(map(len, by_block.values())) + _BLOCK_AND_SIZE.size * len(by_block)


def pack_extra_keys(by_block: Mapping[int, bytes]) -> bytes:
    """Encode the extra keys of a row, by block number."""
    if len(by_block) == 1:  # as those of all sequences of a tenant
        ((block, key),) = by_block.items()
        return _BLOCK_AND_SIZE.pack(block, len(key)) + key
    return b"".join(_BLOCK_AND_SIZE.pack(block, len(key)) + key for block, key in by_block.items())


def unpack_extra_keys(data: bytes) -> dict[int, bytes]:
    by_block: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        block, size = _BLOCK_AND_SIZE.unpack_from(data, at)
        at += _BLOCK_AND_SIZE.size + size
        by_block[block] = data[at - size : at]
    return by_block


def pin_key(number: int, pin_id: int) -> int:
    """Return the key of a pin of namespace `number`."""
    return number << _PIN_ID_BITS | pin_id


def split_pin_key(key: int) -> tuple[int, int]:
    """Return (number of the namespace, id of the pin)."""
    return key >> _PIN_ID_BITS, key & (1 << _PIN_ID_BITS) - 1


def pack_pin(deadline: float, blocks: Int64Array) -> bytes:
    """Encode a pin of blocks int64[n] until `deadline`, in seconds of the clock."""
    return _DEADLINE.pack(deadline) + blocks.tobytes()


def unpack_pin(data: bytes) -> tuple[float, Int64Array]:
    return _DEADLINE.unpack_from(data)[0], np.frombuffer(data, np.int64, offset=_DEADLINE.size)


def pack_ids(ids: Iterable[int]) -> bytes:
    """Encode sequence ids."""
    return np.array(sorted(ids), np.int64).tobytes()


def unpack_ids(data: bytes) -> set[int]:
    return set(np.frombuffer(data, np.int64).tolist())


def pack_steps(steps: list[dict[str, Any]]) -> bytes:
    """Encode steps as values of JSON by name."""
    return plain_json.dumps(steps).encode()


def unpack_steps(data: bytes) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads(data)
    return steps


# ---- Extra keys


class ExtraKeyTable:
    """The extra keys of all rows that have some, kept and counted in bytes.

    `by_row` has the keys of a row by block number. The caller does not modify it.
    """

    def __init__(self, kept: KeptMaps) -> None:
        self.by_row: dict[int, dict[int, bytes]] = {}
        self._kept, self._reserve = kept.extra_keys, kept.reserve
        # The namespace's number and the size of each row in `by_row`, and the sums.
        self._sizes: dict[int, tuple[int, int]] = {}
        self._session_sizes: Counter[int] = Counter()
        self._total = 0

    def num_bytes(self, rows: Iterable[int]) -> int:
        """Return how many bytes the extra keys of these rows have, those of each row counted."""
        sizes = self._sizes
        return sum(sizes[row][1] for row in rows if row in sizes) if sizes else 0

    def require(
        self, number: int, count: int, num_bytes: int, field: str, *, shared: bool = False, dropped: int = 0
    ) -> None:
        """Make room for the extra keys of `count` rows of namespace `number`, of so many bytes together, before an
        operation changes anything. `shared`: they are those of other rows. `dropped` bytes of others are replaced.
        Raises QuotaExceededError if the session would have too many, and ResourceExhaustedError."""
        if self._session_sizes[number] + num_bytes - dropped > MAX_SESSION_KEY_BYTES:
            raise QuotaExceededError(
                f"the extra keys of the session's sequences would have more than {MAX_SESSION_KEY_BYTES} bytes",
                field=field, limit="extra_keys", value=MAX_SESSION_KEY_BYTES,
            )  # fmt: skip
        if self._total + num_bytes - dropped > MAX_KEY_BYTES:
            raise ResourceExhaustedError(
                f"the extra keys of all sequences would have more than {MAX_KEY_BYTES} bytes", field=field
            )
        self._reserve(0 if shared else num_bytes, count)

    def set(self, row: int, number: int, by_block: dict[int, bytes], like: int | None = None) -> None:
        """Set the extra keys of a row of namespace `number`, by block number. Row `like` has the same ones."""
        packed = pack_extra_keys(by_block) if like is None else self._kept[like]
        self._kept[row] = packed
        self.by_row[row] = by_block
        self._count(row, number, len(packed))

    def _count(self, row: int, number: int, num_bytes: int) -> None:
        before, size = self._sizes.pop(row, (number, 0))
        self._session_sizes[before] -= size
        self._session_sizes[number] += num_bytes
        self._total += num_bytes - size
        if num_bytes:
            self._sizes[row] = number, num_bytes

    def move(self, rows: list[int], number: int) -> None:
        """Count the extra keys of rows, of which some may have none, for namespace `number` from now on."""
        for row in rows:
            if row in self._sizes:
                self._count(row, number, self._sizes[row][1])

    def drop(self, rows: list[int]) -> None:
        """Remove the extra keys of rows, of which some may have none."""
        for row in rows:
            if self.by_row.pop(row, None) is not None:
                del self._kept[row]
                self._count(row, 0, 0)

    def recover(self, numbers: Sequence[int]) -> None:
        """Read the extra keys that an earlier process kept, and drop those of free rows. `numbers` has for each row the
        number of its namespace, or 0 if it is free."""
        for row, data in list(self._kept.items()):
            if numbers[row]:
                self.by_row[row] = unpack_extra_keys(data)
                self._count(row, numbers[row], len(data))
            else:
                del self._kept[row]


# ---- Pins


class PinOwner(Protocol):
    """The session namespace of a pin, see state.py."""

    number: int
    pins: dict[int, Int64Array]

    def next_pin_id(self) -> int: ...


class PinTable:
    """The pins of all namespaces: cached prefixes that are kept until the pin expires.

    A pin is not a reference to a block (ref_count counts tables only). It keeps the block in the prefix index and from
    eviction; a sequence that writes into a pinned block gets a copy.

    `counts` int32[num_blocks] is the number of pins of each block, and `num_pinned` the number of blocks with at least
    one. `deadlines` is a heap of (time in seconds of the clock, id of the namespace, pin id, namespace). A pin that was
    removed may still be in it.
    """

    def __init__(self, device: CachingBlockPool, clock: Callable[[], float], kept: MutableMapping[int, bytes]) -> None:
        self.counts = np.zeros(device.num_blocks, np.int32)
        self.num_pinned = 0
        self.num_pins = 0
        # The blocks of all pins, each as often as it is pinned.
        self.num_entries = 0
        self.deadlines: list[tuple[float, int, int, PinOwner]] = []
        self._device, self._clock, self._kept = device, clock, kept

    def add(self, namespace: PinOwner, blocks: Int64Array, ttl_s: float) -> int:
        """Pin these distinct indexed blocks. Returns the id of the pin."""
        pin_id, deadline = namespace.next_pin_id(), self._clock() + ttl_s
        self._kept[pin_key(namespace.number, pin_id)] = pack_pin(deadline, blocks)
        self._add(namespace, pin_id, blocks, deadline)
        return pin_id

    def _add(self, namespace: PinOwner, pin_id: int, blocks: Int64Array, deadline: float) -> None:
        fresh = blocks[~self._device.pinned[blocks]]
        self._device.pin(fresh)
        self.counts[blocks] += 1
        self.num_pinned += len(fresh)
        self.num_pins += 1
        self.num_entries += len(blocks)
        namespace.pins[pin_id] = blocks
        heapq.heappush(self.deadlines, (deadline, id(namespace), pin_id, namespace))

    def remove(self, namespace: PinOwner, pin_id: int) -> int:
        """Remove a pin. Returns the number of blocks that it pinned."""
        blocks = namespace.pins.pop(pin_id)
        del self._kept[pin_key(namespace.number, pin_id)]
        self.counts[blocks] -= 1
        ended = blocks[self.counts[blocks] == 0]
        self.num_pinned -= len(ended)
        self._device.unpin(ended[::-1])
        self.num_pins -= 1
        self.num_entries -= len(blocks)
        return len(blocks)

    def expire(self) -> bool:
        """Remove expired pins, at most one slice of them; later calls remove the rest. Returns whether it removed
        any."""
        now, left = self._clock(), SLICE_BLOCKS
        while left > 0 and self.deadlines and self.deadlines[0][0] <= now:
            _, _, pin_id, namespace = heapq.heappop(self.deadlines)
            if pin_id in namespace.pins:
                left -= self.remove(namespace, pin_id)
        return left < SLICE_BLOCKS

    def recover(self, namespaces: Mapping[int, PinOwner], max_pinned: int) -> None:
        """Pin what the pins of an earlier process pinned, for namespaces by number. A pin ends here if its namespace is
        closed, if one of its blocks left the prefix index, or if more than `max_pinned` blocks would be pinned."""
        for key, data in list(self._kept.items()):
            number, pin_id = split_pin_key(key)
            deadline, blocks = unpack_pin(data)
            num_new = int(np.count_nonzero(~self._device.pinned[blocks]))
            fits = self.num_pinned + num_new <= max_pinned and self.num_pins < max_pinned
            if number in namespaces and fits and self._device.indexed[blocks].all():
                self._add(namespaces[number], pin_id, blocks, deadline)
            else:
                del self._kept[key]

    def forget_removed(self) -> None:
        """Drop the deadlines of removed pins when they are the most, so that the heap stays small."""
        if len(self.deadlines) > 2 * self.num_pins + 64:
            self.deadlines = [entry for entry in self.deadlines if entry[2] in entry[3].pins]
            heapq.heapify(self.deadlines)
