"""The benchmark of blocks of remote clients: every way moves the same bytes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from ports import free_port
from rich.console import Console

from kvservice.bench import remote as bench
from kvservice.bench.remote import BLOCK_BYTES, LABELS, WAYS, ways
from kvservice.bench.store import OPTIONS, StoreWay
from kvservice.launch import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.third, pytest.mark.usefixtures("transfer_engine")]


def test_every_way_moves_the_same_bytes() -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        Daemon(**OPTIONS, tcp_address=address, transfer_address="127.0.0.1"),
        ways(address, 3 * BLOCK_BYTES) as opened,
    ):
        assert list(opened) == list(WAYS) == list(LABELS)
        for name, way in opened.items():
            for _ in range(2):
                way.empty()
                way.put()
                way.batch.out[...] = 0
                way.get()
                np.testing.assert_array_equal(way.batch.out, way.batch.values, err_msg=name)
            if isinstance(way, StoreWay):
                assert way.store.transport == WAYS[name]
                assert way.store.num_transfer_failures == 0


def test_every_way_moves_the_same_sequences() -> None:
    address, num_bytes = f"127.0.0.1:{free_port()}", 3 * BLOCK_BYTES
    options = OPTIONS | bench.pool_options(num_bytes) | {"tcp_address": address, "transfer_address": "127.0.0.1"}
    with Daemon(**options), bench.sequence_ways(address, num_bytes) as opened:
        assert list(opened) == list(bench.SEQUENCE_WAYS) == list(bench.SEQUENCE_LABELS)
        for name, way in opened.items():
            way.empty()
            way.put()
            way.get()
            assert sum(array.nbytes for array in way.found) == num_bytes
            for found, expected in zip(way.found, (way.key, way.value), strict=True):
                np.testing.assert_array_equal(found, expected, err_msg=name)
            assert (way.kv.transport, way.kv.num_transfer_failures) == (bench.SEQUENCE_WAYS[name], 0)


def test_figures_are_in_units_of_the_socket() -> None:
    results = {"batch_bytes": 1_000_000_000}
    results |= {
        f"{way}_{call}_s": 1 + i for i, way in enumerate([*WAYS, *bench.SEQUENCE_WAYS]) for call in ("put", "get")
    }
    shown = io.StringIO()
    bench.render(results, Console(file=shown, width=200))
    assert "1.00 (1.00)" in shown.getvalue()
    assert "0.50 (0.50)" in shown.getvalue()
