"""Validation of arguments and their conversion to arrays. Every error names the field and the index."""

from __future__ import annotations

import operator
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.chain_hash import encoded_extra_keys
from kvservice.errors import InvalidArgumentError

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
MAX_EXTRA_KEYS = 1024
MAX_EXTRA_KEY_BYTES = 256


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
    if np.count_nonzero(array < 0):
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


def extra_keys_by_block(extra_keys: object, field: str, block_size: int, max_tokens: int) -> dict[int, bytes]:
    """Map each block number to the length-prefixed keys at its positions, sorted by (position, key). Raises
    InvalidArgumentError."""
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
