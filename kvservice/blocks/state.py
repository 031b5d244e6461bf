"""The state of a block manager, as one value. The manager's parts have it and share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from typing import Final

import numpy as np

from kvservice.blocks.block_pool import BlockPool, CachingBlockPool
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.events import EventJournal
from kvservice.blocks.intents import Intents
from kvservice.blocks.kept import KeptMaps, pack_ids
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.pins import PinTable
from kvservice.blocks.plans import ArrayMemory, BoolArray, Int32Array, Int64Array, item_view
from kvservice.blocks.sequences import SequenceSlots
from kvservice.blocks.stats import BlockCounters
from kvservice.errors import UnknownSessionError

# The steps that the lanes of a session may finish before the event loop commits them. If there are more, a process that
# takes over does not know of the first ones.
NUM_FINISHED: Final = 64


class BlockState:
    """Block pools of both tiers, sequence slots, pins, namespaces and counters. One thread uses it, the daemon's event
    loop.

    `generation` is incremented by each slice of an operation that may change the state.
    `last_ids` int64[max_namespaces, 2] are the last step id and the last pin id of each namespace, by its number - 1.
    `finished_ids` int64[max_namespaces, NUM_FINISHED] are steps that lanes have finished, see
    BlockManager.finished_ids. `lane_lens` int32[max_sequences] is the context length of each row after the newest of
    its steps that a lane got.
    `unsubmitted` bool[num_blocks] are the blocks that a swap-in fills and whose copies the device has not got yet.
    `unfinished_device` int32[num_blocks] and `unfinished_swap` int32[num_swap_blocks] are the device's counts of
    writes in progress to each block.
    """

    def __init__(
        self,
        config: BlocksConfig,
        clock: Callable[[], float],
        journal: EventJournal | None,
        memory: ArrayMemory,
        kept: KeptMaps,
    ) -> None:
        self.config = config
        self.kept = kept
        self.device = CachingBlockPool(config.num_blocks, config.block_size, clock, journal, memory)
        self.swap = BlockPool(config.num_swap_blocks, config.block_size, "swap", memory)
        self.sequences = SequenceSlots(config, memory, kept.extra_keys)
        self.intents = Intents(self.sequences.states, memory)
        self.last_ids: Int64Array = memory.kept("last_ids", (config.max_namespaces, 2), np.int64, private=True)
        self.finished_ids: Int64Array = memory.kept(
            "finished_ids", (config.max_namespaces, NUM_FINISHED), np.int64, private=True
        )
        self.lane_lens: Int32Array = memory.kept("lane_lens", (config.max_sequences,), np.int32, private=True)
        self.unsubmitted: BoolArray = memory.kept("unsubmitted", (config.num_blocks,), np.bool_, private=True)
        self.unfinished_device: Int32Array = memory.kept(
            "unfinished_device", (config.num_blocks,), np.int32, private=True
        )
        self.unfinished_swap: Int32Array = memory.kept(
            "unfinished_swap", (config.num_swap_blocks,), np.int32, private=True
        )
        self.pins = PinTable(self.device, clock, kept.pins)
        self.namespaces: set[SessionNamespace] = set()
        self.counters = BlockCounters()
        self.generation = 0
        self._last_number = 0
        # Namespaces whose kept lost sequences change when the last operation counts.
        self._unsettled: list[SessionNamespace] = []

    def unused_number(self) -> int:
        """Return the next number of a namespace that no open one has."""
        used, limit = {namespace.number for namespace in self.namespaces}, self.config.max_namespaces
        following = (1 + (self._last_number + i) % limit for i in range(limit))
        self._last_number = next(number for number in following if number not in used)
        return self._last_number

    def add_namespace(self, number: int, counters: MutableSequence[int]) -> SessionNamespace:
        """Add an open namespace, with the last ids of its number."""
        kept_ids = self.last_ids[number - 1]
        namespace = SessionNamespace(number, counters, kept_ids=item_view(kept_ids))
        namespace.last_step_id, namespace.last_pin_id = kept_ids.tolist()
        self.namespaces.add(namespace)
        return namespace

    def enter(self, namespace: SessionNamespace) -> None:
        """Start an operation: check that the namespace is open, and expire pins. The operation before counts from now
        on. Raises UnknownSessionError."""
        if namespace.closed:
            raise UnknownSessionError("the session of the sequences is closed")
        self.enter_without_namespace()

    def enter_without_namespace(self) -> None:
        """Start an operation of the daemon itself, as `enter`."""
        if self.intents.pending:
            self.end_operation()
        self.generation += 1
        if self.pins.deadlines:
            self.pins.expire()

    def end_operation(self) -> None:
        """Declare that the last operation counts."""
        self.intents.end()
        while self._unsettled:
            namespace = self._unsettled.pop()
            if not namespace.closed:
                self.keep_lost(namespace.number, namespace.lost)

    def create_lost(self, namespace: SessionNamespace, sequence_ids: Iterable[int]) -> None:
        """Record that an operation creates sequences, of which some were lost. That is kept when the operation
        counts."""
        namespace.lost.difference_update(sequence_ids)
        self.settle_lost(namespace)

    def settle_lost(self, namespace: SessionNamespace) -> None:
        """Keep the ids of the lost sequences of a namespace as they are now, when the operation counts."""
        self._unsettled.append(namespace)

    def forget_lost(self, namespace: SessionNamespace, sequence_ids: Iterable[int]) -> None:
        """Forget that these sequences of a namespace were lost."""
        namespace.lost.difference_update(sequence_ids)
        self.keep_lost(namespace.number, namespace.lost)

    def keep_lost(self, number: int, lost: set[int]) -> None:
        """Store the ids of the lost sequences of a namespace."""
        if lost:
            self.kept.lost[number] = pack_ids(lost)
        else:
            self.kept.lost.pop(number, None)

    def expire_pins(self) -> None:
        """Remove expired pins before an operation without a namespace."""
        if self.pins.deadlines and self.pins.expire():
            self.generation += 1
