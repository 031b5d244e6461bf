"""Listening sockets that the next process of a daemon takes over from its keeper."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import waiting
from click.testing import CliRunner
from each_row import each_row
from footprint import children
from small_pool import SMALL_POOL

from kvservice.cli import main
from kvservice.client import KVClient
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


def bound_like_grpc(port: int) -> socket.socket:
    """Return a socket that listens on the port as gRPC does with grpc.so_reuseport=0. Raises OSError."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
                bound_like_grpc(port)
            second = KeptSockets(KeptFiles({}, FakeKeeper()))
            with pytest.raises(ConfigError, match="tcp_address: cannot listen on"):
                reserve_port(f"127.0.0.1:{port}", second, cleanup)
    # Between two processes nobody listens there, and the kernel gives the port to nobody who asks for any.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))
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


def test_another_path_of_the_fd_passing_socket_is_bound_anew(keeper: FakeKeeper, tmp_path: Path) -> None:
    with keeper.process() as (kept, cleanup):
        cleanup.enter_context(fd_listener(tmp_path / "a.fds", 0o600, kept))
    with keeper.process() as (kept, cleanup):
        listening = cleanup.enter_context(fd_listener(tmp_path / "b.fds", 0o600, kept))
        assert listening.getsockname() == str(tmp_path / "b.fds")


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
    with Daemon(**SMALL_POOL | addresses, keeper=True, unix_socket=path) as daemon:
        assert {file.name for file in tmp_path.iterdir()} == {"k.sock", "k.sock.fds", "k.sock.keeper"}
        ((http_port, grpc_port),) = ports_of(daemon)
        first = daemon.daemon_pid()
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
        assert daemon.stop() == 0
    assert [*tmp_path.iterdir()] == []
