"""Two daemons in containers that share values through a Mooncake Store, as the compose file starts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from container_engine import output, wait_for
from container_stack import MooncakeStack, running

from kvservice.client import KVClient, StoreNamespace

# Building the image takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def mooncake_stack() -> Iterator[MooncakeStack]:
    with running(MooncakeStack) as started:
        yield started


@contextlib.contextmanager
def store_at(stack: MooncakeStack, daemon: int, namespace: StoreNamespace) -> Iterator[Any]:
    with KVClient(stack.addresses[daemon]) as client, client.store(namespace) as store:
        yield store


def blocks(seed: int) -> tuple[bytes, np.ndarray]:
    """Return keys and values."""
    rng = np.random.default_rng(seed)
    return rng.bytes(32 * NUM_BLOCKS), rng.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


def put(stack: MooncakeStack, daemon: int, namespace: StoreNamespace, seed: int) -> None:
    """Put blocks at one daemon, and wait until the other finds them."""
    keys, values = blocks(seed)
    with store_at(stack, daemon, namespace) as store:
        store.put(keys, values)
    with store_at(stack, 1 - daemon, namespace) as store:
        wait_for("the other daemon finds the blocks", lambda: store.lookup(keys).found.all())


def check_found(stack: MooncakeStack, daemon: int, namespace: StoreNamespace, seed: int) -> None:
    keys, values = blocks(seed)
    found = np.empty_like(values)
    with store_at(stack, daemon, namespace) as store:
        assert store.get(keys, found).all()
    np.testing.assert_array_equal(found, values)


def test_what_one_daemon_has_put_is_found_at_the_other(mooncake_stack: MooncakeStack) -> None:
    """`check_found` fails if a block is missing or has other bytes."""
    namespace = StoreNamespace("shared", BLOCK_BYTES)
    put(mooncake_stack, 0, namespace, seed=1)
    check_found(mooncake_stack, 1, namespace, seed=1)


def test_values_outlive_both_daemons(mooncake_stack: MooncakeStack) -> None:
    """`wait_for` and `check_found` fail if a block is lost."""
    namespace = StoreNamespace("outlive", BLOCK_BYTES)
    put(mooncake_stack, 1, namespace, seed=2)
    for service in ("daemon-a", "daemon-b"):
        output("docker", "kill", mooncake_stack.container(service))
    mooncake_stack.compose("start", "daemon-a", "daemon-b")
    mooncake_stack.await_healthy()
    for daemon in (0, 1):
        with store_at(mooncake_stack, daemon, namespace) as store:
            keys, _ = blocks(2)
            wait_for("the blocks are found", lambda: store.lookup(keys).found.all())  # noqa: B023
        check_found(mooncake_stack, daemon, namespace, seed=2)


def test_nobody_is_root_and_nothing_of_the_store_is_published(mooncake_stack: MooncakeStack) -> None:
    for service in mooncake_stack.services:
        container = mooncake_stack.container(service)
        assert output("docker", "exec", container, "id", "-u") == "10001"
        published = output("docker", "port", container).splitlines()
        assert len(published) == (2 if service.startswith("daemon") else 0)
        assert all(" -> 127.0.0.1:" in line for line in published)


def listeners(stack: MooncakeStack, service: str) -> list[tuple[str, int]]:
    """Return the addresses and ports, as the kernel prints addresses, that are open in a container."""
    tables = output("docker", "exec", stack.container(service), "cat", "/proc/net/tcp", "/proc/net/tcp6")
    fields = [line.split() for line in tables.splitlines()]
    ends = [line[1].partition(":") for line in fields if line[3] == "0A"]
    return [(address, int(port, 16)) for address, _, port in ends]


def test_a_daemon_opens_no_port_for_the_store(mooncake_stack: MooncakeStack) -> None:
    """Only the daemon's own two ports are open, apart from the engine's name server."""
    wildcard = {port for address, port in listeners(mooncake_stack, "daemon-a") if set(address) == {"0"}}
    assert wildcard == {50051, 9464}


def test_the_node_listens_in_its_network_only(mooncake_stack: MooncakeStack) -> None:
    listening = listeners(mooncake_stack, "node")
    assert len([port for _, port in listening if 15000 <= port < 15020]) == 2
    assert not [address for address, _ in listening if set(address) == {"0"}]
