"""The daemon's side of systemd's protocol, against a small server of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from each_row import each_row
from small_manager import SmallManager, memory_file

from kvservice.keeper import HANDOVER, READY, Notifier, taken_descriptors


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[SmallManager]:
    with SmallManager(str(tmp_path / "notify")) as serving:
        yield serving


@pytest.fixture
def notifier(manager: SmallManager) -> Iterator[Notifier]:
    found = Notifier.from_environment({"NOTIFY_SOCKET": manager.address})
    assert found is not None
    yield found
    found.close()


def test_without_a_manager_there_is_no_notifier() -> None:
    assert Notifier.from_environment({}) is None
    assert Notifier.from_environment({"NOTIFY_SOCKET": ""}) is None


def test_an_address_is_a_path_or_an_abstract_name() -> None:
    with SmallManager(f"@kvservice-test-{os.urandom(8).hex()}") as manager:
        notifier = Notifier(manager.address)
        notifier.send(READY)
        assert manager.receive().lines == ("READY=1",)
        notifier.close()
    with each_row() as row:
        for address in ("relative", "@", "/", "vsock:2:1", "/a\0b"):
            with row(address), pytest.raises(ValueError, match="is neither a path nor @ and a name"):
                Notifier(address)


def test_a_manager_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Notifier(str(tmp_path / "absent"))


def test_assignments_are_lines_of_one_message(manager: SmallManager, notifier: Notifier) -> None:
    notifier.send(READY, "STATUS=serving")
    notifier.send(HANDOVER)
    first = manager.receive()
    assert (first.lines, first.descriptors, first.pid) == (("READY=1", "STATUS=serving"), (), os.getpid())
    assert manager.receive().lines == ("X_KVSERVICE_HANDOVER=1",)
    assert manager.is_empty()


def test_a_descriptor_replaces_the_one_of_its_name(manager: SmallManager, notifier: Notifier) -> None:
    descriptor = memory_file(b"pool")
    notifier.store("kvservice.pool", descriptor)
    os.close(descriptor)
    assert manager.receive().lines == ("FDSTOREREMOVE=1", "FDNAME=kvservice.pool")
    stored = manager.receive()
    assert stored.lines == ("FDSTORE=1", "FDNAME=kvservice.pool", "FDPOLL=0")
    (kept,) = stored.descriptors
    assert os.pread(kept, 16, 0) == b"pool"
    os.close(kept)
    assert manager.is_empty()


def test_a_name_is_removed(manager: SmallManager, notifier: Notifier) -> None:
    notifier.remove("a")
    assert manager.receive().lines == ("FDSTOREREMOVE=1", "FDNAME=a")
    assert manager.is_empty()


def test_what_systemd_takes_for_no_name_is_refused(manager: SmallManager, notifier: Notifier) -> None:
    with each_row() as row:
        for name in ("", "a:b", "a\nb", "ä", "\x7f", "x" * 256):
            for use in (notifier.remove, lambda name: notifier.store(name, 0)):
                with row(name), pytest.raises(ValueError, match="is no name for a descriptor"):
                    use(name)
    notifier.remove("x" * 255)
    manager.receive()
    assert manager.is_empty()


def test_what_is_no_line_is_refused(manager: SmallManager, notifier: Notifier) -> None:
    for text in ("STATUS=a\nREADY=1", "STATUS=" + "x" * 4096):
        with pytest.raises(ValueError, match="notification"):
            notifier.send(text)
    assert manager.is_empty()


def test_a_barrier_returns_when_the_manager_has_come_to_it(manager: SmallManager, notifier: Notifier) -> None:
    with pytest.raises(TimeoutError, match="did not answer for 0 s"):
        notifier.barrier(timeout_s=0)
    os.close(manager.receive().descriptors[0])
    answered: list[tuple[str, ...]] = []

    def answer() -> None:
        received = manager.receive()
        answered.append(received.lines)
        os.close(received.descriptors[0])

    answering = threading.Thread(target=answer)
    answering.start()
    notifier.barrier(timeout_s=60)
    assert answered == [("BARRIER=1",)]
    answering.join()


def test_after_the_manager_is_gone_messages_are_errors(tmp_path: Path) -> None:
    with SmallManager(str(tmp_path / "notify")) as manager:
        notifier = Notifier(manager.address)
    with pytest.raises(ConnectionRefusedError):
        notifier.send(READY)
    notifier.close()


# ---- descriptors that a process is started with

TAKING = """
import json, os, sys
from kvservice.keeper import taken_descriptors
try:
    taken = taken_descriptors()
except ValueError as error:
    sys.exit(f"refused: {error}")
contents = {name: os.pread(descriptor, 16, 0).decode() for name, descriptor in taken.items()}
inherited = [name for name, descriptor in taken.items() if os.get_inheritable(descriptor)]
left = [name for name in os.environ if name.startswith("LISTEN_")]
opened = [number for number in range(3, 9) if os.path.exists(f"/dev/fd/{number}")]
print(json.dumps([contents, inherited, left, opened]))
"""


def started(contents: list[bytes], names: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run TAKING in a process that a manager has passed memory files with these contents to. Equal contents are the
    same file."""
    files = {content: memory_file(content) for content in dict.fromkeys(contents)}
    order = ",".join(str(files[content]) for content in contents)
    # The shell's exec keeps the process id, as systemd's does.
    moves = (
        "import os, sys\n"
        "given = [int(d) for d in sys.argv[1].split(',') if d]\n"
        "above = max(given, default=2) + 1\n"
        "high = [os.dup2(d, above + i) for i, d in enumerate(given)]\n"
        "os.closerange(3, above)\n"
        "[(os.dup2(d, 3 + i), os.close(d)) for i, d in enumerate(high)]\n"
        "os.environ.setdefault('LISTEN_PID', str(os.getpid()))\n"
        "os.execv(sys.executable, [sys.executable, '-P', '-c', sys.argv[2]])\n"
    )
    given = {"LISTEN_FDS": str(len(contents)), "LISTEN_FDNAMES": names} | environ
    try:
        return subprocess.run(
            [sys.executable, "-P", "-c", moves, order, TAKING],
            env=os.environ | given,
            pass_fds=[*files.values()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def test_descriptors_are_found_by_name() -> None:
    done = started([b"a pool", b"a table"], "kvservice.pool:kvservice.table")
    contents = '{"kvservice.pool": "a pool", "kvservice.table": "a table"}'
    assert done.stdout == f"[{contents}, [], [], [3, 4]]\n", done.stderr


def test_those_of_another_process_are_left_alone() -> None:
    """A process that the daemon starts inherits the variables, but not the descriptors."""
    done = started([b"a pool"], "a", LISTEN_PID="1")
    assert done.stdout == "[{}, [], [], [3]]\n", done.stderr


def test_a_name_of_two_files_is_none() -> None:
    done = started([b"old", b"new", b"other"], "pool:pool:table")
    assert done.stdout == '[{"table": "other"}, [], [], [5]]\n', done.stderr


def test_a_file_that_is_passed_twice_is_one() -> None:
    done = started([b"pool", b"pool"], "pool:pool")
    assert done.stdout == '[{"pool": "pool"}, [], [], [3]]\n', done.stderr


def test_variables_that_contradict_each_other_are_refused() -> None:
    done = started([b"a", b"b"], "only-one")
    assert done.stderr == "refused: LISTEN_FDNAMES has 1 names for 2 descriptors\n"


def test_nothing_is_taken_without_the_variables() -> None:
    environ = {"HOME": "/"}
    assert taken_descriptors(environ) == {}
    assert environ == {"HOME": "/"}


def test_a_listening_socket_can_be_stored(manager: SmallManager, notifier: Notifier) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        notifier.store("kvservice.http", listening.fileno())
    manager.receive()
    (kept,) = manager.receive().descriptors
    with socket.socket(fileno=kept) as again, socket.create_connection(("127.0.0.1", port)):
        assert again.getsockname()[1] == port
