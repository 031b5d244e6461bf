"""What outlives the process besides arrays of state: the intent of the operation in progress, and kept values by key,
which hold what has no fixed size: extra keys, pins, lost sequences and saved steps."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvservice import plain_json
from kvservice.blocks.plans import ArrayMemory, Int64Array, item_view

_BLOCK_AND_SIZE: Final = struct.Struct("<qI")
_DEADLINE: Final = struct.Struct("<d")
_PIN_ID_BITS: Final = 40
# Kinds of an intent. The states of before are valid, because the content up to their lengths and the tables up to their
# sizes are whole.
RESTORE: Final = 1
# The operation overwrites tables or content of its sequences, so that they are lost.
DROP: Final = 2
# The rows are those of new sequences, and become free.
CREATE: Final = 3
_KIND_BITS: Final = 2
_NO_ROWS: Final = np.zeros(0, np.int64)


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


# ---- The intent


class Intents:
    """The intent of the operation in progress, in kept memory: what recovery does with the operation's rows if the
    daemon's process does not survive it.

    An operation writes its intent before it changes the state of a row, and the intent stays until the daemon has
    remembered the operation's reply, or until the next operation begins. It names the rows and holds their states of
    before, unless their sequences are new.

    Stores that no intent covers count alone: NAMESPACE of a row that becomes free; a chain hash, the computed length
    and the index flag, in this order, when a step commits; the index flag of a block that is evicted, before its
    content changes.

    The header is one integer, number of rows << 2 | kind, or 0 without an intent. It is stored last and cleared first.
    """

    def __init__(self, states: Int64Array, memory: ArrayMemory) -> None:
        """`states` int64[max_sequences, 8] are the live states of all rows."""
        self.pending = False
        self._states, self._num_columns = states, states.shape[1]
        self._state_items = item_view(states)
        header: Int64Array = memory.kept("intent", (1,), np.int64, private=True)
        self._header = item_view(header)
        self._rows: Int64Array = memory.kept("intent_rows", (len(states),), np.int64, private=True)
        self._saved: Int64Array = memory.kept("intent_states", states.shape, np.int64, private=True)
        self._row_items, self._saved_items = item_view(self._rows), item_view(self._saved)
        # The rows that `_rows` holds, and the part of `_saved` for them. A running batch is the same array every time.
        self._batch = self._rows[:0]
        self._saved_batch = self._saved[:0]

    def begin(self, kind: int, rows: Int64Array) -> None:
        """Write down distinct rows int64[n] that an operation is about to change. The caller must not modify the array
        later."""
        assert not self.pending, "an operation has one intent"
        count = len(rows)
        if count == 1:
            self._save_row(rows.item())
        else:
            if rows is not self._batch:
                self._rows[:count] = rows
                self._batch, self._saved_batch = rows, self._saved[:count]
            self._states.take(rows, 0, self._saved_batch, "clip")
        self._header[0] = count << _KIND_BITS | kind
        self.pending = True

    def _save_row(self, row: int) -> None:
        """Do as `begin` for a single row, without NumPy."""
        columns = self._num_columns
        self._batch, self._row_items[0] = _NO_ROWS, row
        self._saved_items[:columns] = self._state_items[row * columns : (row + 1) * columns]

    def begin_new(self, rows: list[int]) -> None:
        """Write down distinct free rows that an operation is about to give to new sequences."""
        assert not self.pending, "an operation has one intent"
        items, self._batch = self._row_items, _NO_ROWS
        for i, row in enumerate(rows):
            items[i] = row
        self._header[0] = len(rows) << _KIND_BITS | CREATE
        self.pending = True

    def end(self) -> None:
        """Declare that the operation counts, or that recovery is done with it."""
        self._header[0] = 0
        self.pending = False

    def read(self) -> tuple[int, Int64Array, Int64Array]:
        """Return the intent of an earlier process: (kind, or 0 without one; rows int64[n]; their states of before
        int64[n, 8])."""
        header: int = self._header[0]
        count = header >> _KIND_BITS
        return header & (1 << _KIND_BITS) - 1, self._rows[:count].copy(), self._saved[:count].copy()
