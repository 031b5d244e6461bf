"""A process ends well while its threads compute in the extension."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import threading
import numpy as np
from kvservice import _ext

pool = np.zeros((4, 1, 2, 1, 32 * 16), np.float32)
slots = np.zeros(16, np.int64)
started = threading.Barrier(4)

def read():
    started.wait()
    while True: _ext.read_kv(pool, 0, slots, 32)

for _ in range(3): threading.Thread(target=read, daemon=True).start()
started.wait()
print("done")
"""


def test_threads_in_native_calls_do_not_abort_the_end_of_the_process() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", SCRIPT]
    for _ in range(3):  # nearly each of them aborted when the thread's end unwound C++
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
