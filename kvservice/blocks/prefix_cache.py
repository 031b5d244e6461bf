"""The prefix cache: cached prefixes of prompts are found, pinned and dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import extra_keys_by_block, int32_array, whole_number
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.plans import Int64Array, PinnedPrefix
from kvservice.blocks.slices import Slices, cut
from kvservice.blocks.state import BlockState
from kvservice.errors import InvalidArgumentError, NotComputedError, QuotaExceededError, UnknownPinError


class PrefixCache:
    """Finds, pins and drops cached prefixes."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._pins = state.device, state.pins

    def match(self, token_ids: npt.ArrayLike, extra_keys: Sequence[tuple[int, bytes]] = ()) -> int:
        """See BlockManager.match_prefix."""
        self._state.expire_pins()
        return len(self._find(token_ids, extra_keys)) << self._config.block_shift

    def touch(self, chain_hashes: Sequence[bytes]) -> int:
        """See BlockManager.touch."""
        self._state.expire_pins()
        self._state.generation += 1
        found = np.array(self._device.index.match_hashes(chain_hashes), np.int64)
        cached = found[(self._device.ref_count[found] == 0) & ~self._device.pinned[found]]
        self._device.evictable.remove(cached)
        self._device.evictable.add(cached[::-1])
        return len(cached)

    def pin(
        self,
        namespace: SessionNamespace,
        token_ids: npt.ArrayLike,
        extra_keys: Sequence[tuple[int, bytes]],
        ttl_s: float,
    ) -> PinnedPrefix:
        """See BlockManager.pin."""
        self._state.enter(namespace)
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf:
            raise InvalidArgumentError("must be a positive number of seconds", field="ttl_s")
        blocks = self._find(token_ids, extra_keys)
        if not len(blocks):
            raise NotComputedError("no block of this prefix is cached", field="token_ids")
        num_new, limit = int(np.count_nonzero(~self._device.pinned[blocks])), self._config.max_pinned_blocks
        if self._pins.num_pinned + num_new > limit or self._pins.num_pins >= limit:
            raise QuotaExceededError(
                f"at most {limit} blocks, and as many pins, may be pinned",
                field="token_ids", limit="max_pinned_fraction", value=str(self._config.max_pinned_fraction),
            )  # fmt: skip
        pin_id = self._pins.add(namespace, blocks, ttl_s)
        return PinnedPrefix(pin_id, len(blocks) << self._config.block_shift, len(blocks))

    def unpin(self, namespace: SessionNamespace, pin_id: int) -> None:
        """See BlockManager.unpin."""
        self._state.enter(namespace)
        if pin_id not in namespace.pins:
            pin_id = whole_number(pin_id, "pin_id", 0, 2**63 - 1)
            raise UnknownPinError(f"pin {pin_id} is unknown or has ended", field="pin_id", pin_id=pin_id)
        self._pins.remove(namespace, pin_id)
        self._pins.forget_removed()

    def reset(self) -> Slices[int]:
        """See BlockManager.reset_prefix_cache."""
        self._state.expire_pins()
        blocks = self._device.unpinned()
        num_freed = 0
        for i, part in enumerate(cut(blocks)):
            if i:
                yield
            self._state.generation += 1
            num_freed += self._device.reset(part, whole=len(part) == len(blocks))
        return num_freed

    def _find(self, token_ids: npt.ArrayLike, extra_keys: Sequence[tuple[int, bytes]]) -> Int64Array:
        """Return the blocks of the longest cached prefix, in order. Raises InvalidArgumentError."""
        tokens = int32_array(token_ids, "token_ids")
        limit = self._config.max_sequence_tokens
        if len(tokens) > limit:
            raise InvalidArgumentError(f"has more than max_sequence_tokens = {limit} tokens", field="token_ids")
        extra = extra_keys_by_block(extra_keys, "extra_keys", self._config.block_size, limit)
        return np.array(self._device.index.match(tokens, extra), np.int64)
