"""The decoding sequences of an engine as arrays, so that a step costs a few NumPy operations for all of them."""

from __future__ import annotations

import numpy as np

from kvservice.blocks import BlocksConfig
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.scheduler.requests import RequestState
from kvservice.scheduler.token_times import TokenTimes

_COLUMNS = 9
_IDS, _LENGTHS, _GENERATED, _LIMITS, _BLOCKS, _BEAMS, _NUMBERS, _PRIORITIES, _PROPOSED = range(_COLUMNS)


class DecodeSet:
    """Sequences that get one token a step, in the order in which they joined.

    `ids`, `lengths` (computed tokens), `generated`, `limits` (most generated tokens), `blocks` (of the table) and
    `beams` (the number of the request whose beams they are, or 0) are int64[n] views; `tokens` int32[n] are the next
    tokens to append, and `times` says when they were reported. `sharing` says that the last blocks of some of them may
    be shared, so that they are copied before the next token is written.
    The first proposed[i] elements of row i of `proposals` int32[n, lookahead] are proposed to follow its next token;
    `speculating` says that there are proposals.
    """

    def __init__(self, capacity: int, config: BlocksConfig, lookahead: int) -> None:
        self._columns = np.zeros((_COLUMNS, capacity), np.int64)
        self._tokens = np.zeros(capacity, np.int32)
        self._places = np.zeros(capacity, np.float64)
        self.times = TokenTimes(capacity)
        self._shift, self._mask = np.array(config.block_shift), np.array(config.block_mask)
        self._reach = np.array(1 + lookahead + config.block_mask)
        self._proposals = np.zeros((capacity, lookahead), np.int32)
        self._size = 0
        self.sharing = self.has_beams = self.speculating = False
        self._cut()

    def __len__(self) -> int:
        return self._size

    def _cut(self) -> None:
        """Make the views of the sequences in the set."""
        size = self._size
        columns = self._columns[:, :size]
        self.ids: Int64Array = columns[_IDS]
        self.lengths: Int64Array = columns[_LENGTHS]
        self.generated: Int64Array = columns[_GENERATED]
        self.limits: Int64Array = columns[_LIMITS]
        self.blocks: Int64Array = columns[_BLOCKS]
        self.beams: Int64Array = columns[_BEAMS]
        self.proposed: Int64Array = columns[_PROPOSED]
        self.tokens: Int32Array = self._tokens[:size]
        self.proposals: Int32Array = self._proposals[:size]

    def add(self, state: RequestState, length: int, token: int) -> None:
        """Add a sequence with `length` computed tokens, and the token to append next."""
        at = self._size
        priority, place, number = state.rank
        beams = state.group.number if state.group.request.beams else 0
        self._columns[:, at] = (
            state.sequence_id, length, state.generated, state.limit, state.blocks, beams, number, priority, 0,
        )  # fmt: skip
        self.has_beams |= beams > 0
        self._places[at] = place
        self.times.add(state.token_at_s)
        self._tokens[at] = token
        self._size += 1
        self._cut()

    def keep(self, kept: BoolArray) -> None:
        """Remove the sequences that are not in `kept` bool[n]. The others keep their order."""
        size = int(np.count_nonzero(kept))
        self._columns[:, :size] = self._columns[:, : self._size][:, kept]
        self._tokens[:size] = self.tokens[kept]
        if self.speculating:
            self._proposals[:size] = self.proposals[kept]
        self._places[:size] = self._places[: self._size][kept]
        self.times.keep(kept)
        self._size = size
        self._cut()
        self.has_beams = self.has_beams and bool(self.beams.any())

    def index(self, sequence_id: int) -> int:
        """Return the index of a sequence in the set."""
        return int((self.ids == sequence_id).argmax())

    def needs(self) -> Int64Array:
        """Return how many new blocks each sequence needs for its next token and the lookahead: int64[n]."""
        reach: Int64Array = self.lengths + self._reach
        reach >>= self._shift
        reach -= self.blocks
        return reach

    def needs_within(self, steps: int) -> int:
        """Return how many sequences need a new block in the `steps` steps after the next."""
        if not self._size or not steps:
            return 0
        left = (-1 - self.lengths) & self._mask
        return int(np.count_nonzero(left < steps))

    def whole(self, chosen: Int64Array) -> Int64Array:
        """Return the sequences `chosen` int64[n] without beams of which not all are chosen."""
        if not self.has_beams:
            return chosen
        left = np.ones(self._size, np.bool_)
        left[chosen] = False
        broken = self.beams[left]
        return chosen[~np.isin(self.beams[chosen], broken[broken > 0])]

    def by_rank(self) -> Int64Array:
        """Return the indices int64[n] of all sequences in the order of their ranks."""
        columns = self._columns[:, : self._size]
        order: Int64Array = np.lexsort((columns[_NUMBERS], self._places[: self._size], columns[_PRIORITIES]))
        return order
