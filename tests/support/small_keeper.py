"""A real keeper whose daemon is a small script that follows a plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from kvservice.keeper import KeeperSettings, ask

# Runs the steps of its plan: those of "standby" in a standby process, else those of the number of restarts before it.
CHILD = """
import json, os, signal, socket, sys
from kvservice.keeper import HANDOVER, READY, Notifier, Standby, report_version, taken_descriptors

SIGNALS = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

def say(event, **values):
    os.write(1, (json.dumps({"event": event, "pid": os.getpid()} | values) + "\\n").encode())

def contents(taken):
    return {name: os.pread(descriptor, 64, 0).decode() for name, descriptor in taken.items()}

plan = json.load(open(sys.argv[1]))
notifier, standby = Notifier.from_environment(), Standby.from_environment()
report_version("1.0" if standby is None else "2.0")
environ = {name: value for name, value in os.environ.items() if name.startswith("KVSERVICE_")}
say("start", taken=contents(taken_descriptors()), environ=environ, standby=standby is not None)
steps = plan.get("standby" if standby else os.environ["KVSERVICE_RESTARTS"], ["ready", "serve"])
for step in steps:
    name, *arguments = step.split(" ")
    if name == "store":
        descriptor = os.memfd_create(arguments[0])
        os.write(descriptor, arguments[1].encode())
        notifier.store(arguments[0], descriptor)
    elif name == "send":
        notifier.send(" ".join(arguments))
    elif name == "ready":
        notifier.send(READY)
        notifier.barrier(60)
        say("ready")
    elif name == "serve":
        number = signal.sigwait(SIGNALS)
        say("signal", number=number)
        if number == signal.SIGUSR1:
            notifier.send(HANDOVER)
        sys.exit(0)
    elif name == "hang":
        signal.pause()
    elif name == "exit":
        sys.exit(int(arguments[0]))
    elif name == "raise":
        os.kill(os.getpid(), int(arguments[0]))
    elif name == "flood":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as garbage:
            garbage.connect(os.environ["NOTIFY_SOCKET"])
            for number in range(int(arguments[0])):
                garbage.send([b"", b"\\xff", b"no equals", b"A=" + b"x" * 5000, b"FDSTORE=1\\nFDNAME=f"][number % 5])
    elif name == "orphan":
        if os.fork() == 0:
            if (pid := os.fork()) == 0:
                os._exit(3)
            say("orphan", orphan=pid)
            os._exit(0)
        os.wait()
    elif name == "refuse":
        standby.refuse(" ".join(arguments))
        sys.exit(1)
    elif name == "go":
        say("go", taken=contents(standby.wait_for_go()), environ=dict(os.environ))
"""

ADOPT = """
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


class SmallKeeper:
    """`plan` maps the number of restarts, or "standby", to steps of CHILD. Without a plan a process becomes ready and
    serves until it gets SIGTERM or SIGUSR1. The keeper adopts orphans, as process 1 of a container does."""

    def __init__(
        self, directory: Path, plan: dict[str, list[str]], drain_s: float = 60.0, control_path: str = ""
    ) -> None:
        script = directory / "child.py"
        script.write_text(CHILD)
        plan_file = directory / "plan.json"
        plan_file.write_text(json.dumps(plan))
        self._log = directory / "log"
        self.control_path = control_path or str(directory / "k.sock.keeper")
        command = [sys.executable, "-P", str(script), str(plan_file)]
        self._settings = KeeperSettings(command, self.control_path, drain_s, "info", "text")

    def __enter__(self) -> SmallKeeper:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ADOPT, sys.executable, "-P", "-m", "kvservice.keeper", self._settings.to_json()],
                stdout=subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("KVSERVICE_")},
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the next event of a child, which must be this one, and return it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        event: dict[str, Any] = json.loads(line)
        assert event["event"] == name, event
        return event

    def is_silent(self) -> bool:
        """Wait until no process can write events any more, and return whether none came."""
        assert self.process.stdout is not None
        return self.process.stdout.readline() == b""

    def started(self) -> dict[str, Any]:
        """Wait until a child is ready, and return what it found at its start."""
        event = self.event("start")
        self.event("ready")
        return event

    def ask(self, command: str) -> list[dict[str, Any]]:
        return list(ask(self.control_path, command, 60))

    def status(self) -> dict[str, Any]:
        return self.ask("status")[-1]

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
