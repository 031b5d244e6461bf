"""`kvservice serve` with a keeper, without one, and under systemd, whose part the test plays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import waiting
from footprint import children
from small_manager import SmallManager
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.keeper import MANAGER_VARIABLES
from kvservice.launch import Daemon, StartError

# Takes the place of systemd: passes the descriptors to the command, as 3 and up, and stays its process.
PASS = """
import os, sys
given = [int(number) for number in sys.argv[1].split(",") if number]
above = max(given, default=2) + 1
high = [os.dup2(number, above + index) for index, number in enumerate(given)]
for index, number in enumerate(high):
    os.dup2(number, 3 + index)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = str(len(given))
os.execv(sys.executable, [sys.executable, "-P", "-m", "kvservice", "serve"])
"""


class Systemd:
    """Keeps what the daemon stores."""

    def __init__(self, manager: SmallManager, unix_socket: Path) -> None:
        self.manager = manager
        self.log = unix_socket.with_name("log")
        self.kept: dict[str, int] = {}
        addresses = {"unix_socket": unix_socket, "tcp_address": "", "http_address": "127.0.0.1:0"}
        self._options = SMALL_POOL | addresses | {"session_grace_s": 600}

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon and do what it says until it is ready."""
        options = {f"KVSERVICE_{name.upper()}": str(value) for name, value in self._options.items()}
        manager = {"NOTIFY_SOCKET": self.manager.address, "LISTEN_FDNAMES": ":".join(self.kept)}
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PASS, ",".join(map(str, self.kept.values()))],
                env=os.environ | options | manager,
                pass_fds=[*self.kept.values()],
                stderr=log,
            )
        while not self._serve(process.pid):
            pass
        return process

    def _serve(self, pid: int) -> bool:
        """Process one message. Returns whether it says that the daemon is ready."""
        received = self.manager.receive()
        if received.pid != pid:  # the last words of the process before
            return False
        values = dict(line.split("=", 1) for line in received.lines)
        if "FDSTOREREMOVE" in values and values["FDNAME"] in self.kept:
            os.close(self.kept.pop(values["FDNAME"]))
        if "FDSTORE" in values:
            (self.kept[values["FDNAME"]],) = received.descriptors
        elif received.descriptors:
            os.close(received.descriptors[0])
        return "READY" in values

    def close(self) -> None:
        for descriptor in self.kept.values():
            os.close(descriptor)


@contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    with SmallManager(str(tmp_path / "notify")) as manager:
        playing = Systemd(manager, tmp_path / "k.sock")
        yield playing
        playing.close()


def test_under_systemd_there_is_no_keeper_and_the_next_process_takes_over(systemd: Systemd, tmp_path: Path) -> None:
    with (
        running(systemd.start()) as first,
        KVClient(f"unix:{tmp_path}/k.sock", reconnect_wait_s=waiting.PATIENCE_S) as client,
    ):
        assert not (tmp_path / "k.sock.keeper").exists()
        assert {"kvservice.http", "kvservice.fds", "kvservice.state.table"} <= set(systemd.kept)
        kv = client.session()
        sequence = kv.allocate([1, 2, 3])
        first.kill()
        first.wait()
        with running(systemd.start()) as second:
            (found,) = kv.describe([sequence])
            assert found.length == 3
            assert "after a crash: took over 1 session, 1 sequence" in systemd.log.read_text()
            # `systemctl reload`
            second.send_signal(signal.SIGHUP)
            assert second.wait(60) == 0
        with running(systemd.start()):
            assert kv.describe([sequence]) == [found]
            said = systemd.log.read_text()
            assert "after upgrade: took over 1 session, 1 sequence" in said
            # systemd does not say when the process before ended, so this counts from the start of the next one.
            assert "down 0.0 s" not in said


def test_a_manager_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    for address in ("/absent/notify", "relative"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvservice", "serve", "--unix-socket", str(tmp_path / "k.sock")],
            env=os.environ | {"NOTIFY_SOCKET": address, "KVSERVICE_NUM_BLOCKS": "64"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("Error: NOTIFY_SOCKET: the keeper or systemd of this process cannot be used: ")


def test_a_configuration_that_is_refused_is_told_to_the_manager(tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text('colour = "red"')
    with SmallManager(str(tmp_path / "notify")) as manager:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvservice", "serve", "--config", str(tmp_path / "options.toml")],
            env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        reason = done.stderr.removeprefix("Error: ").strip()
        assert reason.startswith("colour: unknown option")
        assert manager.receive().lines == (f"STATUS=cannot start: {reason}",)


def test_a_private_daemon_has_a_keeper_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not talk to the manager of the process that starts it either."""
    for name in MANAGER_VARIABLES:
        monkeypatch.setenv(name, "/absent")
    with Daemon(**SMALL_POOL) as daemon:
        assert daemon.daemon_pid() == daemon.process.pid
        assert not Path(f"{daemon.address.removeprefix('unix://')}.keeper").exists()
    with Daemon(**SMALL_POOL, keeper=True) as daemon:
        pid = daemon.daemon_pid()
        assert children(daemon.process.pid) == [pid]
        os.kill(pid, 9)
        waiting.until(lambda: changed(daemon, pid))
        assert daemon.process.poll() is None


def changed(daemon: Daemon, pid: int) -> bool:
    """Return whether the daemon has another process than `pid`."""
    try:
        return daemon.daemon_pid() != pid
    except StartError:
        return False
