"""A process that is killed while its device copies blocks, and what a test gets of it.

Run as a script with a socket and a device, it writes known K/V into the pool, swaps a few blocks out and waits for
them, submits many more copies and kills itself. Its descriptors go over the socket, as to a keeper.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.blocks import AllocationRequest
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.kept import KeptFiles, KeptState

NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE = 4, 16, 8, 128
# Blocks of the pool that are filled, and those of them that are copied in time.
NUM_FILLED, NUM_WAITED = 100, 5
SIZES: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "block_size": BLOCK_SIZE,
    "dtype": "float16",
    "num_blocks": 3 * NUM_FILLED,
    "swap_space_gib": NUM_FILLED * 2 * NUM_LAYERS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_SIZE * 2 / 2**30,
    "max_sequences": 4,
    "max_sequence_tokens": NUM_FILLED * BLOCK_SIZE,
    "allow_client_shm": "off",
}


def config_of(device: str) -> ServeConfig:
    return ServeConfig.model_validate(SIZES | {"device": device})


def content(layer: int) -> tuple[Any, Any]:
    """Return K and V of the filled blocks: float16 `[NUM_FILLED * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE]`."""
    shape = (2, NUM_FILLED * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    key, value = np.random.default_rng(layer).standard_normal(shape, np.float32).astype(np.float16)
    return key, value


class SocketKeeper:
    """Implements FileKeeper: sends the descriptors over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def store(self, name: str, fd: int) -> None:
        socket.send_fds(self._connection, [name.encode()], [fd])

    def remove(self, name: str) -> None:
        """Nothing was sent before."""

    def barrier(self) -> None:
        """Nothing was sent before."""


def killed(device: str) -> dict[str, int]:
    """Run the script until it has killed itself. Returns its descriptors by name."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        command = [sys.executable, "-P", __file__, str(there.fileno()), device]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment, cwd=Path(__file__).parent)
        there.close()
        taken: dict[str, int] = {}
        while (message := socket.recv_fds(here, 4096, 1))[0]:
            name, (taken[name.decode()],) = message[:2]
        assert child.wait(300) == -signal.SIGKILL
    return taken


def unfinished(kept: KeptState, name: str, num_blocks: int) -> Any:
    """Return the numbers of the unfinished blocks of a tier."""
    return np.flatnonzero(kept.arrays.kept(name, (num_blocks,), np.int32, private=True))


async def check_taken_over(device: Any, kept: KeptState) -> None:
    """Check every byte of the blocks that are not unfinished."""
    assert kept.taken
    assert (device.num_blocks, device.num_swap_blocks) == (3 * NUM_FILLED, NUM_FILLED)
    assert len(unfinished(kept, "unfinished_device", device.num_blocks)) == 0
    torn = unfinished(kept, "unfinished_swap", NUM_FILLED)
    assert (torn >= NUM_WAITED).all()
    whole = np.setdiff1d(np.arange(NUM_FILLED), torn).astype(np.int32)
    device.swap_in(whole, whole + np.int32(2 * NUM_FILLED))
    for layer in range(NUM_LAYERS):
        for expected, found in zip(content(layer), await blocks(device, layer, 0), strict=True):
            assert (found == expected).all()
        for expected, found in zip(content(layer), await blocks(device, layer, 2 * NUM_FILLED), strict=True):
            of_blocks = (NUM_FILLED, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
            assert (found.reshape(of_blocks)[whole] == expected.reshape(of_blocks)[whole]).all()


async def blocks(device: Any, layer: int, first: int) -> tuple[Any, Any]:
    slots = np.arange(first * BLOCK_SIZE, (first + NUM_FILLED) * BLOCK_SIZE)
    key, value = await device.read((layer,), slots)
    return key[0], value[0]


async def fill(engine: CacheEngine) -> None:
    space = engine.manager.open_namespace()
    engine.manager.allocate(space, [AllocationRequest(1, np.arange(NUM_FILLED * BLOCK_SIZE))])
    step = engine.manager.open_step(space, np.array([1]), None)
    assert (step.slot_mapping == np.arange(NUM_FILLED * BLOCK_SIZE)).all()
    for layer in range(NUM_LAYERS):
        await engine.write(space, step.step_id, layer, *content(layer))


def main(descriptor: int, name: str) -> None:
    kept = KeptState.open(KeptFiles({}, SocketKeeper(socket.socket(fileno=descriptor))), {})
    device: Any = open_device(config_of(name), kept)
    kept.ready()
    asyncio.run(fill(CacheEngine(config_of(name), device)))
    ids = np.arange(NUM_FILLED, dtype=np.int32)
    device.swap_out(ids[:NUM_WAITED], ids[:NUM_WAITED])
    while len(unfinished(kept, "unfinished_swap", NUM_FILLED)):  # a thread of the device ends this
        time.sleep(0.001)
    for first in range(NUM_WAITED, NUM_FILLED, 19):
        device.swap_out(ids[first : first + 19], ids[first : first + 19])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
