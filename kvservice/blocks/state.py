"""The state of a block manager, as one value. The manager's parts have it and share it."""

from __future__ import annotations

from collections.abc import Callable

from kvservice.blocks.block_pool import BlockPool, CachingBlockPool
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.events import EventJournal
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.pins import PinTable
from kvservice.blocks.plans import Zeros
from kvservice.blocks.sequences import SequenceSlots
from kvservice.blocks.stats import BlockCounters
from kvservice.errors import UnknownSessionError


class BlockState:
    """Block pools of both tiers, sequence slots, pins, namespaces and counters. One thread uses it, the daemon's event
    loop.

    `generation` is incremented by each slice of an operation that may change the state.
    """

    def __init__(
        self, config: BlocksConfig, clock: Callable[[], float], journal: EventJournal | None, zeros: Zeros
    ) -> None:
        self.config = config
        self.device = CachingBlockPool(config.num_blocks, config.block_size, clock, journal, zeros)
        self.swap = BlockPool(config.num_swap_blocks, config.block_size, "swap", zeros)
        self.sequences = SequenceSlots(config, zeros)
        self.pins = PinTable(self.device, clock)
        self.namespaces: set[SessionNamespace] = set()
        self.counters = BlockCounters()
        self.generation = 0

    def enter(self, namespace: SessionNamespace) -> None:
        """Start an operation: check that the namespace is open, and expire pins. Raises UnknownSessionError."""
        if namespace.closed:
            raise UnknownSessionError("the session of the sequences is closed")
        self.generation += 1
        if self.pins.deadlines:
            self.pins.expire()

    def expire_pins(self) -> None:
        """Remove expired pins before an operation without a namespace."""
        if self.pins.deadlines and self.pins.expire():
            self.generation += 1
