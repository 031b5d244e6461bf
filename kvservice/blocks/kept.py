"""Kept values by key, which hold what has no fixed size: extra keys, pins, lost sequences and saved steps."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvservice import plain_json
from kvservice.blocks.plans import Int64Array

_BLOCK_AND_SIZE: Final = struct.Struct("<qI")
_DEADLINE: Final = struct.Struct("<d")
_PIN_ID_BITS: Final = 40


@dataclass(frozen=True)
class KeptMaps:
    """Maps whose changes survive the process one by one. A plain dict ends with the process.

    extra_keys: by row. pins: by number of the namespace and id of the pin. lost: ids of lost sequences, by number of
    the namespace. steps: saved live steps, by number of the namespace.
    """

    extra_keys: MutableMapping[int, bytes] = field(default_factory=dict)
    pins: MutableMapping[int, bytes] = field(default_factory=dict)
    lost: MutableMapping[int, bytes] = field(default_factory=dict)
    steps: MutableMapping[int, bytes] = field(default_factory=dict)


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
