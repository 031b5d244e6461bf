"""Upgrades by real keepers with small daemons, and the command that asks for them."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import waiting
from click.testing import CliRunner
from small_keeper import SmallKeeper

from kvservice.cli import main
from kvservice.keeper import ControlSocketError, ask

# Connections that a keeper serves at once.
MAX_CONNECTIONS = 8
OLD = ["store pool keys", "ready", "serve"]


def socket_of(keeper: SmallKeeper) -> str:
    return keeper.control_path.removesuffix(".keeper")


def command(keeper: SmallKeeper) -> Any:
    """Run `kvservice upgrade` and return its result."""
    return upgrade(f"unix://{socket_of(keeper)}")


def upgrade(address: str) -> Any:
    return CliRunner().invoke(main, ["upgrade", "--address", address])


def test_a_new_process_takes_over(tmp_path: Path) -> None:
    plan = {"0": OLD, "standby": ["store pool changed", "go", "store more values", "ready", "serve"]}
    with SmallKeeper(tmp_path, plan) as keeper:
        old = keeper.started()
        done = command(keeper)
        new = keeper.event("start")
        assert (new["standby"], new["taken"]) == (True, {"pool": "keys"})
        assert keeper.event("signal") == {"event": "signal", "pid": old["pid"], "number": signal.SIGUSR1}
        went = keeper.event("go")
        assert (went["pid"], went["taken"]) == (new["pid"], {"pool": "keys"})
        assert (went["environ"]["KVSERVICE_ENDED"], went["environ"]["KVSERVICE_RESTARTS"]) == ("upgrade", "1")
        assert "KVSERVICE_STANDBY" not in went["environ"]
        keeper.event("ready")
        assert done.exit_code == 0
        assert done.stdout.startswith("upgraded 1.0 -> 2.0, paused ")
        assert done.stderr.splitlines() == [
            "the new process starts", "the old process drains", "the new process takes over",
        ]  # fmt: skip
        status = keeper.status()
        assert (status["pid"], status["descriptors"]) == (new["pid"], ["more", "pool"])
        os.kill(new["pid"], signal.SIGKILL)
        assert keeper.started()["taken"] == {"pool": "keys", "more": "values"}


def test_sighup_is_the_same_request(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": OLD, "standby": ["go", "ready", "serve"]}) as keeper:
        keeper.started()
        keeper.process.send_signal(signal.SIGHUP)
        new = keeper.event("start")
        for name in ("signal", "go", "ready"):
            keeper.event(name)
        assert keeper.status()["pid"] == new["pid"]
        assert "upgraded 1.0 -> 2.0" in keeper.log


def test_a_refusal_is_printed_and_the_old_process_serves(tmp_path: Path) -> None:
    plan = {"0": OLD, "standby": ["refuse version 3 cannot\tread version 2"]}
    with SmallKeeper(tmp_path, plan) as keeper:
        old = keeper.started()
        done = command(keeper)
        assert done.exit_code == 1
        assert "Error: the new process cannot take over: version 3 cannot read version 2" in done.stderr
        keeper.event("start")
        status = keeper.status()
        assert (status["pid"], status["ready"], status["restarts"]) == (old["pid"], True, 0)
        assert keeper.stop() == 0


def test_an_old_process_that_hangs_is_killed(tmp_path: Path) -> None:
    plan = {"0": ["store pool keys", "ready", "hang"], "standby": ["go", "ready", "serve"]}
    # The limit is in the past: DRAIN_MARGIN_S is added to it.
    with SmallKeeper(tmp_path, plan, drain_s=-10.0) as keeper:
        keeper.started()
        answers = keeper.ask("upgrade")
        assert answers[-1]["ok"]
        assert "did not hand over in time and was killed" in answers[-1]["message"]
        keeper.event("start")
        went = keeper.event("go")
        assert (went["taken"], went["environ"]["KVSERVICE_ENDED"]) == ({"pool": "keys"}, "signal 9")


def test_of_two_upgrades_one_is_refused(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": OLD, "standby": ["serve"]}) as keeper:
        keeper.started()
        first: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: first.extend(keeper.ask("upgrade")))
        asking.start()
        assert keeper.event("start")["standby"]
        (second,) = keeper.ask("upgrade")
        assert second["message"] == "an upgrade is in progress: the new process starts"
        keeper.process.send_signal(signal.SIGTERM)
        asking.join()
        assert first[-1]["message"] == "the daemon is asked to stop"
        assert keeper.process.wait(60) == 0


def test_a_client_that_leaves_does_not_stop_the_upgrade(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": OLD, "standby": ["go", "ready", "serve"]}) as keeper:
        keeper.started()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(keeper.control_path)
            client.sendall(b'{"command": "upgrade"}')
            new = keeper.event("start")
        for name in ("signal", "go", "ready"):
            keeper.event(name)
        assert keeper.status()["pid"] == new["pid"]


def test_a_reset_starts_an_empty_daemon_and_asks_before(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {"0": OLD, "2": ["send STATUS=waits for a disk", "hang"]}) as keeper:
        first = keeper.started()
        refused = CliRunner().invoke(main, ["reset", "--unix-socket", socket_of(keeper)], input="n\n")
        assert refused.exit_code == 1
        assert keeper.status()["pid"] == first["pid"]
        done = CliRunner().invoke(main, ["reset", "--unix-socket", socket_of(keeper), "--yes"])
        assert done.output == "the daemon's process is killed, and the next one starts empty\n"
        second = keeper.started()
        assert second["taken"] == {}
        os.kill(second["pid"], signal.SIGKILL)
        keeper.event("start")
        waiting.until(lambda: keeper.status()["status"] == "waits for a disk")
        health = CliRunner().invoke(main, ["health", "--address", f"unix:{socket_of(keeper)}"])
        assert health.exit_code == 1
        assert health.stderr == "Error: not serving: the daemon is starting: waits for a disk\n"


# ---- the control socket


def test_what_is_no_request_ends_the_connection(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {}) as keeper:
        pid = keeper.started()["pid"]
        for request in (b"{}", b"[" * 1024, b'"upgrade"', b"\xff", b'{"command": "x"}', b""):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(keeper.control_path)
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b"", request
            assert keeper.status()["pid"] == pid, request


def test_connections_have_a_limit(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {}) as keeper:
        keeper.started()
        silent = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CONNECTIONS)]
        for client in silent:
            client.connect(keeper.control_path)
        with pytest.raises(ControlSocketError, match="too many connections"):
            keeper.status()
        for client in silent:
            client.close()
        waiting.until(lambda: answers(keeper))


def answers(keeper: SmallKeeper) -> bool:
    try:
        return bool(keeper.status()["ready"])
    except ControlSocketError:
        return False


def test_only_its_user_may_connect(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {}) as keeper:
        keeper.started()
        assert os.stat(keeper.control_path).st_mode & 0o777 == 0o600


def test_a_socket_that_a_killed_keeper_left_is_replaced(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {}) as first:
        first.started()
    assert Path(first.control_path).exists()
    with SmallKeeper(tmp_path, {}) as second:
        pid = second.started()["pid"]
        assert second.status()["pid"] == pid


def test_a_second_keeper_of_the_same_socket_is_refused(tmp_path: Path) -> None:
    with SmallKeeper(tmp_path, {}) as first:
        first.started()
        (tmp_path / "second").mkdir()
        with SmallKeeper(tmp_path / "second", {}, control_path=first.control_path) as second:
            assert second.process.wait(60) == 1
            where = f"cannot listen on {first.control_path}"
            assert second.log == f"Error: unix_socket: {where}: it is served by another process\n"
        assert first.status()["ready"]


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "k.sock.keeper").write_text("precious")
    with SmallKeeper(tmp_path, {}) as keeper:
        assert keeper.process.wait(60) == 1
        assert "exists and is not a socket" in keeper.log
    assert (tmp_path / "k.sock.keeper").read_text() == "precious"


def test_without_a_keeper_the_command_says_so(tmp_path: Path) -> None:
    done = upgrade(str(tmp_path / "k.sock"))
    assert done.exit_code == 1
    assert f"Error: no keeper at {tmp_path}/k.sock.keeper: No such file or directory" in done.stderr
    done = upgrade("")
    assert "send SIGHUP to it instead" in done.stderr


def test_a_keeper_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "silent")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen(1)
        with pytest.raises(ControlSocketError, match=r"no answer for 0\.01 s"):
            list(ask(path, "status", 0.01))
