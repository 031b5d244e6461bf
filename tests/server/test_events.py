"""The stream of block events of a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest

from kvservice.blocks import EventJournal
from kvservice.blocks.prefix import token_bytes
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
from kvservice.server.events import EventStreams
from kvservice.server.services import Services
from kvservice.server.slots import RPC, Rpc, Slots
from kvservice.v1 import events_pb2

BLOCK_SIZE = 4
POOL: dict[str, Any] = {
    "num_layers": 1, "num_kv_heads": 1, "head_size": 32, "dtype": "float32", "block_size": BLOCK_SIZE, "num_blocks": 8,
    "watermark": 0.0, "swap_space_gib": 0.0,
}  # fmt: skip


@pytest.fixture
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


def chain(token_ids: list[int]) -> list[bytes]:
    hashes = [root_hash(BLOCK_SIZE)]
    for begin in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        tokens = np.array(token_ids[begin : begin + BLOCK_SIZE], np.int32)
        hashes.append(block_hash(hashes[-1], token_bytes(tokens)))
    return hashes[1:]


def test_events_tell_what_enters_and_leaves_the_cache(client: KVClient) -> None:
    with client.session() as kv:
        events = client.events(start_number=1)
        tokens = list(range(10))
        first = compute(kv, tokens)
        hashes = chain(tokens)
        stored = BlockStored(tuple(hashes), None, tuple(range(8)), BLOCK_SIZE, "CPU")
        batch = next(events)
        assert (batch.number, batch.events, batch.gap) == (1, (stored,), None)
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
        events = client.events(start_number=1)
        one, other = (kv.allocate([n] * 8) for n in (1, 2))
        step = kv.open_step([one, other])
        step.write(*(np.ones((1, step.num_tokens, 1, 32), np.float32),) * 2)
        batch = next(events)
        assert [event.block_hashes for event in batch.events] == [tuple(chain([n] * 8)) for n in (1, 2)]  # type: ignore[union-attr]
        events.close()


def test_without_permission_events_have_no_tokens() -> None:
    with Daemon(**POOL) as daemon, KVClient(daemon.address) as client, client.session() as kv:
        events = client.events(start_number=1)
        compute(kv, [1, 2, 3, 4])
        assert next(events).events == (BlockStored(tuple(chain([1, 2, 3, 4])), None, (), BLOCK_SIZE, "CPU"),)
        events.close()


def test_from_now_on_means_from_now_on(client: KVClient) -> None:
    with client.session() as kv:
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
        assert received.get(timeout=10) > 1
        events.close()


def test_the_asynchronous_client_reads_them_too(daemon: Daemon) -> None:
    async def run() -> list[int]:
        async with AsyncKVClient(daemon.address) as client:
            events = client.events(start_number=1)
            numbers = [(await asyncio.wait_for(anext(events), 10)).number for _ in range(2)]
            await events.aclose()
            with pytest.raises(InvalidArgumentError, match="start_number"):
                await anext(client.events(start_number=-1))
            return numbers

    with KVClient(daemon.address) as client, client.session() as kv:
        compute(kv, [1, 2, 3, 4])
        kv.reset_prefix_cache()
        assert asyncio.run(run()) == [1, 2]


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


@pytest.mark.parametrize(
    "outcome",
    [grpc.aio.InternalError, grpc.aio.UsageError, asyncio.CancelledError],
    ids=["noticed by sending", "noticed before sending", "noticed by waiting"],
)
def test_a_subscriber_that_leaves_while_it_is_sent_to_is_no_fault(outcome: type[BaseException]) -> None:
    """gRPC logs an error with traceback for each exception that leaves a handler, except for a cancellation."""
    journal = EventJournal(8, False)
    journal.cleared()
    streams = EventStreams(ServeConfig(), journal)
    services = Services(Mock(), Mock(), streams, Mock(), Mock(), Slots(ServeConfig()))

    async def subscribe() -> None:
        context: Any = LeavingContext(outcome)
        RPC.set(Rpc(Mock(), None, Mock(), "event stream"))
        with contextlib.suppress(asyncio.CancelledError):
            await services._subscribe(events_pb2.SubscribeRequest(start_number=1), context)
        assert streams.count == 0

    asyncio.run(subscribe())


def test_refusals(client: KVClient) -> None:
    with pytest.raises(InvalidArgumentError, match="start_number"):
        next(client.events(start_number=-1))
    with Daemon(event_window=0, **POOL) as daemon, KVClient(daemon.address) as other:
        with pytest.raises(EventsOffError):
            next(other.events())
        with other.session() as kv:
            compute(kv, [1, 2, 3, 4])


def test_the_daemon_ends_with_streams_open(daemon: Daemon, client: KVClient) -> None:
    with client.session() as kv:
        compute(kv, [1, 2, 3, 4])
    events = client.events(start_number=1)
    next(events)
    assert daemon.stop() == 0
    with pytest.raises(KVServiceError):
        next(events)
