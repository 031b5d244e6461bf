"""gRPC channel arguments: gRPC must know their names, and the daemon must permit the pings of its clients."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import queue
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from http2_pings import PingingClient

import kvservice
from kvservice.client.channel import channel_options
from kvservice.config import ServeConfig
from kvservice.server.grpc_options import CONNECTION_OPTIONS, server_options
from kvservice.server.slots import max_rpcs, max_rpcs_of_connection
from kvservice.wire.channels import SERVER_NAME_OPTION

PACKAGE = Path(kvservice.__file__).parent
LIBRARY = Path(str(importlib.import_module("grpc._cython.cygrpc").__file__)).read_bytes()
PERMISSION = "grpc.http2.min_ping_interval_without_data_ms"
PINGS = 8  # gRPC closes the connection at the third ping that it does not permit


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
    ours = {name for name, _ in (*server_options(ServeConfig()), *channel_options("unix:"))}
    ours.add(SERVER_NAME_OPTION)
    assert {name for name in ours if not is_known(name)} == set()
    assert set(names_in_sources()) == ours, "an option is set elsewhere"


def test_a_wrong_name_is_noticed() -> None:
    assert not is_known("grpc.http2.min_recv_ping_interval_without_data_ms")
    assert not is_known("grpc.http2.min_ping_interval")


def test_clients_ping_less_often_than_the_daemon_permits() -> None:
    assert int(dict(channel_options("unix:"))["grpc.keepalive_time_ms"]) >= 2 * dict(CONNECTION_OPTIONS)[PERMISSION]


@contextmanager
def serving(options: Iterable[tuple[str, int]], path: Path) -> Iterator[None]:
    """Run a gRPC server with these options and no services."""
    server = grpc.server(ThreadPoolExecutor(1), options=list(options))
    assert server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def test_a_client_that_does_not_answer_loses_its_connection_in_its_time(tmp_path: Path) -> None:
    """gRPC's default limit is a minute."""
    options = server_options(ServeConfig(client_timeout_s=3.0))
    with serving(options, tmp_path / "socket"):
        begin = time.monotonic()
        with PingingClient(tmp_path / "socket") as client:
            assert client.goodbye() == b"ping_timeout"
        assert 2.9 < time.monotonic() - begin < 30


def test_calls_that_wait_for_the_event_loop_are_bounded(tmp_path: Path) -> None:
    """The limit applies to RPCs that arrive while the loop is busy. gRPC's default is 3000."""
    config = ServeConfig(max_sessions=1)
    bound = max_rpcs(config)
    with held_loop(server_options(config), tmp_path / "socket") as is_free, contextlib.ExitStack() as clients:
        done: queue.Queue[Any] = queue.Queue()
        for _ in range(bound // max_rpcs_of_connection(config) + 1):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = clients.enter_context(grpc.insecure_channel(f"unix:{tmp_path}/socket", options))
            for _ in range(max_rpcs_of_connection(config)):
                method: Any = channel.unary_unary("/none/none")
                method.future(b"").add_done_callback(done.put)
        code = done.get(timeout=30).code()
        is_free.set()
    assert code is grpc.StatusCode.CANCELLED


@contextmanager
def held_loop(options: Iterable[tuple[str, int]], path: Path) -> Iterator[threading.Event]:
    """Run a server whose event loop is blocked until the event is set."""
    started, is_free, stop = threading.Event(), threading.Event(), threading.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=list(options))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        started.set()
        is_free.wait()
        await asyncio.to_thread(stop.wait)
        await server.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(60)
        yield is_free
    finally:
        is_free.set()
        stop.set()
        thread.join()


def answers(options: Iterable[tuple[str, int]], path: Path) -> list[bytes]:
    """Return the responses of a server with these options to pings that arrive at least two milliseconds apart."""
    with serving(options, path), PingingClient(path) as client:
        found = [client.ping()]
        while len(found) < PINGS and not found[-1]:
            time.sleep(0.002)
            found.append(client.ping())
        return found


def test_pings_at_the_permitted_interval_are_answered(tmp_path: Path) -> None:
    quicker = [(name, 1 if name == PERMISSION else value) for name, value in CONNECTION_OPTIONS]
    assert answers(quicker, tmp_path / "socket") == [b""] * PINGS


def test_without_the_permission_they_end_the_connection(tmp_path: Path) -> None:
    without = [(name, value) for name, value in CONNECTION_OPTIONS if name != PERMISSION]
    assert answers(without, tmp_path / "socket")[-1] == b"too_many_pings"


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_says_nothing_ends(tls: bool) -> None:
    """The read would time out if the server kept the connection."""
    quicker = [(name, 1 if name == "grpc.server_handshake_timeout_ms" else value) for name, value in CONNECTION_OPTIONS]
    server = grpc.server(ThreadPoolExecutor(1), options=quicker)
    signed = Authority().sign("daemon")
    credentials = grpc.ssl_server_credentials([(signed.key, signed.cert)])
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if tls else server.add_insecure_port(address)
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", port), 60) as silent:
            while silent.recv(4096):  # the initial data of the server
                pass
    finally:
        server.stop(None).wait()
