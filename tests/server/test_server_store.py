"""Sizes of the block store, and its restart."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from blocks_rig import BLOCK_BYTES, identity, keys
from each_row import each_row
from kept_files import HeldFiles
from store_rig import Store, unpack

from kvservice.config import ServeConfig
from kvservice.errors import ResourceExhaustedError
from kvservice.kept import KeptState
from kvservice.server.tiering.store import ServerStore, open_store, store_config
from kvservice.store import SessionStore, StoreRecovery

MIB, GIB = 1 << 20, 1 << 30


def test_blocks_of_usual_sizes_fill_the_store() -> None:
    """Smaller blocks use 99 % of it at least: their records take more."""
    with each_row() as row:
        for store_gib in (1 / 64, 1 / 16, 1 / 4, 1.0, 3.0, 64.0, 1000.0):
            with row(store_gib):
                check_sizes(store_gib)


def check_sizes(store_gib: float) -> None:
    sizes = store_config(ServeConfig(store_gib=store_gib))
    assert sizes.quota_bytes == sizes.capacity_bytes == store_gib * GIB
    assert sizes.num_bytes <= sizes.capacity_bytes * 1.001
    num_slabs = sizes.num_bytes // sizes.slab_bytes
    rig = Store(num_slabs=1, slab_bytes=sizes.slab_bytes)
    for block_bytes in (64 << 10, 256 << 10, MIB, 2 * MIB, 4 * MIB):
        _, _, blocks_per_slab = rig.index.geometry(rig.index.open(block_bytes, sizes.slab_bytes))
        assert num_slabs * blocks_per_slab * block_bytes == sizes.capacity_bytes
    _, _, blocks_per_slab = rig.index.geometry(rig.index.open(16 << 10, sizes.slab_bytes))
    assert num_slabs * blocks_per_slab * (16 << 10) > sizes.capacity_bytes * 0.99


def test_a_store_of_no_round_size_has_whole_slabs() -> None:
    sizes = store_config(ServeConfig(store_gib=0.3, store_quota_gib=0.1))
    assert sizes.capacity_bytes == 76 * 4 * MIB
    assert sizes.num_bytes == 76 * (4 * MIB + 4096)
    assert sizes.quota_bytes == int(0.1 * GIB)


def test_a_store_that_does_not_fit_says_what_there_is() -> None:
    with pytest.raises(ResourceExhaustedError, match=r"takes 65600\.00 GiB, \d+\.\d\d GiB are available") as refused:
        open_store(ServeConfig(store_gib=1 << 16), None, KeptState.fresh())
    assert refused.value.field == "store_gib"


CONNECTED = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    sys.stdin.read()
"""


def test_the_next_process_finds_the_store_of_the_one_before(tmp_path: Path) -> None:
    """Its blocks, what sessions have, and the processes that can write."""
    config, keeper = ServeConfig(store_gib=1 / 64, share_store="write", unix_socket="/unused"), HeldFiles()

    def start() -> ServerStore:
        state = KeptState.open(keeper.start(), {})
        store = open_store(config, None, state)
        assert store is not None
        state.ready()
        return store

    async def first(connection: socket.socket) -> tuple[int, int]:
        store = start()
        assert store.recover({}) == StoreRecovery()
        own = SessionStore(store.blocks, "", 5)
        namespace = own.open(identity())[1]
        reserved = store.blocks.reserve(namespace, keys(1))
        (offset,) = unpack(reserved.offsets)
        store.memory.map[offset : offset + BLOCK_BYTES] = b"x" * BLOCK_BYTES
        store.blocks.commit(namespace, reserved.slots, reserved.keys, reserved.slots)
        own.add_writer(store.writers.add(connection))
        reservation_id, _ = own.reserve(namespace, keys(2))
        return own.acquire(namespace, keys(1), False, 5.0)[0], reservation_id

    async def second(lease_id: int, reservation_id: int) -> None:
        store = start()
        own = SessionStore(store.blocks, "", 5)
        assert store.recover({5: own}) == StoreRecovery(blocks=1, leases=1, reservations=1)
        own.renew(lease_id, 1.0)
        assert own.reservation(reservation_id).num_blocks == 1
        assert len(store.writers) == len(own.opening.writers) == 1
        pinned = store.blocks.acquire(own.open(identity())[1], keys(1))
        (offset,) = unpack(pinned.offsets)
        assert store.memory.map[offset : offset + BLOCK_BYTES] == b"x" * BLOCK_BYTES

    async def third() -> None:
        """Without the session, its room waits for the writer."""
        store = start()
        assert store.recover({}) == StoreRecovery(blocks=1, quarantined=1)

    async def fourth() -> None:
        store = start()
        assert store.recover({}) == StoreRecovery(blocks=1)
        assert len(store.writers) == 0

    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with subprocess.Popen([sys.executable, "-S", "-c", CONNECTED, path], stdin=subprocess.PIPE) as writer:
            connection, _ = listener.accept()
            with connection:
                ids = asyncio.run(first(connection))
            asyncio.run(second(*ids))
            asyncio.run(third())
            writer.kill()
        asyncio.run(fourth())
    keeper.close()
