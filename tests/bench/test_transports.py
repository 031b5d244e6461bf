"""The benchmark of transports: it measures the same work by every way, and says what it could not measure."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvservice.bench import transports
from kvservice.bench.transports import LABELS, POOL, SIZES, ClientWay, NativeWay
from kvservice.launch import Daemon

MICROSECONDS = itertools.count(10, 10)
RESULTS: dict[str, Any] = {
    f"{name}_{figure}": next(MICROSECONDS) * 1e-6
    for name in ("echo_unary", "echo_stream", "ring", *(f"{way}_{size}" for way in LABELS for size in SIZES))
    for figure in ("p50_s", "p99_s")
}


@pytest.fixture
def cleanup() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_every_way_computes_the_same(cleanup: contextlib.ExitStack) -> None:
    daemon = cleanup.enter_context(Daemon(**POOL))
    ways, refused = transports.open_ways(daemon.address, NativeWay(), cleanup)
    assert not refused
    assert list(ways) == list(LABELS)
    outputs = []
    for name, way in ways.items():
        if isinstance(way, ClientWay) and name != "unary":
            assert way.session.transport == name
        assert isinstance(way, ClientWay | NativeWay)
        tensors = way.tensors["256k"]
        tensors.out[...] = np.nan
        assert len(way.step("256k")) == POOL["num_layers"]
        outputs.append(tensors.out)
        assert np.array_equal(tensors.out, outputs[list(ways).index("native")]), name


def test_what_the_daemon_refuses_is_left_out_and_named(cleanup: contextlib.ExitStack) -> None:
    daemon = cleanup.enter_context(Daemon(**POOL | {"allow_client_shm": "off", "share_pool": "off"}))
    ways, refused = transports.open_ways(daemon.address, NativeWay(), cleanup)
    assert set(ways) == {"native", "unary", "inline"}
    assert [name for name, _ in transports.probes(ways)] == ["echo_unary", "echo_stream"]
    assert set(refused) == {"region", "lane", "mapped"}
    assert "--allow-client-shm" in refused["lane"]
    assert "--share-pool" in refused["mapped"]


def printed(results: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=240)
    transports.render(json.loads(json.dumps(results)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text.splitlines()


def test_the_table_shows_every_way_in_units_of_the_native_call_and_of_the_echo() -> None:
    lines = printed(RESULTS | {"refused": {}})
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[1] for row in rows] == [
        "echo, unary",
        "echo, stream",
        "ring",
        *(label for _ in SIZES for label in LABELS.values()),
    ]
    assert rows[1] == ["none", "echo, stream", "30.0", "40.0", "", "1.00"]
    assert rows[3] == ["16KiB", "native call", "70.0 (1.00)", "80.0", "", "2.33"]
    assert rows[-2] == ["2MiB", "lane", "350 (3.18)", "360", "240", "11.67"]


def test_the_table_says_what_is_missing() -> None:
    results = {name: value for name, value in RESULTS.items() if not name.startswith(("lane", "ring"))}
    lines = printed(results | {"refused": {"lane": "the daemon opens no lanes"}})
    assert not any(line.startswith("│") and ("lane" in line or "ring" in line) for line in lines)
    assert lines[-1] == "lane: not measured. the daemon opens no lanes"
