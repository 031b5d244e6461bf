"""Counts of the connections of an address, and the warning at the limit."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from kvservice.server.watching.housekeeping import ConnectionWatch, count_tcp, count_unix


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_to_a_port_are_counted(family: socket.AddressFamily, tmp_path: Path) -> None:
    assert (count_tcp(1, tmp_path), count_unix("k.sock", tmp_path)) == (0, 0), "without tables"
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(family))
        try:
            listening.bind(("127.0.0.1" if family is socket.AF_INET else "::1", 0))
        except OSError as error:
            pytest.skip(f"there is no IPv6 here: {error}")
        listening.listen()
        port = listening.getsockname()[1]
        for expected in range(3):
            assert count_tcp(port) == expected
            ours = stack.enter_context(socket.socket(family))
            ours.connect(listening.getsockname())
            stack.enter_context(listening.accept()[0])


def test_connections_to_a_unix_socket_are_counted(tmp_path: Path) -> None:
    path = str(tmp_path / "a socket")
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        listening.listen()
        for expected in range(3):
            assert count_unix(path) == expected
            ours = stack.enter_context(socket.socket(socket.AF_UNIX))
            ours.connect(path)
            stack.enter_context(listening.accept()[0])


def test_the_log_says_once_that_an_address_is_full(caplog: pytest.LogCaptureFixture) -> None:
    watch = ConnectionWatch(2)
    watch.add_unix("k.sock", "k.sock")
    watch.add_tcp("127.0.0.1:1")
    for count in (1, 2, 3, 2, 1, 2):
        watch.note(count, 1)
    assert (watch.num_unix, watch.num_tcp) == (2, 1)
    said = "k.sock has 2 connections, and max_connections is 2: further ones are closed at once"
    assert [record.getMessage() for record in caplog.records] == [said, said]


def test_the_watch_counts_its_addresses(tmp_path: Path) -> None:
    watch = ConnectionWatch(2)
    assert (watch.count(), watch.addresses) == ((0, 0), [])
    path = str(tmp_path / "k.sock")
    with socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as tcp:
        unix.bind(path)
        unix.listen()
        address = f"127.0.0.1:{tcp.getsockname()[1]}"
        watch.add_unix(path, path)
        watch.add_tcp(address)
        with socket.create_connection(tcp.getsockname()):
            assert (watch.count(), watch.addresses) == ((0, 1), [path, address])
