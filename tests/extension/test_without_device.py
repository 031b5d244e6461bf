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
    "ImportedMemory": "_cuda.ImportedMemory(0, 0, 1 << 21, True)",
    "IpcAllocation": "_cuda.IpcAllocation(0, 1 << 21)",
    "IpcMemory": "_cuda.IpcMemory(0, bytes(64), 1 << 21)",
    "synchronize_stream": "_cuda.synchronize_stream(0)",
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


def test_any_other_call_fails_with_the_code_of_cuda() -> None:
    code = f"""
for call in {list(CALLS.values())}:
    try:
        exec(call)
    except _cuda.CudaError as error:
        print(error.code, error)
    else:
        print(0, call)
"""
    said = dict(zip(CALLS, python(code).splitlines(), strict=True))
    failed = {name: line for name, line in said.items() if int(line.split()[0]) > 0 and "cudaError" in line}
    assert failed == said


ATTENTION = "num_blocks=1, num_layers=1, num_kv_heads=1, head_size=64, block_size=16, num_heads=1, num_seqs=1"
REFUSED = {
    "memory of no size": ("num_bytes", "_cuda.DeviceMemory(0, 0)"),
    "memory of a negative size": ("num_bytes", "_cuda.allocate_async(-1, 0)"),
    "shared memory of no size": ("num_bytes", "_cuda.IpcAllocation(0, 0)"),
    "shared memory of more than there is": ("num_bytes", "_cuda.IpcAllocation(0, 2**63 - 1)"),
    "a descriptor that is none": ("fd", "_cuda.ImportedMemory(0, -1, 1 << 21, True)"),
    "an imported pool of no size": ("num_bytes", "_cuda.ImportedMemory(0, 0, 0, True)"),
    "a memory handle too short": ("raw_handle", "_cuda.IpcMemory(0, bytes(63), 1)"),
    "a memory handle too long": ("raw_handle", "_cuda.IpcMemory(0, bytes(65), 1)"),
    "nothing of a memory handle": ("byte_size", "_cuda.IpcMemory(0, bytes(64), 0)"),
    "more sequences than int32 counts": ("query", "attend(num_seqs=2**31)"),
    "tables wider than int32 counts": ("block_tables", "attend(max_blocks=2**31)"),
    "queries whose sum overflows": ("max_query_len", "attend(max_query_len=2**62, num_seqs=8)"),
    "a pool off the grid": ("pool", "attend(pool=8)"),
    "blocks of no size": ("block_bytes", "_cuda.copy_blocks(16, 16, 2, 2, 0, ids, ids + 1, 0)"),
    "ids that are no int32": ("src_ids", "_cuda.copy_blocks(16, 16, 2, 2, 16, [0], [1], 0)"),
    "a dtype that there is not": ("query", "attend(dtype=5)"),
}


def test_what_is_wrong_is_named_before_the_device_is_asked() -> None:
    code = f"""
import numpy as np
from kvservice.errors import InvalidArgumentError

ids = np.zeros(1, np.int32)

def attend(**changed):
    attention = _cuda.Attention()
    for name, value in (dict({ATTENTION}) | changed).items():
        setattr(attention, name, value)
    attention.wanted_workspace_bytes()

for call in {[call for _, call in REFUSED.values()]}:
    try:
        exec(call)
    except InvalidArgumentError as error:
        print(error.field)
    else:
        print()
"""
    named = dict(zip(REFUSED, python(code).split("\n"), strict=True))
    assert named == {name: field for name, (field, _) in REFUSED.items()}
