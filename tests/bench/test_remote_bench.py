"""The benchmark of blocks of remote clients: every way moves the same bytes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from ports import free_port
from rich.console import Console

pytest.importorskip("mooncake.engine")

from kvservice.bench import remote as bench
from kvservice.bench.remote import BLOCK_BYTES, LABELS, WAYS, ways
from kvservice.bench.store import OPTIONS, StoreWay
from kvservice.launch import Daemon


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


def test_figures_are_in_units_of_the_socket() -> None:
    results = {"batch_bytes": 1_000_000_000}
    results |= {f"{way}_{call}_s": 1 + i for i, way in enumerate(WAYS) for call in ("put", "get")}
    shown = io.StringIO()
    bench.render(results, Console(file=shown, width=200))
    assert "1.00 (1.00)" in shown.getvalue()
    assert "0.50 (0.50)" in shown.getvalue()
