"""Reopening: a step over tokens that may be computed already, for an engine that lost what it computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import counts_for, refuse
from kvservice.blocks.growth import WriteBatch
from kvservice.blocks.limits import check_request_tokens
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.plans import StepPlan
from kvservice.blocks.sequences import LENGTH, NUM_COMPUTED
from kvservice.blocks.state import BlockState
from kvservice.blocks.steps import StepPlanner, check_query_lens


class Reopener:
    """Opens steps over tokens again."""

    def __init__(self, state: BlockState, steps: StepPlanner) -> None:
        self._state, self._config, self._steps = state, state.config, steps
        self._device, self._sequences = state.device, state.sequences

    def reopen(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        starts: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        lookahead: int,
    ) -> StepPlan:
        """See BlockManager.reopen."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        first = counts_for(starts, "starts", len(ids))
        if np.count_nonzero(first > states[:, NUM_COMPUTED]):
            refuse("starts", first > states[:, NUM_COMPUTED], "must not be above the sequence's computed tokens")
        states[:, NUM_COMPUTED] = first
        query_lens = check_query_lens(num_tokens, states[:, LENGTH] - first)
        check_request_tokens(self._config, int(query_lens.sum()), "sequence_ids")
        batch = WriteBatch(ids, rows, states, states[:, LENGTH])
        growth = self._steps.growth.plan(batch, lookahead)
        self._device.require_available(growth.num_new)

        copies = self._steps.growth.apply(batch, growth)
        self._sequences.num_computed[rows] = first
        slots = self._sequences.slots(rows, first, query_lens)
        context_lens = (first + query_lens).astype(np.int32)
        return self._steps.open(namespace, batch, query_lens.astype(np.int32), context_lens, slots, copies, None)
