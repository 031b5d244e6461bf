"""The CUDA kernels are built where they can run, for the GPUs that are there. A stand-in for the driver's library says
which GPUs there are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
DRIVER = """
static const int capabilities[][2] = {CAPABILITIES};
int cuInit(unsigned flags) { (void)flags; return RESULT; }
int cuDeviceGetCount(int* count) { *count = sizeof(capabilities) / sizeof(capabilities[0]); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = capabilities[device][attribute - 75];
  return 0;
}
"""
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def environment(tmp_path: Path, *capabilities: tuple[int, int], result: int = 0) -> dict[str, str]:
    """Return an environment with a driver for these GPUs and without settings of the build. `result` is what the
    driver's initialisation returns."""
    table = ",".join(f"{{{major}, {minor}}}" for major, minor in capabilities)
    source = DRIVER.replace("CAPABILITIES", table).replace("RESULT", str(result))
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    settings = {name: value for name, value in os.environ.items() if name not in ("CUDAARCHS", "KVSERVICE_CUDA")}
    return settings | {"LD_LIBRARY_PATH": str(tmp_path)}


def found(environment: dict[str, str]) -> str:
    """Return the architectures that are compiled for, or what is missing."""
    command = [sys.executable, str(ROOT / "csrc/cuda/find_gpus.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == bool(done.stdout), done.stderr
    return (done.stdout or done.stderr).strip()


def test_architectures_are_those_of_the_gpus(tmp_path: Path) -> None:
    assert found(environment(tmp_path, (8, 0))) == "80-real"
    assert found(environment(tmp_path, (8, 9), (8, 6), (8, 9))) == "86-real;89-real"
    assert found(environment(tmp_path, (9, 0), (7, 5))) == "90a-real"
    # Later GPUs compile PTX when they first use it.
    assert found(environment(tmp_path, (12, 0), (10, 0))) == "90-virtual"


def test_what_is_missing_has_a_name(tmp_path: Path) -> None:
    assert found(environment(tmp_path, (7, 5))) == "no GPU of compute capability 8.0 or later"
    assert found(environment(tmp_path, (9, 0), result=NO_DEVICE)) == "no GPU that the NVIDIA driver can use"


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for several configurations. CMake keeps there what it finds out about the compilers, which takes most of
    its time."""
    return tmp_path_factory.mktemp("build")


def configure(folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Return the status of CMake, and what it says. It chooses the architectures anew."""
    for chosen in folder.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        chosen.unlink()
    command = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), "-U", "CMAKE_CUDA_ARCHITECTURES"]
    command.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["auto", "on", "off"])
def test_architectures_that_cannot_be_are_refused_by_name(cuda: str, build_folder: Path, tmp_path: Path) -> None:
    wanted = environment(tmp_path, (9, 0)) | {"KVSERVICE_CUDA": cuda}
    for wrong in ("banana", "75", "90a-real;70", "all"):
        status, said = configure(build_folder, wanted | {"CUDAARCHS": wrong})
        assert status != 0, wrong
        assert f"CUDAARCHS has '{wrong.split(';')[-1]}'" in said, said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
def test_cuda_is_built_where_it_can_run(build_folder: Path, tmp_path: Path) -> None:
    def configured(environment: dict[str, str]) -> str:
        _, said = configure(build_folder, environment)
        return next(line.removeprefix("-- ") for line in said.splitlines() if "kvservice: building" in line)

    hopper = environment(tmp_path, (9, 0))
    assert configured(hopper).endswith(" for 90a-real")
    assert configured(hopper | {"CUDAARCHS": "80-real"}).endswith(" for 80-real")
    assert configured(hopper | {"CUDAARCHS": ""}).endswith(" for 90a-real")

    nothing = environment(tmp_path, (9, 0), result=NO_DEVICE)
    left_out = configured(nothing)
    assert left_out.startswith("kvservice: building without CUDA (there is a compiler, but no GPU that")
    assert "KVSERVICE_CUDA=on" in left_out
    assert "CUDAARCHS" in left_out
    assert configured(nothing | {"KVSERVICE_CUDA": "on"}).endswith(" for 80-real;90a-real;90-virtual")
