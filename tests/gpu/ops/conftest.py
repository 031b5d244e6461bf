"""Adds this directory and that of the CPU tests to the path, because they share `attention_reference`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "ops")]

from gpu_memory import GpuMemory  # noqa: E402  the path comes first


@pytest.fixture
def memory() -> Iterator[GpuMemory]:
    with GpuMemory() as opened:
        yield opened
