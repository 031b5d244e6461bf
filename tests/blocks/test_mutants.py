"""Block managers with a fault in their source. The state machine, the tests of recovery and the churn with blocks that
leave and return must each detect their own. A run tries a third of the faults. See also test_integrity.py."""

from __future__ import annotations

import pytest
from blocks_machine import run_quick
from edited_package import DETECTED, check_edited, edits_in
from todays_part import ENTRIES

pytestmark = pytest.mark.slow

OF_MACHINE = {
    "no copy-on-write": """
-    return copied, distinct[kept & state.device.indexed[distinct]]
+    return np.zeros(len(blocks), np.bool_), blocks[:0]
""",
    # The last holder's rule applied to every writer that is not alone.
    "everybody keeps the block": """
-    return copied, distinct[kept & state.device.indexed[distinct]]
+    return copied & (state.device.ref_count[blocks] > 2), distinct[kept & state.device.indexed[distinct]]
""",
    "a decode step that stores another token": """
-    state.step_tables.append(rows, plan.slots, tokens, plan.fresh, blocks)
+    state.step_tables.append(rows, plan.slots, state.ones[: len(rows)], plan.fresh, blocks)
""",
    "copies are not counted": """
-        if required > self.num_available:
+        if False:
""",
    "a fork that holds nothing": """
         state.device.num_shared += state.step_tables.fork(parent, row)
+        state.device.ref_count[sequences.block_tables[row, : items[at + NUM_BLOCKS]]] -= 1
""",
    "a beam that holds nothing": """
-    device.incref(blocks)
""",
    "a release that frees shared blocks": """
         self.num_shared -= num_unshared
-        return unreferenced
+        return blocks
""",
    "a hash without its parent": """
-        known[block] = chain_hash = block_hash(parent, data[start : start + size], extra)
+        known[block] = chain_hash = block_hash(b"", data[start : start + size], extra)
@@
         for entry, start in enumerate(range(0, len(data) - size + 1, size)):
-            parent = block_hash(parent, data[start : start + size], extra.get(entry, b"") if extra else b"")
+            parent = block_hash(b"", data[start : start + size], extra.get(entry, b"") if extra else b"")
""",
    "extra keys left out": """
-        known[block] = chain_hash = block_hash(parent, data[start : start + size], extra)
+        known[block] = chain_hash = block_hash(parent, data[start : start + size])
@@
         for entry, start in enumerate(range(0, len(data) - size + 1, size)):
-            parent = block_hash(parent, data[start : start + size], extra.get(entry, b"") if extra else b"")
+            parent = block_hash(parent, data[start : start + size])
""",
    "blocks shared before they are computed": """
-    step = entry.plan
-    if not (first or count or entry.sent):
+    step = entry.plan
+    before = state.sequences.num_computed[step.rows]
+    commit_rows(state, step.rows, step.context_lens)
+    state.sequences.num_computed[step.rows] = before
+    if not (first or count or entry.sent):
""",
    "a hit that stays evictable": """
         unreferenced = self._add_references(blocks)
-        if len(unreferenced):
-            self._reuse(unreferenced)
""",
    "a hit on the whole prompt": """
-        found = state.device.index.match(tokens[:-1], extra)
+        found = state.device.index.match(tokens, extra)
""",
    "a rewritten block that stays findable": """
-    device.remove_from_index(copies.unindexed)
""",
    "truncate that keeps what was computed": """
-    changed = np.stack((kept, np.minimum(kept, states[:, NUM_COMPUTED]), num_blocks), axis=1)
+    changed = np.stack((kept, states[:, NUM_COMPUTED], num_blocks), axis=1)
""",
    "swap-in that takes any block for found": """
-    found = np.array([find(hashes[block] or b"", _MISSING) for block in group.blocks.tolist()], np.int64)
+    found = np.full(len(group.blocks), next(iter(state.device.index.blocks.values()), _MISSING))
""",
    "a follower that does not end": """
-            self.on_step_end(step_id)
-            if step.follows:
+            continue
+            if step.follows:
""",
    "a follower that commits without its tokens": """
-        return self.unknown is None and not self.ahead
+        return True
""",
    "a follower that begins at the computed tokens": """
-        covered = _begin_after(state, followed, batch)
+        covered = np.zeros(0, np.int64)
""",
}

# Managers that store in the wrong order, or recover wrongly.
OF_RECOVERY = {
    "blocks that were not loaded": """
-        device, missing = self._device, load.missing.first(num_loaded)
+        num_loaded = len(load)
+        device, missing = self._device, load.missing
""",
    "loaded blocks whose tokens come last": """
-        device.token_ids[blocks] = missing.tokens
@@
         self._record(missing, blocks, new)
-        return int(np.count_nonzero(new))
+        device.token_ids[blocks] = missing.tokens
+        return int(np.count_nonzero(new))
""",
    "tokens computed before their hashes": """
-    if full is not None:
-        state.device.keep_hashes(full.blocks, full.hashes)
     state.sequences.num_computed[rows] = context_lens
     if full is not None:
         _index_blocks(state, full)
+        state.device.keep_hashes(full.blocks, full.hashes)
""",
    "no intent": """
+        return
         count = len(rows)
         if count == 1:
""",
    "no intent of new sequences": """
+        return
         items, self._batch = self._row_items, _NO_BATCH[1]
""",
    "an intent that counts before its rows": """
         count = len(rows)
+        self._header[0] = count << _KIND_BITS | kind
         if count == 1:
""",
    "copied sequences that are restored": """
-        self._header[0] = count << _KIND_BITS | kind
+        self._header[0] = count << _KIND_BITS | RESTORE
""",
    "an evicted block that is still indexed": """
+            before = self.indexed.copy()
             self.remove_from_index(evicted)
+            self.indexed[:] = before
""",
    "unfinished blocks that can be found": """
-    blocks: BoolArray = (state.unfinished_device != 0) | state.unsubmitted
+    blocks: BoolArray = np.zeros(state.device.num_blocks, np.bool_)
""",
    "swapped-in blocks that nobody copies": """
-    blocks: BoolArray = (state.unfinished_device != 0) | state.unsubmitted
+    blocks: BoolArray = state.unfinished_device != 0
""",
    "unfinished blocks forgotten first": """
-    blocks: BoolArray = (state.unfinished_device != 0) | state.unsubmitted
+    blocks: BoolArray = getattr(state, "torn", (state.unfinished_device != 0) | state.unsubmitted)
@@
+    state.torn = _unfinished_blocks(state)
+    state.unfinished_device[:] = 0
+    state.unsubmitted[:] = False
     tables = _tables(state)
""",
    "an operation that is not undone": """
-    _undo_operation(state, lost)
""",
    "lost sequences that are forgotten": """
-            self.kept.lost[number] = pack_ids(lost)
+            pass
""",
    "extra keys that are not kept": """
-        self._kept[row] = packed
@@
-                del self._kept[row]
                 self._count(row, 0, 0)
""",
    "sequences that outlive their scheduler": """
-    _execute(state, namespace, _plan_for(state, sequences), SCHEDULED)
+    _execute(state, namespace, _plan_for(state, sequences))
""",
    "step ids that are used again": """
-        self.kept_ids[LAST_STEP_ID] = self.last_step_id
""",
    "pins that are forgotten": """
-        for key, data in list(self._kept.items()):
+        for key, data in ():
""",
}

OF_CHURN = {
    "copies are always whole": """
-        whole: BoolArray = device.copied[copy.blocks] == copy.number
+        whole: BoolArray = np.ones(len(kept), np.bool_)
""",
    "hashes of other blocks": """
-        return MissingBlocks(found, parent, _block_hashes(parent, part, extra, first), part, quota)
+        return MissingBlocks(found, parent, _block_hashes(parent, part, extra, first), part[::-1].copy(), quota)
""",
    "blocks that others can have": """
-        return PoolLoad(device.begin_loading(count), missing.first(count))
+        load = PoolLoad(device.begin_loading(count), missing.first(count))
+        device._push_free(load.blocks[:1])
+        return load
""",
}

CHECKS = {
    "blocks_machine:run_quick": OF_MACHINE,
    "crash_operations:operate": OF_RECOVERY,
    "spill_churn:run_other_seeds": OF_CHURN,
}


FAULTS = [(check, fault) for check, faults in CHECKS.items() for fault in faults]


@pytest.mark.parametrize(("check", "fault"), FAULTS[ENTRIES])
def test_a_fault_is_detected(check: str, fault: str) -> None:
    done = check_edited("kvservice.blocks", CHECKS[check][fault], check)
    assert done.returncode == DETECTED, done.stdout[-2000:] + done.stderr[-4000:]


def test_every_fault_can_be_made() -> None:
    """Also those that another run tries."""
    assert all(edits_in("kvservice.blocks", CHECKS[check][fault]) for check, fault in FAULTS)


def test_no_edits_are_no_fault() -> None:
    """The package passes in the same way with some of the seeds that detect the mutants."""
    done = check_edited("kvservice.blocks", "", "crash_operations:operate_shortly")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_the_machine_passes_what_is_no_mutant() -> None:
    """The machine passes with the settings under which it detects the mutants, in as many examples as most need."""
    run_quick(100)
