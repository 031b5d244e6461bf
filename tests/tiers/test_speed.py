"""Latency and bandwidth are found in the times of transfers."""

from __future__ import annotations

import pytest

from kvservice.tiers import Speed


def test_nothing_is_known_at_first() -> None:
    speed = Speed()
    assert (speed.latency_s, speed.bytes_per_s, speed.seconds(1 << 40), speed.bytes_in(0.0)) == (0, 0, 0, float("inf"))


def test_transfers_of_several_sizes_tell_latency_and_bandwidth_apart() -> None:
    speed = Speed()
    for i in range(100):
        num_bytes = 1_000_000 * (1 + i % 5)
        speed.add(num_bytes, 0.002 + num_bytes / 1e9)
    assert speed.latency_s == pytest.approx(0.002, rel=1e-3)
    assert speed.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert speed.seconds(10_000_000) == pytest.approx(0.012, rel=1e-3)
    assert speed.bytes_in(0.012) == pytest.approx(10_000_000, rel=1e-3)
    assert speed.bytes_in(0.001) == 0


def test_transfers_of_one_size_are_all_bandwidth() -> None:
    speed = Speed()
    for _ in range(10):
        speed.add(1000, 0.5)
    assert speed.latency_s == 0
    assert speed.seconds(1000) == pytest.approx(0.5)


def test_old_transfers_are_forgotten() -> None:
    speed = Speed()
    for seconds in (1.0, 0.1):
        for _ in range(200):
            speed.add(1000, seconds)
    assert speed.seconds(1000) == pytest.approx(0.1, rel=1e-2)


def test_larger_transfers_that_were_faster_do_not_make_bandwidth_negative() -> None:
    speed = Speed()
    speed.add(1000, 1.0)
    speed.add(2000, 0.5)
    assert speed.latency_s == 0
    assert speed.seconds(3000) > 0
