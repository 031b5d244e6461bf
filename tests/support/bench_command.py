"""The command `kvservice bench`, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from kvservice.cli import main
from kvservice.environment import missing_environment


def invoke(*arguments: str) -> Result:
    """Run the command in this process. Without these variables some would start the process anew."""
    return CliRunner(env=missing_environment(os.environ) | {"COLUMNS": "400"}).invoke(main, ["bench", *arguments])


def shown(*arguments: str) -> str:
    """Run the command in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvservice", "bench", *arguments],
        env=os.environ | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=280,  # a benchmark on a busy machine takes minutes
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(*arguments: str) -> dict[str, Any]:
    """Run the command in a process of its own, and return its results."""
    results: dict[str, Any] = json.loads(shown(*arguments, "--json"))
    return results


def cells(text: str) -> list[list[str]]:
    """Return the rows of the tables in a text, without their headings."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
