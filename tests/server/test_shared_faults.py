"""What clients and daemons share, when one of them dies, stops or does what it should not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import staged_client
from footprint import await_equal, footprint
from shm_objects import shm_objects
from small_pool import SMALL_POOL
from survivor import Survivor

from kvservice.client import KVClient
from kvservice.launch import Daemon

# Room for the survivor's 8 blocks and a client's 50, and for a call that takes its time.
OPTIONS = SMALL_POOL | {"max_region_mib": 128}


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    with Daemon(**OPTIONS) as running:
        yield running


@contextmanager
def staged(daemon: Daemon, stage: str) -> Iterator[subprocess.Popen[str]]:
    """A client that has come as far as the stage."""
    command = [sys.executable, "-P", staged_client.__file__, daemon.address, stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{stage}\n", process.communicate()
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def survivor(shared_daemon: Daemon) -> Iterator[Survivor]:
    """It works over a lane of its own."""
    with KVClient(shared_daemon.address, transport="lane") as client, client.session() as kv:
        large = kv.allocate(range(200))  # for a call that takes all the threads that there are
        kv.open_step([large]).extend(0, *(np.ones((200, heads, 32), np.float32) for heads in (256, 2, 2)))
        kv.free([large])
        one = Survivor(kv)
        one.lap()
        yield one


@pytest.mark.parametrize("stage", staged_client.STAGES)
def test_a_client_killed_at_any_stage_leaves_nothing(shared_daemon: Daemon, survivor: Survivor, stage: str) -> None:
    pid = shared_daemon.process.pid
    log = shared_daemon.log.read_text()
    with KVClient(shared_daemon.address) as client:
        before, stats = footprint(pid), client.stats()
        with staged(shared_daemon, stage) as process:
            assert footprint(pid) != before
            process.kill()
            process.wait()
            await_equal(lambda: footprint(pid), before, client.info.session_grace_s + 5, survivor.lap)
            await_equal(lambda: gauges(client), gauges_of(stats), 5, survivor.lap)
    assert shm_objects(process.pid) == set()
    assert shared_daemon.log.read_text() == log


def gauges(client: KVClient) -> tuple[int, ...]:
    return gauges_of(client.stats())


def gauges_of(stats: object) -> tuple[int, ...]:
    names = ("sessions", "sequences", "tokens", "free_blocks", "active_blocks", "used_swap_blocks", "pinned_blocks")
    return tuple(getattr(stats, name) for name in names)
