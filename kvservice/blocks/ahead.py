"""Steps ahead: decode steps that a client takes before their tokens are known here.

A step ahead has slots for the next `num_steps` tokens of each sequence, which are no tokens of the sequences yet. The
client writes their K/V by itself. When it commits, the tokens that it has written become computed tokens, and another
step ahead, with slots after them, replaces this one. So nobody waits for the bookkeeping between two tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import counts_for, int32_array, refuse, whole_number
from kvservice.blocks.growth import WriteBatch
from kvservice.blocks.intents import RESTORE
from kvservice.blocks.layers import LayerTracker
from kvservice.blocks.limits import check_request_tokens
from kvservice.blocks.namespaces import COMPUTED_TOKENS, LiveStep, SessionNamespace
from kvservice.blocks.plans import BlockCopies, Int32Array, Int64Array, StepPlan
from kvservice.blocks.sequences import LENGTH, NUM_COMPUTED
from kvservice.blocks.state import BlockState
from kvservice.blocks.steps import StepPlanner, check_expected_lengths
from kvservice.errors import FailedPreconditionError, InvalidArgumentError

_NO_TOKENS = np.zeros(0, np.int32)


class AheadStepper:
    """Opens steps ahead, and commits them."""

    def __init__(self, state: BlockState, steps: StepPlanner, layers: LayerTracker) -> None:
        self._state, self._config, self._steps, self._layers = state, state.config, steps, layers
        self._device, self._sequences = state.device, state.sequences

    def open(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        num_steps: int,
        expected_lengths: npt.ArrayLike | None,
    ) -> StepPlan:
        """See BlockManager.open_ahead."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        num_steps = whole_number(num_steps, "num_steps", 1, self._config.max_sequence_tokens)
        if expected_lengths is not None:
            check_expected_lengths(ids, states[:, LENGTH], expected_lengths)
        _check_computed(ids, states)
        batch = self._planned(WriteBatch(ids, rows, states, states[:, LENGTH]), num_steps)
        growth = self._steps.growth.plan(batch, 0)
        self._device.require_available(growth.num_new)
        copies = self._steps.growth.apply(batch, growth)
        return self._open(namespace, batch, num_steps, copies)

    def commit(
        self,
        namespace: SessionNamespace,
        step_id: int,
        token_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None,
        num_steps: int,
    ) -> StepPlan | None:
        """See BlockManager.commit_ahead."""
        self._state.enter(namespace)
        entry = namespace.live_step(step_id)
        if not entry.ahead:
            raise FailedPreconditionError(f"step {step_id} is not ahead", field="step_id", step_id=step_id)
        tokens, counts = self._written(entry, token_ids, num_tokens)
        num_steps = whole_number(num_steps, "num_steps", 0, self._config.max_sequence_tokens)
        ids, rows = entry.plan.sequence_ids, entry.plan.rows
        states = self._sequences.resident_states(ids, rows)
        begins, lengths = states[:, LENGTH].copy(), states[:, LENGTH] + counts
        states[:, LENGTH] = states[:, NUM_COMPUTED] = lengths
        batch = WriteBatch(ids, rows, states, lengths)
        if num_steps == 0:
            self._state.intents.begin(RESTORE, rows)
            self._compute(namespace, batch, begins, counts, tokens)
            self._sequences.end_steps(namespace, rows)
            return None
        batch = self._planned(batch, num_steps)
        growth = self._steps.growth.plan(batch, 0)
        self._device.require_available(growth.num_new)
        copies = self._steps.growth.apply(batch, growth)
        self._compute(namespace, batch._replace(lengths=lengths), begins, counts, tokens)
        return self._open(namespace, batch, num_steps, copies)

    def _planned(self, batch: WriteBatch, num_steps: int) -> WriteBatch:
        """Return the batch with its lengths after `num_steps` more tokens. Raises InvalidArgumentError and
        QuotaExceededError."""
        lengths, limit = batch.lengths + num_steps, self._config.max_sequence_tokens
        if np.count_nonzero(lengths > limit):
            i = int((lengths > limit).argmax())
            raise InvalidArgumentError(
                f"makes sequence {batch.ids[i]} longer than max_sequence_tokens = {limit}", field="num_steps"
            )
        check_request_tokens(self._config, len(lengths) * num_steps, "num_steps")
        return batch._replace(lengths=lengths)

    def _open(self, namespace: SessionNamespace, batch: WriteBatch, num_steps: int, copies: BlockCopies) -> StepPlan:
        """Open a step ahead over a batch that has its blocks."""
        lengths = batch.states[:, LENGTH]
        query_lens = np.full(len(lengths), num_steps, np.int32)
        slots = self._sequences.slots(batch.rows, lengths, query_lens.astype(np.int64))
        known = batch._replace(lengths=lengths)
        step = self._steps.open(namespace, known, query_lens, batch.lengths.astype(np.int32), slots, copies, None)
        namespace.steps[step.step_id].ahead = True
        return step

    def _written(
        self, entry: LiveStep, token_ids: npt.ArrayLike, num_tokens: npt.ArrayLike | None
    ) -> tuple[Int32Array, Int64Array]:
        """Return the tokens int32[sum(counts)] that were written, and how many in each sequence, int64[n]."""
        tokens = int32_array(token_ids, "token_ids") if np.size(token_ids) else _NO_TOKENS
        num_sequences, most = len(entry.plan.rows), int(entry.plan.query_lens[0])
        if num_tokens is None:
            each, rest = divmod(len(tokens), num_sequences)
            if rest or each > most:
                raise InvalidArgumentError(
                    f"has {len(tokens)} tokens for {num_sequences} sequences with up to {most} each", field="token_ids"
                )
            return tokens, np.full(num_sequences, each, np.int64)
        counts = counts_for(num_tokens, "num_tokens", num_sequences)
        outside = (counts < 0) | (counts > most)
        if np.count_nonzero(outside):
            refuse("num_tokens", outside, f"must be from 0 to the step's {most} tokens of a sequence")
        if int(counts.sum()) != len(tokens):
            raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {counts.sum()}", field="token_ids")
        return tokens, counts

    def _compute(
        self,
        namespace: SessionNamespace,
        batch: WriteBatch,
        begins: Int64Array,
        counts: Int64Array,
        tokens: Int32Array,
    ) -> None:
        """Make the written tokens computed tokens of their sequences, whose lengths were `begins` int64[n]."""
        self._device.tokens_by_slot[self._sequences.slots(batch.rows, begins, counts)] = tokens
        self._sequences.lengths[batch.rows] = batch.lengths
        self._sequences.num_tokens += len(tokens)
        self._state.generation += 1
        self._state.counters.computed_tokens += len(tokens)
        namespace.counters[COMPUTED_TOKENS] += len(tokens)
        self._layers.commit_rows(batch.rows, batch.lengths.astype(np.int32))


def _check_computed(ids: Int64Array, states: Int64Array) -> None:
    """Raise FailedPreconditionError if a sequence has tokens that are not computed."""
    pending = states[:, LENGTH] != states[:, NUM_COMPUTED]
    if np.count_nonzero(pending):
        i = int(pending.argmax())
        raise FailedPreconditionError(
            f"sequence {ids[i]} has tokens that are not computed", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
        )
