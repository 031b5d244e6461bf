"""Shared memory of clients and daemons when one side dies, stops or writes invalid data."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import staged_client
from both_faces import Face, session_of
from each_row import each_row
from footprint import footprint
from lane_ring import (
    CAPACITY,
    COMPLETED,
    COMPLETIONS,
    CONSUMED,
    ENTRIES,
    ENTRY,
    NO_REGION,
    SLOT_BYTES,
    STATE,
    SUBMITTED,
)
from shm_objects import shm_objects
from small_pool import SMALL_POOL
from survivor import Survivor
from waiting import until

from kvservice.client import KVClient, Session
from kvservice.errors import (
    ConnectionLostError,
    DaemonAwayError,
    FailedPreconditionError,
    RegionShrunkError,
)
from kvservice.launch import Daemon

# Enough for the survivor's 8 blocks, the 50 blocks of a client, and a long call.
OPTIONS = SMALL_POOL | {"max_region_mib": 128}


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    with Daemon(**OPTIONS) as running:
        yield running


@contextmanager
def staged(daemon: Daemon, stage: str) -> Iterator[subprocess.Popen[str]]:
    """A client process that has reached the given stage."""
    command = [sys.executable, "-P", staged_client.__file__, daemon.address, stage]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{stage}\n", process.communicate()
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def survivor(shared_daemon: Daemon) -> Iterator[Survivor]:
    """A client that uses its own lane."""
    with KVClient(shared_daemon.address, transport="lane") as client, client.session() as kv:
        large = kv.allocate(range(200))  # for a call that uses all threads
        kv.open_step([large]).extend(0, *(np.ones((200, heads, 32), np.float32) for heads in (256, 2, 2)))
        kv.free([large])
        one = Survivor(kv)
        one.lap()
        yield one


@pytest.fixture(scope="module")
def observer(shared_daemon: Daemon) -> Iterator[KVClient]:
    """A client without a session. It stays connected, so that its connection is part of the footprint at rest."""
    with KVClient(shared_daemon.address, transport="inline") as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def at_rest(shared_daemon: Daemon, survivor: Survivor, observer: KVClient) -> dict[str, Any]:
    """The daemon's footprint before the first test. Between tests it can include memory not yet released."""
    survivor.lap()
    observer.stats()
    return footprint(shared_daemon.process.pid)


@pytest.mark.slow
@pytest.mark.third
def test_a_client_killed_at_any_stage_leaves_nothing(
    shared_daemon: Daemon, survivor: Survivor, observer: KVClient, at_rest: dict[str, Any]
) -> None:
    """The daemon's descriptors, mappings and threads, and its blocks, are those of before."""
    with each_row() as row:
        for stage in staged_client.STAGES:
            with row(stage):
                kill_at(stage, shared_daemon, survivor, observer, at_rest)


def kill_at(stage: str, shared_daemon: Daemon, survivor: Survivor, observer: KVClient, at_rest: dict[str, Any]) -> None:
    pid = shared_daemon.process.pid
    log = shared_daemon.log.read_text()
    until(lambda: observer.stats().sessions == 1, survivor.lap)
    before = gauges(observer)
    with staged(shared_daemon, stage) as process:
        assert footprint(pid) != at_rest
        process.kill()
        process.wait()
        until(lambda: footprint(pid) == at_rest, survivor.lap)
        until(lambda: gauges(observer) == before, survivor.lap)
    assert shm_objects(process.pid) == set()
    assert shared_daemon.log.read_text() == log


def gauges(client: KVClient) -> tuple[int, ...]:
    stats = client.stats()
    names = ("sessions", "sequences", "tokens", "free_blocks", "active_blocks", "used_swap_blocks", "pinned_blocks")
    return tuple(getattr(stats, name) for name in names)


def test_who_waits_for_a_lane_learns_that_the_daemon_is_dead() -> None:
    async def scenario(daemon: Daemon, face: Face) -> None:
        async with session_of(face, daemon.address, "lane", reconnect_wait_s=0.3) as kv:
            step = await kv.open_step([await kv.allocate(range(8))])
            tensors = [np.ones((8, 2, 32), np.float32)] * 3
            await step.extend(0, *tensors)
            freeze(daemon.process.pid)  # so that the call is still in flight
            killing = threading.Timer(0.3, daemon.process.kill)
            killing.start()
            with pytest.raises(DaemonAwayError):
                await step.extend(1, *tensors)
            killing.join()

    faces: tuple[Face, ...] = ("blocking", "asyncio")
    for face in faces:
        with Daemon(**OPTIONS) as daemon:
            asyncio.run(scenario(daemon, face))


def freeze(pid: int) -> None:
    """Stop a process, and return when all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while any(state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "it was not stopped"
        time.sleep(0.001)


def state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def test_every_transport_tells_that_the_daemon_is_dead() -> None:
    """The calls wait for a connection for `reconnect_wait_s` in all."""
    tensors = [np.ones((100, 2, 32), np.float32)] * 3
    with Daemon(**OPTIONS | {"num_blocks": 128}) as daemon, contextlib.ExitStack() as stack:
        used = []
        for transport in ("lane", "mapped", "region", "inline"):
            client = stack.enter_context(KVClient(daemon.address, transport=transport, reconnect_wait_s=0.3))
            kv = stack.enter_context(client.session())
            step = kv.open_step([kv.allocate(range(100))])
            step.extend(0, *tensors)
            used.append((kv, step))
        daemon.process.kill()
        daemon.process.wait()
        for kv, step in used:
            # The last layer, after which a step in the mapped pool commits.
            with pytest.raises(ConnectionLostError):
                step.extend(1, *tensors)
            with pytest.raises(DaemonAwayError):
                kv.describe()
            if kv.transport != "mapped":
                with pytest.raises(DaemonAwayError):
                    step.extend(1, *tensors)


def test_a_client_that_is_stopped_with_a_full_ring_blocks_nobody(shared_daemon: Daemon, survivor: Survivor) -> None:
    with staged(shared_daemon, "ring_full") as full, staged(shared_daemon, "lane_computing") as computing:
        for process in (full, computing):
            process.send_signal(signal.SIGSTOP)
        with KVClient(shared_daemon.address, transport="lane") as client:
            for _ in range(5):
                survivor.lap()
                with client.session() as kv:
                    step = kv.open_step([kv.allocate([1, 2])])
                    step.extend(0, *(np.ones((2, 2, 32), np.float32) for _ in range(3)))
            assert client.stats().sessions == 3


def test_an_object_that_is_truncated_meanwhile(shared_daemon: Daemon) -> None:
    """The call returns the right result or REGION_SHRUNK, never garbage, and the daemon survives."""
    tensors = [
        np.random.default_rng(n).standard_normal((40, heads, 32), np.float32) for n, heads in enumerate((8, 2, 2))
    ]
    num_bytes = [tensor.nbytes for tensor in tensors]
    ends = collections.Counter[str]()
    with KVClient(shared_daemon.address, transport="inline") as client, client.session() as kv:
        sequence = kv.allocate(range(40))
        wanted = kv.open_step([sequence]).extend(0, *tensors)
        for round_ in range(30):
            path = Path("/dev/shm", f"kvservice-{os.getpid()}-truncated")
            path.write_bytes(b"".join(tensor.tobytes() for tensor in tensors))
            memory = kv.open_region(path.name, sum(num_bytes))
            offsets = np.cumsum([0, *num_bytes[:-1]]).tolist()
            there = [memory.array(one.shape, one.dtype, at) for one, at in zip(tensors, offsets, strict=True)]
            keep = (0, 100, sum(num_bytes) - 1)[round_ % 3]
            cutting = threading.Timer(0.0004 * round_, os.truncate, (path, keep))
            cutting.start()
            with contextlib.suppress(RegionShrunkError):
                for _ in range(500):
                    np.testing.assert_array_equal(kv.open_step([sequence]).extend(0, *there), wanted)
                    ends["right"] += 1
                pytest.fail("it was never seen to be truncated")
            ends["shrunk"] += 1
            cutting.join()
            with pytest.raises(RegionShrunkError):
                kv.open_step([sequence]).extend(0, *there)
            path.unlink()
            kv.unregister_region(memory)
    assert ends["shrunk"] == 30
    assert ends["right"] > 0
    assert shared_daemon.process.poll() is None


class Vandal:
    """Writes random data into its own lane: nearly valid entries, bytes, indices, the header."""

    def __init__(self, kv: Session, seed: int) -> None:
        self._random = random.Random(seed)
        self._kv = kv
        self._region = kv.create_region(1 << 20).number
        self._steps = [kv.open_step([kv.allocate([n])]).step_id for n in range(4)]
        self.lanes = 0
        self._open()

    def _open(self) -> None:
        self._lane = staged_client.lane_fetched(self._kv)
        self.lanes += 1

    def write_something(self) -> None:
        """Write once. A lane that has ended is opened again first."""
        if int.from_bytes(self._lane[STATE : STATE + 4], "little") not in (0, 1):
            with contextlib.suppress(FailedPreconditionError):  # the state was overwritten, and the lane is still open
                self._open()
        pick, lane = self._random, self._lane
        kind = pick.randrange(10)
        submitted = int.from_bytes(lane[SUBMITTED : SUBMITTED + 8], "little")
        if kind < 6:
            at = ENTRIES + submitted % CAPACITY * SLOT_BYTES
            lane[at : at + SLOT_BYTES] = self._entry(submitted)
            lane[CONSUMED : CONSUMED + 8] = lane[COMPLETED : COMPLETED + 8]
            lane[SUBMITTED : SUBMITTED + 8] = (submitted + 1).to_bytes(8, "little")
        else:
            begin, end = ((0, 512), (ENTRIES, COMPLETIONS), (COMPLETIONS, len(lane)), (SUBMITTED, 512))[kind - 6]
            at = pick.randrange(begin, end - 8)
            lane[at : at + 8] = pick.randbytes(8)

    def _entry(self, number: int) -> bytes:
        pick = self._random
        step_id = pick.choice([*self._steps, pick.randrange(-(1 << 63), 1 << 63)])
        places = [part for n in range(4) for part in (self._region, 0, n << 12)] + [NO_REGION, 0, 0] * 2
        good = bytearray(ENTRY.pack(number, step_id, pick.randrange(3), 0, 4, 0, 0.0, 0.0, *places, *[0] * 5))
        if pick.randrange(3) == 0:
            good[pick.randrange(len(good))] = pick.randrange(256)
        return bytes(good)


@pytest.mark.parametrize("num_laps", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_arbitrary_content_of_a_lane_does_not_affect_others(
    shared_daemon: Daemon, survivor: Survivor, observer: KVClient, at_rest: dict[str, Any], num_laps: int
) -> None:
    log = shared_daemon.log.read_text()
    with observer.session() as kv:
        staged_client.ADDRESSES[kv.token] = shared_daemon.address
        vandal = Vandal(kv, seed=4)
        for _ in range(num_laps):
            for _ in range(200):
                vandal.write_something()
            survivor.lap()
        assert vandal.lanes > num_laps // 20
        # Its calls over the stream are still served.
        kv.open_step([kv.allocate([9])]).extend(0, *(np.ones((1, 2, 32), np.float32) for _ in range(3)))
    del vandal  # the daemon counts memory that a client keeps mapped
    gc.collect()
    until(lambda: footprint(shared_daemon.process.pid) == at_rest, survivor.lap)
    assert shared_daemon.log.read_text() == log
