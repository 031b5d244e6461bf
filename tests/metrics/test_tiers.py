"""The metrics of a daemon with a disk below its block store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scraping import POOL, Samples, by_label, scrape, scrape_until, value

from kvservice.client import KVClient, Store, StoreNamespace
from kvservice.launch import Daemon

BLOCK_BYTES = 1 << 20
# More than the 16 MiB of the block store.
NUM_BLOCKS = 32
KEYS = [bytes([number]) * 32 for number in range(NUM_BLOCKS)]
STORED = StoreNamespace(model="stored", block_bytes=BLOCK_BYTES)


@contextmanager
def storing(port: int, disk: Path) -> Iterator[Store]:
    options: dict[str, Any] = {
        "http_address": f"127.0.0.1:{port}",
        "store_gib": 1 / 64,
        "disk": disk,
        "disk_gib": 1 / 4,
    }
    with Daemon(**POOL, **options) as daemon, KVClient(daemon.address) as client, client.store(STORED) as store:
        yield store


def of_disk(samples: Samples, name: str) -> float:
    return value(samples, f"kvservice_tier_{name}", tier="disk")


def is_open(samples: Samples) -> bool:
    return value(samples, "kvservice_tier_state", tier="disk", state="open") == 1


def test_values_go_to_the_disk_and_come_back(free_port: int, tmp_path: Path) -> None:
    blocks = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None].repeat(BLOCK_BYTES, axis=1)
    with storing(free_port, tmp_path) as store:
        samples = scrape_until(free_port, is_open)
        (capacity_bytes,) = by_label(samples, "kvservice_tier_capacity_bytes", "tier").values()
        assert 1 << 27 < capacity_bytes <= 1 << 28
        assert of_disk(samples, "values") == of_disk(samples, "lookup_misses_total") == 0
        for key, block in zip(KEYS, blocks, strict=True):
            store.put(key, block[None])
        scrape_until(free_port, lambda found: of_disk(found, "values_written_total") > 0)
        store.lookup(b"no such key".ljust(32))
        assert of_disk(scrape(free_port), "lookup_misses_total") == 1
    with storing(free_port, tmp_path) as store:
        samples = scrape_until(free_port, is_open)
        on_disk = of_disk(samples, "values")
        assert on_disk >= 16, "what was in memory was written at the end"
        assert of_disk(samples, "used_bytes") >= on_disk * BLOCK_BYTES
        assert of_disk(samples, "values_written_total") == of_disk(samples, "values_read_total") == 0
        found = np.zeros((1, BLOCK_BYTES), np.uint8)
        assert store.get(KEYS[-1], found).all()
        assert (found == blocks[-1]).all()
        samples = scrape(free_port)
        assert of_disk(samples, "lookup_hits_total") == of_disk(samples, "values_read_total") == 1
        assert of_disk(samples, "read_bytes_total") == BLOCK_BYTES
        assert of_disk(samples, "read_seconds_total") > 0
        for fault in ("errors", "values_corrupt", "suspensions"):
            assert of_disk(samples, f"{fault}_total") == 0
