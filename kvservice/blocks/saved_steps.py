"""Live steps that an orderly take-over carries to the next process, with their written layers and parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvservice.blocks.growth import NO_COPIES
from kvservice.blocks.kept import pack_steps, unpack_steps
from kvservice.blocks.namespaces import LiveStep, SessionNamespace
from kvservice.blocks.plans import Int64Array, StepPlan
from kvservice.blocks.sequences import FLAGS, NUM_BLOCKS, SCHEDULED
from kvservice.blocks.state import BlockState


def save_steps(state: BlockState) -> int:
    """See BlockManager.save_steps."""
    num_saved = 0
    for namespace in state.namespaces:
        steps = [_saved(entry) for entry in namespace.steps.values() if _can_be_saved(state, entry)]
        num_saved += len(steps)
        state.kept.steps[namespace.number] = pack_steps(steps)
    return num_saved


def restore_steps(state: BlockState, namespace: SessionNamespace, data: bytes) -> Int64Array:
    """Make the saved steps of a namespace live, if they are the newest of all their sequences. Returns their rows
    int64[n]."""
    rows = [_restore(state, namespace, saved) for saved in unpack_steps(data)]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)


def _can_be_saved(state: BlockState, entry: LiveStep) -> bool:
    """Return whether a step means something without a scheduler and without other steps."""
    alone = not entry.follows and not entry.follower and entry.tokens_known
    return alone and not np.count_nonzero(state.sequences.states[entry.plan.rows, FLAGS] & SCHEDULED)


def _saved(entry: LiveStep) -> dict[str, Any]:
    step, appended = entry.plan, entry.num_appended
    return {
        "step_id": step.step_id,
        "sequence_ids": step.sequence_ids.tolist(),
        "query_lens": step.query_lens.tolist(),
        "context_lens": step.context_lens.tolist(),
        "num_appended": appended.tolist() if isinstance(appended, np.ndarray) else appended,
        "written": list(entry.written),
        "sent": list(entry.sent.items()),
        "committed": entry.committed,
    }


def _restore(state: BlockState, namespace: SessionNamespace, saved: dict[str, Any]) -> Int64Array:
    """Make a saved step live. Returns its rows, or none if one of its sequences is gone."""
    ids, sequences = saved["sequence_ids"], state.sequences
    rows = np.array([namespace.rows.get(sequence_id, -1) for sequence_id in ids], np.int64)
    if (rows < 0).any() or (sequences.steps[rows] != saved["step_id"]).any():
        return rows[:0]
    query_lens, context_lens = (np.array(saved[name], np.int64) for name in ("query_lens", "context_lens"))
    assert (context_lens <= sequences.states[rows, NUM_BLOCKS] * state.config.block_size).all()
    step = StepPlan(
        step_id=saved["step_id"],
        sequence_ids=np.array(ids, np.int64),
        rows=rows,
        query_lens=query_lens.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        slot_mapping=sequences.slots(rows, context_lens - query_lens, query_lens),
        copies=NO_COPIES,
        tables=sequences.block_tables,
        block_size=state.config.block_size,
    )
    appended = saved["num_appended"]
    entry = LiveStep(
        step,
        bytearray(saved["written"]),
        np.array(appended, np.int64) if isinstance(appended, list) else appended,
        committed=saved["committed"],
        sent=dict(saved["sent"]),
    )
    namespace.steps[step.step_id] = entry
    return rows
