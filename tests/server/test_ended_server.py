"""A gRPC server that ends by itself ends the daemon's process, so that another one opens its address again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
import os
import socket
import sys

import grpc
from small_pool import SMALL_POOL

from kvservice.config import ServeConfig
from kvservice.kept import KeptFiles
from kvservice.server.daemon import KVServer


class Manager:
    def __init__(self):
        self.said = []

    def send(self, *lines):
        self.said += lines


async def until_served(address):
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)


def server_of(manager=None, **addresses):
    config = ServeConfig(**SMALL_POOL | {"unix_socket": "", "tcp_address": "", "http_address": ""} | addresses)
    return KVServer(config, KeptFiles({}, None), manager)


async def end_server(name, manager):
    path = f"{sys.argv[1]}/{name}.sock"
    server = server_of(manager, unix_socket=path)
    serving = asyncio.create_task(server.serve())
    await until_served(f"unix:{path}")
    await server._servers[0].stop(None)
    return await asyncio.wait_for(serving, 60)


async def open_late(fails):
    os.environ["KVSERVICE_RESTARTS"] = "1"
    others = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    tcp_address, http_address = (f"127.0.0.1:{other.getsockname()[1]}" for other in others)
    server = server_of(tcp_address=tcp_address, http_address=http_address if fails else "")
    failed = asyncio.Event()

    def fail(_):
        failed.set()
        raise RuntimeError("an address is open, and then it fails")

    server._serve_http = fail
    serving = asyncio.create_task(server.serve())
    while len(server._not_open) < 1 + fails:
        await asyncio.sleep(0.01)
    others[0].close()
    await until_served(tcp_address)
    others[1].close()
    if fails:
        await asyncio.wait_for(failed.wait(), 60)
        server._stop.set()
    else:
        await server._servers[-1].stop(None)
    return await asyncio.wait_for(serving, 30)


"""


def output_of(program: str, folder: Path) -> tuple[str, str]:
    """Return what a process prints, and its log."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", PROGRAM + program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_process_ends_with_its_server(tmp_path: Path) -> None:
    """Its keeper takes that for a crash: a new process takes over, and does so later each time."""
    program = """
manager = Manager()
print(asyncio.run(end_server("alone", None)), asyncio.run(end_server("kept", manager)), *manager.said)
"""
    said, log = output_of(program, tmp_path)
    assert said.split()[:2] == ["1", "1"], log
    assert "X_KVSERVICE_HANDOVER=1" not in said
    assert log.count("a gRPC server has ended by itself") == 2


def test_the_process_ends_with_a_server_whose_address_was_opened_later(tmp_path: Path) -> None:
    said, log = output_of("print(asyncio.run(open_late(fails=False)))", tmp_path)
    assert said == "1\n", log
    assert "a gRPC server has ended by itself" in log


def test_the_process_ends_in_order_after_the_opening_of_another_address_failed(tmp_path: Path) -> None:
    said, log = output_of("print(asyncio.run(open_late(fails=True)))", tmp_path)
    assert said == "0\n", log
    assert "an address is open, and then it fails" in log
