"""The sizes and limits of a block manager, and the validation of arguments. Every error names the field and the
index."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from kvservice._ext import first_negative
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.chain_hash import encoded_extra_keys
from kvservice.errors import InvalidArgumentError, QuotaExceededError

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
MAX_EXTRA_KEYS = 1024
MAX_EXTRA_KEY_BYTES = 256


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

    @cached_property
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


def refuse(field: str, bad: BoolArray, message: str) -> NoReturn:
    """Raise InvalidArgumentError for the first bad element."""
    raise InvalidArgumentError(message, field=f"{field}[{int(bad.argmax())}]")


def _integers(value: npt.ArrayLike, field: str) -> npt.NDArray[np.integer]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError("must be a flat list of whole numbers", field=field) from error
    if array.ndim != 1:
        raise InvalidArgumentError(f"must have one dimension, not {array.ndim}", field=field)
    if array.size == 0:
        raise InvalidArgumentError("must not be empty", field=field)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError("must be whole numbers of at most 63 bits", field=field)
    return array


def int64_array(value: npt.ArrayLike, field: str) -> Int64Array:
    """Return `value` as int64[n], n >= 1. Raises InvalidArgumentError."""
    if type(value) is np.ndarray and value.dtype is _INT64 and value.ndim == 1 and value.size:
        return value
    array = _integers(value, field)
    if array.dtype.kind == "u" and int(array.max()) >= 2**63:
        refuse(field, array >= np.uint64(2**63), "must be below 2**63")
    return array.astype(np.int64)


def int32_array(value: npt.ArrayLike, field: str) -> Int32Array:
    """Return `value` as int32[n], n >= 1, no element negative. Raises InvalidArgumentError."""
    if type(value) is np.ndarray and value.dtype is _INT32 and value.ndim == 1 and value.size:
        array = value
    else:
        wide = _integers(value, field)
        if int(wide.max()) >= 2**31:
            refuse(field, wide >= 2**31, "must be below 2**31")
        if int(wide.min()) < 0:
            refuse(field, wide < 0, "must not be negative")
        return wide.astype(np.int32)
    if first_negative(array) >= 0:
        refuse(field, array < 0, "must not be negative")
    return array


def counts_for(value: npt.ArrayLike, field: str, batch: int) -> Int64Array:
    """Return `value` as int64[batch], no element negative. Raises InvalidArgumentError."""
    array = int64_array(value, field)
    if len(array) != batch:
        raise InvalidArgumentError(f"has {len(array)} elements for {batch} sequences", field=field)
    if np.count_nonzero(array < 0):
        refuse(field, array < 0, "must not be negative")
    return array


def whole_number(value: object, field: str, lowest: int, highest: int) -> int:
    """Return `value`, a Python or NumPy integer from `lowest` to `highest`. Raises InvalidArgumentError."""
    if type(value) is int:
        number = value
    elif isinstance(value, bool | np.bool_):
        raise InvalidArgumentError("must be a whole number", field=field)
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # anything else is what the except is for
        except TypeError as error:
            raise InvalidArgumentError("must be a whole number", field=field) from error
    if not lowest <= number <= highest:
        raise InvalidArgumentError(f"must be from {lowest} to {highest}, not {number}", field=field)
    return number


class TenantSalt(tuple[tuple[int, bytes], ...]):
    """The extra keys of all sequences of a tenant: one key at position 0. They are encoded once."""

    def __new__(cls, salt: bytes) -> Self:
        return super().__new__(cls, ((0, salt),))

    def __init__(self, _: bytes) -> None:
        self.by_block = encoded_extra_keys(self, 1)


def extra_keys_by_block(extra_keys: object, field: str, block_size: int, max_tokens: int) -> dict[int, bytes]:
    """Map each block number to the length-prefixed keys at its positions, sorted by (position, key). Callers must not
    modify the map. Raises InvalidArgumentError."""
    if isinstance(extra_keys, TenantSalt):
        return extra_keys.by_block
    if not isinstance(extra_keys, list | tuple):
        raise InvalidArgumentError("must be a list of (position, bytes)", field=field)
    if len(extra_keys) > MAX_EXTRA_KEYS:
        raise InvalidArgumentError(f"must not hold more than {MAX_EXTRA_KEYS} keys", field=field)
    pairs: list[tuple[int, bytes]] = []
    for i, pair in enumerate(extra_keys):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[1], bytes):
            raise InvalidArgumentError("must be a (position, bytes) pair", field=f"{field}[{i}]")
        position, key = pair
        if not 1 <= len(key) <= MAX_EXTRA_KEY_BYTES:
            raise InvalidArgumentError(f"must have from 1 to {MAX_EXTRA_KEY_BYTES} bytes", field=f"{field}[{i}]")
        if type(position) is not int or not 0 <= position < max_tokens:
            position = whole_number(position, f"{field}[{i}]", 0, max_tokens - 1)
        pairs.append((position, key))
    return encoded_extra_keys(pairs, block_size)


def check_request_tokens(config: BlocksConfig, num_tokens: int, field: str) -> None:
    """Raise QuotaExceededError if a request covers more than max_request_tokens tokens."""
    limit = config.max_request_tokens
    if num_tokens > limit:
        raise QuotaExceededError(
            f"covers {num_tokens} tokens, a request may cover at most max_request_tokens = {limit}",
            field=field, limit="max_request_tokens", value=limit,
        )  # fmt: skip


def check_request_blocks(config: BlocksConfig, num_blocks: int, field: str) -> None:
    """Raise QuotaExceededError if a request covers more than max_request_blocks table entries."""
    limit = config.max_request_blocks
    if num_blocks > limit:
        raise QuotaExceededError(
            f"covers {num_blocks} blocks, a request may cover at most max_request_blocks = {limit}",
            field=field, limit="max_request_blocks", value=limit,
        )  # fmt: skip


def check_sequence_lengths(config: BlocksConfig, lengths: Int64Array, lookahead: Int64Array | int) -> None:
    """Check that no sequence of these lengths int64[n], including its lookahead slots, exceeds max_sequence_tokens.
    Raises InvalidArgumentError."""
    limit = config.max_sequence_tokens
    if not np.count_nonzero(lengths + lookahead > limit):
        return
    if np.count_nonzero(lengths > limit):
        refuse("token_ids", lengths > limit, f"makes a sequence longer than max_sequence_tokens = {limit}")
    refuse("lookahead", lengths + lookahead > limit, f"reaches past max_sequence_tokens = {limit}")
