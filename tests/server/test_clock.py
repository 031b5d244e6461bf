"""When a process was started."""

from __future__ import annotations

import subprocess
import sys
import time

# The kernel's unit of the start of a process.
TICK_S = 0.01


def test_a_process_knows_when_it_was_started() -> None:
    code = "from kvservice.server.clock import process_start_s; print(process_start_s())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert before - 2 * TICK_S <= float(done.stdout) <= time.monotonic()
