"""K/V of sequences that travel by Transfer Engines, and by messages when these fail, at either end."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from both_faces import Face, session_of
from each_row import each_row
from kept_daemon import next_process
from ports import free_port
from transfer_rig import LOOPBACK, TRANSFERS, engines_of, frozen, is_gone
from waiting import until

from kvservice.client import KVClient, remote
from kvservice.client.connection import SessionConnection
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    LayerWrittenError,
    MessageTooLargeError,
    TransferFailedError,
    TransferOffError,
    UnknownSequenceError,
)
from kvservice.launch import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("transfer_engine")]

# Writes and reads of 256 tokens take several parts, and each part several slots.
POOL: dict[str, Any] = TRANSFERS | {"num_blocks": 1024, "max_sequence_tokens": 1024, "session_grace_s": 30.0}
SLOT_BYTES = 32 << 10
LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 32
NUM_TOKENS = 256

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FACES: tuple[Face, ...] = ("blocking", "asyncio")
Address = str
Contents = tuple[np.ndarray, np.ndarray]


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(remote, "LEAST_BYTES", 4096)
    # A failure is not followed by another attempt, unless a test waits for it.
    monkeypatch.setattr(remote, "RETRY_S", 3600.0)
    monkeypatch.setattr(remote, "MAX_RETRY_S", 3600.0)


def no_engines() -> bool:
    """Return whether this process has no engine, nor starts one: that of a closed session ends when it has started."""
    starting = any(thread.name == "kvservice-reconnects" for thread in threading.enumerate())
    return not starting and not engines_of(os.getpid())


@pytest.fixture(autouse=True)
def _engines_of_tests_before() -> None:
    until(no_engines)


@pytest.fixture(scope="module")
def daemon_of() -> Iterator[Callable[[str], tuple[Daemon, Address]]]:
    """Return the daemon whose pool has this dtype. Each is started once."""
    running: dict[str, tuple[Daemon, Address]] = {}
    with ExitStack() as stack:

        def find(dtype: str) -> tuple[Daemon, Address]:
            if dtype not in running:
                address = f"{LOOPBACK}:{free_port()}"
                options = POOL | {"dtype": dtype, "tcp_address": address}
                running[dtype] = stack.enter_context(Daemon(**options)), address
            return running[dtype]

        yield find


@pytest.fixture
def daemon(daemon_of: Callable[[str], tuple[Daemon, Address]]) -> tuple[Daemon, Address]:
    return daemon_of("float32")


def contents(seed: int, num_tokens: int = NUM_TOKENS, dtype: str = "float32") -> Contents:
    rng = np.random.default_rng(seed)
    shape = (LAYERS, num_tokens, KV_HEADS, HEAD_SIZE)
    key, value = (rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype]) for _ in range(2))
    return key, value


@asynccontextmanager
async def session(face: Face, address: Address, transport: str = "transfer", **options: Any) -> AsyncIterator[Any]:
    async with session_of(face, address, transport, **options) as kv:
        await kv.reset_prefix_cache()
        assert kv.transport == transport
        yield kv


async def opened(kv: Any, num_tokens: int = NUM_TOKENS) -> tuple[Any, Any]:
    """Return a new sequence, and a step over all its tokens."""
    await kv.reset_prefix_cache()
    sequence = await kv.allocate(range(num_tokens))
    return sequence, await kv.open_step([sequence])


async def both_ways(kv: Any, seed: int = 0) -> None:
    """Write K/V and read them, and check every byte."""
    key, value = contents(seed)
    sequence, step = await opened(kv)
    await step.write(key, value)
    await check(kv, sequence, (key, value))
    await kv.free([sequence])


async def check(kv: Any, sequence: Any, expected: Contents) -> None:
    for found, one in zip(await kv.read(sequence, 0, NUM_TOKENS), expected, strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), one.view(np.uint8))


def around_calls(
    monkeypatch: pytest.MonkeyPatch, way: str, nth: int, before: Callable[[Any], object], after: Callable[[Any], object]
) -> list[str]:
    """Call `before` and `after` around the nth Write or Read by an engine, with the request. Returns the names of all
    such calls, as they are made."""
    call = SessionConnection.call_until
    made: list[str] = []

    async def hooked(connection: SessionConnection, deadline: float | None, name: str, request: Any, *_: object) -> Any:
        places = name == "read" and request.HasField("key_place")
        places |= name == "write" and request.key.HasField("shared_memory")
        wanted = places and name == way and made.count(way) == nth
        if places:
            made.append(name)
        if wanted:
            before(request)
        try:
            return await call(connection, deadline, name, request)
        finally:
            if wanted:
                after(request)

    monkeypatch.setattr(SessionConnection, "call_until", hooked)
    return made


def nothing(_: object) -> None:
    """Do nothing."""


def engines(daemon: tuple[Daemon, Address]) -> dict[str, int]:
    """Return the processes of the engines at both ends."""
    (near,) = engines_of(os.getpid())
    (far,) = engines_of(daemon[0].process.pid)
    return {"client's": near, "daemon's": far}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("face", FACES)
@in_a_loop
async def test_random_ranges_of_random_batches(
    daemon_of: Callable[[str], tuple[Daemon, Address]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    seed: int,
    face: Face,
) -> None:
    choice = random.Random(seed)
    lengths = [choice.randrange(1, 400) for _ in range(3)]
    key, value = contents(seed, sum(lengths), dtype)
    made = around_calls(monkeypatch, "", -1, nothing, nothing)
    async with session(face, daemon_of(dtype)[1]) as kv:
        sequences = await kv.allocate_batch([range(1000 * i, 1000 * i + n) for i, n in enumerate(lengths)])
        step = await kv.open_step(sequences)
        if choice.random() < 0.5:
            await step.write(key, value)
        else:
            for layer in range(LAYERS):
                await step.write(key[layer], value[layer], layer)
        for _ in range(12):
            number = choice.randrange(len(lengths))
            start, stop = sorted(choice.sample(range(lengths[number] + 1), 2))
            layer = choice.choice((None, *range(LAYERS)))
            tokens = slice(sum(lengths[:number]) + start, sum(lengths[:number]) + stop)
            where = (slice(None) if layer is None else layer, tokens)
            for found, one in zip(await kv.read(sequences[number], start, stop, layer), (key, value), strict=True):
                assert found.dtype == DTYPES[dtype]
                np.testing.assert_array_equal(found.view(np.uint8), np.ascontiguousarray(one[where]).view(np.uint8))
        assert (kv.transport, kv.num_transfer_failures) == ("transfer", 0)
    assert set(made) == {"write", "read"}, "engines have carried them"


@pytest.mark.parametrize("whose", ["client's", "daemon's"])
@pytest.mark.parametrize("way", ["write", "read"])
@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("face", FACES)
@in_a_loop
async def test_a_killed_engine_costs_no_byte(
    daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch, whose: str, way: str, nth: int, face: Face
) -> None:
    async with session(face, daemon[1], timeout_s=60.0) as kv:
        engine = engines(daemon)[whose]

        def kill(_: object) -> None:
            os.kill(engine, signal.SIGKILL)
            until(lambda: is_gone(engine))

        made = around_calls(monkeypatch, way, nth, kill, nothing)
        await both_ways(kv)
        assert made[-1] == way
        assert made.count(way) == nth + 1, "what follows goes in messages"
        assert kv.num_transfer_failures == 1
        until(lambda: not engines_of(daemon[0].process.pid) and not engines_of(os.getpid()))


@pytest.mark.parametrize("whose", ["client's", "daemon's"])
@pytest.mark.parametrize("way", ["write", "read"])
@in_a_loop
async def test_a_frozen_engine_costs_no_byte(
    daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch, whose: str, way: str
) -> None:
    async with session("blocking", daemon[1], timeout_s=60.0) as kv:
        engine = engines(daemon)[whose]
        freezing = frozen(engine)
        around_calls(monkeypatch, way, 1, lambda _: freezing.__enter__(), nothing)
        await both_ways(kv)
        assert kv.num_transfer_failures == 1
        until(lambda: is_gone(engine))


@pytest.mark.parametrize("way", ["write", "read"])
@in_a_loop
async def test_bytes_that_change_on_the_way_are_sent_again(
    daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A write is damaged after its checksums were computed; a read when it has arrived, which shows while the next part
    travels."""
    async with session("asyncio", daemon[1]) as kv:
        region = kv.context.remote.staging()

        def damage(request: Any) -> None:
            place = request.key.shared_memory if way == "write" else request.key_place
            region.array(region.num_bytes, "uint8")[place.offset + 77] ^= 1

        made = around_calls(monkeypatch, way, 1, *((damage, nothing) if way == "write" else (nothing, damage)))
        await both_ways(kv)
        assert made.count(way) == (2 if way == "write" else 3)
        assert kv.num_transfer_failures == 1


@in_a_loop
async def test_a_call_that_the_daemon_refuses_costs_no_engine(daemon: tuple[Daemon, Address]) -> None:
    async with session("asyncio", daemon[1]) as kv:
        before = engines(daemon)
        key, value = contents(1)
        sequence, step = await opened(kv)
        await step.write(key, value)
        with pytest.raises(LayerWrittenError):
            await step.write(key[0], value[0], 0)
        await check(kv, sequence, (key, value))
        await kv.free([sequence])
        with pytest.raises(UnknownSequenceError):
            await kv.read(sequence, 0, NUM_TOKENS)
        assert engines(daemon) == before
        assert kv.num_transfer_failures == 0


@in_a_loop
async def test_tensors_of_wrong_shapes_are_refused(daemon: tuple[Daemon, Address]) -> None:
    good, flat = (LAYERS, NUM_TOKENS, KV_HEADS, HEAD_SIZE), (LAYERS, NUM_TOKENS, KV_HEADS * HEAD_SIZE)
    few, large = (1, 64, KV_HEADS, HEAD_SIZE), (40 << 20,)
    wrong: list[tuple[tuple[int, ...], tuple[int, ...], type[Exception]]] = [
        (good, flat, InvalidArgumentError),
        (flat, flat, InvalidArgumentError),
        (few, few, InvalidArgumentError),
        (large, large, MessageTooLargeError),
    ]
    async with session("blocking", daemon[1]) as kv:
        sequence, step = await opened(kv)
        with each_row() as row:
            for key_shape, value_shape, error in wrong:
                with row(f"{key_shape}, {value_shape}"), pytest.raises(error):
                    await step.write(np.zeros(key_shape, np.float32), np.zeros(value_shape, np.float32))
        await step.write(*contents(7))
        await check(kv, sequence, contents(7))
        assert kv.num_transfer_failures == 0


@in_a_loop
async def test_nobody_writes_to_the_memory_of_a_call_that_was_given_up(
    daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read whose answer is lost may be executed later. The client's engine is gone before the caller goes on."""
    async with session("blocking", daemon[1]) as kv:
        key, value = contents(2)
        sequence, step = await opened(kv)
        await step.write(key, value)
        engine = engines(daemon)["client's"]

        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        around_calls(monkeypatch, "read", 0, interrupt, nothing)
        with pytest.raises(KeyboardInterrupt):
            await kv.read(sequence, 0, NUM_TOKENS)
        until(lambda: is_gone(engine))
        await check(kv, sequence, (key, value))
        assert kv.num_transfer_failures == 0
    until(lambda: not engines_of(os.getpid()))  # also the one that this read has started


@pytest.mark.parametrize("face", FACES)
@in_a_loop
async def test_the_engine_starts_beside_the_first_large_calls(
    face: Face, daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = around_calls(monkeypatch, "", -1, nothing, nothing)
    started: set[int] = set()
    async with session_of(face, daemon[1], "auto") as kv:
        assert kv.transport == "transfer"
        assert not engines_of(os.getpid()), "a session that moves little needs no process"
        for seed in range(1000):
            await both_ways(kv, seed)
            started.update(engines_of(os.getpid()))
            if "write" in made and "read" in made:
                break
        assert {"write", "read"} <= set(made)
        assert len(started) == 1
        assert kv.num_transfer_failures == 0
    until(lambda: not engines_of(daemon[0].process.pid) and not engines_of(os.getpid()))


@in_a_loop
async def test_small_calls_take_messages(daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch) -> None:
    made = around_calls(monkeypatch, "", -1, nothing, nothing)
    monkeypatch.setattr(remote, "LEAST_BYTES", 1 << 20)
    async with session("asyncio", daemon[1]) as kv:
        await both_ways(kv)
    assert not made


@in_a_loop
async def test_messages_carry_tensors_of_daemons_without_engines() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    with Daemon(**POOL | {"transfer_address": ""}, tcp_address=address):
        for face in FACES:
            async with session_of(face, address, "auto") as kv:
                assert (kv.transport, kv.num_transfer_failures) == ("inline", 0)
                await both_ways(kv)
        with KVClient(address, transport="transfer") as client, pytest.raises(TransferOffError):
            client.session()


@in_a_loop
async def test_messages_carry_tensors_when_the_daemon_has_no_room_for_another_region(
    daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SLOT_BYTES", 64 << 20)  # above max_region_mib
    async with session_of("blocking", daemon[1], "auto") as kv:
        for seed in range(1000):
            await both_ways(kv, seed)
            if kv.num_transfer_failures:
                break
        assert kv.num_transfer_failures == 1
        await both_ways(kv)
    until(lambda: not engines_of(os.getpid()))


def test_a_wanted_engine_that_cannot_be_had_is_an_error(
    daemon: tuple[Daemon, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVClient(daemon[0].address, transport="transfer") as local:
        with pytest.raises(FailedPreconditionError) as raised:
            local.session()
        assert raised.value.field == "transport"
    monkeypatch.setattr(remote, "is_installed", lambda: False)
    with KVClient(daemon[1], transport="transfer") as client, pytest.raises(TransferFailedError, match="mooncake"):
        client.session()
    with KVClient(daemon[1]) as client, client.session() as kv:
        assert kv.transport == "inline"
    until(lambda: not engines_of(os.getpid()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_another_process_of_the_daemon_makes_another_region(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The K/V that engines brought are there, and engines bring them after that too."""
    address = f"{LOOPBACK}:{free_port()}"
    key, value = contents(5)
    with Daemon(keeper=True, **POOL, tcp_address=address) as daemon, KVClient(address, transport="transfer") as client:
        with client.session() as kv:
            made = around_calls(monkeypatch, "", -1, nothing, nothing)
            sequence = kv.allocate(range(NUM_TOKENS))
            kv.open_step([sequence]).write(key, value)
            assert set(made) == {"write"}
            next_process(daemon, number)
            num_made = 0
            while made.count("read") < 3:  # the first finds no region, and has its bytes by messages
                for found, one in zip(kv.read(sequence, 0, NUM_TOKENS), (key, value), strict=True):
                    np.testing.assert_array_equal(found, one)
                num_made += 1
                assert num_made < 1000
            assert (kv.num_restarts, kv.num_transfer_failures) == (1, 0)
        until(lambda: not engines_of(os.getpid()))
