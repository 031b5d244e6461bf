"""A Mooncake Store of real processes, on the loopback interface. Skips the test with the reason if it cannot run."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path

import debian_packages
import numpy as np
import pytest
from ports import free_ports
from waiting import until

from kvservice import _ext
from kvservice.tiers import Space, Values

# Shared libraries that Mooncake's wheel does not bring, and their packages in Debian and its kin.
LIBRARIES = {
    "libcurl.so.4": ["libcurl4"],
    "libibverbs.so.1": ["libibverbs1", "libnl-3-200", "libnl-route-3-200"],
    "libnuma.so.1": ["libnuma1"],
}
BLOCK_BYTES = 64 << 10
STRIDE = BLOCK_BYTES + 4096
NUM_BLOCKS = 64


@functools.cache
def programs() -> Path:
    """Return the folder of Mooncake's programs. Skips the test if its library cannot be used."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package mooncake-transfer-engine-non-cuda is not installed")
    debian_packages.require_libraries(LIBRARIES)
    tried = subprocess.run(
        [sys.executable, "-P", "-c", "import mooncake.store"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"Mooncake's library cannot be used: {tried.stderr.strip().splitlines()[-1]}")
    return Path(found.submodule_search_locations[0])


class Process:
    """A process that can be frozen, killed and started again with the same command."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self.command, self._environment = command, os.environ | (environment or {})
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def start(self) -> None:
        nothing = subprocess.DEVNULL
        self._running = subprocess.Popen(self.command, env=self._environment, stdout=nothing, stderr=nothing)

    @property
    def runs(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


class MooncakeCluster:
    """A master and a node with memory."""

    def __init__(self, directory: Path) -> None:
        self._rpc_port, self._http_port = free_ports(2)
        self.address = f"127.0.0.1:{self._rpc_port}"
        self.master = Process(
            str(programs() / "mooncake_master"),
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--rpc_port={self._rpc_port}",
            f"--metrics_port={self._http_port}",
            "--client_ttl=2",
        )
        self._ready_file = directory / "node-is-ready"
        self.node = Process(
            *(sys.executable, "-P", "-m", "kvservice.mooncake.node"),
            *("--master", self.address, "--segment-gib", "0.25", "--ready-file", str(self._ready_file)),
        )

    def start(self) -> None:
        self.start_master()
        self.start_node()

    def start_master(self) -> None:
        self.master.start()
        until(self._answers)

    def start_node(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        self.node.start()
        until(lambda: self._ready_file.exists() or not self.node.runs)
        assert self.node.runs

    def metric(self, name: str) -> float:
        """Return a metric of the master without labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise AssertionError(f"the master has no {name}")

    def stop(self) -> None:
        self.node.kill()
        self.master.kill()

    def _answers(self) -> bool:
        assert self.master.runs, "it does not start"
        try:
            for port in (self._rpc_port, self._http_port):
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except ConnectionRefusedError:
            return False
        return True


@contextlib.contextmanager
def mooncake_cluster(directory: Path) -> Iterator[MooncakeCluster]:
    cluster = MooncakeCluster(directory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Memory:
    """A memory file, which other processes map too."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("test-store")
        os.truncate(self.fd, num_bytes)
        self.map = mmap.mmap(self.fd, num_bytes)
        self.address = int(np.frombuffer(self.map, np.uint8).ctypes.data)
        weakref.finalize(self, os.close, self.fd)


class Blocks:
    """The memory of a store, with blocks of random bytes. Block i is written at place i."""

    def __init__(self, seed: int = 0, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes, self.stride = block_bytes, -(-block_bytes // 4096) * 4096 + 4096
        self.memory = Memory(num_blocks * self.stride)
        self.bytes = np.frombuffer(self.memory.map, np.uint8).reshape(num_blocks, self.stride)[:, :block_bytes]
        self._random = np.random.default_rng(seed)

    def fill(self, *places: int) -> None:
        for place in places:
            self.bytes[place] = self._random.integers(0, 256, self.block_bytes, np.uint8)

    def space(self, name: bytes) -> Space:
        return Space(name.ljust(16, b"\0"), self.block_bytes, "model")

    def at(self, *places: int, keys: bytes | None = None) -> Values:
        """Return values at these places, without checksums. Their keys are the places' if there are no others."""
        offsets = struct.pack(f"<{len(places)}Q", *(place * self.stride for place in places))
        return Values(keys_of(*places) if keys is None else keys, offsets)

    def values(self, *places: int, keys: bytes | None = None) -> Values:
        """Return the values at these places, with their checksums."""
        at = self.at(*places, keys=keys)
        checksums = _ext.store_checksums(self.memory.address, at.offsets, self.block_bytes, 1)
        return Values(at.keys, at.offsets, checksums)


def keys_of(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in numbers)
