"""The parts that all benchmarks share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvservice.bench import attention_rows, largest_error, medians, normal, quantiles, sampled, take_turns


def test_contenders_take_turns_and_warm_ups_do_not_count() -> None:
    calls: list[str] = []

    def contender(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return float(len(calls))

        return run

    seconds = take_turns({"one": contender("one"), "two": contender("two")}, rounds=2, warm_ups=1)
    assert calls == ["one", "two"] * 3
    assert seconds == {"one": [3.0, 5.0], "two": [4.0, 6.0]}
    assert medians(seconds) == {"one": 4.0, "two": 5.0}


def test_quantiles_are_named_after_what_they_measure() -> None:
    figures = quantiles("call", [float(n) for n in range(1, 100)])
    assert figures == {"call_p50_s": 50.0, "call_p99_s": pytest.approx(99.0)}


def test_random_numbers_are_the_same_in_every_run_and_differ_by_generator() -> None:
    assert np.array_equal(normal(3, 5), normal(3, 5))
    assert not np.array_equal(normal(3, 5), normal(3, 5, rng=np.random.default_rng(1)))
    large = normal(9 << 20, dtype="float32")
    assert abs(float(large.std()) - 1.0) < 1e-2
    assert len(np.unique(large[[0, 1 << 20, 1 << 22, 1 << 23]])) == 4


def test_samples_include_both_ends_and_the_extras() -> None:
    assert sampled(1, 8) == [0]
    assert sampled(100, 4) == [0, 25, 50, 75, 99]
    assert sampled(100, 2, extra=(7,)) == [0, 7, 50, 99]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_attention_in_float64(library: str) -> None:
    xp = pytest.importorskip(library)
    rng = np.random.default_rng(3)
    query, keys, values = rng.normal(size=(2, 4, 8)), rng.normal(size=(2, 6, 8)), rng.normal(size=(2, 6, 8))
    hidden = np.arange(6) > np.array([3, 5])[:, None]
    expected = np.empty_like(query)
    for row, head in np.ndindex(2, 4):
        seen = ~hidden[row]
        weights = np.exp(keys[head // 2][seen] @ query[row, head] * 0.5)
        expected[row, head] = weights @ values[head // 2][seen] / weights.sum()
    as_array = xp.asarray if library == "numpy" else xp.from_numpy
    inputs = [as_array(array) for array in (query, keys, values, hidden)]
    got = attention_rows(xp, inputs[0], inputs[1], inputs[2], inputs[3], 0.5)
    assert largest_error(got, as_array(expected)) < 1e-12
    assert largest_error(got * 1.01, as_array(expected)) == pytest.approx(0.01)
