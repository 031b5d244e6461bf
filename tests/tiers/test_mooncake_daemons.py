"""Daemons that share values through a Mooncake Store: all are real processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake_rig import MooncakeCluster, mooncake_cluster
from ports import free_port
from store_daemons import SMALL_STORE, blocks_of, keys_of, new_namespace
from waiting import until

from kvservice.client import KVClient, StoreNamespace
from kvservice.launch import Daemon

# Each test starts several daemons, which have to join the store.
pytestmark = pytest.mark.slow

NUMBERS = range(10)
NUM_PROMPT_BLOCKS = 8
WRITTEN = 'kvservice_tier_values_written_total{tier="mooncake"}'
READ = 'kvservice_tier_values_read_total{tier="mooncake"}'
OPEN = 'kvservice_tier_state{tier="mooncake",state="open"}'
OPEN = 'kvservice_tier_state{state="open",tier="mooncake"}'
CLIENT = "-m kvservice.mooncake.serving "


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with mooncake_cluster(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


def daemon_of(cluster: MooncakeCluster, **options: Any) -> Daemon:
    return Daemon(**SMALL_STORE | {"mooncake": cluster.address} | options)


@contextlib.contextmanager
def store_of(daemon: Daemon, namespace: StoreNamespace) -> Iterator[Any]:
    with KVClient(daemon.address) as client, client.store(namespace) as store:
        yield store


def put(daemon: Daemon, namespace: StoreNamespace) -> None:
    with store_of(daemon, namespace) as store:
        store.put(keys_of(*NUMBERS), blocks_of(*NUMBERS))


def await_found(daemon: Daemon, namespace: StoreNamespace) -> None:
    """Wait until a daemon finds all values, and compare them."""
    with store_of(daemon, namespace) as store:
        until(lambda: store.lookup(keys_of(*NUMBERS)).found.all())
        values = np.zeros_like(blocks_of(*NUMBERS))
        assert store.get(keys_of(*NUMBERS), values).all()
    np.testing.assert_array_equal(values, blocks_of(*NUMBERS))


def await_in_mooncake(daemon: Daemon, namespace: StoreNamespace) -> None:
    """Wait until a daemon finds all values that another one has put. They do not come to its memory."""
    with store_of(daemon, namespace) as store:
        until(lambda: store.lookup(keys_of(*NUMBERS)).found.all())


def children_of(pid: int) -> dict[int, str]:
    """Return the command lines of a process's descendants, by process id."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            found |= children_of(child)
    return found


@contextlib.contextmanager
def daemon_with_page(options: dict[str, Any]) -> Iterator[tuple[Daemon, Callable[[], dict[str, float]]]]:
    """Start a daemon. Yields it, and a function that returns its metrics."""
    http_address = f"127.0.0.1:{free_port()}"

    def metrics() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=30) as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    with Daemon(**options, http_address=http_address) as daemon:
        yield daemon, metrics


def client_of(daemon: Daemon) -> int:
    """Return the process id of the daemon's Mooncake client."""
    (found,) = [pid for pid, command in children_of(daemon.daemon_pid()).items() if CLIENT in command]
    return found


def test_a_value_put_at_one_daemon_is_found_at_the_other(cluster: MooncakeCluster) -> None:
    """`await_found` fails if the value is missing or has other bytes."""
    namespace = new_namespace()
    with daemon_of(cluster) as one, daemon_of(cluster) as other:
        put(one, namespace)
        await_found(other, namespace)
        put(other, namespace)  # what is there already does not disturb
        await_found(one, namespace)


def test_what_a_killed_daemon_has_put_is_found(cluster: MooncakeCluster) -> None:
    """`await_found` fails if the value ended with its daemon."""
    namespace = new_namespace()
    with daemon_of(cluster) as other:
        with daemon_of(cluster) as one:
            put(one, namespace)
            await_found(other, namespace)
            one.process.kill()
            one.process.wait()
        with daemon_of(cluster) as third:
            await_found(third, namespace)


def test_removed_values_are_gone_below_and_come_from_the_other_daemon_s_memory_only(cluster: MooncakeCluster) -> None:
    namespace = new_namespace()
    with daemon_of(cluster) as one, daemon_of(cluster) as other:
        put(one, namespace)
        await_found(other, namespace)
        for daemon in (one, other):
            with store_of(daemon, namespace) as store:
                store.remove(keys_of(*NUMBERS))
        with daemon_of(cluster) as third, store_of(third, namespace) as store:
            assert not store.lookup(keys_of(*NUMBERS)).found.any()


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_values_that_are_put_after_their_removal_are_found(cluster: MooncakeCluster, how: str) -> None:
    """`await_found` fails if they are missing."""
    namespace = new_namespace()
    with daemon_of(cluster) as one, daemon_of(cluster) as other:
        put(one, namespace)
        await_in_mooncake(other, namespace)
        with store_of(one, namespace) as store:
            _ = store.remove(keys_of(*NUMBERS)) if how == "remove" else store.clear()
        with store_of(other, namespace) as store:
            assert not store.lookup(keys_of(*NUMBERS)).found.any()
        put(one, namespace)
        await_found(other, namespace)


def test_values_that_are_put_again_reach_the_master_that_follows_a_killed_one(tmp_path: Path) -> None:
    """They are still in the memory of the daemon that puts them. `await_found` fails if the other one does not find
    them."""
    namespace = new_namespace()
    with mooncake_cluster(tmp_path) as cluster, daemon_of(cluster) as one, daemon_of(cluster) as other:
        put(one, namespace)
        await_in_mooncake(other, namespace)
        cluster.master.kill()
        cluster.start_master()

        def is_found() -> bool:
            put(one, namespace)  # the node needs a while to join
            with store_of(other, namespace) as store:
                return bool(store.lookup(keys_of(*NUMBERS)).found.all())

        with store_of(other, namespace) as store:
            assert not store.lookup(keys_of(*NUMBERS)).found.any(), "the new master is empty"
        until(is_found, lambda: time.sleep(0.2))
        await_found(other, namespace)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_daemon_goes_on_while_its_client_process_does_not(cluster: MooncakeCluster, number: signal.Signals) -> None:
    namespace = new_namespace()
    with daemon_of(cluster) as one, daemon_of(cluster) as other:
        put(one, namespace)
        await_found(other, namespace)
        os.kill(client_of(other), number)
        with store_of(other, namespace) as store:
            assert store.lookup(keys_of(*NUMBERS)).found.all(), "memory has them"
            assert not store.lookup(keys_of(*range(100, 110))).found.any(), "a miss, not an error"
            with store_of(one, namespace) as theirs:
                fresh = itertools.count(200)

                def reaches_the_other() -> bool:
                    number = next(fresh)
                    store.put(keys_of(number), blocks_of(number))
                    return bool(theirs.lookup(keys_of(*range(200, number))).found.any())

                until(reaches_the_other, lambda: time.sleep(0.2))


@pytest.mark.parametrize("keeper", [False, True])
def test_the_client_process_ends_with_its_daemon(cluster: MooncakeCluster, keeper: bool) -> None:
    """Also when it is frozen: otherwise it could write later to memory that the next process uses."""
    namespace = new_namespace()
    with daemon_of(cluster, keeper=keeper) as one:
        pid = one.daemon_pid()
        child = client_of(one)
        until(lambda: "kvservice-store" in Path(f"/proc/{child}/maps").read_text())
        os.kill(child, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{child}").exists())
        if keeper:  # the next process of the daemon uses the memory
            put(one, namespace)
            await_found(one, namespace)


def test_daemons_that_give_memory(cluster: MooncakeCluster) -> None:
    """The node is a process of its own, which ends with the daemon."""
    namespace = new_namespace()
    with daemon_of(cluster, mooncake_segment_gib=1 / 16) as one, daemon_of(cluster) as other:
        (node,) = [pid for pid, command in children_of(one.process.pid).items() if "mooncake.node" in command]
        put(one, namespace)
        await_found(other, namespace)
        one.process.kill()
        one.process.wait()
        until(lambda: not Path(f"/proc/{node}").exists())


def test_a_daemon_without_the_library_does_not_start(tmp_path: Path) -> None:
    """A package of the same name, which cannot be imported, stands in its way."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    command = [sys.executable, "-P", "-m", "kvservice", "serve", "--no-keeper", "--unix-socket", str(tmp_path / "s")]
    command += ["--http-address", "", "--num-blocks", "8", "--num-layers", "1", "--store-gib", "0.03125"]
    command += ["--mooncake", f"127.0.0.1:{free_port()}"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "mooncake: Mooncake's library cannot be used: ImportError: libibverbs.so.1: no such file" in done.stderr


def test_a_daemon_starts_without_the_master() -> None:
    """`Daemon` fails if it does not start, `await_found` if its own memory misses the value."""
    namespace = new_namespace()
    with Daemon(**SMALL_STORE | {"mooncake": f"127.0.0.1:{free_port()}"}) as daemon:
        put(daemon, namespace)
        await_found(daemon, namespace)


def test_a_prompt_that_one_daemon_has_computed_is_found_at_the_other(cluster: MooncakeCluster, tmp_path: Path) -> None:
    from tiny_llama import save_tiny_llama

    from kvservice.engines import LLM, SamplingParams

    save_tiny_llama(tmp_path)
    options: dict[str, Any] = {
        "model": str(tmp_path),
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 64,
        "store_gib": 1 / 32,
        "mooncake": cluster.address,
        "weights": "the tiny Llama of this test",
        "prefill_tokens_per_s": 1.0,  # slower to compute than to load
    }
    prompt = list(itertools.islice(itertools.cycle(range(5, 300)), 16 * NUM_PROMPT_BLOCKS + 3))
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with daemon_with_page(options) as (one, metrics), daemon_with_page(options) as (other, other_metrics):
        with LLM(str(tmp_path), address=one.address) as llm:
            (computed,) = llm.generate([prompt], params)
        until(lambda: metrics().get(WRITTEN) == NUM_PROMPT_BLOCKS)
        until(lambda: other_metrics()[OPEN] == 1)
        with LLM(str(tmp_path), address=other.address) as llm:
            (again,) = llm.generate([prompt], params)
        until(lambda: other_metrics().get(READ) == NUM_PROMPT_BLOCKS)
    assert [sample.token_ids for sample in again.outputs] == [sample.token_ids for sample in computed.outputs]
