"""Read-only operations: slots of tokens to read back, descriptions of sequences, statistics."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.blocks.limits import check_request_blocks, check_request_tokens
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.plans import BoolArray, Int64Array, SequenceSnapshot
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED
from kvservice.blocks.slices import Slices, in_turn
from kvservice.blocks.state import BlockState
from kvservice.blocks.stats import BlocksStats
from kvservice.errors import InvalidArgumentError, KVServiceError, NotComputedError, UnknownSequenceError


class Inspector:
    """Reads the state: slots of tokens to read back, descriptions of sequences, statistics."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._swap, self._sequences = state.device, state.swap, state.sequences

    def read_slots(self, namespace: SessionNamespace, ranges: Sequence[tuple[int, int, int]]) -> Int64Array:
        """See BlockManager.read_slots."""
        self._state.enter(namespace)
        if not ranges:
            raise InvalidArgumentError("must not be empty", field="ranges")
        names = [sequence_id for sequence_id, _, _ in ranges]
        rows = self._range_rows(namespace, names)
        length, computed = self._sequences.lengths[rows], self._sequences.num_computed[rows]
        starts, stops = (np.array([token_range[i] for token_range in ranges], np.int64) for i in (1, 2))
        _refuse_range((stops < 0) | (stops > length), "stop", "must be from 0 to the sequence's length")
        _refuse_range((starts < 0) | (starts > stops), "start", "must be from 0 to stop")
        if np.count_nonzero(stops > computed):
            i = int((stops > computed).argmax())
            raise NotComputedError(
                f"only {computed[i]} tokens of sequence {names[i]} are computed", field=f"ranges[{i}].stop",
                sequence_id=names[i], num_computed=int(computed[i]),
            )  # fmt: skip
        return self._sequences.slots(rows, starts, stops - starts)

    def _range_rows(self, namespace: SessionNamespace, names: list[int]) -> Int64Array:
        try:
            rows = np.array([namespace.rows[name] for name in names], np.int64)
            self._sequences.resident_states(np.array(names, np.int64), rows, "ranges")
        except KeyError:
            error = namespace.unknown_sequence(names, "ranges")
        except KVServiceError as swapped:
            error = swapped
        else:
            return rows
        error.field += ".sequence_id"
        raise error

    def describe(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike | None,
        *,
        first: int,
        limit: int | None,
        include_tokens: bool,
        include_blocks: bool,
    ) -> Slices[list[SequenceSnapshot]]:
        """See BlockManager.describe. The first slice selects the sequences; each is described as of its own slice."""
        self._state.enter(namespace)
        if sequence_ids is None:
            rest = itertools.islice(namespace.rows.items(), min(first, len(namespace.rows)), None)
            named = dict(itertools.islice(rest, limit))
        else:
            ids, rows = namespace.lookup(sequence_ids)
            named = dict(zip(ids.tolist(), rows.tolist(), strict=True))
        described = list(named.values())
        if include_tokens:
            check_request_tokens(self._config, int(self._sequences.lengths[described].sum()), "sequence_ids")
        if include_blocks:
            check_request_blocks(self._config, int(self._sequences.num_blocks[described].sum()), "sequence_ids")
        return (yield from in_turn(self._describe(namespace, name, include_tokens, include_blocks) for name in named))

    def _describe(
        self, namespace: SessionNamespace, sequence_id: int, include_tokens: bool, include_blocks: bool
    ) -> SequenceSnapshot:
        row = None if namespace.closed else namespace.rows.get(sequence_id)
        if row is None:
            raise UnknownSequenceError(
                f"sequence {sequence_id} was freed meanwhile", field="sequence_ids", sequence_id=sequence_id
            )
        states = self._sequences.states[row].tolist()
        blocks = self._sequences.block_tables[row, : states[NUM_BLOCKS]]
        pool = self._swap if states[SWAPPED] else self._device
        return SequenceSnapshot(
            sequence_id,
            length=states[LENGTH],
            num_computed=states[NUM_COMPUTED],
            num_blocks=states[NUM_BLOCKS],
            swapped=bool(states[SWAPPED]),
            token_ids=pool.token_ids[blocks].reshape(-1)[: states[LENGTH]] if include_tokens else None,
            block_ids=blocks.copy() if include_blocks else None,
        )

    def block_hash(self, block_id: int) -> bytes:
        """See BlockManager.block_hash."""
        device = self._device
        if 0 <= block_id < device.num_blocks and device.indexed[block_id]:
            return device.hashes[block_id] or b""
        return b""

    def stats(self) -> BlocksStats:
        """See BlockManager.stats."""
        device, swap, sequences = self._device, self._swap, self._sequences
        return BlocksStats(
            num_blocks=device.num_blocks,
            free_blocks=device.num_free,
            active_blocks=device.num_active - device.num_shared + device.num_loading,
            shared_blocks=device.num_shared,
            cached_blocks=device.num_cached,
            pinned_blocks=device.num_pinned_cached,
            num_swap_blocks=swap.num_blocks,
            used_swap_blocks=swap.num_active,
            sequences=self._config.max_sequences - len(sequences.free_rows),
            swapped_sequences=sequences.num_swapped,
            tokens=sequences.num_tokens,
            evicted_blocks=device.num_evicted,
            **dataclasses.asdict(self._state.counters),
        )


def _refuse_range(bad: BoolArray, name: str, message: str) -> None:
    if np.count_nonzero(bad):
        raise InvalidArgumentError(message, field=f"ranges[{int(bad.argmax())}].{name}")
