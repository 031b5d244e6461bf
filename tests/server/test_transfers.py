"""Counts of transfers between hosts, and what the daemon says about its engines."""

from __future__ import annotations

import asyncio

import pytest
from fake_engines import FakeEngines, create, life_with_engines
from manual_clock import ManualClock
from raw_store import identity, keys

from kvservice.errors import TransferFailedError
from kvservice.v1 import store_pb2, transfer_pb2

FALLBACK_BYTES = 1 << 20

pytestmark = pytest.mark.usefixtures("transfer_engine")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    made = FakeEngines()
    made.install(monkeypatch)
    return made


def test_many_bytes_of_clients_over_tcp_in_messages_are_fall_backs(clock: ManualClock) -> None:
    rows = [
        ("127.0.0.1", "10.0.0.7", FALLBACK_BYTES, True),
        ("127.0.0.1", "10.0.0.7", FALLBACK_BYTES - 8, False),
        ("127.0.0.1", "", FALLBACK_BYTES, False),
        ("", "10.0.0.7", FALLBACK_BYTES, False),
    ]
    for address, peer, num_bytes, is_counted in rows:
        with life_with_engines(clock, peer, transfer_address=address) as life:
            session = life.open()

            async def put(num_bytes: int = num_bytes) -> None:
                opening = store_pb2.OpenNamespaceRequest(namespace=identity(block_bytes=num_bytes))
                opened = await life.call(session, "store_open_namespace", opening)  # noqa: B023  it is awaited here
                request = store_pb2.BatchPutRequest(
                    namespace_id=opened.namespace_id, keys=keys(1), data=bytes(num_bytes)
                )
                await life.call(session, "store_batch_put", request)  # noqa: B023

            asyncio.run(put())
            stats = life.sessions.transfers.stats()
            expected = (1, num_bytes) if is_counted else (0, 0)
            assert (stats.fallbacks, stats.fallback_bytes) == expected, (address, peer, num_bytes)


def test_regions_and_engines_that_do_not_start_are_told(clock: ManualClock, engines: FakeEngines) -> None:
    def fail() -> None:
        raise TransferFailedError("it cannot listen")

    async def scenario() -> None:
        with life_with_engines(clock) as life:
            session, transfers = life.open(), life.sessions.transfers
            assert transfers.note == ""
            await create(life, session, "kept", 4096)
            await create(life, session, "lost", 8192)
            engines.made[1].is_alive = False
            stats = transfers.stats()
            assert (stats.engines, stats.regions, stats.region_bytes) == (1, 2, 12288)
            remove = transfer_pb2.RemoveRemoteRegionRequest(name="lost")
            await life.call(session, "remove_remote_region", remove)
            engines.begin = fail
            with pytest.raises(TransferFailedError):
                await create(life, session, "unused", 4096)
            stats = transfers.stats()
            assert (stats.engines, stats.regions, stats.region_bytes, stats.engine_failures) == (1, 1, 4096, 1)
            assert transfers.note == "the latest Transfer Engine has not started"
            engines.begin = lambda: None
            await create(life, session, "another", 4096)
            assert transfers.note == ""
            session.regions.close()
            stats = transfers.stats()
            assert (stats.engines, stats.regions, stats.region_bytes, stats.engine_failures) == (0, 0, 0, 1)

    asyncio.run(scenario())
