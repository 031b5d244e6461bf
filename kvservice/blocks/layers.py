"""Layers of a step. Each layer is written once; the step commits, and its tokens are computed, after the last one.

Checking and marking are separate operations. The bytes are written in between, so a failed write changes nothing.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvservice.blocks.arguments import whole_number
from kvservice.blocks.core import Core, ragged
from kvservice.blocks.plans import Int64Array, Step
from kvservice.blocks.prefix import block_hash, token_bytes
from kvservice.blocks.sequences import COMPUTED_TOKENS, OpenStep, SequenceSpace
from kvservice.errors import FailedPreconditionError, LayerWrittenError, StaleStepError, UnknownStepError


class LayerOps(Core):
    """Checking and marking of layers, and the commit after the last one."""

    def get_step(self, space: SequenceSpace, step_id: int) -> Step:
        """Return the live step with this id. Raises UnknownStepError if it was never opened, and StaleStepError if a
        newer operation on one of its sequences replaced it."""
        return self._live(space, step_id).plan

    def written_layers(self, space: SequenceSpace, step_id: int) -> bytearray | None:
        """Return the flags of a live step, one byte per layer, which the writer of a layer sets. None if the step is
        not live."""
        entry = space.steps.get(step_id)
        return None if entry is None else entry.written

    def check_layer(self, space: SequenceSpace, step_id: int, layer: int) -> Step:
        """Return the step. Raises LayerWrittenError if this layer of it is already written. Changes nothing."""
        entry = self._live(space, step_id)
        layer = whole_number(layer, "layer", 0, self.config.num_layers - 1)
        if entry.written[layer]:
            raise LayerWrittenError(
                f"layer {layer} of step {step_id} is written", field="layer", step_id=step_id, layer=layer
            )
        return entry.plan

    def mark_layer(self, space: SequenceSpace, step_id: int, layer: int) -> bool:
        """Record that a layer is written. Returns True if it was the last one, which commits the step."""
        self.check_layer(space, step_id, layer)
        entry = space.steps[step_id]
        entry.written[layer] = 1
        return self._commit_if_complete(space, entry)

    def check_part(self, space: SequenceSpace, step_id: int, layer: int, first: int, count: int) -> Step:
        """Return the part of a step that is written next in this layer: `count` tokens from `first` on, or all
        remaining tokens if `count` is 0. Returns the step itself if the part covers all of it. Changes nothing.

        Raises LayerWrittenError, and FailedPreconditionError if tokens before the part are not written.
        """
        step = self.check_layer(space, step_id, layer)
        entry = space.steps[step_id]
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

    def mark_part(self, space: SequenceSpace, step_id: int, layer: int, part: Step) -> bool:
        """Record that a part from `check_part` is written. The last part marks the layer and returns as
        `mark_layer`."""
        entry = space.steps[step_id]
        if part is not entry.plan:
            sent = entry.sent.pop(layer, 0) + len(part.slot_mapping)
            if sent < len(entry.plan.slot_mapping):
                entry.sent[layer] = sent
                return False
        return self.mark_layer(space, step_id, layer)

    def commit_written(self, space: SequenceSpace, step_id: int) -> bool:
        """Commit a step whose layers were marked directly in its `written` flags. Returns False if the step is not
        live, is incomplete, or was committed before."""
        entry = space.steps.get(step_id)
        return entry is not None and self._commit_if_complete(space, entry)

    def _commit_if_complete(self, space: SequenceSpace, entry: OpenStep) -> bool:
        if entry.committed or not entry.complete:
            return False
        entry.committed = True
        self.generation += 1
        num_tokens = len(entry.plan.slot_mapping)
        self.computed_tokens += num_tokens
        space.counters[COMPUTED_TOKENS] += num_tokens
        self._commit(entry.plan)
        return True

    def check_all_layers(self, space: SequenceSpace, step_id: int) -> Step:
        """Return the step. Raises LayerWrittenError if a layer of it is already written. Changes nothing."""
        entry = self._live(space, step_id)
        if entry.begun:
            layer = entry.written.index(1) if 1 in entry.written else next(iter(entry.sent))
            raise LayerWrittenError(
                f"layer {layer} of step {step_id} is written", field="layer", step_id=step_id, layer=layer
            )
        return entry.plan

    def mark_all_layers(self, space: SequenceSpace, step_id: int) -> None:
        """Record that all layers are written, and commit the step."""
        self.check_all_layers(space, step_id)
        entry = space.steps[step_id]
        entry.written[:] = b"\1" * self.config.num_layers
        self._commit_if_complete(space, entry)

    def _live(self, space: SequenceSpace, step_id: int) -> OpenStep:
        self._enter(space)
        entry = space.steps.get(step_id)
        if entry is not None:
            return entry
        step_id = whole_number(step_id, "step_id", 0, 2**63 - 1)
        if 0 < step_id <= space.last_step_id:
            raise StaleStepError(
                f"a newer operation on one of its sequences replaced step {step_id}", field="step_id", step_id=step_id
            )
        raise UnknownStepError(f"step {step_id} was never opened", field="step_id", step_id=step_id)

    def _commit(self, step: Step) -> None:
        """Mark the tokens of a step as computed. Blocks that became full get their hash and can be shared."""
        before = self.sequences.num_computed[step.rows]
        self.sequences.num_computed[step.rows] = step.context_lens
        if not self.config.enable_prefix_caching:
            return
        first = before >> self._shift
        num_full = (step.context_lens >> self._shift) - first
        if np.count_nonzero(num_full):
            self._hash_blocks(step.rows, first, num_full)

    def _hash_blocks(self, rows: Int64Array, first: Int64Array, num_full: Int64Array) -> None:
        """Compute the chain hashes of num_full[i] blocks of each row from entry first[i] on."""
        device, journal = self.device, self.device.journal
        which, entries = ragged(first, num_full)
        rows = rows[which]
        blocks = self.block_tables[rows, entries].astype(np.int64)
        before = self.block_tables[rows, np.maximum(entries - 1, 0)].tolist()
        data, size = token_bytes(device.token_ids[blocks]), 4 * self.config.block_size
        names = blocks.tolist()
        known, root, extra_keys = device.hashes, device.index.root, self.sequences.extra_keys
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
        found = device.make_findable(names, hashes)
        if journal is not None and any(found):
            contents = _split(data, size) if journal.with_tokens else [b""] * len(hashes)
            told = (None if parent == root else parent for parent in parents)
            journal.stored(list(itertools.compress(zip(hashes, told, contents, strict=True), found)))


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
