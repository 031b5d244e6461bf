"""A gRPC server that ends by itself ends the daemon's process, so that another one opens its address again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
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


async def serve(manager):
    path = f"{sys.argv[1]}/{manager is None}.sock"
    config = ServeConfig(**SMALL_POOL, unix_socket=path, tcp_address="", http_address="")
    server = KVServer(config, KeptFiles({}, None), manager)
    serving = asyncio.create_task(server.serve())
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    await server._servers[0].stop(None)
    return await asyncio.wait_for(serving, 60)


manager = Manager()
print(asyncio.run(serve(None)), asyncio.run(serve(manager)), *manager.said)
"""


def test_the_process_ends_with_its_server(tmp_path: Path) -> None:
    """Where a keeper keeps the state, the next process takes over."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    status, with_keeper, *said = done.stdout.split()
    assert (status, with_keeper) == ("1", "0"), done.stderr
    assert said[-1] == "X_KVSERVICE_HANDOVER=1"
    assert done.stderr.count("a gRPC server has ended by itself") == 2
