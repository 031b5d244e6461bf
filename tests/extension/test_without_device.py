"""The CUDA extension where there is no device: it imports, and says what is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("kvservice._cuda") is None, reason="kvservice was built without CUDA"
)

CALLS = {
    "memory_info": "_cuda.memory_info(0)",
    "device_facts": "_cuda.device_facts(0)",
    "set_device": "_cuda.set_device(0)",
    "DeviceMemory": "_cuda.DeviceMemory(0, 1 << 21)",
    "HostRegistration": "_cuda.HostRegistration(4096, 4096)",
    "Stream": "_cuda.Stream(0)",
    "Event": "_cuda.Event(0)",
    "allocate_async": "_cuda.allocate_async(16, 0)",
}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from kvservice import _cuda\n{code}"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_counts_no_device() -> None:
    assert python("print(_cuda.device_count())") == "0"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_any_other_call_fails_with_the_code_of_cuda(call: str) -> None:
    code = f"try:\n    {call}\nexcept _cuda.CudaError as error:\n    print(error.code, error)"
    number, _, message = python(code).partition(" ")
    assert int(number) > 0
    assert "cudaError" in message
