"""Rules of admission."""

from __future__ import annotations

from typing import Any

import numpy as np
from store_rig import keys_of

from kvservice.tiers import AdmitAll, AdmitReused


def test_everything_is_admitted() -> None:
    assert AdmitAll().admit(keys_of([1, 2]), np.array([0, 5], np.uint64)).tolist() == [True, True]


def test_values_are_admitted_when_they_were_used_or_come_again() -> None:
    rule = AdmitReused()
    assert rule.admit(keys_of([1, 2, 3]), np.array([0, 1, 0], np.uint64)).tolist() == [False, True, False]
    assert rule.admit(keys_of([3, 4, 2]), np.array([0, 0, 0], np.uint64)).tolist() == [True, False, True]
    assert rule.admit(b"", np.array([], np.uint64)).tolist() == []


class SeenKeys:
    """The keys of values that nobody has used yet, and that were offered before."""

    def __init__(self) -> None:
        self._rule = AdmitReused()

    def add(self, keys: bytes) -> Any:
        return self._rule.admit(keys, np.zeros(len(keys) // 32, np.uint64))


def test_few_keys_are_taken_for_others() -> None:
    seen = SeenKeys()
    seen.add(np.random.default_rng(1).bytes(32 * 200_000))
    wrong = seen.add(np.random.default_rng(2).bytes(32 * 10_000))
    assert wrong.sum() < 100


def test_small_numbers_are_different_keys() -> None:
    """Keys are what clients choose."""
    seen = SeenKeys()
    first = b"".join(number.to_bytes(32, "little") for number in range(3000))
    assert seen.add(first).sum() < 30
    second = b"".join(number.to_bytes(32, "little") for number in range(3000, 6000))
    assert seen.add(second).sum() < 30
    assert seen.add(first).all()


def test_keys_are_forgotten_after_two_generations() -> None:
    """A generation has a million keys."""
    seen, random = SeenKeys(), np.random.default_rng(3)
    seen.add(keys_of(range(9)))
    seen.add(random.bytes(32 << 20))
    assert seen.add(keys_of([0])).tolist() == [True], "one generation later"
    for _ in range(2):
        seen.add(random.bytes(32 << 20))
    assert seen.add(keys_of([1, 2, 3, 4, 5])).sum() < 3
