"""Blocks that travel by Transfer Engines, and by messages when these fail, at each stage and at either end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from both_faces import Face
from client_calls import Send, around_calls
from each_row import each_row
from kept_daemon import next_process
from ports import free_port
from store_daemons import blocks_of, keys_of, new_namespace, store_of
from transfer_rig import LOOPBACK, TRANSFERS, engines_of, frozen, is_gone
from waiting import until

from kvservice import _ext
from kvservice.client import KVClient, PutStatus, Scatter, remote
from kvservice.errors import TransferFailedError, TransferOffError, UnknownRegionError
from kvservice.launch import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("transfer_engine")]

DONE, PRESENT = PutStatus.DONE, PutStatus.PRESENT
BLOCK_BYTES = 64 << 10
STAGING_BYTES, SLOT_BYTES = 1 << 20, 128 << 10
# Blocks of four requests, each of them of four slots of the daemon, the last of which is not full.
COUNT = 3 * STAGING_BYTES // 2 // BLOCK_BYTES + 7
NUMBERS = range(COUNT)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(remote, "STAGING_BYTES", STAGING_BYTES)
    # A failure is not followed by another attempt, unless a test waits for it.
    monkeypatch.setattr(remote, "RETRY_S", 3600.0)
    monkeypatch.setattr(remote, "MAX_RETRY_S", 3600.0)


@pytest.fixture(autouse=True)
def _engines_of_tests_before() -> None:
    until(lambda: not engines_of(os.getpid()))


@pytest.fixture(scope="module")
def daemon() -> Iterator[tuple[Daemon, str]]:
    address = f"{LOOPBACK}:{free_port()}"
    with Daemon(**TRANSFERS, tcp_address=address) as running:
        yield running, address


@pytest.fixture(params=["blocking", "asyncio"])
def face(request: pytest.FixtureRequest) -> Face:
    return request.param


def content(*numbers: int) -> np.ndarray:
    return blocks_of(*numbers, block_bytes=BLOCK_BYTES)


def engines(daemon: tuple[Daemon, str]) -> dict[str, int]:
    """Return the processes of the engines at both ends."""
    (near,) = engines_of(os.getpid())
    (far,) = engines_of(daemon[0].process.pid)
    return {"client's": near, "daemon's": far}


@in_a_loop
async def test_blocks_go_and_come_by_engines(face: Face, daemon: tuple[Daemon, str]) -> None:
    async with store_of(face, daemon[1], new_namespace(BLOCK_BYTES), transport="transfer") as store:
        assert store.transport == "transfer"
        statuses = await store.put(keys_of(*NUMBERS), content(*NUMBERS))
        assert set(statuses.tolist()) == {DONE}
        out = np.zeros((COUNT + 2, BLOCK_BYTES), np.uint8)
        found = await store.get(keys_of(77, *NUMBERS, 78), out)
        assert found.tolist() == [False] + [True] * COUNT + [False]
        np.testing.assert_array_equal(out[1:-1], content(*NUMBERS))
        assert set((await store.put(keys_of(*NUMBERS), content(*NUMBERS))).tolist()) == {PRESENT}
        assert (store.transport, store.num_transfer_failures) == ("transfer", 0)


@in_a_loop
async def test_random_sizes_and_pieces(daemon: tuple[Daemon, str]) -> None:
    """It fails if a byte is wrong, or if a transfer failed."""
    with each_row() as row:
        for seed in range(4):
            with row(seed):
                await check_random_sizes(seed, daemon)


async def check_random_sizes(seed: int, daemon: tuple[Daemon, str]) -> None:
    choice = random.Random(seed)
    pieces = tuple(choice.choice((64, 4096, 4097, 40000)) for _ in range(3))
    size, count = sum(pieces), choice.randrange(30, 60)
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (count, size), np.uint8)
    async with store_of("blocking", daemon[1], new_namespace(size)) as store:
        assert store.transport == "transfer"
        assert set((await store.put(keys_of(*range(count)), values)).tolist()) == {DONE}
        removed = [number for number in range(count) if choice.random() < 0.3]
        await store.remove(keys_of(*removed))
        base = np.zeros(count * size, np.uint8)
        order = rng.permutation(count)
        begins = np.cumsum((0, *pieces[:-1]))
        offsets = order[:, None] * size + begins[None, :]
        found = await store.get(keys_of(*range(count)), Scatter(base, offsets, pieces))
        assert found.tolist() == [number not in removed for number in range(count)]
        got = base.reshape(count, size)[order]
        np.testing.assert_array_equal(got[found], values[found])
        assert not got[~found].any(), "the places of missing blocks are unchanged"
        assert store.num_transfer_failures == 0


@contextlib.contextmanager
def before_call(way: str, nth: int, act: Callable[[], object]) -> Iterator[None]:
    """Act before the nth BatchPut or BatchGet."""
    numbers = iter(range(1000))

    async def hooked(name: str, request: Any, send: Send) -> Any:  # noqa: ARG001
        if name == f"store_batch_{way}" and next(numbers) == nth:
            act()
        return await send()

    with around_calls(hooked):
        yield


@contextlib.contextmanager
def damaged(way: str, nth: int) -> Iterator[None]:
    """Change a byte of the staging region between the nth copy there and back: in a put after its checksums were
    computed, in a get when it has arrived."""
    numbers, name = iter(range(1000)), {"put": "store_copy_in", "get": "store_copy_out"}[way]
    copy = getattr(_ext, name)

    def copied(address: int, offsets: bytes, *rest: Any) -> Any:
        place = address + int.from_bytes(offsets[8:16], "little") + 5
        is_chosen = next(numbers) == nth
        if is_chosen and way == "get":
            ctypes.c_uint8.from_address(place).value ^= 1
        result = copy(address, offsets, *rest)
        if is_chosen and way == "put":
            ctypes.c_uint8.from_address(place).value ^= 1
        return result

    with patch.object(_ext, name, copied):
        yield


async def region_and_engine(store: Any, num_bytes: int) -> tuple[Any, int]:
    """Create a region. Returns it and the process of its engine here."""
    before = set(engines_of(os.getpid()))
    region = await store.create_region(num_bytes)
    (engine,) = set(engines_of(os.getpid())) - before
    return region, engine


async def both_ways(store: Any) -> None:
    """Put blocks and get them, and check every byte."""
    statuses = await store.put(keys_of(*NUMBERS), content(*NUMBERS))
    assert set(statuses.tolist()) == {DONE}
    await check(store)


async def check(store: Any) -> None:
    """Get blocks, and check every byte."""
    out = np.zeros((COUNT, BLOCK_BYTES), np.uint8)
    assert (await store.get(keys_of(*NUMBERS), out)).all()
    np.testing.assert_array_equal(out, content(*NUMBERS))


@pytest.mark.parametrize("whose", ["client's", "daemon's"])
@pytest.mark.parametrize("way", ["put", "get"])
@pytest.mark.parametrize("nth", [0, 2])
@in_a_loop
async def test_a_killed_engine_costs_no_block(
    face: Face, daemon: tuple[Daemon, str], whose: str, way: str, nth: int
) -> None:
    async with store_of(face, daemon[1], new_namespace(BLOCK_BYTES), timeout_s=60.0) as store:
        engine = engines(daemon)[whose]

        def kill() -> None:
            os.kill(engine, signal.SIGKILL)
            until(lambda: is_gone(engine))

        with before_call(way, nth, kill):
            await both_ways(store)
        assert (store.transport, store.num_transfer_failures) == ("inline", 1)
        until(lambda: not engines_of(daemon[0].process.pid) and not engines_of(os.getpid()))


@pytest.mark.parametrize("whose", ["client's", "daemon's"])
@pytest.mark.parametrize("way", ["put", "get"])
@in_a_loop
async def test_a_frozen_engine_costs_no_block(daemon: tuple[Daemon, str], whose: str, way: str) -> None:
    async with store_of("blocking", daemon[1], new_namespace(BLOCK_BYTES), timeout_s=60.0) as store:
        engine = engines(daemon)[whose]
        freezing = frozen(engine)
        with before_call(way, 1, freezing.__enter__):
            await both_ways(store)
        assert (store.transport, store.num_transfer_failures) == ("inline", 1)
        until(lambda: is_gone(engine))


@pytest.mark.parametrize("way", ["put", "get"])
@in_a_loop
async def test_bytes_that_change_on_the_way_are_sent_again(face: Face, daemon: tuple[Daemon, str], way: str) -> None:
    async with store_of(face, daemon[1], new_namespace(BLOCK_BYTES)) as store:
        with damaged(way, 1):
            await both_ways(store)
        assert (store.transport, store.num_transfer_failures) == ("inline", 1)


@in_a_loop
async def test_a_region_that_is_given_up_ends_its_engine(face: Face, daemon: tuple[Daemon, str]) -> None:
    async with store_of(face, daemon[1], new_namespace(BLOCK_BYTES)) as store:
        region, engine = await region_and_engine(store, COUNT * BLOCK_BYTES)
        values = region.array((COUNT, BLOCK_BYTES), "uint8")
        values[...] = content(*NUMBERS)
        await store.unregister_region(region)
        await store.unregister_region(region)
        until(lambda: is_gone(engine))
        assert set((await store.put(keys_of(*NUMBERS), values)).tolist()) == {DONE}
        await check(store)
        assert (store.transport, store.num_transfer_failures) == ("transfer", 0)


@in_a_loop
async def test_blocks_in_a_region_are_not_copied_here(
    face: Face, daemon: tuple[Daemon, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_of(face, daemon[1], new_namespace(BLOCK_BYTES)) as store:
        region = await store.create_region(2 * COUNT * BLOCK_BYTES)
        values = region.array((COUNT, BLOCK_BYTES), "uint8")
        out = region.array((COUNT, BLOCK_BYTES), "uint8", values.nbytes)
        values[...] = content(*NUMBERS)
        for name in ("store_copy_in", "store_copy_out"):
            monkeypatch.setattr(_ext, name, None)
        assert set((await store.put(keys_of(*NUMBERS), values)).tolist()) == {DONE}
        removed = NUMBERS[5]
        await store.remove(keys_of(removed))
        found = await store.get(keys_of(*NUMBERS), out)
        assert found.tolist() == [number != removed for number in NUMBERS]
        np.testing.assert_array_equal(out[found], values[found])
        assert not out[removed].any()
        assert (store.transport, store.num_transfer_failures) == ("transfer", 0)


@in_a_loop
async def test_a_region_whose_engine_is_gone_is_memory_as_any_other(face: Face, daemon: tuple[Daemon, str]) -> None:
    async with store_of(face, daemon[1], new_namespace(BLOCK_BYTES), timeout_s=60.0) as store:
        region, engine = await region_and_engine(store, COUNT * BLOCK_BYTES)
        values = region.array((COUNT, BLOCK_BYTES), "uint8")
        values[...] = content(*NUMBERS)
        os.kill(engine, signal.SIGKILL)
        until(lambda: is_gone(engine))
        assert set((await store.put(keys_of(*NUMBERS), values)).tolist()) == {DONE}
        assert store.num_transfer_failures == 1
        values[...] = 0
        assert (await store.get(keys_of(*NUMBERS), values)).all()
        np.testing.assert_array_equal(values, content(*NUMBERS))
        assert (store.transport, store.num_transfer_failures) == ("transfer", 1)


@in_a_loop
async def test_nobody_writes_to_the_region_of_a_call_that_was_given_up(daemon: tuple[Daemon, str]) -> None:
    """A get whose answer is lost may be executed later. The client's engine is gone before the caller goes on."""
    async with store_of("blocking", daemon[1], new_namespace(BLOCK_BYTES)) as store:
        region, engine = await region_and_engine(store, COUNT * BLOCK_BYTES)
        out = region.array((COUNT, BLOCK_BYTES), "uint8")
        await store.put(keys_of(*NUMBERS), content(*NUMBERS))
        held: list[Send] = []

        async def interrupted(name: str, request: Any, send: Send) -> Any:  # noqa: ARG001
            if name == "store_batch_get" and not held:
                held.append(send)
                raise KeyboardInterrupt
            return await send()

        with around_calls(interrupted), pytest.raises(KeyboardInterrupt):
            await store.get(keys_of(*NUMBERS), out)
        until(lambda: is_gone(engine))
        with pytest.raises((TransferFailedError, UnknownRegionError)):
            await held[0]()  # it is executed now
        assert not out.any()
        assert (await store.get(keys_of(*NUMBERS), out)).all()
        np.testing.assert_array_equal(out, content(*NUMBERS))


@in_a_loop
async def test_another_attempt_is_made_in_the_background(
    face: Face, daemon: tuple[Daemon, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.0)
    async with store_of(face, daemon[1], new_namespace(BLOCK_BYTES)) as store:
        engine = engines(daemon)["daemon's"]
        os.kill(engine, signal.SIGKILL)
        until(lambda: is_gone(engine))
        await both_ways(store)
        for _ in range(1000):
            await store.remove(keys_of(*NUMBERS))
            await both_ways(store)
            if store.transport == "transfer":
                break
        assert (store.transport, store.num_transfer_failures) == ("transfer", 1)


@in_a_loop
async def test_two_stores_have_engines_of_their_own(daemon: tuple[Daemon, str]) -> None:
    async with store_of("blocking", daemon[1], new_namespace(BLOCK_BYTES)) as one:
        async with store_of("blocking", daemon[1], new_namespace(BLOCK_BYTES)) as other:
            assert len(engines_of(daemon[0].process.pid)) == 2
            await both_ways(one)
            await both_ways(other)
            assert (one.num_transfer_failures, other.num_transfer_failures) == (0, 0)
        until(lambda: len(engines_of(daemon[0].process.pid)) == 1)
        await one.remove(keys_of(*NUMBERS))
        await both_ways(one)
        assert one.transport == "transfer"
    until(lambda: not engines_of(daemon[0].process.pid) and not engines_of(os.getpid()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_another_process_of_the_daemon_makes_another_region(number: signal.Signals) -> None:
    address = f"{LOOPBACK}:{free_port()}"
    out = np.zeros((COUNT, BLOCK_BYTES), np.uint8)
    with (
        Daemon(keeper=True, **TRANSFERS, tcp_address=address) as daemon,
        KVClient(address) as client,
        client.store(new_namespace(BLOCK_BYTES), transport="transfer") as store,
    ):
        assert set(store.put(keys_of(*NUMBERS), content(*NUMBERS)).tolist()) == {DONE}
        next_process(daemon, number)

        def is_right() -> bool:
            """Whether the blocks are found. While the daemon is away, they are not."""
            out[:] = 0
            found = store.get(keys_of(*NUMBERS), out)
            np.testing.assert_array_equal(out[found], content(*NUMBERS)[found])
            return bool(found.all()) and store.transport == "transfer"

        until(is_right)
        assert len(engines_of(daemon.daemon_pid())) == 1
        assert store.num_transfer_failures == 0
    until(lambda: not engines_of(os.getpid()))


@in_a_loop
async def test_messages_carry_blocks_when_the_daemon_has_no_room_for_another_region() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    with Daemon(**TRANSFERS | {"max_transfers": 1}, tcp_address=address):
        stores = [store_of("blocking", address, new_namespace(BLOCK_BYTES)) for _ in range(2)]
        async with stores[0] as one, stores[1] as other:
            assert (one.transport, other.transport) == ("transfer", "inline")
            await both_ways(other)
            assert other.num_transfer_failures == 1


@in_a_loop
async def test_messages_carry_blocks_of_daemons_without_engines() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    with Daemon(**TRANSFERS | {"transfer_address": ""}, tcp_address=address):
        async with store_of("blocking", address, new_namespace(BLOCK_BYTES)) as store:
            assert (store.transport, store.num_transfer_failures) == ("inline", 0)
            await both_ways(store)
        with KVClient(address) as client, pytest.raises(TransferOffError):
            client.store(new_namespace(BLOCK_BYTES), transport="transfer", unreachable="raise")


@in_a_loop
async def test_messages_carry_blocks_without_the_library(
    daemon: tuple[Daemon, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "is_installed", lambda: False)
    async with store_of("blocking", daemon[1], new_namespace(BLOCK_BYTES)) as store:
        assert (store.transport, store.num_transfer_failures) == ("inline", 0)
        await both_ways(store)
    with KVClient(daemon[1]) as client, pytest.raises(TransferFailedError, match="mooncake"):
        client.store(new_namespace(BLOCK_BYTES), transport="transfer", unreachable="raise")
