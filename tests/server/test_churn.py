"""Many clients connect and disconnect concurrently over every transport, and some are killed. No resources may leak.

The test runs for KVSERVICE_CHURN_SECONDS.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import churning_client
import pytest
from footprint import footprint
from small_pool import SMALL_POOL
from survivor import Survivor
from waiting import until

from kvservice.client import KVClient
from kvservice.launch import Daemon

# The variable is removed, because a daemon refuses unknown options.
SECONDS = float(os.environ.pop("KVSERVICE_CHURN_SECONDS", "1"))
PROCESSES, CLIENTS = 4, 8
OPTIONS: dict[str, Any] = SMALL_POOL | {
    "num_blocks": 1024, "swap_space_gib": 1024 * 4096 / 2**30, "max_sequences": 1024, "max_lanes": 256,
    "max_pool_mappings": 256,
    "max_pinned_fraction": 0.5, "max_detach_ttl_s": 3.0,
    "session_grace_s": 10.0,  # also the time that a busy daemon has to answer an attach
}  # fmt: skip


def start(daemon: Daemon, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", churning_client.__file__, daemon.address, str(seed), str(CLIENTS)]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=path)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    _, errors = process.communicate(timeout=20)
    assert not errors, errors  # there was no error before the kill


@pytest.mark.slow
@pytest.mark.third
@pytest.mark.timeout(600 + 2 * SECONDS)
def test_clients_that_come_and_go_leave_nothing() -> None:
    """come_and_go fails if sessions, blocks, memory or descriptors remain."""
    come_and_go(OPTIONS, lambda: None)


def come_and_go(options: dict[str, Any], look_elsewhere: Callable[[], Any]) -> None:
    """`look_elsewhere` must return the same value before and after."""
    choose = random.Random(5)
    seeds = itertools.count()
    with Daemon(**options) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        survivor = Survivor(kv)

        def look() -> tuple[Any, ...]:
            kv.reset_prefix_cache()
            stats = client.stats()
            gauges = (stats.sessions, stats.sequences, stats.free_blocks, stats.used_swap_blocks, stats.pinned_blocks)
            return *gauges, footprint(daemon.process.pid), look_elsewhere()

        run(daemon, client, survivor, seeds, choose, 0.0)  # the daemon then has all that it keeps permanently
        await_rest(client, survivor)
        before = look()
        run(daemon, client, survivor, seeds, choose, SECONDS)
        await_rest(client, survivor)
        with contextlib.suppress(AssertionError):
            until(lambda: look() == before, survivor.lap)
        now = look()
        assert now == before, (before, now)
        assert daemon.log.read_text() == ""


def run(
    daemon: Daemon, client: KVClient, survivor: Survivor, seeds: Any, choose: random.Random, seconds: float
) -> None:
    """Kill processes for the given time, each after some of its clients have finished; at least as many as run at a
    time."""
    own = itertools.count()

    def num_opened() -> int:
        """Return the number of sessions that the processes have opened."""
        with client.session() as one:
            return one.session_id - next(own)

    processes = [start(daemon, next(seeds)) for _ in range(PROCESSES)]
    try:
        end = time.monotonic() + seconds
        for number in itertools.count():
            if number >= PROCESSES and time.monotonic() >= end:
                break
            wanted = num_opened() + choose.randrange(1, 2 * CLIENTS)
            until(functools.partial(lambda wanted: num_opened() >= wanted, wanted), survivor.lap)
            victim = choose.randrange(PROCESSES)
            kill(processes[victim])
            processes[victim] = start(daemon, next(seeds))
    finally:
        for process in processes:
            kill(process)


def await_rest(client: KVClient, survivor: Survivor) -> None:
    until(lambda: client.stats().sessions == 1, survivor.lap)
