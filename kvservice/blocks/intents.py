"""The intent: what recovery does with the rows of an operation that the daemon's process did not survive.

An operation writes its intent before it changes the state of a row, and the intent stays until the daemon has
remembered the operation's reply, or until the next operation begins. It names the rows and holds their states of
before, which are zero for the row of a new sequence.

Stores that no intent covers count alone: NAMESPACE of a row that becomes free; a chain hash, the computed length and
the index flag, in this order, when a step commits; the index flag of a block that is evicted, before its content
changes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvservice.blocks.plans import ArrayMemory, Int64Array

# The states of before are valid, because the content up to their lengths and the tables up to their sizes are whole.
RESTORE: Final = 1
# The operation overwrites tables or content of its sequences, so that they are lost.
DROP: Final = 2
_KIND_BITS: Final = 2


class Intents:
    """The intent of the operation in progress, in kept memory.

    The header is one integer, number of rows << 2 | kind, or 0 without an intent. It is stored last and cleared first.
    """

    def __init__(self, states: Int64Array, memory: ArrayMemory) -> None:
        """`states` int64[max_sequences, 8] are the live states of all rows."""
        self.pending = False
        self._states = states
        header: Int64Array = memory.kept("intent", (1,), np.int64, private=True)
        self._header = memoryview(header)  # type: ignore[arg-type]  # numpy exports its buffer
        self._rows: Int64Array = memory.kept("intent_rows", (len(states),), np.int64, private=True)
        self._saved: Int64Array = memory.kept("intent_states", states.shape, np.int64, private=True)
        # The rows that `_rows` holds, and the part of `_saved` for them. A running batch is the same array every time.
        self._batch = self._rows[:0]
        self._saved_batch = self._saved[:0]

    def begin(self, kind: int, rows: Int64Array) -> None:
        """Write down distinct rows int64[n] that an operation is about to change. The caller must not modify the array
        later."""
        assert not self.pending, "an operation has one intent"
        if rows is not self._batch:
            count = len(rows)
            self._rows[:count] = rows
            self._batch, self._saved_batch = rows, self._saved[:count]
        self._states.take(rows, 0, self._saved_batch, "clip")
        self._header[0] = len(rows) << _KIND_BITS | kind
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
