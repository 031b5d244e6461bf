"""The stream of block events of a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import grpc
import numpy as np
import pytest
from each_row import each_row

from kvservice.chain_hash import block_hash, root_hash
from kvservice.client import (
    AllBlocksCleared,
    AsyncKVClient,
    BlockRemoved,
    BlockStored,
    Gap,
    KVClient,
    Sequence,
    Session,
)
from kvservice.config import ServeConfig
from kvservice.errors import EventsOffError, InvalidArgumentError, KVServiceError, QuotaExceededError
from kvservice.launch import Daemon
from kvservice.server.rpc.slots import RPC
from kvservice.server.rpc.stream import Services
from kvservice.v1 import events_pb2

BLOCK_SIZE = 4
# Token ids that only one test has.
MARKS = itertools.count(1_000_000)
POOL: dict[str, Any] = {
    "num_layers": 1, "num_kv_heads": 1, "head_size": 32, "dtype": "float32", "block_size": BLOCK_SIZE, "num_blocks": 8,
    "watermark": 0.0, "swap_space_gib": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(event_token_ids=True, max_event_streams=2, **POOL) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[KVClient]:
    with KVClient(daemon.address) as connected:
        yield connected


def compute(kv: Session, token_ids: list[int]) -> Sequence:
    sequence = kv.allocate(token_ids)
    step = kv.open_step([sequence])
    step.write(*(np.ones((1, step.num_tokens, 1, 32), np.float32),) * 2)
    return sequence


def next_number(client: KVClient, kv: Session) -> int:
    """Clear the cache, and return the number of the next batch of events."""
    token_ids = [next(MARKS)] * BLOCK_SIZE
    kv.free([compute(kv, token_ids)])
    kv.reset_prefix_cache()
    events = client.events(start_number=1)
    stored = BlockStored(tuple(chain(token_ids)), None, tuple(token_ids), BLOCK_SIZE, "CPU")
    while stored not in next(events).events:
        pass
    cleared = next(events)
    assert cleared.events == (AllBlocksCleared(),)
    events.close()
    return cleared.number + 1


def chain(token_ids: list[int]) -> list[bytes]:
    hashes = [root_hash(BLOCK_SIZE)]
    for begin in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        tokens = np.array(token_ids[begin : begin + BLOCK_SIZE], "<i4")
        hashes.append(block_hash(hashes[-1], tokens.tobytes()))
    return hashes[1:]


def test_events_tell_what_enters_and_leaves_the_cache(client: KVClient) -> None:
    with client.session() as kv:
        start = next_number(client, kv)
        events = client.events(start_number=start)
        tokens = list(range(10))
        first = compute(kv, tokens)
        hashes = chain(tokens)
        stored = BlockStored(tuple(hashes), None, tuple(range(8)), BLOCK_SIZE, "CPU")
        batch = next(events)
        assert (batch.number, batch.events, batch.gap) == (start, (stored,), None)
        kv.append([first], [10])
        second = compute(kv, [*range(8), *range(50, 58)])  # continues the prefix of the first
        deeper = chain([*range(8), *range(50, 58)])[2:]
        assert next(events).events == (BlockStored(tuple(deeper), hashes[1], tuple(range(50, 58)), BLOCK_SIZE, "CPU"),)
        kv.free([second])
        compute(kv, list(range(100, 120)))  # five blocks, while three are free
        assert next(events).events == (BlockRemoved((deeper[1], deeper[0]), "CPU"),)
        assert isinstance(next(events).events[0], BlockStored)
        kv.reset_prefix_cache()
        assert next(events).events == (AllBlocksCleared(),)
        events.close()


def test_several_chains_of_one_step_are_distinguished(client: KVClient) -> None:
    with client.session() as kv:
        events = client.events(start_number=next_number(client, kv))
        one, other = (kv.allocate([n] * 8) for n in (1, 2))
        step = kv.open_step([one, other])
        step.write(*(np.ones((1, step.num_tokens, 1, 32), np.float32),) * 2)
        batch = next(events)
        assert [event.block_hashes for event in batch.events] == [tuple(chain([n] * 8)) for n in (1, 2)]  # type: ignore[union-attr]
        events.close()


def test_without_permission_events_have_no_tokens_and_the_daemon_ends_with_streams_open() -> None:
    with Daemon(**POOL) as daemon, KVClient(daemon.address) as client:
        with client.session() as kv:
            events = client.events(start_number=1)
            compute(kv, [1, 2, 3, 4])
            assert next(events).events == (BlockStored(tuple(chain([1, 2, 3, 4])), None, (), BLOCK_SIZE, "CPU"),)
        assert daemon.stop() == 0
        with pytest.raises(KVServiceError):
            next(events)


def test_from_now_on_means_from_now_on(client: KVClient) -> None:
    with client.session() as kv:
        first = next_number(client, kv)
        compute(kv, [1, 2, 3, 4])
        received: queue.SimpleQueue[int] = queue.SimpleQueue()
        events = client.events()
        reader = threading.Thread(target=lambda: received.put(next(events).number))
        reader.start()
        for n in range(500):  # the stream starts at an unknown time
            kv.free([compute(kv, [n, 6, 7, 8])])
            reader.join(0.02)
            if not reader.is_alive():
                break
        assert received.get(timeout=10) > first
        events.close()


def test_the_asynchronous_client_reads_them_too(daemon: Daemon) -> None:
    async def run(start: int) -> list[int]:
        async with AsyncKVClient(daemon.address) as client:
            events = client.events(start_number=start)
            numbers = [(await asyncio.wait_for(anext(events), 10)).number for _ in range(2)]
            await events.aclose()
            with pytest.raises(InvalidArgumentError, match="start_number"):
                await anext(client.events(start_number=-1))
            return numbers

    with KVClient(daemon.address) as client, client.session() as kv:
        start = next_number(client, kv)
        compute(kv, [1, 2, 3, 4])
        kv.reset_prefix_cache()
        assert asyncio.run(run(start)) == [start, start + 1]


def test_a_gap_is_reported() -> None:
    with Daemon(event_window=3, **POOL) as small, KVClient(small.address) as client, client.session() as kv:
        for n in range(5):
            compute(kv, [n] * 4)
            kv.reset_prefix_cache()
        events = client.events(start_number=2)
        batch = next(events)
        assert (batch.gap, batch.number) == (Gap(2, 6), 8)
        assert [next(events).gap for _ in range(2)] == [None, None]
        events.close()
        other = client.events(start_number=9, daemon_id=batch.daemon_id + 1)
        batch = next(other)
        assert (batch.gap, batch.number) == (Gap(0, 0), 8)
        other.close()
        ahead = client.events(start_number=1000)
        assert (next(ahead).gap, next(ahead).number) == (Gap(0, 0), 9)
        ahead.close()


def test_a_slow_reader_gets_a_gap_and_keeps_up_again() -> None:
    """Unread events fill gRPC's buffers; then the journal drops batches that the reader has not received."""
    with (
        Daemon(event_window=8, event_token_ids=True, **(POOL | {"num_blocks": 1024, "block_size": 128})) as daemon,
        KVClient(daemon.address) as client,
        client.session() as kv,
    ):
        events = client.events(start_number=1)
        tokens = np.arange(1000 * 128)
        for n in range(40):  # half a megabyte of token ids each
            sequence = kv.allocate((tokens + n).tolist())
            step = kv.open_step([sequence])
            step.write(*(np.zeros((1, step.num_tokens, 1, 32), np.float32),) * 2)
            kv.free([sequence])
            kv.reset_prefix_cache()
        numbers: list[int] = []
        gaps = []
        while not numbers or numbers[-1] < 80:
            batch = next(events)
            numbers.append(batch.number)
            if batch.gap is not None:
                gaps.append(batch.gap)
                assert batch.gap.first_number + batch.gap.count == batch.number
        assert gaps
        assert len(numbers) + sum(gap.count for gap in gaps) == 80
        events.close()


def test_streams_are_limited_and_given_back(client: KVClient) -> None:
    with client.session() as kv:
        compute(kv, [1, 2, 3, 4])
        for _ in range(3):
            streams = [client.events(start_number=1) for _ in range(2)]
            for stream in streams:
                next(stream)
            with pytest.raises(QuotaExceededError, match="2 streams"):
                next(client.events())
            for stream in streams:
                stream.close()
            await_room(client)


def await_room(client: KVClient) -> None:
    """Wait until a new stream is accepted. The daemon ends a cancelled stream when it receives the cancellation."""
    for _ in range(200):
        stream = client.events(start_number=1)
        try:
            next(stream)
            stream.close()
            return
        except QuotaExceededError:
            threading.Event().wait(0.02)
    pytest.fail("the streams were not given back")


class LeavingContext:
    """A subscriber that disconnects during the write of a message."""

    def __init__(self, outcome: type[BaseException]) -> None:
        self._outcome = outcome

    def peer(self) -> str:
        return "unix:"

    async def write(self, _: bytes) -> None:
        raise self._outcome


class Streams:
    """A journal with one batch. `count` is the number of open streams."""

    count = 0

    async def subscribe(self, *_: Any) -> AsyncIterator[bytes]:
        self.count += 1
        try:
            yield b"a batch"
        finally:
            self.count -= 1


def test_a_subscriber_that_leaves_while_it_is_sent_to_is_no_fault() -> None:
    """gRPC logs an error with traceback for each exception that leaves a handler, except for a cancellation. The
    subscriber's end is noticed by sending, before sending, and by waiting."""
    rpc: Any = Mock(working=contextlib.nullcontext, waiting=contextlib.nullcontext, ended_for=None)
    slots: Any = Mock(of_peer=lambda *_: contextlib.nullcontext())

    async def subscribe(outcome: type[BaseException]) -> None:
        streams: Any = Streams()
        limits = ServeConfig().request_limits
        handlers = Services(MagicMock(), MagicMock(), streams, limits, Mock(), slots).handlers()
        handler: Any = handlers["/kvservice.v1.EventService/Subscribe"]
        RPC.set(rpc)
        with contextlib.suppress(asyncio.CancelledError):
            await handler.unary_stream(events_pb2.SubscribeRequest(start_number=1), LeavingContext(outcome))
        assert streams.count == 0

    with each_row() as row:
        for outcome in (grpc.aio.InternalError, grpc.aio.UsageError, asyncio.CancelledError):
            with row(outcome.__name__):
                asyncio.run(subscribe(outcome))


def test_refusals(client: KVClient) -> None:
    with pytest.raises(InvalidArgumentError, match="start_number"):
        next(client.events(start_number=-1))
    with Daemon(event_window=0, **POOL) as daemon, KVClient(daemon.address) as other:
        with pytest.raises(EventsOffError):
            next(other.events())
        with other.session() as kv:
            compute(kv, [1, 2, 3, 4])
