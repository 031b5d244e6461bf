"""Nothing that a process owns is left when it ends, by whatever end, and a fork of it is not the owner."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from footprint import children
from transfer_rig import is_gone
from waiting import until

# Forks an owner for each line of its input, which is how the owner ends, and answers with its exit code. An owner has a
# folder and a process, which has another one. Only this process imports anything.
OWNERS = """
import multiprocessing, os, signal, sys, time
from kvservice.owned import OwnedFolder, OwnedProcess

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests inherit

def guards(folder):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(folder.path).encode() in open(f"/proc/{pid}/cmdline", "rb").read():
                found.append(int(pid))
        except OSError:
            pass
    return found

def until(condition):
    while not condition():
        time.sleep(0.01)

def is_gone(process):
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"

for line in sys.stdin:
    if (owner := os.fork()) == 0:
        folder = OwnedFolder("kvservice-test-")
        (folder.path / "file").touch()
        process = OwnedProcess(["sh", "-c", "sleep 1000 & exec sleep 1000"])
        print(process.pid, folder.path, flush=True)
        signal.alarm(100)
        exec(line.replace("; ", "\\n"))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1]), flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
GONE = "lambda: not folder.path.exists() and not os.path.exists(f'/proc/{process.pid}')"
FORK = f"multiprocessing.get_context('fork').Process(target=until, args=({GONE},)).start()"
ENDS = {
    "the last line": ("pass", 0),
    "an exception": ("raise ValueError", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP),
    "SIGKILL": (KILL, -signal.SIGKILL),
    "another program": ("os.execv('/bin/true', ['true'])", 0),
    "while the process is frozen": (f"os.kill(process.pid, signal.SIGSTOP); {KILL}", -signal.SIGKILL),
    "with one of the two guards": (
        f"until(lambda: len(guards(folder)) == 2); os.kill(guards(folder)[0], signal.SIGKILL); {KILL}",
        -signal.SIGKILL,
    ),
    "signals for all": (
        "until(lambda: len(guards(folder)) == 2); [os.kill(pid, signal.SIGTERM) for pid in guards(folder)]; " + KILL,
        -signal.SIGKILL,
    ),
    "while a fork lives on": (f"os.fork() or until({GONE}); {KILL}", -signal.SIGKILL),
    "while a fork of multiprocessing lives on": (f"{FORK}; {KILL}", -signal.SIGKILL),
}
# An owner that has dropped what it owns, and one that has closed it, go on.
DROPPED = """pid, path = process.pid, folder.path; del process, folder; until(lambda: not path.exists()); \
until(lambda: not os.path.exists(f"/proc/{pid}"))"""
CLOSED = """guard = guards(folder)[0]; folder.remove(); assert not folder.path.exists(); \
assert not os.path.exists(f"/proc/{guard}"); folder.remove(); process.kill(); process.wait()"""
# A fork that removes and drops everything changes nothing.
FORKED = """child = os.fork(); child or folder.remove(); child or setattr(sys.modules["__main__"], "process", None); \
child or os._exit(0); assert os.waitpid(child, 0)[1] == 0; time.sleep(0.1); assert folder.path.exists(); \
assert process.poll() is None; assert not is_gone(process.pid)"""
LIVES = {"dropped": DROPPED, "closed": CLOSED, "a fork lets go": FORKED}
End = Callable[[str], tuple[int, Path, int]]
# Two daemons: one with an observer, one with a keeper and a socket elsewhere. A fork leaves the context, and ends.
DAEMONS = """
import os, signal, sys
from kvservice.launch import Daemon

OPTIONS = {"num_blocks": 16, "head_size": 32, "num_layers": 1}
with (
    Daemon(**OPTIONS, http_address="127.0.0.1:0") as first,
    Daemon(**OPTIONS, keeper=True, unix_socket=sys.argv[1]) as second,
):
    if os.fork():
        assert os.wait()[1] == 0
        print(first.process.pid, second.process.pid, second.daemon_pid())
        print(first.log.parent, second.log.parent, flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
os._exit(0)
"""


@pytest.fixture(scope="module")
def end() -> Iterator[End]:
    """Let an owner end. Returns the id of its process, its folder, and its exit code."""
    command = [sys.executable, "-P", "-c", OWNERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owners:
        assert owners.stdin is not None
        stdin, stdout = owners.stdin, owners.stdout
        assert stdout is not None

        def run(line: str) -> tuple[int, Path, int]:
            stdin.write(f"{line}\n")
            stdin.flush()
            pid, folder = stdout.readline().split()
            return int(pid), Path(folder), int(stdout.readline())

        yield run


def group(leader: int) -> list[int]:
    """Return the processes in the group of this process, but for zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_after(how: str, end: End) -> None:
    line, status = ENDS[how]
    pid, folder, ended = end(line)
    assert ended == status
    until(lambda: not group(pid))
    until(lambda: not folder.exists())


@pytest.mark.parametrize("how", LIVES)
def test_of_an_owner_that_lives_on(how: str, end: End) -> None:
    pid, folder, ended = end(LIVES[how])
    assert ended == 0
    until(lambda: not group(pid))
    until(lambda: not folder.exists())


def test_nothing_is_left_of_daemons(tmp_path: Path) -> None:
    elsewhere = tmp_path / "kv.sock"
    command = [sys.executable, "-P", "-c", DAEMONS, str(elsewhere)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        processes = [int(pid) for pid in owner.stdout.readline().split()]
        folders = [Path(path) for path in owner.stdout.readline().split()]
        until(lambda: len(children(processes[0])) == 1)
        processes += children(processes[0])
        assert not any(is_gone(pid) for pid in processes)
        assert {path.name for path in folders[0].iterdir()} >= {"daemon.log", "kvservice.sock"}
        owner.communicate("end")
        assert owner.returncode == -signal.SIGKILL
    until(lambda: all(is_gone(pid) for pid in processes))
    until(lambda: not any(path.exists() for path in [*folders, *tmp_path.iterdir()]))
