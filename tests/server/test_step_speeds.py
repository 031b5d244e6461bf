"""The measured speeds: which steps count, and what a client has fixed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_pool import SMALL_POOL

from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.scheduler import Speeds
from kvservice.server.step_speeds import SpeedMeter

SWAP_S = 3e-6


def meter(speeds: Speeds, **fixed: bool) -> SpeedMeter:
    engine: Any = SimpleNamespace(swap_block_s=SWAP_S)
    return SpeedMeter(engine, speeds, **{"swap_is_fixed": False, "compute_is_fixed": False, **fixed})


def batch(number: int, num_tokens: int, num_decodes: int = 1, num_rows: int = 2) -> Any:
    step = SimpleNamespace(sequence_ids=np.arange(num_rows))
    return SimpleNamespace(number=number, step=step, num_tokens=num_tokens, num_decodes=num_decodes)


def test_the_time_of_a_step_over_its_tokens() -> None:
    speeds = Speeds(1.0, 2e-5)
    one = meter(speeds)
    one.called([], 10.0)
    one.made(batch(1, 1000))
    one.called([1], 10.1)
    assert speeds.compute_token_s == pytest.approx(2e-5 + (1e-4 - 2e-5) / 8)
    assert speeds.swap_block_s == SWAP_S


@pytest.mark.parametrize("other", [batch(1, 63), batch(1, 500, num_decodes=2), SimpleNamespace(number=1, step=None)])
def test_steps_that_do_not_count(other: Any) -> None:
    speeds = Speeds(1.0, 2e-5)
    one = meter(speeds)
    one.called([], 10.0)
    one.made(other)
    one.called([1], 99.0)
    assert speeds.compute_token_s == 2e-5


def test_two_batches_of_one_call_and_batches_that_were_taken_back() -> None:
    speeds = Speeds(1.0, 0.0)
    one = meter(speeds)
    one.made(batch(1, 300))
    one.made(batch(2, 100))
    one.called([], 10.0)
    one.called([1, 2], 14.0)
    assert speeds.compute_token_s == pytest.approx(4.0 / 400 / 8)
    one.made(batch(3, 300))
    one.forget(())
    one.called([3], 20.0)
    assert speeds.compute_token_s == pytest.approx(4.0 / 400 / 8)


def test_what_the_client_has_fixed_stays() -> None:
    speeds = Speeds(1.0, 2e-5)
    one = meter(speeds, swap_is_fixed=True, compute_is_fixed=True)
    one.called([], 10.0)
    one.made(batch(1, 1000))
    one.called([1], 20.0)
    assert speeds == Speeds(1.0, 2e-5)


def test_the_speed_of_swaps_is_estimated_then_measured() -> None:
    engine = CacheEngine(ServeConfig(**SMALL_POOL, tcp_address=""), open_device(ServeConfig(**SMALL_POOL)))
    estimated = engine.swap_block_s
    assert estimated == pytest.approx(engine.layout.block_bytes / 10e9)
    counters = engine.manager.state.counters
    counters.swapped_out_blocks, counters.swapped_in_blocks = 30, 10
    engine.device.swap_busy_s.update({"out": 0.03, "in": 0.01})
    assert engine.swap_block_s == pytest.approx(1e-3)
    engine.device.close()
