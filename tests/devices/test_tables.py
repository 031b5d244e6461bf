"""Common leading blocks of the sequences of a step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from kvservice.devices.arena import common_blocks


def test_random_tables() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        width, num_seqs, most = rng.randint(1, 40), rng.randint(1, 5), rng.randint(0, 40)
        tables = np.tile(np.arange(width, dtype=np.int32), (num_seqs, 1))
        for _ in range(rng.choice((0, 1, 1, 3))):
            tables[rng.randrange(num_seqs), rng.randrange(width)] += rng.randint(0, 1) * 100
        most = min(most, width)
        equal = [len({row[column] for row in tables.tolist()}) == 1 for column in range(most)]
        expected = ([*equal, False].index(False)) if num_seqs > 1 else 0
        assert common_blocks(tables, most) == expected


def test_tables_that_differ_early_are_hardly_read() -> None:
    class Counted(np.ndarray):
        looked_at = 0

        def __getitem__(self, index: Any) -> Any:
            part = super().__getitem__(index)
            Counted.looked_at += part.size
            return part

    tables = np.arange(100 * 1000, dtype=np.int32).reshape(100, 1000).view(Counted)
    tables[:, :10] = np.arange(10)
    Counted.looked_at = 0
    assert common_blocks(tables, 1000) == 10
    assert Counted.looked_at <= 2 * 10 * 100
