"""A process that connects to the unix socket on and on loses its connections before gRPC has them. Others do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from http2_requests import PREFACE
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.environment import PRELOADED, library, missing_environment, missing_of_daemon
from kvservice.launch import Daemon

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
MAX_CONNECTS = 10_000


def is_served(path: str) -> bool:
    """Connect as a client of gRPC. Returns whether gRPC answers with its settings."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        try:
            connection.sendall(PREFACE + SETTINGS)
            return len(connection.recv(9)) > 0
        except (BrokenPipeError, ConnectionResetError):
            return False


def connect_on_and_on(path: str, enough: threading.Event) -> None:
    """Connect much faster than a process may in the long run, since it waits for no answer."""
    while not enough.is_set():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)


def test_a_flood_of_connections_is_closed_and_other_processes_connect() -> None:
    with Daemon(**SMALL_POOL) as daemon:
        path, enough = daemon.address.removeprefix("unix://"), threading.Event()
        assert all(is_served(path) for _ in range(64))
        with ThreadPoolExecutor(1) as thread:
            flood = thread.submit(connect_on_and_on, path, enough)
            try:
                assert any(not is_served(path) for _ in range(MAX_CONNECTS))
            finally:
                enough.set()
            flood.result(60)
        code = "import sys; from kvservice.client import KVClient; KVClient(sys.argv[1]).ping()"
        subprocess.run([sys.executable, "-P", "-c", code, daemon.address], timeout=60, check=True)
        # This process can connect again, too, when it does so more rarely.
        with KVClient(daemon.address) as client:
            client.ping()


def test_connections_over_tcp_are_not_counted() -> None:
    """Otherwise the process with the library accepts less than it connects to, and waits."""
    code = (
        "import socket\n"
        "with socket.create_server(('127.0.0.1', 0)) as listening:\n"
        f"    for _ in range({MAX_CONNECTS // 10}):\n"
        "        with socket.create_connection(listening.getsockname()) as connection:\n"
        "            accepted, address = listening.accept()\n"
        "            with accepted:\n"
        "                assert address == connection.getsockname()\n"
    )
    environ = os.environ | missing_of_daemon(os.environ)
    subprocess.run([sys.executable, "-P", "-c", code], env=environ, timeout=60, check=True)


def test_the_daemon_has_the_library_beside_others() -> None:
    path = str(library(PRELOADED))
    assert Path(path).exists()
    environ = missing_environment({})
    assert missing_of_daemon(environ) == {"LD_PRELOAD": path}
    assert missing_of_daemon(environ | {"LD_PRELOAD": "libother.so"}) == {"LD_PRELOAD": f"libother.so:{path}"}
    assert missing_of_daemon(environ | {"LD_PRELOAD": f"{path}:libother.so"}) == {}
