"""The table of call latencies."""

from __future__ import annotations

import numpy as np
import pytest

from kvservice.errors import KVServiceError
from kvservice.telemetry import BUCKETS_S, STATUSES, CallTable, keys


def test_calls_are_counted_where_they_belong() -> None:
    table = CallTable(["append", "free"], lambda _name, shape, dtype: np.zeros(shape, dtype))
    table.observe("free", "NOT_FOUND", "stream", BUCKETS_S[3])  # at a bound counts as below, as in Prometheus
    table.observe("free", "NOT_FOUND", "stream", BUCKETS_S[3] * 1.01)
    table.observe("append", "OK", "unary", 1e9)
    counted = {
        key: ({i: n for i, n in enumerate(counts) if n}, seconds)
        for key, counts, seconds in zip(
            keys(["append", "free"]), table.counts.tolist(), table.seconds.tolist(), strict=True
        )
        if any(counts)
    }
    assert counted == {
        ("free", "NOT_FOUND", "stream"): ({3: 1, 4: 1}, pytest.approx(2.01 * BUCKETS_S[3])),
        ("append", "OK", "unary"): ({len(BUCKETS_S): 1}, 1e9),
    }


def test_every_status_has_a_row() -> None:
    pending = [KVServiceError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        assert kind.status in STATUSES
