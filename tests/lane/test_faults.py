"""A daemon that fails during a call: the lane ends, and both client and daemon get the error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The plan of a call with four million rows needs more memory than the process may allocate. `on_fault` may close or
# drop the server, raise an error or not return: the server and the process must end in each case.
SCRIPT = """
import gc, resource, sys, threading
from lane_rig import LaneRig
from kvservice.errors import ConnectionLostError

rig = LaneRig(num_layers=1, num_blocks=32, region_bytes=2 << 30)
told = []
def on_fault(text):
    told.append(text)
    if sys.argv[1] == "close": rig.server.close()
    if sys.argv[1] == "drop": del rig.server
    while sys.argv[1] == "stay": pass  # until the process ends
    if sys.argv[1] == "raise": raise RuntimeError("on_fault itself")
reported = threading.Event()
def report(unraisable):
    sys.__unraisablehook__(unraisable)
    reported.set()
sys.unraisablehook = report
rig.faults.clear()
rig.server.close()
rig.server = type(rig.server)(rig.memory, rig.session, rig.executor, 20.0, on_fault)
rig.client = type(rig.client)(rig.memory, 20.0)
rig.publish(1, (64,), (64,))
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 20), resource.RLIM_INFINITY))
places = [(0, 0), (0, 640 << 20), (0, 641 << 20), (0, 642 << 20)]
answer = rig.client.wait(rig.client.submit(1, 0, False, 65534, *places, None), 60.0)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert answer[:2] == ("INTERNAL", ""), answer
while not told: pass
try: rig.client.submit(1, 0, False, 4, *places, None)
except ConnectionLostError as error: assert "failure" in str(error)
else: raise AssertionError
if sys.argv[1] != "drop":
    assert rig.server.closed
    assert rig.server.stats()[:2] == (1, 1)
    rig.server.close()
    del rig.server
gc.collect()
assert told == [answer[2]]
assert sys.argv[1] != "raise" or reported.wait(60)
print("done")
"""


@pytest.mark.parametrize("what", ["return", "close", "drop", "raise", "stay"])
def test_a_fault_ends_the_lane_and_is_reported(what: str) -> None:
    # Without arenas of the threads, which may hold enough free memory for the plan.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-P", "-c", SCRIPT, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
    assert done.returncode == 0
    assert ("on_fault itself" in done.stderr) == (what == "raise")
