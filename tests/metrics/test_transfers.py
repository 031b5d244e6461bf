"""Metrics of transfers between a daemon and a client over TCP, and of those that messages replace."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from ports import free_port as any_port
from scraping import Samples, by_label, scrape, scrape_until, value
from store_daemons import blocks_of, keys_of
from transfer_rig import LOOPBACK, TRANSFERS, engines_of, is_gone
from waiting import until

from kvservice.client import KVClient, Store, StoreNamespace
from kvservice.launch import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("transfer_engine")]

BLOCK_BYTES = 64 << 10
# They travel in messages of 2 MiB and of 1, which is the least that counts.
COUNT = 48
NUM_BYTES = COUNT * BLOCK_BYTES
# A client registers three slots of 4 MiB.
REGION_BYTES = 3 * (4 << 20)
KEYS, BLOCKS = keys_of(*range(COUNT)), blocks_of(*range(COUNT), block_bytes=BLOCK_BYTES)


@contextmanager
def storing(port: int) -> Iterator[tuple[Daemon, Store]]:
    address = f"{LOOPBACK}:{any_port()}"
    namespace = StoreNamespace(model="m", block_bytes=BLOCK_BYTES)
    options = TRANSFERS | {"tcp_address": address, "http_address": f"{LOOPBACK}:{port}"}
    with Daemon(**options) as daemon, KVClient(address) as client:
        with client.store(namespace, transport="transfer") as store:
            yield daemon, store
        scrape_until(port, lambda found: of(found, "engines") == of(found, "regions") == 0)


def of(samples: Samples, name: str) -> float:
    return value(samples, f"kvservice_transfer_{name}")


def ended(samples: Samples) -> dict[str, float]:
    """Return the transfers that have ended, unless none did, as "in done" and so on."""
    found = {
        f"{dict(labels)['direction']} {dict(labels)['outcome']}": number
        for (name, labels), number in samples.items()
        if name == "kvservice_transfers_total"
    }
    assert len(found) == 4
    return {name: number for name, number in found.items() if number}


def test_transfers_are_counted_until_their_engine_ends_and_messages_after(free_port: int) -> None:
    with storing(free_port) as (daemon, store):
        samples = scrape(free_port)
        assert (of(samples, "engines"), of(samples, "regions")) == (1, 1)
        assert of(samples, "region_bytes") == REGION_BYTES
        assert ended(samples) == {}
        store.put(KEYS, BLOCKS)
        out = np.zeros_like(BLOCKS)
        assert store.get(KEYS, out).all()
        samples = scrape(free_port)
        assert ended(samples) == {"in done": 1, "out done": 1}
        assert by_label(samples, "kvservice_transfer_bytes_total", "direction") == {"in": NUM_BYTES, "out": NUM_BYTES}
        assert by_label(samples, "kvservice_transfers_running", "direction") == {"in": 0, "out": 0}
        for direction in ("in", "out"):
            assert value(samples, "kvservice_transfer_duration_seconds_count", direction=direction) == 1
            assert value(samples, "kvservice_transfer_duration_seconds_sum", direction=direction) > 0
        assert of(samples, "fallbacks_total") == 0
        (engine,) = engines_of(daemon.process.pid)
        os.kill(engine, signal.SIGKILL)
        until(lambda: is_gone(engine))
        assert store.get(KEYS, out).all()
        np.testing.assert_array_equal(out, BLOCKS)
        samples = scrape(free_port)
        assert ended(samples) == {"in done": 1, "out done": 1, "out failed": 1}
        assert of(samples, "fallbacks_total") >= 1
        assert of(samples, "fallback_bytes_total") == NUM_BYTES
        assert of(samples, "engine_failures_total") == of(samples, "blocks_damaged_total") == 0
