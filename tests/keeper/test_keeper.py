"""The keeper's decisions, with processes and a clock of the test."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_children import KeeperRig

from kvservice.keeper import Ending


@pytest.fixture
def rig() -> Iterator[KeeperRig]:
    made = KeeperRig()
    yield made
    made.close()


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# ---- restarts


def test_a_daemon_that_dies_starts_again_with_its_descriptors(rig: KeeperRig) -> None:
    rig.serving()
    rig.stores(1, "pool")
    rig.passes(5)
    rig.ends(1, signal=11)
    assert rig.keeper.wait_s() == 0
    rig.passes(0)
    second = rig.children.all[2]
    assert second.taken == ("pool",)
    ended = {"KVSERVICE_ENDED": "signal 11", "KVSERVICE_ENDED_AT": "1005.0", "KVSERVICE_RESTARTS": "1"}
    assert second.environ == {"NAME": "value"} | ended
    assert rig.keeper.wait_s() is None


def test_the_end_that_is_reported_is_that_of_the_last_service(rig: KeeperRig) -> None:
    """A process that dies before it serves changes neither the reason nor the beginning of the outage."""
    rig.serving()
    rig.ends(1, signal=9)
    rig.passes(0)
    rig.passes(3)
    rig.ends(2, status=1)
    rig.passes(10)
    environ = rig.children.all[3].environ
    assert (environ["KVSERVICE_ENDED"], environ["KVSERVICE_ENDED_AT"]) == ("signal 9", "1000.0")
    assert (environ["KVSERVICE_RESTARTS"], environ["KVSERVICE_ENDED_EARLY"]) == ("2", "status 1")
    rig.ends(3, signal=9)
    rig.passes(10)
    fourth = rig.children.all[4]
    assert fourth.environ["KVSERVICE_ENDED_EARLY"] == "status 1,signal 9"
    rig.says(4, "READY=1")
    rig.ends(4, signal=9)
    rig.passes(10)
    assert "KVSERVICE_ENDED_EARLY" not in rig.children.all[5].environ


def test_back_off_and_the_end_of_a_crash_loop(rig: KeeperRig) -> None:
    rig.serving()
    waits = []
    for pid in range(1, 5):
        rig.ends(pid, status=3)
        waits.append(rig.keeper.wait_s())
        rig.passes(waits[-1] or 0.0)
    assert waits == [0, 1, 2, 4]
    assert rig.keeper.exit_status is None
    rig.ends(5, signal=6)
    assert rig.keeper.exit_status == 134
    at_its_start = ", status 3 at its start" * 3
    series = f"within 60 s of service: status 3 after 0.0 s of service{at_its_start}, signal 6 at its start"
    assert f"gives up: the daemon ended 5 times in a row {series}" in rig.lines[-1]


def crash(rig: KeeperRig, pid: int, service_s: float, signal: int = 11) -> float | None:
    """Let a process serve, and end by a signal. Returns how long the keeper waits before it starts the next one."""
    if pid > 1:
        rig.says(pid, "READY=1")
    rig.passes(service_s)
    rig.ends(pid, signal=signal)
    wait_s = rig.keeper.wait_s()
    rig.passes(wait_s or 0.0)
    return wait_s


def test_a_minute_of_service_ends_the_series(rig: KeeperRig) -> None:
    rig.serving()
    waits = [crash(rig, pid, 59.75) for pid in range(1, 5)]
    assert waits == [0, 1, 2, 4]
    assert crash(rig, 5, 60.0) == 0
    assert crash(rig, 6, 59.75) == 1


def test_a_daemon_that_somebody_kills_again_and_again_has_not_crashed(rig: KeeperRig) -> None:
    rig.serving()
    assert {crash(rig, pid, 0.5, signal=9) for pid in range(1, 301)} == {0}
    assert crash(rig, 301, 0.5) == 0
    assert crash(rig, 302, 0.5, signal=9) == 0
    assert crash(rig, 303, 0.5) == 1


def test_one_that_is_killed_at_its_start_has_not_either(rig: KeeperRig) -> None:
    """The kernel also sends SIGKILL to a process that needs more memory than there is: the next one waits."""
    rig.serving()
    crash(rig, 1, 0.5, signal=9)
    waits = []
    for pid in range(2, 9):
        rig.ends(pid, signal=9 if pid % 2 else 15)
        waits.append(rig.keeper.wait_s())
        rig.passes(waits[-1] or 0.0)
    assert waits == [0, 1, 2, 4, 4, 4, 4]
    assert rig.keeper.exit_status is None
    assert crash(rig, 9, 0.5, signal=9) == 0
    rig.ends(10, signal=9)
    assert rig.keeper.wait_s() == 0


def test_a_keeper_that_holds_state_never_gives_up(rig: KeeperRig) -> None:
    """It goes on trying, slowly, and says what to do. Addresses are no state."""
    rig.serving()
    rig.stores(1, "pool")
    address = rig.stores_socket(1, "http")
    rig.ends(1, signal=9)
    waits = []
    for pid in range(2, 10):
        rig.passes(rig.keeper.wait_s() or 0.0)
        assert rig.children.all[pid].taken == ("pool", "http")
        rig.says(pid, f"STATUS=lacks {pid}")
        rig.ends(pid, status=2 if pid % 2 else 1)
        waits.append(rig.keeper.wait_s())
    assert waits == [0, 1, 2, 4, 10, 10, 10, 10]
    assert "; its state stays held. `kvservice reset` lets go of it" in rig.lines[-2]
    status = rig.keeper.status()
    assert (status["status"], status["starts_in_s"]) == ("lacks 9", 10.0)
    assert rig.keeper.reset() == "the daemon starts empty"
    rig.passes(0)
    assert rig.children.all[10].taken == ("http",)
    assert is_open(address)
    for pid in range(10, 15):
        assert rig.keeper.exit_status is None
        rig.ends(pid, status=1)
        rig.passes(rig.keeper.wait_s() or 0.0)
    assert rig.keeper.exit_status == 1


def test_a_reset_kills_the_daemon_and_is_no_crash(rig: KeeperRig) -> None:
    rig.serving()
    rig.stores(1, "pool")
    rig.upgrade()
    assert "is killed" in rig.keeper.reset()
    assert result(rig) == "the daemon is reset"
    assert (rig.children.all[1].signals, rig.children.all[2].signals) == ([signal.SIGKILL], [signal.SIGKILL])
    rig.upgrade()
    assert result(rig) == "the daemon is being reset"
    rig.passes(7)
    rig.ends(2, signal=9)
    rig.ends(1, signal=9)
    rig.passes(0)
    third = rig.children.all[3]
    assert third.taken == ()
    assert (third.environ["KVSERVICE_ENDED"], third.environ["KVSERVICE_ENDED_AT"]) == ("signal 9", "1007.0")
    rig.keeper.stop()
    assert rig.keeper.reset() == "the daemon is stopping"


def test_an_ending_is_a_status_or_a_signal() -> None:
    endings = {"import os; os.kill(os.getpid(), 9)": "signal 9", "raise SystemExit(70)": "status 70", "": "status 0"}
    for code, text in endings.items():
        process = subprocess.Popen([sys.executable, "-S", "-c", code])
        ending = Ending.from_wait(os.waitpid(process.pid, 0)[1])
        process.returncode = 0
        assert str(ending) == text


def test_before_its_time_nothing_starts(rig: KeeperRig) -> None:
    rig.serving()
    for pid in (1, 2):
        rig.ends(pid, status=3)
        rig.passes(0)
    assert len(rig.children.all) == 2
    rig.passes(0.9)
    assert len(rig.children.all) == 2
    rig.passes(0.1)
    assert len(rig.children.all) == 3


def test_a_daemon_that_ends_for_good_ends_the_keeper() -> None:
    for status in (0, 2):
        rig = KeeperRig()
        rig.serving()
        rig.ends(1, status=status)
        assert rig.keeper.exit_status == status
        rig.close()


def test_a_first_start_that_is_refused_ends_the_keeper(rig: KeeperRig) -> None:
    rig.keeper.start()
    rig.ends(1, status=1)
    assert rig.keeper.exit_status == 1
    assert rig.lines == []


def test_a_later_start_that_is_refused_does_not(rig: KeeperRig) -> None:
    rig.serving()
    rig.ends(1, signal=9)
    rig.passes(0)
    rig.ends(2, status=1)
    assert rig.keeper.exit_status is None


def test_a_handover_that_nobody_asked_the_keeper_for_is_a_restart(rig: KeeperRig) -> None:
    rig.serving()
    rig.says(1, "X_KVSERVICE_HANDOVER=1")
    rig.ends(1, status=0)
    assert rig.keeper.exit_status is None
    rig.passes(0)
    assert rig.children.all[2].environ["KVSERVICE_ENDED"] == "upgrade"


def test_a_device_fault_discards_the_state_and_no_address(rig: KeeperRig) -> None:
    rig.serving()
    pool = rig.stores(1, "pool")
    address = rig.stores_socket(1, "http")
    rig.ends(1, status=70)
    assert not is_open(pool)
    assert is_open(address)
    rig.passes(0)
    assert rig.children.all[2].taken == ("http",)


def test_without_memory_for_a_process_it_tries_again(rig: KeeperRig) -> None:
    rig.serving()
    rig.ends(1, signal=9)
    rig.children.fails = OSError(errno.ENOMEM, "no memory")
    rig.passes(0)
    wait_s = rig.keeper.wait_s()
    assert wait_s
    rig.children.fails = None
    rig.passes(wait_s)
    assert rig.children.all[2].environ["KVSERVICE_RESTARTS"] == "1"


# ---- stops


def test_a_stop_waits_for_the_daemon(rig: KeeperRig) -> None:
    rig.serving()
    rig.keeper.stop()
    assert rig.children.all[1].signals == [signal.SIGTERM]
    assert rig.keeper.exit_status is None
    rig.ends(1, signal=15)
    assert rig.keeper.exit_status == 143


def test_a_daemon_that_does_not_stop_is_killed(rig: KeeperRig) -> None:
    rig.serving()
    rig.keeper.stop()
    rig.passes(80)
    rig.keeper.stop()
    assert rig.keeper.wait_s() == 10
    rig.passes(10)
    assert rig.children.all[1].signals == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert "does not stop in time and is killed" in rig.lines[-1]
    assert rig.keeper.wait_s() is None
    rig.ends(1, signal=9)
    assert rig.keeper.exit_status == 137


def test_a_stop_between_two_processes_is_immediate(rig: KeeperRig) -> None:
    rig.serving()
    rig.ends(1, signal=9)
    rig.keeper.stop()
    assert rig.keeper.exit_status == 0


# ---- descriptors


def test_a_descriptor_replaces_the_one_of_its_name(rig: KeeperRig) -> None:
    rig.serving()
    first = rig.stores(1, "pool")
    second = rig.stores(1, "pool")
    assert rig.keeper.descriptors == {"pool": second}
    assert second != first
    assert not is_open(first)
    rig.says(1, "FDSTOREREMOVE=1", "FDNAME=pool")
    rig.says(1, "FDSTOREREMOVE=1", "FDNAME=absent")
    assert rig.keeper.descriptors == {}
    assert not is_open(second)


def test_a_barrier_is_closed(rig: KeeperRig) -> None:
    rig.serving()
    barrier = os.memfd_create("barrier")
    rig.says(1, "BARRIER=1", descriptors=(barrier,))
    assert not is_open(barrier)


def test_messages_that_are_wrong_or_of_others_are_ignored(rig: KeeperRig) -> None:
    rig.serving()
    kept = rig.stores(1, "pool")
    for pid, name, count in ((7, "pool", 1), (1, "a:b", 1), (1, "", 1), (1, "pool", 0), (1, "pool", 2)):
        sent = tuple(os.memfd_create("x") for _ in range(count))
        rig.says(pid, "FDSTORE=1", f"FDNAME={name}", descriptors=sent)
        assert not any(is_open(descriptor) for descriptor in sent)
    rig.says(7, "FDSTOREREMOVE=1", "FDNAME=pool")
    rig.says(7, "READY=1")
    assert rig.keeper.descriptors == {"pool": kept}
    assert is_open(kept)
    assert len([line for line in rig.lines if "ignored" in line]) == 7


def test_lines_about_them_have_a_limit(rig: KeeperRig) -> None:
    rig.serving()
    for _ in range(50):
        rig.says(7, "READY=1")
    assert len(rig.lines) == 10
    rig.passes(60)
    rig.says(7, "READY=1")
    assert len(rig.lines) == 11


# ---- upgrades


def test_an_upgrade(rig: KeeperRig) -> None:
    rig.serving()
    rig.stores(1, "pool")
    rig.upgrade()
    standby = rig.children.all[2]
    assert standby.taken == ("pool",)
    rig.says(2, "X_KVSERVICE_VERSION=2.0")
    assert rig.children.all[1].signals == []
    rig.passes(20)
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    assert rig.children.all[1].signals == [signal.SIGUSR1]
    rig.stores(1, "steps")
    rig.says(1, "X_KVSERVICE_HANDOVER=1")
    rig.passes(0.25)
    rig.ends(1, status=0)
    go = standby.go()
    ended = {"KVSERVICE_ENDED": "upgrade", "KVSERVICE_ENDED_AT": "1020.25", "KVSERVICE_RESTARTS": "1"}
    assert go == {"names": ["pool", "steps"], "descriptors": 2, "environ": ended}
    rig.passes(0.5)
    rig.says(2, "READY=1")
    assert [answer["event"] for answer in rig.answers] == ["progress", "progress", "progress", "result"]
    message = "upgraded 1.0 -> 2.0, paused 0.75 s"
    assert rig.answers[-1] == {"event": "result", "ok": True, "message": message, "pause_s": 0.75}
    status = rig.keeper.status()
    assert (status["pid"], status["version"], status["restarts"], status["upgrade"]) == (2, "2.0", 1, None)
    rig.stores(2, "more")
    assert len(rig.keeper.descriptors) == 3
    rig.ends(2, signal=9)
    rig.passes(0)
    assert rig.children.all[3].environ["KVSERVICE_RESTARTS"] == "2"


def result(rig: KeeperRig) -> str:
    """Return the message of the last answer, which must be a failure."""
    assert rig.answers[-1]["event"] == "result"
    assert not rig.answers[-1]["ok"]
    return str(rig.answers[-1]["message"])


def test_a_new_process_that_cannot_start_says_why(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.says(2, "STATUS=cannot start: colour: unknown option")
    rig.ends(2, status=1)
    assert result(rig) == "the new process ended: status 1, cannot start: colour: unknown option"


def test_a_new_process_that_refuses_leaves_the_old_one_alone(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.says(2, "X_KVSERVICE_STANDBY=block_size differs")
    assert result(rig) == "the new process cannot take over: block_size differs"
    assert rig.children.all[2].signals == [signal.SIGKILL]
    rig.ends(2, signal=9)
    assert rig.children.all[1].signals == []
    assert rig.keeper.status()["pid"] == 1
    assert rig.keeper.wait_s() is None
    rig.upgrade()
    assert len(rig.children.all) == 3


def test_one_that_dies_or_is_never_ready_does_as_well(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.ends(2, status=1)
    assert result(rig) == "the new process ended: status 1"
    rig.upgrade()
    rig.passes(120)
    assert result(rig) == "the new process was not ready in time"
    assert rig.children.all[3].signals == [signal.SIGKILL]
    assert rig.children.all[1].signals == []


def test_before_its_turn_the_new_process_changes_nothing(rig: KeeperRig) -> None:
    rig.serving()
    kept = rig.stores(1, "pool")
    rig.upgrade()
    rig.stores(2, "pool")
    rig.says(2, "FDSTOREREMOVE=1", "FDNAME=pool")
    rig.says(2, "READY=1")
    assert rig.keeper.descriptors == {"pool": kept}
    assert rig.keeper.status()["pid"] == 1
    assert rig.answers[-1]["event"] == "progress"


def test_a_second_upgrade_is_refused_and_the_first_goes_on(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.upgrade()
    assert result(rig) == "an upgrade is in progress: the new process starts"
    assert len(rig.children.all) == 2
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    assert rig.children.all[1].signals == [signal.SIGUSR1]


def test_a_daemon_that_does_not_serve_is_not_upgraded(rig: KeeperRig) -> None:
    rig.keeper.start()
    rig.upgrade()
    assert result(rig) == "the daemon is starting"
    rig.says(1, "READY=1")
    rig.keeper.stop()
    rig.upgrade()
    assert result(rig) == "the daemon is stopping"
    assert len(rig.children.all) == 1


def test_an_old_process_that_hangs_is_killed(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    assert rig.keeper.wait_s() == 40
    rig.passes(40)
    assert rig.children.all[1].signals == [signal.SIGUSR1, signal.SIGKILL]
    rig.ends(1, signal=9)
    assert rig.children.all[2].go()["environ"]["KVSERVICE_ENDED"] == "signal 9"
    rig.says(2, "READY=1")
    assert rig.answers[-1]["message"] == (
        "upgraded 1.0 -> unknown, paused 40.00 s; the old process did not hand over in time and was killed, so its "
        "state was taken over as after a crash"
    )


def test_an_old_process_that_dies_while_it_drains_is_followed_by_the_new_one(rig: KeeperRig) -> None:
    rig.serving()
    rig.stores(1, "pool")
    rig.upgrade()
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    rig.ends(1, status=70)
    go = rig.children.all[2].go()
    assert (go["names"], go["environ"]["KVSERVICE_ENDED"]) == ([], "status 70")
    rig.says(2, "READY=1")
    assert "the old process ended: status 70, so" in rig.answers[-1]["message"]


def test_an_old_process_that_dies_earlier_starts_again(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.ends(1, signal=9)
    assert result(rig) == "the daemon ended before it was complete: signal 9"
    assert rig.children.all[2].signals == [signal.SIGKILL]
    rig.passes(0)
    assert rig.keeper.status()["pid"] == 3


def test_a_new_process_that_dies_while_it_takes_over_is_followed_by_another(rig: KeeperRig) -> None:
    rig.serving()
    rig.stores(1, "pool")
    rig.upgrade()
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    rig.says(1, "X_KVSERVICE_HANDOVER=1")
    rig.ends(1, status=0)
    rig.ends(2, status=1)
    assert result(rig) == "the new process ended before it was complete: status 1"
    rig.passes(0)
    third = rig.children.all[3]
    assert (third.taken, third.environ["KVSERVICE_ENDED"]) == (("pool",), "upgrade")


def test_a_new_process_that_dies_while_the_old_one_drains_is_followed_by_another(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    rig.ends(2, signal=11)
    assert result(rig) == "the new process ended: signal 11"
    rig.says(1, "X_KVSERVICE_HANDOVER=1")
    rig.ends(1, status=0)
    rig.passes(0)
    assert rig.keeper.status()["pid"] == 3
    assert rig.keeper.exit_status is None


def test_a_channel_that_is_closed_is_followed_by_another_process(rig: KeeperRig) -> None:
    """The new process can have ended while the keeper does not know it yet."""
    rig.serving()
    rig.upgrade()
    rig.says(2, "X_KVSERVICE_STANDBY=ready")
    channel = rig.children.all[2].channel
    assert channel is not None
    channel.close()
    rig.says(1, "X_KVSERVICE_HANDOVER=1")
    rig.ends(1, status=0)
    assert "the new process does not answer" in result(rig)
    rig.passes(0)
    assert rig.children.all[3].environ["KVSERVICE_RESTARTS"] == "1"


def test_a_stop_ends_an_upgrade(rig: KeeperRig) -> None:
    rig.serving()
    rig.upgrade()
    rig.keeper.stop()
    assert result(rig) == "the daemon is asked to stop"
    assert rig.children.all[1].signals == [signal.SIGTERM]
    assert rig.children.all[2].signals == [signal.SIGKILL]
    rig.ends(2, signal=9)
    rig.ends(1, status=0)
    assert rig.keeper.exit_status == 0


def test_without_memory_for_the_new_process_the_old_one_goes_on(rig: KeeperRig) -> None:
    rig.serving()
    rig.children.fails = OSError(errno.ENOMEM, "no memory")
    rig.upgrade()
    assert "cannot be started: [Errno 12] no memory" in result(rig)
    assert rig.keeper.status()["upgrade"] is None
