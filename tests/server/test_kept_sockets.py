"""Listening sockets that the next process of a daemon takes over from its keeper."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lingering
import numpy as np
import pytest
import waiting
from click.testing import CliRunner
from each_row import each_row
from footprint import children
from other_user import as_user
from small_pool import SMALL_POOL

from kvservice.auth.client import NO_CREDENTIALS
from kvservice.cli import main
from kvservice.client import KVClient
from kvservice.health import ask, check
from kvservice.keeper import refuse_descriptors
from kvservice.kept import KeptFiles
from kvservice.launch import Daemon
from kvservice.server.rpc.listening import (
    FD_PASSING,
    GRPC_PORT,
    HTTP,
    ConfigError,
    KeptSockets,
    fd_listener,
    listen_http,
    reserve_port,
)

SO_PASSRIGHTS = 83
# The variable is removed, because a daemon refuses unknown options.
NUM_ENDS = int(os.environ.pop("KVSERVICE_KILLS", "12"))


class FakeKeeper:
    """Keeps duplicates of descriptors over the `processes` of a test."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def store(self, name: str, fd: int, /) -> None:
        self.remove(name)
        self.kept[name] = os.dup(fd)

    def remove(self, name: str, /) -> None:
        if name in self.kept:
            os.close(self.kept.pop(name))

    def barrier(self) -> None:
        pass

    @contextlib.contextmanager
    def process(self) -> Iterator[tuple[KeptSockets, contextlib.ExitStack]]:
        """A process of the daemon: its kept sockets, and what it closes at its end."""
        taken = {name: os.dup(fd) for name, fd in self.kept.items()}
        files = KeptFiles(taken, self)
        with contextlib.ExitStack() as cleanup:
            yield KeptSockets(files), cleanup
        for name in files.names():
            os.close(files.take(name) or -1)


@pytest.fixture
def keeper() -> Iterator[FakeKeeper]:
    made = FakeKeeper()
    yield made
    for name in [*made.kept]:
        made.remove(name)


def test_a_connection_made_between_two_processes_is_accepted_by_the_second(keeper: FakeKeeper) -> None:
    with keeper.process() as (kept, cleanup):
        port = listen_http("127.0.0.1:0", kept, cleanup).getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"a request")
        with keeper.process() as (kept, cleanup):
            listening = listen_http("127.0.0.1:0", kept, cleanup)
            assert listening.getsockname()[1] == port
            with listening.accept()[0] as accepted:
                assert accepted.recv(100) == b"a request"


def test_an_address_that_means_the_same_is_the_same(keeper: FakeKeeper) -> None:
    with keeper.process() as (kept, cleanup):
        port = listen_http("127.0.0.1:0", kept, cleanup).getsockname()[1]
    before = dict(keeper.kept)
    with each_row() as row:
        for address in (f"localhost:{port}", f"127.0.0.1:{port}", "127.0.0.1:0"):
            with row(address), keeper.process() as (kept, cleanup):
                assert listen_http(address, kept, cleanup).getsockname() == ("127.0.0.1", port)
                assert keeper.kept == before


def test_another_address_gets_a_socket_of_its_own(keeper: FakeKeeper, free_port: int) -> None:
    with each_row() as row:
        for address in (f"127.0.0.1:{free_port}", "127.0.0.2:0", "0.0.0.0:0"):
            with row(address):
                keeper.remove(HTTP)
                with keeper.process() as (kept, cleanup):
                    port = listen_http("127.0.0.1:0", kept, cleanup).getsockname()[1]
                with keeper.process() as (kept, cleanup):
                    assert listen_http(address, kept, cleanup).getsockname() != ("127.0.0.1", port)
                # The keeper has the new one only.
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port), timeout=60)
                assert [*keeper.kept] == [HTTP]
    with keeper.process() as (kept, cleanup), pytest.raises(ConfigError, match="cannot listen on"):
        listen_http("absent.invalid:0", kept, cleanup)


def test_what_the_next_process_does_not_use_is_closed(keeper: FakeKeeper) -> None:
    with keeper.process() as (kept, cleanup):
        port = listen_http("127.0.0.1:0", kept, cleanup).getsockname()[1]
        kept.drop_unused()
        assert [*keeper.kept] == [HTTP]
    state = os.memfd_create("state")
    keeper.store("kvservice.state.table", state)
    os.close(state)
    with keeper.process() as (kept, _):
        kept.drop_unused()
    assert [*keeper.kept] == ["kvservice.state.table"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_without_a_keeper_nothing_is_kept() -> None:
    kept = KeptSockets(KeptFiles({}, None))
    with contextlib.ExitStack() as cleanup:
        port = listen_http("127.0.0.1:0", kept, cleanup).getsockname()[1]
        kept.drop_unused()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def bound_like_grpc(port: int, *, reuse_port: bool = True) -> socket.socket:
    """Return a socket that listens on the port as gRPC does with this value of grpc.so_reuseport. Raises OSError."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        listening.bind(("127.0.0.1", port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def test_a_reserved_port_is_free_for_grpc_and_for_one_daemon_only(keeper: FakeKeeper) -> None:
    with keeper.process() as (kept, cleanup):
        port = reserve_port("127.0.0.1:0", kept, cleanup)
        with bound_like_grpc(port):
            with pytest.raises(OSError, match="in use"):
                bound_like_grpc(port, reuse_port=False)
            second = KeptSockets(KeptFiles({}, FakeKeeper()))
            with pytest.raises(ConfigError, match="tcp_address: cannot listen on"):
                reserve_port(f"127.0.0.1:{port}", second, cleanup)
    # Between two processes nobody listens there, and nobody can.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    with pytest.raises(OSError, match="in use"):
        bound_like_grpc(port, reuse_port=False)
    second = KeptSockets(KeptFiles({}, FakeKeeper()))
    with contextlib.ExitStack() as cleanup, pytest.raises(ConfigError, match="tcp_address: cannot listen on"):
        reserve_port(f"127.0.0.1:{port}", second, cleanup)
    with keeper.process() as (kept, cleanup):
        assert reserve_port("127.0.0.1:0", kept, cleanup) == port
        bound_like_grpc(port).close()
    assert [*keeper.kept] == [GRPC_PORT]


def test_the_fd_passing_socket_is_taken_while_its_path_is_there(keeper: FakeKeeper, tmp_path: Path) -> None:
    path = tmp_path / "k.sock.fds"
    with keeper.process() as (kept, cleanup):
        cleanup.enter_context(fd_listener(path, 0o600, kept))
    kept_at_first = keeper.kept[FD_PASSING]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with keeper.process() as (kept, cleanup):
            listening = cleanup.enter_context(fd_listener(path, 0o660, kept))
            listening.accept()[0].close()
            assert path.stat().st_mode & 0o777 == 0o660
    assert keeper.kept[FD_PASSING] == kept_at_first
    path.unlink()
    with keeper.process() as (kept, cleanup), socket.socket(socket.AF_UNIX) as client:
        cleanup.enter_context(fd_listener(path, 0o600, kept))
        client.connect(str(path))


def test_a_socket_of_another_process_at_its_path_is_not_taken_for_it(keeper: FakeKeeper, tmp_path: Path) -> None:
    """While the other process serves, the path cannot be had. When it has ended, its socket is replaced."""
    path = tmp_path / "k.sock.fds"
    with keeper.process() as (kept, cleanup):
        cleanup.enter_context(fd_listener(path, 0o600, kept))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with keeper.process() as (kept, cleanup), pytest.raises(ConfigError, match="served by another process"):
            fd_listener(path, 0o600, kept)
    with keeper.process() as (kept, cleanup), socket.socket(socket.AF_UNIX) as client:
        listening = cleanup.enter_context(fd_listener(path, 0o600, kept))
        client.connect(str(path))
        listening.accept()[0].close()


def test_another_path_of_the_fd_passing_socket_is_bound_anew(keeper: FakeKeeper, tmp_path: Path) -> None:
    """Connections to the new path arrive at the new socket."""
    with keeper.process() as (kept, cleanup):
        cleanup.enter_context(fd_listener(tmp_path / "a.fds", 0o600, kept))
    with keeper.process() as (kept, cleanup):
        listening = cleanup.enter_context(fd_listener(tmp_path / "b.fds", 0o600, kept))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "b.fds"))
            with listening.accept()[0] as accepted:
                client.sendall(b"b")
                assert accepted.recv(1) == b"b"


def kernel_refuses_descriptors() -> bool:
    """Return whether a socket of this kernel has SO_PASSRIGHTS, as from Linux 6.16 on."""
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            return bool(tried.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS))
        except OSError:
            return False


on_new_kernels = pytest.mark.skipif(not kernel_refuses_descriptors(), reason="Linux 6.16 or later")


@on_new_kernels
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_descriptor_that_is_slow_to_close_does_not_reach_the_daemon() -> None:
    """Neither the process that opened the sockets, nor the next one. A client beside it gets its region. The other
    user is one to whom the fd-passing socket listens, which would close the connections of others at once."""
    others = {"unix_socket_mode": "0666", "trusted_uids": "65534", "share_pool": "read"}
    with (
        Daemon(**SMALL_POOL | others, keeper=True) as daemon,
        KVClient(daemon.address) as client,
        client.session("neighbour") as kv,
        contextlib.ExitStack() as lasting,
    ):
        path = daemon.address.removeprefix("unix://")
        Path(path).parent.chmod(0o711)
        for _ in range(2):
            for each in (path, f"{path}.fds"):
                for _ in range(4):
                    outcome = lasting.enter_context(lingering.sent_as(65534, each, socket.SOCK_STREAM))
                    assert outcome == "PermissionError", each
            kv.create_region(4096)
            os.kill(daemon.daemon_pid(), signal.SIGKILL)
            kv.allocate([1, 2, 3])


@on_new_kernels
def test_the_fd_passing_socket_of_an_earlier_version_gets_no_descriptors_any_more(
    keeper: FakeKeeper, tmp_path: Path
) -> None:
    path = tmp_path / "k.sock.fds"
    with keeper.process() as (kept, cleanup):
        listening = cleanup.enter_context(fd_listener(path, 0o600, kept))
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
    with keeper.process() as (kept, cleanup), socket.socket(socket.AF_UNIX) as client:
        listening = cleanup.enter_context(fd_listener(path, 0o600, kept))
        client.connect(str(path))
        with listening.accept()[0] as accepted, pytest.raises(PermissionError):
            socket.send_fds(client, [b"x"], [accepted.fileno()])


def test_a_kernel_that_cannot_refuse_descriptors_is_no_error() -> None:
    class Old(socket.socket):
        error = errno.ENOPROTOOPT

        def setsockopt(self, *_: Any) -> None:
            raise OSError(self.error, os.strerror(self.error))

    with Old(socket.AF_UNIX) as listening:
        refuse_descriptors(listening)
        listening.error = errno.EPERM
        with pytest.raises(PermissionError):
            refuse_descriptors(listening)


# As another user, tries to bind a port in every way, again and again. Prints a way that has worked.
HIJACK = """
import itertools, os, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
port = int(sys.argv[1])
print("ready", flush=True)
ways = itertools.product((0, 1), (0, 1), ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"))
for address, port_too, host in itertools.cycle(list(ways)):
    time.sleep(0.0005)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, address)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, port_too)
        try:
            other.bind((host, port))
        except OSError:
            continue
        print("taken by", address, port_too, host, flush=True)
"""


@contextlib.contextmanager
def hijacking(port: int) -> Iterator[subprocess.Popen[str]]:
    """Run HIJACK."""
    with running([sys.executable, "-S", "-c", HIJACK, str(port)], "ready\n") as process:
        yield process


@contextlib.contextmanager
def running(command: list[str], first_line: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == first_line
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def watching(*paths: Path) -> Iterator[list[Path]]:
    """Look for the paths all the time, and yield a list of those that were not there once."""
    missed: list[Path] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            missed.extend(path for path in paths if not path.exists())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield missed
    finally:
        over.set()
        thread.join()


# ---- a daemon


def ports_of(daemon: Daemon) -> list[tuple[str, str]]:
    """Return the ports for HTTP and for gRPC that each process of the daemon has logged."""
    said = daemon.log.read_text()
    return list(
        zip(
            re.findall(r"the page and /metrics are at http://127.0.0.1:(\d+)/", said),
            re.findall(r"serving .*, 127\.0\.0\.1:(\d+)$", said, re.MULTILINE),
            strict=False,
        )
    )


def test_a_killed_daemon_and_an_upgraded_one_keep_the_sockets_and_a_stopped_one_leaves_none(tmp_path: Path) -> None:
    addresses = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "log_level": "info"}
    path = tmp_path / "k.sock"
    with Daemon(**SMALL_POOL | addresses, keeper=True, unix_socket=path) as daemon, contextlib.ExitStack() as beside:
        assert {file.name for file in tmp_path.iterdir()} == {"k.sock", "k.sock.fds", "k.sock.own", "k.sock.keeper"}
        ((http_port, grpc_port),) = ports_of(daemon)
        first = daemon.daemon_pid()
        hijacker = beside.enter_context(hijacking(int(grpc_port))) if os.geteuid() == 0 else None
        watched = beside.enter_context(watching(*(tmp_path / name for name in ("k.sock", "k.sock.fds", "k.sock.own"))))
        # The observer answers HTTP. A stopped daemon starts no other one.
        os.kill(first, signal.SIGSTOP)
        for observer in children(first):
            os.kill(observer, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=60) as answer:
            assert b"kvservice_" in answer.read()
        waiting.until(lambda: len(ports_of(daemon)) == 2)
        with KVClient(f"127.0.0.1:{grpc_port}", reconnect_wait_s=waiting.PATIENCE_S) as client:
            assert client.ping(b"again") == b"again"
            second = daemon.daemon_pid()
            assert second != first
            upgraded = CliRunner().invoke(main, ["upgrade", "--unix-socket", str(path)])
            assert upgraded.exit_code == 0, (upgraded.output, daemon.log.read_text())
            assert daemon.daemon_pid() != second
            waiting.until(lambda: len(ports_of(daemon)) == 3)
            assert client.ping(b"new") == b"new"
        assert set(ports_of(daemon)) == {(http_port, grpc_port)}
        assert not watched, "the paths are never free"
        if hijacker is not None:
            hijacker.kill()
            assert hijacker.stdout is not None
            assert hijacker.stdout.read() == "", "no other user gets the port"
        assert daemon.stop() == 0
    assert [*tmp_path.iterdir()] == []


# A client that may only read the store, and locks each descriptor of it that it is given.
LOCK = """
import fcntl
from kvservice.client import StoreNamespace
with KVClient(sys.argv[1]) as client, client.store(StoreNamespace("model", 4096)):
    locked = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path) and "kvservice-store" in os.readlink(path):
            fcntl.flock(int(name), fcntl.LOCK_SH)
            locked += 1
    print("locked", locked, flush=True)
    sys.stdin.read()
"""
# As another user, removes the daemon's sockets and binds their paths, as often as it can.
SQUAT = """
import os, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print("ready", flush=True)
while True:
    time.sleep(0.0005)
    for name in sys.argv[1:]:
        with socket.socket(socket.AF_UNIX) as other:
            try:
                os.unlink(name)
            except OSError:
                pass
            try:
                other.bind(name)
            except OSError:
                continue
            print("taken", name, flush=True)
"""


@pytest.mark.slow
@pytest.mark.third
@pytest.mark.timeout(120 + 30 * NUM_ENDS)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_nothing_is_lost_in_kills_and_upgrades_beside_hijackers_of_port_paths_and_lock(
    free_port: int,
) -> None:
    """As many as KVSERVICE_KILLS says."""
    tcp = f"127.0.0.1:{free_port}"
    options = SMALL_POOL | {
        "tcp_address": tcp, "session_grace_s": 600, "unix_socket_mode": "0666", "share_store": "read",
        "store_gib": 1 / 64, "trusted_uids": "65534",
    }  # fmt: skip
    with Daemon(**options, keeper=True) as daemon, contextlib.ExitStack() as beside:
        path = Path(daemon.address.removeprefix("unix://"))
        path.parent.chmod(0o755)
        port_taker = beside.enter_context(hijacking(free_port))
        paths = [f"{path}{ending}" for ending in ("", ".fds", ".own", ".keeper")]
        squatter = beside.enter_context(running([sys.executable, "-S", "-c", SQUAT, *paths], "ready\n"))
        locker = beside.enter_context(as_user(65534, LOCK, daemon.address))
        assert locker.stdout is not None
        assert re.fullmatch(r"locked [1-9]\d*\n", locker.stdout.readline())
        clients = [
            beside.enter_context(KVClient(address, reconnect_wait_s=waiting.PATIENCE_S))
            for address in (tcp, daemon.address)
        ]
        sessions = [client.session() for client in clients]
        ones = np.ones((2, 6, 2, 32), np.float32)
        sequences = [kv.allocate([number + 1, 2, 3, 4, 5, 6]) for number, kv in enumerate(sessions)]
        for number, (kv, sequence) in enumerate(zip(sessions, sequences, strict=True)):
            kv.open_step([sequence]).write(ones * (number + 1), ones * (number + 1))
        for number in range(NUM_ENDS):
            before = daemon.daemon_pid()
            if number % 3:
                os.kill(before, signal.SIGKILL)
            else:
                upgraded = CliRunner().invoke(main, ["upgrade", "--unix-socket", str(path)])
                assert upgraded.exit_code == 0, (number, upgraded.output, daemon.log.read_text())
            for which, (kv, sequence) in enumerate(zip(sessions, sequences, strict=True)):
                key, value = kv.read(sequence, 0, 6)
                assert (key == which + 1).all(), number
                assert (value == which + 1).all(), number
            assert daemon.daemon_pid() != before
        for hijacker in (port_taker, squatter):
            hijacker.kill()
            assert hijacker.stdout is not None
            assert hijacker.stdout.read() == "", "no other user gets the port or a path"
        locker.communicate()


def test_a_path_that_something_else_has_costs_the_next_process_that_path_alone(tmp_path: Path, free_port: int) -> None:
    path = tmp_path / "k.sock"
    tcp = f"127.0.0.1:{free_port}"
    with (
        Daemon(**SMALL_POOL | {"tcp_address": tcp, "session_grace_s": 600}, keeper=True, unix_socket=path) as daemon,
        KVClient(tcp, reconnect_wait_s=waiting.PATIENCE_S) as client,
    ):
        kv = client.session()
        sequence = kv.allocate([1, 2, 3])
        path.unlink()
        path.write_text("of somebody else")
        os.kill(daemon.daemon_pid(), signal.SIGKILL)
        assert kv.describe([sequence])[0].length == 3
        reason = f"unix_socket: cannot listen on {path}: it exists and is not a socket"
        waiting.until(lambda: reason in ask(tcp, 5.0, NO_CREDENTIALS).note)
        assert f"ERROR kvservice.server.daemon: {reason}; it is tried again" in daemon.log.read_text()
        assert f"not open at the start: {reason}" in daemon.log.read_text()
        assert path.read_text() == "of somebody else"
        path.unlink()
        waiting.until(lambda: check(daemon.address, timeout_s=0.5))
        assert ask(tcp, 5.0, NO_CREDENTIALS).note == ""
        with KVClient(daemon.address) as local, local.session() as another:
            assert another.transport == "lane"
        assert kv.describe([sequence])[0].length == 3
