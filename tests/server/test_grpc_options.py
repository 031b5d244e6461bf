"""gRPC channel arguments: gRPC must know their names, and the daemon must permit the pings of its clients."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import held_daemon
import pytest
from http2_pings import PingingClient
from scraping import value
from secure_daemon import Secured
from small_pool import SMALL_POOL
from waiting import PATIENCE_S, until

import kvservice
from kvservice.client import KVClient, TLSConfig
from kvservice.environment import missing_environment
from kvservice.health import check
from kvservice.launch import Daemon

PACKAGE = Path(kvservice.__file__).parent
LIBRARY = Path(str(importlib.import_module("grpc._cython.cygrpc").__file__)).read_bytes()
CONNECTIONS = "kvservice_tcp_connections_total"
# gRPC closes a connection at the third ping that it does not permit. A client pings every five seconds.
IDLE_S = 18


def is_known(name: str) -> bool:
    """Return whether the name is one of the zero-terminated strings in gRPC's library."""
    return name.encode() + b"\0" in LIBRARY


def names_in_sources() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        if "v1" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and re.fullmatch(r"grpc\.[a-z][a-z0-9_.]+", str(node.value)):
                    yield str(node.value)


def test_every_option_is_one_that_grpc_knows() -> None:
    ours = {*names_in_sources()}
    assert len(ours) > 10
    assert {name for name in ours if not is_known(name)} == set()
    assert not is_known("grpc.http2.min_recv_ping_interval_without_data_ms"), "a wrong name is noticed"
    assert not is_known("grpc.http2.min_ping_interval")


def test_clients_that_ping_too_often_or_do_not_answer_lose_their_connections_in_their_time() -> None:
    """gRPC's default limit of the time for an answer is a minute."""
    with Daemon(**SMALL_POOL, client_timeout_s=3.0) as daemon:
        path = Path(daemon.address.removeprefix("unix://"))
        begin = time.monotonic()
        with PingingClient(path) as client:
            with PingingClient(path) as hasty:
                while not (answer := hasty.ping()):
                    pass
                assert answer == b"too_many_pings"
            assert client.goodbye() == b"ping_timeout"
        assert 2.9 < time.monotonic() - begin < 30


@pytest.mark.slow
def test_clients_that_ping_as_often_as_they_may_keep_their_connections_and_silent_ones_do_not(
    encrypted: Secured,
) -> None:
    """The daemon permits a ping a second, and waits ten seconds for the first bytes or the handshake. The reads of
    silent connections would time out if it kept them."""
    path = Path(encrypted.daemon.address.removeprefix("unix://"))
    (encrypted.files / "ca.crt").write_bytes(encrypted.authority.cert)
    tls = TLSConfig(encrypted.files / "ca.crt")
    with (
        socket.create_connection(("127.0.0.1", encrypted.port), 60) as by_tls,
        socket.socket(socket.AF_UNIX) as by_path,
        KVClient(encrypted.address, token=encrypted.tokens["alice"], tls=tls) as client,
        client.session() as idle,
        PingingClient(path) as pinging,
    ):
        by_path.settimeout(60)
        by_path.connect(str(path))
        assert idle.describe() == []
        before = value(encrypted.samples(), CONNECTIONS)
        for _ in range(IDLE_S):  # an idle client has pinged more often than gRPC tolerates a ping too many
            assert pinging.ping() == b""
            threading.Event().wait(1.1)
        for silent in (by_tls, by_path):
            while silent.recv(4096):  # the initial data of the server
                pass
        assert idle.describe() == []
        assert value(encrypted.samples(), CONNECTIONS) == before, "the idle client has not connected again"


def test_calls_that_wait_for_the_event_loop_are_bounded(tmp_path: Path) -> None:
    """The limit applies to RPCs that arrive while the loop is busy. gRPC's default is at least 1000."""
    path = tmp_path / "socket"
    options = SMALL_POOL | {
        "unix_socket": path, "tcp_address": "", "http_address": "", "keeper": False, "max_sessions": 1,
    }  # fmt: skip
    environ = os.environ | missing_environment(os.environ)
    environ |= {f"KVSERVICE_{name.upper()}": str(value) for name, value in options.items()}
    command = [sys.executable, "-P", held_daemon.__file__]
    with (
        subprocess.Popen(command, env=environ, stdin=subprocess.PIPE) as process,
        contextlib.ExitStack() as clients,
    ):
        clients.callback(process.kill)
        until(lambda: path.is_socket() and check(f"unix:{path}", timeout_s=PATIENCE_S))
        process.send_signal(signal.SIGUSR1)
        done: queue.Queue[Any] = queue.Queue()
        for _ in range(7):
            channel = clients.enter_context(
                grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(129):  # a connection has no more at a time
                method: Any = channel.unary_unary("/none/none")
                method.future(b"").add_done_callback(done.put)
        assert done.get(timeout=PATIENCE_S).code() is grpc.StatusCode.CANCELLED
        assert process.stdin is not None
        process.stdin.write(b"1")
        process.stdin.flush()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
