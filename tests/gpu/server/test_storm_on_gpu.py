"""A daemon with its pool on a GPU is killed and upgraded under load, see storm.py."""

from __future__ import annotations

import pytest
from storm import run

pytestmark = pytest.mark.gpu


def test_kills_under_load_on_a_gpu() -> None:
    report = run(30, seed=21, num_at_start=1, num_upgrades=2, device="cuda")
    assert report.failures == [], report.text()
    assert report.kills >= 30
    for name in ("bytes read", "cached tokens", "swap_in", "fork", "unpin", "store hits"):
        assert report.counts[name], name
