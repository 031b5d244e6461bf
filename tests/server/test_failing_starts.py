"""Each error that can happen between the start of a process and its service: the state is never lost for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import failing_starts
import pytest


def injected(first: int, step: int, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, failing_starts.__file__, str(first), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True, cwd=Path.cwd())
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(4))
def test_after_an_error_at_any_place_the_next_start_takes_over(first: int) -> None:
    """If something was lacking. After another error, which damage or a bug may cause, it takes over or begins empty."""
    result = injected(first, 4, 3600)
    assert result["places"] > 300, "a start calls the functions of many modules"
    assert result["tried"] > 150
    assert not result["wrong"]
