"""The sanitizer's grid, in separate processes. Table entries that must not be read have invalid block ids, and a
process cannot use its device after such a fault.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "sanitize.py"


@pytest.mark.parametrize("name", ["reference", "decode", "extend", "auto", "cascade", "slots"])
def test_nothing_is_read_that_must_not_be(name: str) -> None:
    ran = subprocess.run([sys.executable, str(PROGRAM), name], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{name} ok\n"), ran.stderr[-3000:]
