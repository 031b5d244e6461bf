"""Builds store_fuzz.cpp with sanitizers and runs it: the hash table with colliding hashes, and the index, which is also
killed at each of its stores."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.third]

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "csrc"
STEPS = 30_000


def test_random_calls_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    flags = ["-std=gnu++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    flags.append("-DKVSERVICE_STORE_FUZZ")
    if subprocess.run([compiler, *flags, probe, "-o", tmp_path / "probe"], check=False).returncode != 0:
        pytest.skip("the compiler has no sanitizers")
    program = tmp_path / "store_fuzz"
    native = [SOURCES / "store" / f"{name}.cpp" for name in ("check", "index", "mirror", "recover", "slots")]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", HERE / "store_fuzz.cpp", *native, "-o", program], check=True)
    seed = random.SystemRandom().randrange(2**32)
    done = subprocess.run([program, str(STEPS), str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
