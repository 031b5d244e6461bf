"""Pins: cached prefixes that are kept until the pin expires.

A pin is not a reference to a block (ref_count counts tables only). It keeps the block in the prefix index and from
eviction; a sequence that writes into a pinned block gets a copy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import extra_keys_by_block, int32_array, whole_number
from kvservice.blocks.core import Core
from kvservice.blocks.plans import Int64Array, Pin
from kvservice.blocks.sequences import SequenceSpace
from kvservice.blocks.slices import Slices, cut, finish
from kvservice.blocks.tier import ONE
from kvservice.errors import InvalidArgumentError, NotComputedError, QuotaExceededError, UnknownPinError


class PinOps(Core):
    """match_prefix, pin, unpin, reset_prefix_cache."""

    def match_prefix(self, token_ids: npt.ArrayLike, extra_keys: Sequence[tuple[int, bytes]] = ()) -> int:
        """Return how many leading tokens of a prompt int32[n] the prefix cache holds, a multiple of the block size.

        Raises InvalidArgumentError.
        """
        if self.pin_deadlines:
            self._expire_pins()
        return len(self._find_prefix(token_ids, extra_keys)) << self._shift

    def pin(
        self,
        space: SequenceSpace,
        token_ids: npt.ArrayLike,
        extra_keys: Sequence[tuple[int, bytes]] = (),
        *,
        ttl_s: float,
    ) -> Pin:
        """Keep the cached prefix of a prompt int32[n] from eviction for ttl_s seconds, or until unpin or close_space.

        Raises InvalidArgumentError, NotComputedError if no block of the prompt is cached, and QuotaExceededError if
        more than max_pinned_fraction of the pool would be pinned, or if there would be more pins than that many blocks.
        """
        self._enter(space)
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf:
            raise InvalidArgumentError("must be a positive number of seconds", field="ttl_s")
        blocks = self._find_prefix(token_ids, extra_keys)
        if not len(blocks):
            raise NotComputedError("no block of this prefix is cached", field="token_ids")
        fresh = blocks[~self.device.pinned[blocks]]
        limit = self.config.max_pinned_blocks
        if self.num_pinned + len(fresh) > limit or self.num_pins >= limit:
            raise QuotaExceededError(
                f"at most {limit} blocks, and as many pins, may be pinned",
                field="token_ids", limit="max_pinned_fraction", value=str(self.config.max_pinned_fraction),
            )  # fmt: skip
        self.device.pin(fresh)
        self.pin_counts[blocks] += ONE
        self.num_pinned += len(fresh)
        space.last_pin_id += 1
        space.pins[space.last_pin_id] = blocks
        self.num_pins += 1
        heapq.heappush(self.pin_deadlines, (self.clock() + ttl_s, id(space), space.last_pin_id, space))
        return Pin(space.last_pin_id, len(blocks) << self._shift, len(blocks))

    def unpin(self, space: SequenceSpace, pin_id: int) -> None:
        """Remove a pin. Raises UnknownPinError if the id is unknown or the pin has ended."""
        self._enter(space)
        if pin_id not in space.pins:
            pin_id = whole_number(pin_id, "pin_id", 0, 2**63 - 1)
            raise UnknownPinError(f"pin {pin_id} is unknown or has ended", field="pin_id", pin_id=pin_id)
        self._end_pin(space, pin_id)
        if len(self.pin_deadlines) > 2 * self.num_pins + 64:
            self.pin_deadlines = [entry for entry in self.pin_deadlines if entry[2] in entry[3].pins]
            heapq.heapify(self.pin_deadlines)

    def reset_prefix_cache(self) -> int:
        """`reset_prefix_cache_in_slices` without a pause."""
        return finish(self.reset_prefix_cache_in_slices())

    def reset_prefix_cache_in_slices(self) -> Slices[int]:
        """Remove all blocks from the prefix index that are in it now, except pinned ones. Returns how many cached
        blocks became free."""
        if self.pin_deadlines:
            self._expire_pins()
        blocks = self.device.unpinned()
        num_freed = 0
        for i, part in enumerate(cut(blocks)):
            if i:
                yield
            self.generation += 1
            num_freed += self.device.reset(part, whole=len(part) == len(blocks))
        return num_freed

    def _find_prefix(self, token_ids: npt.ArrayLike, extra_keys: Sequence[tuple[int, bytes]]) -> Int64Array:
        tokens = int32_array(token_ids, "token_ids")
        limit = self.config.max_sequence_tokens
        if len(tokens) > limit:
            raise InvalidArgumentError(f"has more than max_sequence_tokens = {limit} tokens", field="token_ids")
        extra = extra_keys_by_block(extra_keys, "extra_keys", self.config.block_size, limit)
        return np.array(self.device.index.match(tokens, extra), np.int64)
