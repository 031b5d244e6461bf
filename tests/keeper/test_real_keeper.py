"""Real keepers with small daemons: crashes, stops, descriptors, garbage."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import lingering
import pytest
import waiting
from footprint import open_files
from small_keeper import SmallKeeper

import kvservice

# Descriptors that a keeper holds.
MAX_DESCRIPTORS = 64
STRANGER = 65534


def test_descriptors_outlive_a_killed_daemon(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": ["store pool keys", "store table rows", "ready", "hang"]}) as keeper:
        first = keeper.started()
        assert first["taken"] == {}
        assert first["environ"] == {"KVSERVICE_RESTARTS": "0"}
        os.kill(first["pid"], signal.SIGKILL)
        second = keeper.started()
        assert second["taken"] == {"pool": "keys", "table": "rows"}
        assert second["environ"]["KVSERVICE_ENDED"] == "signal 9"
        assert second["environ"]["KVSERVICE_RESTARTS"] == "1"
        os.kill(second["pid"], signal.SIGKILL)
        assert keeper.started()["taken"] == {"pool": "keys", "table": "rows"}
        status = keeper.status()
        assert (status["ready"], status["version"], status["restarts"]) == (True, "1.0", 2)
        assert "ended: signal 9; it starts again now" in keeper.log


def test_what_a_daemon_stored_at_last_is_kept(tmp_path: Path) -> None:
    """The message and the end of the process can reach the keeper at the same time."""
    with SmallKeeper(tmp_path, {"0": ["ready", *["store last words"] * 3, "raise 9"]}) as keeper:
        keeper.started()
        assert keeper.started()["taken"] == {"last": "words"}


def test_no_keeper_no_daemon(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": ["ready", "hang"]}) as keeper:
        keeper.started()
        keeper.process.kill()
        # The daemon has the other end of the pipe.
        assert keeper.is_silent()


def test_a_stop_is_passed_on(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        with SmallKeeper(tmp_path, {}) as keeper:
            keeper.started()
            keeper.process.send_signal(number)
            assert keeper.event("signal")["number"] == signal.SIGTERM
            assert keeper.process.wait(60) == 0
            assert keeper.is_silent()
            assert not Path(keeper.control_path).exists()


def test_signals_without_a_meaning_do_not_end_it(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {}) as keeper:
        keeper.started()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            keeper.process.send_signal(number)
        assert keeper.status()["restarts"] == 0
        assert keeper.stop() == 0


def test_a_daemon_that_refuses_its_configuration_is_not_started_again(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": ["exit 1"]}) as keeper:
        assert keeper.process.wait(60) == 1
        keeper.event("start")
        assert keeper.is_silent()
        assert keeper.log == ""


def test_after_a_device_fault_nothing_is_kept(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": ["store pool keys", "ready", "exit 70"]}) as keeper:
        keeper.started()
        second = keeper.started()
        assert second["taken"] == {}
        assert second["environ"]["KVSERVICE_ENDED"] == "status 70"
        assert "status 70; the device failed, so nothing is kept" in keeper.log


def test_garbage_and_floods_change_nothing(tmp_path: Path) -> None:
    """Descriptors in messages that are refused, or that come from other processes, are closed."""
    plan = {"0": ["store pool keys", "ready", "flood 500", "store pool values", "ready", "hang"]}
    with SmallKeeper(tmp_path, plan) as keeper:
        first = keeper.started()
        keeper.event("ready")
        address = environment_of(first["pid"])["NOTIFY_SOCKET"]
        flood = (
            "import os, socket, sys\n"
            "garbage = os.memfd_create('garbage')\n"
            "with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:\n"
            "    other.connect(sys.argv[1])\n"
            "    for number in range(500):\n"
            "        socket.send_fds(other, [b'FDSTORE=1\\nFDNAME=pool'], [garbage] * (1 + number % 40))\n"
            "        other.send(b'FDSTOREREMOVE=1\\nFDNAME=pool')\n"
            "    other.send(b'READY=1')\n"
        )
        subprocess.run([sys.executable, "-c", flood, address], check=True, timeout=60)
        assert keeper.status()["descriptors"] == ["pool"]
        assert open_files(keeper.process.pid)["/memfd:garbage (deleted)"] == 0
        os.kill(first["pid"], signal.SIGKILL)
        assert keeper.started()["taken"] == {"pool": "values"}
        assert "ignored" in keeper.log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_send_it_a_descriptor_that_is_slow_to_close(tmp_path: Path) -> None:
    """Neither at the address that the daemon has, nor at one that the kernel lists. The daemon can."""
    with SmallKeeper(tmp_path, {"0": ["store pool keys", "ready", "hang"]}) as keeper:
        first = keeper.started()
        address = environment_of(first["pid"])["NOTIFY_SOCKET"]
        assert stat.S_IMODE(os.stat(address).st_mode) == 0o600
        assert not list(tmp_path.glob(".kvservice-*")), "a killed keeper would leave a file"
        assert f"@kvservice-keeper-{keeper.process.pid}" not in Path("/proc/net/unix").read_text()
        # The address is a link into the keeper's process. Here the other user gets the socket's file itself, as if it
        # could follow that.
        file = os.open(address, os.O_PATH)
        with lingering.sent_as(STRANGER, f"/proc/self/fd/{file}", socket.SOCK_DGRAM, file) as outcome:
            assert outcome == "PermissionError"
            with lingering.sent_as(STRANGER, address, socket.SOCK_DGRAM) as outcome:
                assert outcome == "PermissionError"
            os.kill(first["pid"], signal.SIGKILL)
            assert keeper.started()["taken"] == {"pool": "keys"}
            assert keeper.stop() == 0
        os.close(file)


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if line)


def test_the_number_of_descriptors_has_a_limit(tmp_path: Path) -> None:
    stores = [f"store f{number} x" for number in range(MAX_DESCRIPTORS + 3)]
    with SmallKeeper(tmp_path, {"0": [*stores, "store f0 again", "ready", "raise 9"]}) as keeper:
        keeper.started()
        taken = keeper.started()["taken"]
        assert taken == {f"f{number}": "x" for number in range(MAX_DESCRIPTORS)} | {"f0": "again"}
        assert f"f{MAX_DESCRIPTORS} is not kept: there are {MAX_DESCRIPTORS} descriptors" in keeper.log


def test_it_reaps_orphans_as_process_1_of_a_container_has_to(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": ["orphan", "ready", "serve"]}) as keeper:
        keeper.event("start")
        orphan = Path(f"/proc/{keeper.event('orphan')['orphan']}")
        keeper.event("ready")
        waiting.until(lambda: not orphan.exists())
        assert keeper.stop() == 0


def test_the_keeper_is_small(tmp_path: Path) -> None:
    """It maps no extension module of another package, above all neither gRPC nor CUDA."""
    with SmallKeeper(tmp_path, {}) as keeper:
        keeper.started()
        maps = Path(f"/proc/{keeper.process.pid}/maps").read_text()
        files = {line.split()[-1] for line in maps.splitlines() if "/" in line}
        assert not [file for file in files if "site-packages" in file or str(Path(kvservice.__file__).parent) in file]
        assert not [file for file in files if "cuda" in file or "libffi" in file or "libssl" in file]
        assert keeper.stop() == 0


def test_the_keeper_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import kvservice.keeper.__main__\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('kvservice.') and 'keeper' not in name))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "kvservice\n\n"
