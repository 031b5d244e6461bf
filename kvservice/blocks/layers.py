"""Layers of a step. Each layer is written once; the step commits, and its tokens are computed, after the last one.

A step that follows another one commits after it, and only when its tokens are known, because the chain hashes of its
blocks depend on them. Checking and marking are separate operations. The bytes are written in between, so a failed write
changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import int32_array, whole_number
from kvservice.blocks.intents import RESTORE
from kvservice.blocks.namespaces import COMPUTED_TOKENS, LiveStep, SessionNamespace
from kvservice.blocks.plans import Int32Array, Int64Array, StepPlan
from kvservice.blocks.prefix import token_bytes
from kvservice.blocks.ranges import ragged
from kvservice.blocks.state import BlockState
from kvservice.chain_hash import block_hash
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LayerWrittenError


class _FullBlocks(NamedTuple):
    """Blocks that a step completed, with the hash, the parent's hash and the tokens of each, little-endian int32."""

    blocks: Int64Array
    hashes: list[bytes]
    parents: list[bytes]
    tokens: bytes


class LayerTracker:
    """Checks and marks the layers of live steps, and commits a step after its last layer."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._sequences = state.device, state.sequences
        self._shift = state.config.block_shift

    def get_step(self, namespace: SessionNamespace, step_id: int) -> StepPlan:
        """See BlockManager.get_step."""
        return self._live_step(namespace, step_id).plan

    def written_layers(self, namespace: SessionNamespace, step_id: int) -> bytearray | None:
        """See BlockManager.written_layers."""
        entry = namespace.steps.get(step_id)
        return None if entry is None else entry.written

    def hand_to_lane(self, namespace: SessionNamespace, step_id: int) -> bytearray | None:
        """See BlockManager.hand_to_lane."""
        entry = namespace.steps.get(step_id)
        if entry is None:
            return None
        self._state.lane_lens[entry.plan.rows] = entry.plan.context_lens
        return entry.written

    def check_layer(self, namespace: SessionNamespace, step_id: int, layer: int) -> StepPlan:
        """See BlockManager.check_layer."""
        entry = self._step_with_layers(namespace, step_id)
        layer = whole_number(layer, "layer", 0, self._config.num_layers - 1)
        if entry.written[layer]:
            raise LayerWrittenError(
                f"layer {layer} of step {step_id} is written", field="layer", step_id=step_id, layer=layer
            )
        return entry.plan

    def mark_layer(self, namespace: SessionNamespace, step_id: int, layer: int) -> bool:
        """See BlockManager.mark_layer."""
        self.check_layer(namespace, step_id, layer)
        entry = namespace.steps[step_id]
        entry.written[layer] = 1
        return self._commit_if_complete(namespace, entry)

    def check_part(self, namespace: SessionNamespace, step_id: int, layer: int, first: int, count: int) -> StepPlan:
        """See BlockManager.check_part."""
        step = self.check_layer(namespace, step_id, layer)
        entry = namespace.steps[step_id]
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

    def mark_part(self, namespace: SessionNamespace, step_id: int, layer: int, part: StepPlan) -> bool:
        """See BlockManager.mark_part."""
        entry = namespace.steps[step_id]
        if part is not entry.plan:
            sent = entry.sent.pop(layer, 0) + len(part.slot_mapping)
            if sent < len(entry.plan.slot_mapping):
                entry.sent[layer] = sent
                return False
        return self.mark_layer(namespace, step_id, layer)

    def completes(self, namespace: SessionNamespace, step_id: int, layer: int, part: StepPlan) -> bool:
        """See BlockManager.completes."""
        entry = namespace.steps[step_id]
        if part is not entry.plan:
            sent = entry.sent.get(layer, 0) + len(part.slot_mapping)
            if sent < len(entry.plan.slot_mapping):
                return False
        return entry.written.count(0) == 1

    def commit_written(self, namespace: SessionNamespace, step_id: int) -> bool:
        """See BlockManager.commit_written."""
        entry = namespace.steps.get(step_id)
        return entry is not None and self._commit_if_complete(namespace, entry)

    def set_tokens(self, namespace: SessionNamespace, step_id: int, token_ids: npt.ArrayLike) -> bool:
        """See BlockManager.set_tokens."""
        entry = self._live_step(namespace, step_id)
        if entry.unknown is None:
            raise FailedPreconditionError(f"step {step_id} does not wait for tokens of another", field="step_id")
        tokens, step, which = int32_array(token_ids, "token_ids"), entry.plan, entry.unknown
        if len(tokens) != len(which):
            raise InvalidArgumentError(f"has {len(tokens)} tokens for {len(which)} sequences", field="token_ids")
        last = np.cumsum(step.query_lens, dtype=np.int64)[which] - 1
        rows = step.rows[which]
        self._state.intents.begin(RESTORE, rows)
        self._device.tokens_by_slot[step.slot_mapping[last]] = tokens
        self._sequences.lengths[rows] = step.context_lens[which]
        self._sequences.num_tokens += len(tokens)
        entry.unknown = None
        return self._commit_if_complete(namespace, entry)

    def _commit_if_complete(self, namespace: SessionNamespace, entry: LiveStep) -> bool:
        if entry.committed or not entry.complete or not entry.tokens_known:
            return False
        if entry.follows and not namespace.steps[entry.follows].committed:
            return False
        entry.committed = True
        self._state.generation += 1
        num_tokens = len(entry.plan.slot_mapping)
        self._state.counters.computed_tokens += num_tokens
        namespace.counters[COMPUTED_TOKENS] += num_tokens
        self.commit_rows(entry.plan.rows, entry.plan.context_lens)
        if entry.follower:
            self._commit_if_complete(namespace, namespace.steps[entry.follower])
        return True

    def check_all_layers(self, namespace: SessionNamespace, step_id: int) -> StepPlan:
        """See BlockManager.check_all_layers."""
        entry = self._step_with_layers(namespace, step_id)
        if entry.begun:
            layer = entry.written.index(1) if 1 in entry.written else next(iter(entry.sent))
            raise LayerWrittenError(
                f"layer {layer} of step {step_id} is written", field="layer", step_id=step_id, layer=layer
            )
        return entry.plan

    def mark_all_layers(self, namespace: SessionNamespace, step_id: int) -> None:
        """See BlockManager.mark_all_layers."""
        self.check_all_layers(namespace, step_id)
        entry = namespace.steps[step_id]
        entry.written[:] = b"\1" * self._config.num_layers
        self._commit_if_complete(namespace, entry)

    def mark_layers(self, namespace: SessionNamespace, step_id: int, layers: Sequence[int]) -> None:
        """See BlockManager.mark_layers."""
        if len(set(layers)) != len(layers):
            raise InvalidArgumentError("a layer is named twice", field="layers")
        for layer in layers:
            self.check_part(namespace, step_id, layer, 0, 0)
        entry = namespace.steps[step_id]
        for layer in layers:
            entry.written[layer] = 1
        self._commit_if_complete(namespace, entry)

    def _live_step(self, namespace: SessionNamespace, step_id: int) -> LiveStep:
        self._state.enter(namespace)
        return namespace.live_step(step_id)

    def _step_with_layers(self, namespace: SessionNamespace, step_id: int) -> LiveStep:
        """Return a live step whose layers can be written."""
        entry = self._live_step(namespace, step_id)
        if entry.ahead:
            raise FailedPreconditionError(
                f"step {step_id} is ahead: its client writes it in the mapped pool", field="step_id", step_id=step_id
            )
        return entry

    def commit_rows(self, rows: Int64Array, context_lens: Int32Array) -> None:
        """Mark the tokens of each row up to these context lengths as computed. Blocks that became full get their hash
        and can be shared. A full block has its hash before its tokens count as computed, and is whole before the index
        finds it."""
        full = None
        if self._config.enable_prefix_caching:
            first = self._sequences.num_computed[rows] >> self._shift
            num_full = (context_lens >> self._shift) - first
            if np.count_nonzero(num_full):
                full = self._hash_blocks(rows, first, num_full)
                self._device.keep_hashes(full.blocks, full.hashes)
        self._sequences.num_computed[rows] = context_lens
        if full is not None:
            self._index_blocks(full)

    def _hash_blocks(self, rows: Int64Array, first: Int64Array, num_full: Int64Array) -> _FullBlocks:
        """Compute the chain hashes of num_full[i] blocks of each row from entry first[i] on."""
        device = self._device
        which, entries = ragged(first, num_full)
        rows = rows[which]
        blocks = self._sequences.block_tables[rows, entries].astype(np.int64)
        before = self._sequences.block_tables[rows, np.maximum(entries - 1, 0)].tolist()
        data, size = token_bytes(device.token_ids[blocks]), 4 * self._config.block_size
        names = blocks.tolist()
        known, root, extra_keys = device.hashes, device.index.root, self._sequences.extra_keys
        hashes: list[bytes] = []
        parents: list[bytes] = []
        starts = range(0, len(data), size)
        for row, entry, block, previous, start in zip(
            rows.tolist(), entries.tolist(), names, before, starts, strict=True
        ):
            parent = known[previous] if entry else root
            assert parent is not None, "a full block stands before this one, so it has a hash"
            extra = extra_keys[row].get(entry, b"") if row in extra_keys else b""
            known[block] = chain_hash = block_hash(parent, data[start : start + size], extra)
            hashes.append(chain_hash)
            parents.append(parent)
        return _FullBlocks(blocks, hashes, parents, data)

    def _index_blocks(self, full: _FullBlocks) -> None:
        """Add full blocks to the prefix index."""
        device, journal = self._device, self._device.journal
        found = device.add_to_index(full.blocks, full.hashes)
        if journal is not None and any(found):
            root, size = device.index.root, 4 * self._config.block_size
            contents = _split(full.tokens, size) if journal.with_tokens else [b""] * len(full.hashes)
            parents = (None if parent == root else parent for parent in full.parents)
            journal.stored(list(itertools.compress(zip(full.hashes, parents, contents, strict=True), found)))


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
