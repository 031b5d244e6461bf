"""A gRPC server that ends by itself ends the daemon's process, so that another one opens its address again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# An error where gRPC accepts calls ends its server. The one that is known is that of a path which is not UTF-8; here
# nothing keeps it away.
PROGRAM = """
import asyncio
import sys

from http2_requests import PREFACE, request
from small_pool import SMALL_POOL

from kvservice.config import ServeConfig
from kvservice.kept import KeptFiles
from kvservice.server import daemon

daemon.accept_any_path = lambda: None


class Manager:
    def __init__(self):
        self.said = []

    def send(self, *lines):
        self.said += lines


async def serve(manager):
    path = f"{sys.argv[1]}/{manager is None}.sock"
    server = daemon.KVServer(ServeConfig(**SMALL_POOL, unix_socket=path), KeptFiles({}, None), manager)
    serving = asyncio.create_task(server.serve())
    while True:
        try:
            _, writer = await asyncio.open_unix_connection(path)
            break
        except OSError:
            await asyncio.sleep(0.01)
    writer.write(PREFACE + b"\\0\\0\\0\\4\\0\\0\\0\\0\\0" + request("/not UTF-8: \\udcc1", 1))
    return await asyncio.wait_for(serving, 60)


manager = Manager()
print(asyncio.run(serve(None)), asyncio.run(serve(manager)), *manager.said)
"""


def test_the_process_ends_with_its_server(tmp_path: Path) -> None:
    """Where a keeper keeps the state, the next process takes over."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    status, with_keeper, *said = done.stdout.split()
    assert (status, with_keeper) == ("1", "0"), done.stderr
    assert said[-1] == "X_KVSERVICE_HANDOVER=1"
    assert done.stderr.count("a gRPC server has ended by itself") == 2
