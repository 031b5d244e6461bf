"""Clients that are killed at any point leak no resources and do not disturb other clients."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import doomed_client
import numpy as np
import pytest
from footprint import open_files
from shm_objects import shm_objects
from survivor import Survivor
from waiting import until

from kvservice.client import KVClient, PoolStats
from kvservice.launch import Daemon

ROUNDS = 4
CLIENTS = 8  # per round; together with the survivor's 8 blocks they fit into the pool


def start(address: str, kind: str, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", doomed_client.__file__, address, kind, str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_work(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "works\n", process.communicate()


def kill_at_random(processes: list[subprocess.Popen[str]], survivor: Survivor) -> None:
    """Kill the processes at random times in random order. Some are stopped first: alive, but not responding."""
    random.shuffle(processes)
    for process in processes:
        end = time.monotonic() + random.uniform(0, 0.06)
        until(functools.partial(lambda end: time.monotonic() > end, end), survivor.lap)
        process.send_signal(random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
    survivor.lap()
    for process in processes:
        process.kill()
        _, errors = process.communicate(timeout=10)
        assert (process.returncode, errors) == (-signal.SIGKILL, "")  # there was no error before the kill


def assert_empty(stats: PoolStats) -> None:
    left = (stats.sessions, stats.sequences, stats.tokens, stats.used_swap_blocks, stats.pinned_blocks)
    assert left == (0, 0, 0, 0, 0)
    assert stats.free_blocks == stats.num_blocks


@pytest.mark.slow
@pytest.mark.third
def test_killed_clients_leave_nothing_behind(daemon: Daemon, client: KVClient, wire: Any, raw: Any) -> None:
    raw.await_no_sessions(wire)
    assert_kills_leave_nothing(daemon, client, ROUNDS, CLIENTS)


@pytest.mark.brief
def test_a_killed_client_of_each_kind_leaves_nothing_behind(
    daemon: Daemon, client: KVClient, wire: Any, raw: Any
) -> None:
    raw.await_no_sessions(wire)
    assert_kills_leave_nothing(daemon, client, 1, len(doomed_client.KINDS))


def assert_kills_leave_nothing(daemon: Daemon, client: KVClient, rounds: int, num_clients: int) -> None:
    """Kill so many clients in each round."""
    pids = []
    random.seed(20)
    seeds = itertools.count()
    kinds = itertools.cycle(doomed_client.KINDS)
    cut_off = 0
    with client.session() as kv:
        survivor = Survivor(kv)
        survivor.lap()
        kv.reset_prefix_cache()
        alone, files, log = client.stats(), open_files(daemon.process.pid), daemon.log.read_text()
        for _ in range(rounds):
            processes = [start(daemon.address, next(kinds), next(seeds)) for _ in range(num_clients)]
            pids += [process.pid for process in processes]
            try:
                for process in processes:
                    await_work(process)
                kill_at_random(processes, survivor)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            cut_off += client.stats().sequences - alone.sequences
            until(lambda: client.stats().sessions == 1, survivor.lap)
            kv.reset_prefix_cache()
            for gauge in ("sequences", "tokens", "free_blocks", "pinned_blocks", "used_swap_blocks"):
                assert getattr(client.stats(), gauge) == getattr(alone, gauge), gauge
            # Memory that a client still mapped when its session ended is checked periodically.
            until(lambda: open_files(daemon.process.pid) <= files, survivor.lap)
            assert daemon.log.read_text() == log  # every failure was reported to a client, none to the log only
        kv.reset_prefix_cache()
    # A client that was killed during the registration of a region had not unlinked its object yet.
    for name in shm_objects(*pids):
        os.unlink(f"/dev/shm/{name}")
    # Otherwise the clients were killed between two calls, and the test would show nothing.
    assert cut_off >= rounds
    with client.session() as kv:
        kv.reset_prefix_cache()
    assert_empty(client.stats())


def test_a_client_killed_between_two_layers_gives_its_blocks_to_the_next(
    daemon: Daemon, client: KVClient, wire: Any, raw: Any
) -> None:
    raw.await_no_sessions(wire)
    script = (
        "import sys, time, numpy\n"
        "from kvservice.client import KVClient\n"
        "kv = KVClient(sys.argv[1]).session()\n"
        "step = kv.open_step([kv.allocate(range(kv.info.num_blocks * kv.info.block_size))])\n"
        "ones = numpy.ones((step.num_tokens, kv.info.num_kv_heads, kv.info.head_size), numpy.float32)\n"
        "step.extend(0, ones, ones, ones)\n"
        "print('works', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-P", "-c", script, daemon.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            await_work(process)
            assert client.stats().free_blocks == 0
        finally:
            process.kill()
    until(lambda: client.stats().sessions == 0)
    # Its partly written blocks are not in the prefix cache, and a sequence with the same tokens computes all of them.
    token_ids = list(range(client.info.num_blocks * client.info.block_size))
    with client.session() as kv:
        sequence = kv.allocate(token_ids)
        assert sequence.num_cached_tokens == 0
        doomed_client.fill(kv.open_step([sequence]), kv.info, token_ids)
        key, _ = kv.read(sequence, 0, len(token_ids))
        np.testing.assert_array_equal(key, doomed_client.content(kv.info, token_ids))
        kv.free([sequence])
        kv.reset_prefix_cache()
    assert_empty(client.stats())
