"""Builds turns.cpp and runs it: large work of one client, on the threads of the kernels and on a lane, beside small
work of another."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "csrc"


@pytest.mark.timeout(300)
def test_small_work_does_not_wait_for_large_work(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    native = [HERE / "turns.cpp", SOURCES / "cpu" / "parallel.cpp", SOURCES / "lane" / "cpu_executor.cpp"]
    program = tmp_path / "turns"
    subprocess.run([compiler, "-std=gnu++17", "-g1", "-pthread", f"-I{SOURCES}", *native, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
