"""A daemon that serves while the memory of its store is not complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import growing_daemon
import numpy as np
from click.testing import CliRunner
from growing_daemon import SLAB_BYTES
from small_pool import SMALL_POOL
from waiting import PATIENCE_S, until

from kvservice.auth.client import NO_CREDENTIALS
from kvservice.cli import main
from kvservice.client import KVClient, StoreNamespace
from kvservice.client.store import PutStatus
from kvservice.environment import missing_environment
from kvservice.health import HealthAnswer, ask, check

BLOCK_BYTES = (4 << 20) - 4096  # a slab has one
KEYS = [number.to_bytes(32, "little") for number in range(8)]
NOTE = "the block store has 0.0 of 0.0 GiB of memory: the host has no more, which is tried again each 0.05 s"


@contextmanager
def growing(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yield the process of a daemon, and its address."""
    config = SMALL_POOL | {"store_gib": 1 / 32, "unix_socket": folder / "socket", "tcp_address": "", "keeper": False}
    environment = os.environ | missing_environment(os.environ) | {"KVSERVICE_HTTP_ADDRESS": ""}
    environment |= {f"KVSERVICE_{name.upper()}": str(value) for name, value in config.items()}
    address = f"unix:{folder / 'socket'}"
    with subprocess.Popen([sys.executable, "-P", growing_daemon.__file__], env=environment) as process:
        try:
            until(lambda: check(address, timeout_s=0.5) or process.poll() is not None)
            yield process, address
        finally:
            process.kill()


def ready_bytes(address: str) -> tuple[int, int]:
    done = CliRunner().invoke(main, ["top", "--once", "--json", "--address", address])
    store = json.loads(done.stdout)["store"]
    return store["ready_bytes"], store["num_bytes"]


def test_it_serves_with_what_there_is_and_says_so(tmp_path: Path) -> None:
    with growing(tmp_path) as (process, address), KVClient(address) as client:
        until(lambda: ask(address, PATIENCE_S, NO_CREDENTIALS) == HealthAnswer("", NOTE))
        assert ready_bytes(address) == (8 << 20, 32 << 20)
        namespace = StoreNamespace("model", BLOCK_BYTES)
        values = np.random.default_rng(0).integers(0, 256, (len(KEYS), BLOCK_BYTES), np.uint8)
        with client.store(namespace) as store:
            assert store.put(KEYS[:3], values[:3]).tolist() == [PutStatus.DONE] * 2 + [PutStatus.NO_ROOM]
            assert store.memory is not None
            assert [store.memory.has_slab(slab) for slab in range(8)] == [True] * 2 + [False] * 6
            found = store.memory.find(b"".join(KEYS))
            assert found is not None
            assert found.tolist() == [True] * 2 + [False] * 6
            process.send_signal(signal.SIGUSR1)
            until(lambda: ask(address, PATIENCE_S, NO_CREDENTIALS) == HealthAnswer(""))
            assert ready_bytes(address) == (32 << 20, 32 << 20)
            assert all(map(store.memory.has_slab, range(8)))
            assert set(store.put(KEYS, values).tolist()) == {PutStatus.DONE, PutStatus.PRESENT}
            out = np.zeros_like(values)
            assert store.get(KEYS, out).all()
            np.testing.assert_array_equal(out, values)
        with client.store(namespace) as again:
            assert again.memory is not None
            assert all(map(again.memory.has_slab, range(8)))
            assert again.memory.num_bytes == 8 * SLAB_BYTES
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
