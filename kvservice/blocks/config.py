"""Configuration of a block manager."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvservice.errors import InvalidArgumentError


@dataclass(frozen=True)
class BlocksConfig:
    """Sizes and limits. All arrays of the manager are allocated once, with these sizes.

    `max_request_tokens` limits the tokens of one step, and `max_request_blocks` the table entries that one operation
    processes, so that no operation takes long. Freeing sequences has no limit, because it runs in slices. `watermark`
    is the fraction of the device pool that allocate and swap_in leave free, so that running sequences can still grow.
    `max_pinned_fraction` limits the blocks that pins keep from eviction.
    Raises InvalidArgumentError naming the field that is out of range.
    """

    num_blocks: int
    block_size: int = 16
    num_layers: int = 1
    num_swap_blocks: int = 0
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    max_sequences: int = 1024
    max_namespaces: int = 1024
    max_sequence_tokens: int = 131072
    max_request_tokens: int = 2**31 - 1
    max_request_blocks: int = 2**31 - 1
    max_pinned_fraction: float = 0.5

    def __post_init__(self) -> None:
        for field, lowest, highest in (
            ("num_blocks", 1, 2**31 - 1),
            ("block_size", 1, 256),
            ("num_layers", 1, 2**16),
            ("num_swap_blocks", 0, 2**31 - 1),
            ("max_sequences", 1, 2**24),
            ("max_namespaces", 1, 2**24),
            ("max_sequence_tokens", 1, 2**31 - 1),
            ("max_request_tokens", 1, 2**31 - 1),
            ("max_request_blocks", 1, 2**31 - 1),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
                raise InvalidArgumentError(f"must be a whole number from {lowest} to {highest}", field=field)
        if self.block_size & (self.block_size - 1):
            raise InvalidArgumentError("must be a power of two", field="block_size")
        for field in ("watermark", "max_pinned_fraction"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise InvalidArgumentError("must be a fraction from 0 to 1", field=field)

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)

    @property
    def block_shift(self) -> int:
        """Base-2 logarithm of the block size: `position >> block_shift` is the table entry of a token position."""
        return self.block_size.bit_length() - 1

    @property
    def block_mask(self) -> int:
        """`position & block_mask` is the offset of a token position in its block."""
        return self.block_size - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks this many tokens need."""
        return -(-num_tokens // self.block_size)

    @property
    def max_blocks_per_sequence(self) -> int:
        return math.ceil(self.max_sequence_tokens / self.block_size)

    @property
    def max_pinned_blocks(self) -> int:
        return int(self.max_pinned_fraction * self.num_blocks)
