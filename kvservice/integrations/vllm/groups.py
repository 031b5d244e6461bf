"""Decides which blocks a request needs of each group of K/V caches.

Layers with the same kind of attention are a group. Each group has blocks of its own for the tokens of a request, from
one pool for all, so that all blocks have the same bytes. To continue after a prefix, full attention needs all of its
blocks; a sliding window, or attention within chunks, only the last; a recurrent layer (Mamba), whose block is its state
after the block's last token, the last one:

    full attention   ■ ■ ■ ■ ■ ■ ■ ■ ▸
    sliding window   · · · · · ■ ■ ■ ▸
    recurrent        · · · · · · · ■ ▸
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.client.store.values import KEY_BYTES, chosen_keys, num_leading, some_keys
from kvservice.errors import InvalidArgumentError

Places = npt.NDArray[np.intp]

# vLLM's kinds of caches whose blocks have the K/V of their tokens and nothing else, and the one of recurrent states.
SUPPORTED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
RECURRENT = "MambaSpec"


@dataclass(frozen=True)
class Group:
    """The attention of a group: to all tokens, to the last `window` tokens, or to those in the same `chunk`. Or it is
    `recurrent`, and needs the state after the last token."""

    window: int = 0
    chunk: int = 0
    recurrent: bool = False

    @property
    def is_full(self) -> bool:
        return not (self.window or self.chunk or self.recurrent)

    def first_token(self, num_tokens: int) -> int:
        """Return the first token to which the one after `num_tokens` tokens attends."""
        if self.recurrent:
            return max(num_tokens - 1, 0)
        if self.window:
            return max(num_tokens - self.window + 1, 0)
        return num_tokens // self.chunk * self.chunk if self.chunk else 0

    def __str__(self) -> str:
        if self.recurrent:
            return "recurrent"
        return f"window {self.window}" if self.window else f"chunk {self.chunk}" if self.chunk else "full"


class CacheGroups:
    """The groups of a model, in vLLM's order."""

    def __init__(self, groups: Sequence[Group], block_size: int) -> None:
        """`num` is how many there are. `full` is the number of one that needs all blocks of a prefix; None: there is
        none. `leading`: a prefix is just its first blocks. `recurrent`: a prefix ends with a whole block, since there
        is no state after other tokens. `key_bytes` are those of the keys of a block."""
        self.groups, self.num, self.block_size = tuple(groups), len(groups), block_size
        self.key_bytes = KEY_BYTES * self.num
        self.full = next((number for number, group in enumerate(groups) if group.is_full), None)
        self.leading = self.num == 1 and groups[0].is_full
        self.recurrent = any(group.recurrent for group in groups)

    @staticmethod
    def of(kv_cache_config: Any, block_size: int) -> CacheGroups:
        """Raises InvalidArgumentError for groups whose blocks are not the K/V of `block_size` tokens each."""
        groups = [_group_of(group.kv_cache_spec, block_size) for group in kv_cache_config.kv_cache_groups]
        if not groups:
            raise InvalidArgumentError("the model has no K/V caches", field="kv_cache_groups")
        return CacheGroups(groups, block_size)

    def num_full_blocks(self, num_tokens: int) -> int:
        """Return how many of the first blocks of so many tokens a request can be given. It computes the last token
        itself; with that in a block of K/V, a state would have to be the one before it."""
        return (num_tokens - self.recurrent) // self.block_size

    def needed(self, first: int, num_tokens: int) -> Places:
        """Return the places of what is needed to continue after `num_tokens` tokens, without blocks before `first`: a
        block has a place for each group, one block after the other, and the first place is of block `first`."""
        num_blocks = -(-num_tokens // self.block_size) - first
        starts = np.array(self._starts(first, num_tokens)) - first
        return np.flatnonzero(np.arange(max(num_blocks, 0))[:, None] >= starts)

    def longest(self, found: npt.NDArray[np.bool_], first: int, most_tokens: int) -> int:
        """Return the most blocks from `first` on after which a request can continue, at most after `most_tokens`
        tokens. `found`: `[blocks, groups]`, from block `first` on."""
        blocks = np.arange(1, len(found) + 1)[:, None]
        # How many blocks are found without a gap, up to each.
        runs = blocks - np.maximum.accumulate(np.where(found, 0, blocks), axis=0)
        for count in range(len(found) if self.full is None else num_leading(found[:, self.full]), 0, -1):
            stop = first + count
            starts = self._starts(first, min(stop * self.block_size, most_tokens))
            if all(runs[count - 1, group] >= stop - start for group, start in enumerate(starts)):
                return count
        return 0

    def _starts(self, first: int, num_tokens: int) -> list[int]:
        return [max(group.first_token(num_tokens) // self.block_size, first) for group in self.groups]

    def __str__(self) -> str:
        return ", ".join(map(str, self.groups))


@dataclass(slots=True)
class Wanted:
    """The blocks of a prompt from block `first` on: `keys`, one after the other, of all groups of each block. vLLM can
    use at most those of `most_tokens` tokens of the prompt."""

    keys: bytes
    groups: CacheGroups
    first: int
    most_tokens: int

    def __len__(self) -> int:
        return len(self.keys) // self.groups.key_bytes

    def longest(self, found: npt.NDArray[np.bool_]) -> int:
        """Return the most blocks that can be used if these `keys` are found."""
        return self.groups.longest(found.reshape(-1, self.groups.num), self.first, self.most_tokens)

    def leading(self, found: npt.NDArray[np.bool_]) -> int:
        """Return how many of the first blocks are found of a group that needs all, or of the first group."""
        return num_leading(found.reshape(-1, self.groups.num)[:, self.groups.full or 0])

    def key(self, block: int) -> bytes:
        """Return the key of a block, of the same group."""
        place = (block * self.groups.num + (self.groups.full or 0)) * KEY_BYTES
        return self.keys[place : place + KEY_BYTES]

    def needed(self, num_blocks: int) -> bytes:
        """Return the keys without which the first blocks cannot be used."""
        if self.groups.leading:
            return some_keys(self.keys, slice(0, num_blocks))
        num_tokens = min((self.first + num_blocks) * self.groups.block_size, self.most_tokens)
        return chosen_keys(self.keys, self.groups.needed(self.first, num_tokens))


def _group_of(spec: Any, block_size: int) -> Group:
    kinds = {_kind_of(part) for part in getattr(spec, "kv_cache_specs", {"": spec}).values()}
    if len(kinds) != 1:
        raise InvalidArgumentError("layers of one group differ in their attention", field="kv_cache_spec")
    if getattr(spec, "block_size", block_size) != block_size:
        raise InvalidArgumentError(
            f"blocks of {spec.block_size} and of {block_size} tokens in one model are not supported; set "
            "--disable-hybrid-kv-cache-manager",
            field="kv_cache_spec",
        )
    return kinds.pop()


def _kind_of(spec: Any) -> Group:
    kind = type(spec).__name__
    if kind == RECURRENT:
        if (mode := getattr(spec, "mamba_cache_mode", "none")) != "align":
            raise InvalidArgumentError(
                f"mode {mode!r} keeps no states at the ends of blocks; set --mamba-cache-mode align",
                field="mamba_cache_mode",
            )
        if getattr(spec, "num_speculative_blocks", 0):
            raise InvalidArgumentError("speculation with recurrent layers is not supported", field="speculative_config")
        return Group(recurrent=True)
    if kind not in SUPPORTED:
        raise InvalidArgumentError(
            f"{kind} is not supported: its blocks are not the K/V of their tokens", field="kv_cache_spec"
        )
    if getattr(spec, "non_causal", False):
        raise InvalidArgumentError("the K/V of a token depend on later tokens", field="kv_cache_spec")
    if kind == "SlidingWindowSpec":
        return Group(window=spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    return Group(chunk=spec.attention_chunk_size) if kind == "ChunkedLocalAttentionSpec" else Group()
