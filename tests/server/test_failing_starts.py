"""Each error that can happen between the start of a process and its service: the state is never lost for it.

A run tries a third of the places, each day the next one. TEST_PART=0, 1 or 2 chooses it; TEST_PART=all takes all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import failing_starts
import pytest

NUM_PARTS = 3
PART = os.environ.get("TEST_PART", str(int(time.time() // 86400) % NUM_PARTS))
FIRST, STEP = (0, 1) if PART == "all" else (int(PART), NUM_PARTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_after_an_error_at_any_place_the_next_start_takes_over() -> None:
    """If something was lacking. After another error, which damage or a bug may cause, it takes over or begins empty."""
    assert 0 <= FIRST < NUM_PARTS
    command = [sys.executable, failing_starts.__file__, str(FIRST), str(STEP)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["places"] > 300, "a start calls the functions of many modules"
    assert result["tried"] >= 2 * (result["places"] // STEP), "two errors at each place"
    assert not result["wrong"], f"TEST_PART={PART}"
