"""Arrays that another process can read but not write."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from kvservice.telemetry import SharedArrays, open_arrays

READER = """
import json, sys
from kvservice.telemetry import open_arrays
arrays = open_arrays(int(sys.argv[1]), json.loads(sys.argv[2]))
print(json.dumps({name: array.tolist() for name, array in arrays.items()}))
"""


def test_another_process_reads_what_is_written() -> None:
    shared = SharedArrays()
    numbers = shared.zeros("numbers", (2, 3), np.int64)
    flags = shared.zeros("flags", (5,), np.bool_)
    seconds = shared.zeros("seconds", (1,), np.float64)
    nothing = shared.zeros("nothing", (0,), np.int32)
    numbers[1, 2], flags[4], seconds[0] = -7, True, 0.5
    fd = shared.read_only()
    command = [sys.executable, "-P", "-c", READER, str(fd), json.dumps(shared.manifest)]
    done = subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, timeout=60, check=True)
    os.close(fd)
    read = json.loads(done.stdout)
    assert read == {
        "numbers": numbers.tolist(), "flags": flags.tolist(), "seconds": seconds.tolist(), "nothing": nothing.tolist(),
    }  # fmt: skip


def test_the_reader_sees_later_writes_and_cannot_write() -> None:
    shared = SharedArrays()
    numbers = shared.zeros("numbers", (4,), np.int64)
    fd = shared.read_only()
    read = open_arrays(fd, shared.manifest)["numbers"]
    numbers[:] = 3
    assert read.tolist() == [3] * 4
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 8)
    os.close(fd)


def test_what_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(MemoryError, match="tables takes"):
        SharedArrays().zeros("tables", (1 << 40,), np.int64)
