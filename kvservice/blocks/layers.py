"""Layers of a step. Each layer is written once; the step commits, and its tokens are computed, after the last one.

A step that follows another one commits after it, and only when its tokens are known, because the chain hashes of its
blocks depend on them. Checking and marking are separate operations. The work is submitted to the device in between: if
that raises, nothing has changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import int32_array, whole_number
from kvservice.blocks.plans import Int32Array, Int64Array, LiveStep, StepPlan
from kvservice.blocks.pool import token_bytes
from kvservice.blocks.state import (
    COMPUTED_TOKENS,
    RESTORE,
    BlockState,
    SessionNamespace,
)
from kvservice.chain_hash import block_hash
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LayerWrittenError


class _FullBlocks(NamedTuple):
    """Blocks that a step completed, with the hash of each, the block before it, or -1, and its tokens, little-endian
    int32."""

    blocks: Int64Array
    hashes: list[bytes]
    before: list[int]
    tokens: bytes


def written_layers(namespace: SessionNamespace, step_id: int) -> bytearray | None:
    """Return the flags of a live step, one byte per layer, which the writer of a layer sets. None if the step is
    not live."""
    entry = namespace.steps.get(step_id)
    return None if entry is None else entry.written


def finished_ids(state: BlockState, namespace: SessionNamespace) -> Int64Array:
    """Return int64[n] in kept memory. A lane stores the id of a step there, at id % n, when it has written all its
    layers, and `recover` commits the step if the process ends before `commit_written`."""
    ids: Int64Array = state.lane_finished_ids[namespace.number - 1]
    return ids


def hand_to_lane(state: BlockState, namespace: SessionNamespace, step_id: int) -> bytearray | None:
    """Return the `written_layers` of a step that a lane may finish from now on."""
    entry = namespace.steps.get(step_id)
    if entry is None:
        return None
    state.lane_lens[entry.plan.rows] = entry.plan.context_lens
    return entry.written


def check_part(
    state: BlockState, namespace: SessionNamespace, step_id: int, layer: int, first: int, count: int
) -> StepPlan:
    """Return the part of a step that is written next in this layer: `count` tokens from `first` on, or all
    remaining tokens if `count` is 0. Returns the step itself if the part covers all of it. Changes nothing.

    Raises UnknownStepError if the step was never opened, StaleStepError if a newer operation on one of its sequences
    replaced it, LayerWrittenError, and FailedPreconditionError if tokens before the part are not written. The functions
    below raise the same for their step.
    """
    entry = _step_with_layers(state, namespace, step_id)
    if type(layer) is not int or not 0 <= layer < state.config.num_layers:
        layer = whole_number(layer, "layer", 0, state.config.num_layers - 1)
    if entry.written[layer]:
        raise _layer_written(step_id, layer)
    step = entry.plan
    if not (first or count or entry.sent):
        return step
    num_tokens = len(step.slot_mapping)
    first = whole_number(first, "first_token", 0, num_tokens - 1)
    stop = first + whole_number(count, "num_tokens", 0, num_tokens - first) if count else num_tokens
    sent = entry.sent.get(layer, 0)
    if first < sent:
        raise LayerWrittenError(
            f"the first {sent} tokens of layer {layer} of step {step_id} are written", field="first_token",
            step_id=step_id, layer=layer,
        )  # fmt: skip
    if first > sent:
        raise FailedPreconditionError(f"the next part must begin at token {sent}", field="first_token")
    if stop - first == num_tokens:
        return step
    if (first, stop) not in entry.parts:
        entry.parts[first, stop] = step.part(first, stop)
    return entry.parts[first, stop]


def mark_part(state: BlockState, namespace: SessionNamespace, step_id: int, layer: int, part: StepPlan) -> bool:
    """Record that a part from `check_part` is written, in the same slice. The last part marks the layer. Returns True
    if that commits the step: it was the last layer, all tokens are known, and the step that it follows is committed.
    The step's tokens are then computed, and its full blocks can be shared."""
    entry = namespace.steps[step_id]
    if part is not entry.plan:
        sent = entry.sent.pop(layer, 0) + len(part.slot_mapping)
        if sent < len(entry.plan.slot_mapping):
            entry.sent[layer] = sent
            return False
    if entry.written[layer]:  # by a lane, meanwhile
        raise _layer_written(step_id, layer)
    entry.written[layer] = 1
    return _commit_if_complete(state, namespace, entry)


def completes(namespace: SessionNamespace, step_id: int, layer: int, part: StepPlan) -> bool:
    """Return whether `mark_part` of this part from `check_part` marks the last layer of the step."""
    entry = namespace.steps[step_id]
    if part is not entry.plan:
        sent = entry.sent.get(layer, 0) + len(part.slot_mapping)
        if sent < len(entry.plan.slot_mapping):
            return False
    return entry.written.count(0) == 1


def commit_written(state: BlockState, namespace: SessionNamespace, step_id: int) -> bool:
    """Commit a step whose layers were marked directly in its `written_layers`. Returns False if the step is not
    live, cannot commit yet, or was committed before."""
    entry = namespace.steps.get(step_id)
    return entry is not None and _commit_if_complete(state, namespace, entry)


def set_tokens(state: BlockState, namespace: SessionNamespace, step_id: int, token_ids: npt.ArrayLike) -> bool:
    """Give a following step the tokens that were not known when it was opened.

    token_ids int32[u], one for each of its sequences that got a token and that the followed step covers, in their
    order. Returns True if the step is complete, and thereby commits. Raises FailedPreconditionError if all tokens
    of the step are known.
    """
    state.enter(namespace)
    entry = namespace.live_step(step_id)
    if entry.unknown is None:
        raise FailedPreconditionError(f"step {step_id} does not wait for tokens of another", field="step_id")
    tokens, step, which = int32_array(token_ids, "token_ids"), entry.plan, entry.unknown
    if len(tokens) != len(which):
        raise InvalidArgumentError(f"has {len(tokens)} tokens for {len(which)} sequences", field="token_ids")
    last = np.cumsum(step.query_lens, dtype=np.int64)[which] - 1
    rows = step.rows[which]
    state.intents.begin(RESTORE, rows)
    state.device.tokens_by_slot[step.slot_mapping[last]] = tokens
    state.sequences.lengths[rows] = step.context_lens[which]
    state.sequences.num_tokens += len(tokens)
    entry.unknown = None
    return _commit_if_complete(state, namespace, entry)


def _commit_if_complete(state: BlockState, namespace: SessionNamespace, entry: LiveStep) -> bool:
    if 0 in entry.written or entry.committed or not entry.tokens_known:
        return False
    if entry.follows and not namespace.steps[entry.follows].committed:
        return False
    entry.committed = True
    state.generation += 1
    num_tokens = len(entry.plan.slot_mapping)
    state.counters.computed_tokens += num_tokens
    namespace.counters[COMPUTED_TOKENS] += num_tokens
    commit_rows(state, entry.plan.rows, entry.plan.context_lens)
    if entry.follower:
        _commit_if_complete(state, namespace, namespace.steps[entry.follower])
    return True


def check_all_layers(state: BlockState, namespace: SessionNamespace, step_id: int) -> StepPlan:
    """Return the step. Raises LayerWrittenError if a layer of it is already written. Changes nothing."""
    entry = _step_with_layers(state, namespace, step_id)
    if entry.begun:
        raise _layer_written(step_id, entry.written.index(1) if 1 in entry.written else next(iter(entry.sent)))
    return entry.plan


def mark_all_layers(state: BlockState, namespace: SessionNamespace, step_id: int) -> None:
    """Record that all layers are written, and commit the step as `mark_part`. Raises LayerWrittenError."""
    check_all_layers(state, namespace, step_id)
    entry = namespace.steps[step_id]
    entry.written[:] = b"\1" * state.config.num_layers
    _commit_if_complete(state, namespace, entry)


def mark_layers(state: BlockState, namespace: SessionNamespace, step_id: int, layers: Sequence[int]) -> None:
    """Record that these distinct layers are written, all or none, and commit the step as `mark_part`."""
    if len(set(layers)) != len(layers):
        raise InvalidArgumentError("a layer is named twice", field="layers")
    for layer in layers:
        check_part(state, namespace, step_id, layer, 0, 0)
    entry = namespace.steps[step_id]
    for layer in layers:
        entry.written[layer] = 1
    _commit_if_complete(state, namespace, entry)


def _step_with_layers(state: BlockState, namespace: SessionNamespace, step_id: int) -> LiveStep:
    """Return a live step whose layers can be written."""
    state.enter(namespace)
    entry = namespace.live_step(step_id)
    if entry.ahead:
        raise FailedPreconditionError(
            f"step {step_id} is ahead: its client writes it in the mapped pool", field="step_id", step_id=step_id
        )
    return entry


def _layer_written(step_id: int, layer: int) -> LayerWrittenError:
    return LayerWrittenError(f"layer {layer} of step {step_id} is written", field="layer", step_id=step_id, layer=layer)


def commit_rows(state: BlockState, rows: Int64Array, context_lens: Int32Array) -> None:
    """Mark the tokens of each row up to these context lengths as computed. Blocks that became full get their hash
    and can be shared. A full block has its hash before its tokens count as computed, and is whole before the index
    finds it."""
    full = _hash_blocks(state, rows, context_lens) if state.config.enable_prefix_caching else None
    if full is not None:
        state.device.keep_hashes(full.blocks, full.hashes)
    state.sequences.num_computed[rows] = context_lens
    if full is not None:
        _index_blocks(state, full)


def _hash_blocks(state: BlockState, rows: Int64Array, context_lens: Int32Array) -> _FullBlocks | None:
    """Compute the chain hashes of the blocks that become full, or return None if there are none."""
    found = state.step_tables.full_blocks(rows, context_lens)
    if found is None:
        return None
    of_rows, entries, blocks, before = found
    data, size = token_bytes(state.device.token_ids[blocks]), 4 * state.config.block_size
    known, root, extra_keys = state.device.hashes, state.device.index.root, state.sequences.extra_keys.by_row
    hashes: list[bytes] = []
    start = 0
    for row, entry, block, previous in zip(of_rows, entries, blocks.tolist(), before, strict=True):
        parent = known[previous] if entry else root
        assert parent is not None, "a full block stands before this one, so it has a hash"
        extra = extra_keys[row].get(entry, b"") if row in extra_keys else b""
        known[block] = chain_hash = block_hash(parent, data[start : start + size], extra)
        hashes.append(chain_hash)
        start += size
    return _FullBlocks(blocks, hashes, before, data)


def _index_blocks(state: BlockState, full: _FullBlocks) -> None:
    """Add full blocks to the prefix index."""
    device, journal = state.device, state.device.journal
    found = device.add_to_index(full.blocks, full.hashes)
    if journal is not None and any(found):
        contents = [b""] * len(full.hashes)
        if journal.with_tokens:
            contents = _split(full.tokens, 4 * state.config.block_size)
        parents = [device.hashes[previous] if previous >= 0 else None for previous in full.before]
        stored = list(itertools.compress(zip(full.hashes, parents, contents, strict=True), found))
        journal.stored(stored, device.domains_of(full.blocks, found))


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
