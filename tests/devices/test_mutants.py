"""CUDA devices that leave a wait out, or give memory back too early. The churn or a save must detect them.

The kernels of `fake_cuda` refuse invalid tables, which faults the device. A run tries a third of the faults.
"""

from __future__ import annotations

import pytest
from edited_package import DETECTED, check_edited, edits_in
from todays_part import ENTRIES

pytestmark = pytest.mark.slow

OF_CHURN = {
    "computing does not wait for copies": """
-        self._wait(self._compute, self.to_wait_for(reads, writes))
+        return
""",
    "readers do not wait for copies": """
-        return self._in_flight(self.pool.last_write[reads]) + self._in_flight(self.pool.last_touch[writes])
+        return self._in_flight(self.pool.last_touch[writes])
""",
    "writers do not wait for copies": """
-        return self._in_flight(self.pool.last_write[reads]) + self._in_flight(self.pool.last_touch[writes])
+        return self._in_flight(self.pool.last_write[reads])
""",
    "writers wait only for copies that write": """
-        return self._in_flight(self.pool.last_write[reads]) + self._in_flight(self.pool.last_touch[writes])
+        return self._in_flight(self.pool.last_write[reads]) + self._in_flight(self.pool.last_write[writes])
""",
    "copies do not wait for computing": """
-        stream.wait(self._computed)
""",
    "copies do not wait for copies": """
-            if other is not stream:
+            if other is not stream and stream is self._compute:
""",
    "copies forget the swap tier": """
+        self.swap.last_touch[:] = 0
         self._wait_for_compute(stream)
         self._wait(stream, self._in_flight(source.last_touch[src_ids]))
""",
    "copies forget the pool": """
+        touched = self.pool.last_touch.copy()
+        self.pool.last_touch[:] = 0
         self._wait_for_compute(stream)
         self._wait(stream, self._in_flight(source.last_touch[src_ids]))
@@
         source.last_touch[src_ids] = self._newest
         target.last_touch[dst_ids] = target.last_write[dst_ids] = self._newest
+        self.pool.last_touch = np.maximum(self.pool.last_touch, touched)
""",
    "copies are thought done": """
         busy: set[int] = set()
+        self._copies.clear()
""",
    "results are not waited for": """
-            self.queue.guarded(in_flight.completed.synchronize)
""",
    "room is given back at launch": """
             event.record(self.stream.handle)
+            self.arena.release(buffer)
""",
    "room overlaps": """
             assert start is not None
+            start = 0
             buffer = StagingBuffer(self, start)
""",
    "tables are freed at once": """
             self._cuda.copy_async(tables.pointer, host, tables.num_bytes, self.stream.handle)
             tables.pending = []
+        self._cuda.fill_async(tables.pointer, 255, tables.num_bytes, self._cuda.Stream(0).handle)
""",
}

OF_SAVE = {
    "host copies do not wait": """
-        self._wait(stream, self._in_flight((tier.last_touch if writes else tier.last_write)[blocks]))
@@
             writes = direction is self._in
-            self._compute.copies.let_wait(direction.stream, tier, block_ids, writes=writes)
""",
}

CHECKS = {"cuda_churn:run_in_threads": OF_CHURN, "host_memory:save_on_fake_gpus": OF_SAVE}


FAULTS = [(check, fault) for check, faults in CHECKS.items() for fault in faults]


@pytest.mark.parametrize(("check", "fault"), FAULTS[ENTRIES])
def test_a_fault_is_detected(check: str, fault: str) -> None:
    done = check_edited("kvservice.devices", CHECKS[check][fault], check)
    assert done.returncode == DETECTED, done.stdout[-2000:] + done.stderr[-4000:]


def test_every_fault_can_be_made() -> None:
    """Also those that another run tries."""
    assert all(edits_in("kvservice.devices", CHECKS[check][fault]) for check, fault in FAULTS)
