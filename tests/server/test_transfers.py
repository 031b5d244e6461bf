"""Counts of transfers between hosts, and what the daemon says about its engines."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvservice.config import ServeConfig
from kvservice.errors import TransferFailedError
from kvservice.server import transfers as server_transfers
from kvservice.server.budget import Budget, BudgetedMemory
from kvservice.server.transfer_totals import IN, OUT, TransferTotals
from kvservice.server.transfers import FALLBACK_BYTES, PEER, Transfers
from kvservice.telemetry.calls import BUCKETS_S
from kvservice.telemetry.transfers import TransferStats, TransferTable

HOST = "127.0.0.1"


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_transfers_are_counted_with_their_bytes_and_durations() -> None:
    clock = Clock()
    totals = TransferTotals(clock)
    with totals.transfer(OUT, 100):
        assert (totals.flows[OUT].running, totals.flows[OUT].num_bytes) == (1, 0)
        clock.now += 0.015
    with totals.transfer(OUT, 7):
        pass
    flow = totals.flows[OUT]
    assert (flow.running, flow.done, flow.failed, flow.num_bytes) == (0, 2, 0, 107)
    assert totals.seconds.tolist() == pytest.approx([0, 0.015])
    assert np.flatnonzero(totals.durations[1]).tolist() == [0, BUCKETS_S.index(0.02)]
    assert not totals.durations[0].any()


def test_a_transfer_that_raises_has_failed() -> None:
    totals = TransferTotals()
    with pytest.raises(TransferFailedError), totals.transfer(IN, 100):
        raise TransferFailedError("the peer has gone")
    flow = totals.flows[IN]
    assert (flow.running, flow.done, flow.failed, flow.num_bytes) == (0, 0, 1, 0)
    assert not totals.durations.any()
    assert not totals.seconds.any()


def test_threads_count_at_once() -> None:
    totals = TransferTotals()

    def count(_: int) -> None:
        with totals.transfer(IN, 3):
            pass

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(count, range(4000)))
    flow = totals.flows[IN]
    assert (flow.running, flow.done, flow.num_bytes) == (0, 4000, 12000)
    assert totals.durations[0].sum() == 4000


def transfers_of(address: str = HOST) -> Transfers:
    return Transfers(ServeConfig(tcp_address="", transfer_address=address))


@pytest.mark.parametrize(
    ("address", "peer", "num_bytes", "counted"),
    [
        (HOST, "10.0.0.7", FALLBACK_BYTES, True),
        (HOST, "10.0.0.7", FALLBACK_BYTES - 1, False),
        (HOST, "", FALLBACK_BYTES, False),
        ("", "10.0.0.7", FALLBACK_BYTES, False),
    ],
)
def test_many_bytes_of_clients_over_tcp_in_messages_are_fall_backs(
    address: str, peer: str, num_bytes: int, counted: bool
) -> None:
    transfers = transfers_of(address)
    token = PEER.set(peer)
    try:
        transfers.travelled_in_messages(num_bytes)
    finally:
        PEER.reset(token)
    stats = transfers.stats()
    assert (stats.fallbacks, stats.fallback_bytes) == ((1, num_bytes) if counted else (0, 0))


class Engine:
    """In place of the process of an engine. `fails`: whether it does not start."""

    fails = False

    def __init__(self, *_: object, **__: object) -> None:
        if self.fails:
            raise TransferFailedError("it cannot listen")
        self.is_running = True

    def kill(self) -> None:
        self.is_running = False


def memory(num_bytes: int) -> BudgetedMemory:
    return Budget(1).make("test", num_bytes)


def test_regions_and_engines_that_do_not_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_transfers, "TransferProcess", Engine)
    monkeypatch.setattr(server_transfers, "is_installed", lambda: True)

    async def scenario() -> None:
        PEER.set(HOST)
        transfers = transfers_of()
        assert transfers.note == ""
        kept, lost = await transfers.open(memory(4096), [1], 1), await transfers.open(memory(8192), [1], 1)
        cast(Any, lost.process).is_running = False
        assert transfers.stats() == TransferStats(engines=1, regions=2, region_bytes=12288)
        lost.close()
        monkeypatch.setattr(Engine, "fails", True)
        unused = memory(4096)
        with pytest.raises(TransferFailedError):
            await transfers.open(unused, [1], 1)
        unused.close()
        assert transfers.stats() == TransferStats(engines=1, regions=1, region_bytes=4096, engine_failures=1)
        assert transfers.note == "the latest Transfer Engine has not started"
        assert transfers.count == 1
        monkeypatch.setattr(Engine, "fails", False)
        (await transfers.open(memory(4096), [1], 1)).close()
        assert transfers.note == ""
        kept.close()
        assert transfers.stats() == TransferStats(engine_failures=1)

    asyncio.run(scenario())


def test_a_daemon_without_the_library_says_so_if_it_should_have_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_transfers, "is_installed", lambda: False)
    assert transfers_of().note == "the daemon lacks its Transfer Engine"
    assert transfers_of("").note == ""


def test_a_daemon_without_engines_reports_nothing() -> None:
    written: list[Any] = []
    table = cast(TransferTable, SimpleNamespace(write=lambda *figures: written.append(figures)))
    transfers_of("").write(table)
    assert written == []
    transfers_of().write(table)
    assert [stats for stats, *_ in written] == [TransferStats()]
