"""Builds lane_fuzz.cpp with sanitizers and runs it for KVSERVICE_FUZZ_SECONDS."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.third]

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "csrc"
KERNELS = ("attention", "isa", "kernels_portable", "kv_slots", "parallel")
SECONDS = int(os.environ.get("KVSERVICE_FUZZ_SECONDS", "10"))


@pytest.mark.timeout(300 + SECONDS)
def test_lanes_survive_arbitrary_content_of_their_memory(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    flags = ["-std=gnu++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread"]
    if subprocess.run([compiler, *flags, probe, "-o", tmp_path / "probe"], check=False).returncode != 0:
        pytest.skip("the compiler has no sanitizers")
    program = tmp_path / "lane_fuzz"
    native = [
        HERE / "lane_fuzz.cpp",
        *SOURCES.glob("lane/*.cpp"),
        *(SOURCES / "cpu" / f"{name}.cpp" for name in KERNELS),
    ]
    objects = [tmp_path / f"{source.stem}.o" for source in native]

    def build(source: Path, target: Path) -> None:
        subprocess.run([compiler, *flags, f"-I{SOURCES}", "-c", source, "-o", target], check=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(build, native, objects))
    subprocess.run([compiler, *flags, *objects, "-o", program], check=True)
    seed = random.SystemRandom().randrange(2**32)
    done = subprocess.run([program, str(SECONDS), str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
