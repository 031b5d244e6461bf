"""Sizes of the block store, and its restart."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blocks_rig import BLOCK_BYTES, identity, keys
from constants import set_constants
from each_row import each_row
from kept_files import HeldFiles
from store_rig import DONE, NO_ROOM, PRESENT, Store, unpack

from kvservice.config import ServeConfig
from kvservice.errors import ResourceExhaustedError
from kvservice.kept import KeptState
from kvservice.server.tiering.store import AGAIN_S, ServerStore, open_store, store_config
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


# ---- a large store, whose memory comes while it is used

SLAB_BYTES = 4 * MIB + 4096
SLABS_8 = ServeConfig(store_gib=1 / 32)
SMALL_STEPS = {"WHOLE_BYTES": 8 * MIB, "FIRST_BYTES": 2 * SLAB_BYTES, "ROUND_BYTES": 2 * SLAB_BYTES, "PART_BYTES": MIB}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, "kvservice.server.tiering", **SMALL_STEPS)


def blocks_of(store: ServerStore, *numbers: int) -> list[int]:
    """Store blocks that fill a slab each. Returns the statuses."""
    namespace = store.blocks.open(replace(identity(), block_bytes=4 * MIB - 4096))
    reserved = store.blocks.reserve(namespace, keys(*numbers))
    for offset in unpack(reserved.offsets):
        assert offset < store.growth.ready_bytes
    store.blocks.commit(namespace, reserved.slots, reserved.keys, reserved.slots)
    store.blocks.leave(namespace)
    return list(reserved.statuses)


def allocated_bytes(store: ServerStore) -> int:
    return os.fstat(store.memory.fd).st_blocks * 512


def budget_of_clients() -> Any:
    """Return the part of the memory budget that a growing store uses: what is kept from clients."""
    return SimpleNamespace(reserve_bytes=0)


@pytest.mark.usefixtures("small_steps")
def test_a_large_store_is_used_as_far_as_its_memory_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that has no more for some time is asked again. Clients' own memory leaves it room."""
    budget, slept, reserved = budget_of_clients(), list[float](), list[int]()

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        assert store.growth.note.startswith("the block store has 0.0 of 0.0 GiB of memory: the host has no more")
        assert allocated_bytes(store) == 4 * SLAB_BYTES + 4 * 4096
        reserved.append(budget.reserve_bytes)

    available = iter([2 * SLAB_BYTES, 2 * SLAB_BYTES - 1, 0, 1 << 40, 1 << 40])
    opened = open_store(SLABS_8, None, KeptState.fresh())
    assert opened is not None
    store = opened
    assert (store.growth.note, store.growth.is_complete) == ("the block store has 0.0 of 0.0 GiB of memory", False)
    assert allocated_bytes(store) == 2 * SLAB_BYTES + 6 * 4096, "the first page of each slab is there"
    assert blocks_of(store, 1, 2, 3) == [DONE, DONE, NO_ROOM]
    assert store.ready_bytes == 2 * 4 * MIB
    set_constants(monkeypatch, "kvservice.server.tiering", available_bytes=lambda: next(available))
    asyncio.run(store.growth.run(budget, sleep))
    assert slept == [AGAIN_S] * 2
    assert (store.growth.note, store.growth.is_complete, store.ready_bytes) == ("", True, 32 * MIB)
    assert allocated_bytes(store) == store.memory.num_bytes == 8 * SLAB_BYTES
    assert {each - budget.reserve_bytes for each in reserved} == {4 * SLAB_BYTES}
    assert blocks_of(store, *range(1, 9)) == [PRESENT, PRESENT, *[DONE] * 6]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "Cannot allocate memory" in errors[0]


@pytest.mark.usefixtures("small_steps")
def test_the_next_process_goes_on_with_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = HeldFiles()

    def start() -> ServerStore:
        state = KeptState.open(keeper.start(), {})
        store = open_store(SLABS_8, None, state)
        assert store is not None
        state.ready()
        return store

    async def killed() -> None:
        """It ends within the second round."""
        store = start()
        blocks_of(store, 1, 2)
        is_second = asyncio.Event()
        allocate, loop = store.memory.allocate, asyncio.get_running_loop()

        def slow(begin: int, num_bytes: int) -> None:
            if begin >= 5 * SLAB_BYTES:
                loop.call_soon_threadsafe(is_second.set)
            allocate(begin, num_bytes)

        monkeypatch.setattr(store.memory, "allocate", slow)
        task = asyncio.create_task(store.growth.run(budget_of_clients()))
        await is_second.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not [one.name for one in threading.enumerate() if "growth" in one.name]
        assert store.growth.ready_bytes == 4 * SLAB_BYTES
        assert blocks_of(store, 3, 4, 5) == [DONE, DONE, DONE], "one was evicted"

    async def goes_on() -> None:
        store = start()
        assert store.recover({}).blocks == 4
        assert store.growth.ready_bytes == 4 * SLAB_BYTES
        await store.growth.run(budget_of_clients())
        assert allocated_bytes(store) == 8 * SLAB_BYTES
        assert blocks_of(store, *range(11, 15)) == [DONE] * 4
        assert blocks_of(store, 1, 3, 4, 5, *range(11, 15)) == [PRESENT] * 8

    async def has_all() -> None:
        store = start()
        assert store.growth.is_complete
        assert store.recover({}).blocks == 8

    for life in (killed, goes_on, has_all):
        asyncio.run(life())
    keeper.close()
