"""Each error that can happen between the start of a process and its service: the state is never lost for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import failing_starts
import pytest
from todays_part import ENTRIES, PART


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_after_an_error_at_any_place_the_next_start_takes_over() -> None:
    """If something was lacking. After another error, which damage or a bug may cause, it takes over or begins empty."""
    command = [sys.executable, failing_starts.__file__, str(ENTRIES.start), str(ENTRIES.step)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["places"] > 300, "a start calls the functions of many modules"
    assert result["tried"] >= 2 * (result["places"] // ENTRIES.step), "two errors at each place"
    assert not result["wrong"], f"TEST_PART={PART}"
