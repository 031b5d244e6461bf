"""A client that only pings, for `limits.py`: `python -m kvservice.bench.pinger ADDRESS`.

It prints "pinging" after the first response and pings until its standard input ends. Then it writes the start and end
time of each ping, two doubles of the clock of `time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import uvloop

from kvservice.environment import prepare_grpc

prepare_grpc()

import grpc  # noqa: E402  the environment comes first

from kvservice.owned import OwnedProcess  # noqa: E402
from kvservice.v1 import pool_pb2, pool_pb2_grpc  # noqa: E402

# Pause between two pings. It is short enough that a blocked daemon delays most pings.
PAUSE_S = 0.001
Pings = npt.NDArray[np.float64]


async def ping(address: str) -> list[float]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pool_pb2_grpc.PoolServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pool_pb2.PingRequest(payload=bytes(100))
        await stub.Ping(request)
        print("pinging", flush=True)
        stopped = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        times = []
        while not stopped.done():
            times.append(time.monotonic())
            await stub.Ping(request)
            times.append(time.monotonic())
            await asyncio.sleep(PAUSE_S)
        return times


class Pinger:
    """The pinger process. `pings` float64[n, 2] (start, end) is available after `pinging`."""

    def __init__(self) -> None:
        self.pings: Pings = np.zeros((0, 2))

    @contextlib.contextmanager
    def pinging(self, address: str) -> Iterator[None]:
        """Raises RuntimeError if the process ends early."""
        command = [sys.executable, "-P", "-m", "kvservice.bench.pinger", address]
        with OwnedProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != b"pinging\n":
                    raise RuntimeError("the pinging process has ended")
                yield
                said, _ = process.communicate()
                if process.returncode:
                    raise RuntimeError("the pinging process has failed")
                self.pings = np.frombuffer(said, np.float64).reshape(-1, 2)
            finally:
                process.kill()


if __name__ == "__main__":
    measured = uvloop.run(ping(sys.argv[1]))
    sys.stdout.buffer.write(struct.pack(f"={len(measured)}d", *measured))
