"""The prefix cache: the chain hashes of a prompt, and its cached prefix, which is found, pinned and dropped.

The index itself is in pool.py, and a block enters it in layers.py; see also chain_hash."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import extra_keys_by_block, int32_array, whole_number
from kvservice.blocks.kept import PINS_PER_BLOCK
from kvservice.blocks.plans import Int32Array, Int64Array, PinnedPrefix
from kvservice.blocks.pool import token_bytes
from kvservice.blocks.slices import Slices, cut, finish
from kvservice.blocks.state import BlockState, SessionNamespace
from kvservice.chain_hash import block_hash, root_hash
from kvservice.errors import InvalidArgumentError, NotComputedError, QuotaExceededError, UnknownPinError

# Hashes of one slice, which takes a few milliseconds.
_SLICE_HASHES: Final = 2048


def chain_hashes(token_ids: Int32Array, extra: Mapping[int, bytes], block_size: int) -> list[bytes]:
    """Return the chain hash of each full block of these tokens int32[n]. `extra` maps block numbers to extra keys."""
    return finish(chain_hashes_in_slices(token_ids, extra, block_size))


def chain_hashes_in_slices(token_ids: Int32Array, extra: Mapping[int, bytes], block_size: int) -> Slices[list[bytes]]:
    """Do as `chain_hashes`, in slices."""
    size = 4 * block_size
    data, parent = token_bytes(token_ids), root_hash(block_size)
    hashes: list[bytes] = []
    for first in range(0, len(data) - size + 1, size * _SLICE_HASHES):
        if first:
            yield
        for start in range(first, min(first + size * _SLICE_HASHES, len(data) - size + 1), size):
            parent = block_hash(parent, data[start : start + size], extra.get(start // size, b"") if extra else b"")
            hashes.append(parent)
    return hashes


def match_prefix(state: BlockState, token_ids: npt.ArrayLike, extra_keys: Sequence[tuple[int, bytes]] = ()) -> int:
    """Return how many leading tokens of a prompt int32[n] the prefix cache holds, a multiple of the block size."""
    state.expire_pins()
    return len(_find(state, token_ids, extra_keys)) << state.config.block_shift


def touch(state: BlockState, chain_hashes: Sequence[bytes]) -> int:
    """Make the cached blocks of a prompt with these chain hashes the last to be evicted. Returns how many they
    are."""
    state.expire_pins()
    state.generation += 1
    found = np.array(state.device.index.match_hashes(chain_hashes), np.int64)
    cached = found[(state.device.ref_count[found] == 0) & ~state.device.pinned[found]]
    state.device.evictable.remove(cached)
    state.device.evictable.add(cached[::-1])
    return len(cached)


def pin(
    state: BlockState,
    namespace: SessionNamespace,
    token_ids: npt.ArrayLike,
    extra_keys: Sequence[tuple[int, bytes]] = (),
    *,
    ttl_s: float,
) -> PinnedPrefix:
    """Keep the cached prefix of a prompt int32[n] from eviction for ttl_s seconds, or until unpin or
    close_namespace.

    Raises NotComputedError if no block of the prompt is cached, and QuotaExceededError if more than
    max_pinned_fraction of the pool would be pinned, if there would be more pins than that many blocks, if the pins
    would have more than PINS_PER_BLOCK times as many blocks together, or if the tenant would have more than its
    max_pins. Pinned blocks count for their tenant as those that its sequences hold: QuotaExceededError, and
    OutOfBlocksError if others have them guaranteed.
    """
    state.enter(namespace)
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf:
        raise InvalidArgumentError("must be a positive number of seconds", field="ttl_s")
    blocks = _find(state, token_ids, extra_keys)
    if not len(blocks):
        raise NotComputedError("no block of this prefix is cached", field="token_ids")
    num_new, limit = int(np.count_nonzero(~state.device.pinned[blocks])), state.config.max_pinned_blocks
    entries = state.pins.num_entries + len(blocks)
    if state.pins.num_pinned + num_new > limit or state.pins.num_pins >= limit or entries > PINS_PER_BLOCK * limit:
        raise QuotaExceededError(
            f"at most {limit} blocks, and as many pins, may be pinned, which have {PINS_PER_BLOCK * limit} together",
            field="token_ids", limit="max_pinned_fraction", value=str(state.config.max_pinned_fraction),
        )  # fmt: skip
    if namespace.quota is not None:
        namespace.quota.require_pin("token_ids")
    state.device.require_available(state.device.num_evictable(blocks))
    pin_id = state.pins.add(namespace, blocks, ttl_s)
    return PinnedPrefix(pin_id, len(blocks) << state.config.block_shift, len(blocks))


def unpin(state: BlockState, namespace: SessionNamespace, pin_id: int) -> None:
    """Remove a pin. Raises UnknownPinError if the id is unknown or the pin has ended."""
    state.enter(namespace)
    if pin_id not in namespace.pins:
        pin_id = whole_number(pin_id, "pin_id", 0, 2**63 - 1)
        raise UnknownPinError(f"pin {pin_id} is unknown or has ended", field="pin_id", pin_id=pin_id)
    state.pins.remove(namespace, pin_id)
    state.pins.forget_removed()


def reset_prefix_cache(state: BlockState) -> int:
    """Remove all blocks from the prefix index, except pinned ones. Returns how many cached blocks became free."""
    return finish(reset_prefix_cache_in_slices(state))


def reset_prefix_cache_in_slices(state: BlockState) -> Slices[int]:
    """`reset_prefix_cache` in slices. It removes the blocks that are in the index at the first slice."""
    state.expire_pins()
    blocks = state.device.unpinned()
    num_freed = 0
    for i, part in enumerate(cut(blocks)):
        if i:
            yield
        state.generation += 1
        num_freed += state.device.reset(part, whole=len(part) == len(blocks))
    return num_freed


def _find(state: BlockState, token_ids: npt.ArrayLike, extra_keys: Sequence[tuple[int, bytes]]) -> Int64Array:
    """Return the blocks of the longest cached prefix, in order. Raises InvalidArgumentError."""
    tokens = int32_array(token_ids, "token_ids")
    limit = state.config.max_sequence_tokens
    if len(tokens) > limit:
        raise InvalidArgumentError(f"has more than max_sequence_tokens = {limit} tokens", field="token_ids")
    extra = extra_keys_by_block(extra_keys, "extra_keys", state.config.block_size, limit)
    return state.device.index.match(tokens, extra)
