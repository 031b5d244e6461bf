"""The benchmark of the block store: every way moves the same bytes, and what is missing is named."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvservice.bench import store as bench
from kvservice.bench.store import CALLS, COUNTS, LABELS, OPTIONS, SIZES, StoreWay, ways
from kvservice.client import KVClient
from kvservice.launch import Daemon

PEERS = ("grpc", "redis", "mooncake", "mooncake_memory")
MICROSECONDS = itertools.count(1000, 10)
RESULTS: dict[str, Any] = {
    "batch_bytes": 1 << 20,
    "echo_s": 1e-4,
    **{f"{call}_{count}_s": next(MICROSECONDS) * 1e-7 for call in CALLS for count in COUNTS},
    **{
        f"{way}_{call}_{size}_s": next(MICROSECONDS) * 1e-6
        for way in (*LABELS, *PEERS)
        for call in ("put", "get")
        for size in SIZES
    },
}


@pytest.mark.third
@pytest.mark.slow
def test_every_way_moves_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with Daemon(**OPTIONS | {"store_gib": 1 / 16}) as daemon, KVClient(daemon.address) as client:
        with ways(client, 4096, 8 * 4096) as (opened, missing):
            assert set(opened) | set(missing) == {*LABELS, *PEERS}
            for name, way in opened.items():
                for _ in range(2):
                    way.empty()
                    way.put()
                    way.batch.out[...] = 0
                    way.get()
                    np.testing.assert_array_equal(way.batch.out, way.batch.values, err_msg=name)
                if isinstance(way, StoreWay):
                    assert way.store.transport == name
        monkeypatch.setattr(shutil, "which", lambda _: None)
        with ways(client, 4096, 4096) as (opened, missing):
            assert {*LABELS, "grpc"} <= set(opened)
            assert "redis-server" in missing["redis"]


def printed(results: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    bench.render(json.loads(json.dumps(results)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_the_tables_are_in_units_of_memcpy_and_of_the_echo() -> None:
    results = RESULTS | {"missing": {}, "memcpy_put_2m_s": 1e-4, "mapped_put_2m_s": 2e-4, "lookup_32_s": 1.5e-4}
    rows = cells(printed(results))
    copies = len(SIZES) * (len(LABELS) + len(PEERS))
    assert [row[1] for row in rows[:copies]] == [*LABELS.values(), *PEERS] * len(SIZES)
    assert rows[0][2] == "10.49 (1.00)"
    assert rows[1][2] == "5.24 (0.50)"
    assert rows[copies:][0] == ["echo", "100 (1.00)", ""]
    assert rows[copies + 1][:2] == ["lookup", "150 (1.50)"]


def test_the_tables_say_what_is_missing() -> None:
    text = printed(RESULTS | {"missing": {"redis": "There is no redis-server."}})
    assert "redis: not measured. There is no redis-server." in text
    assert not any("redis" in row for row in cells(text))
