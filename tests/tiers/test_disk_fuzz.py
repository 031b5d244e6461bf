"""Builds disk_fuzz.cpp with sanitizers and runs it: the index of the disk tier over a simulated disk."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.third]

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "csrc"
STEPS = 2_000_000


def test_random_calls_and_kills_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    flags = ["-std=gnu++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    if subprocess.run([compiler, *flags, probe, "-o", tmp_path / "probe"], check=False).returncode != 0:
        pytest.skip("the compiler has no sanitizers")
    program = tmp_path / "disk_fuzz"
    native = [SOURCES / "disk" / f"{name}.cpp" for name in ("check", "index", "recover", "sectors", "slots")]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", HERE / "disk_fuzz.cpp", *native, "-o", program], check=True)
    seed = random.SystemRandom().randrange(2**32)
    done = subprocess.run([program, str(STEPS), str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
