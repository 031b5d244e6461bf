"""The disk tier against a dictionary: random calls by a seed, over several spaces, with restarts in between."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from random import Random

import pytest
from disk_rig import SECTOR, keys, opened, options, space

from kvservice.tiers import Space

SIZES = (1, 63, 4000, SECTOR, SECTOR + 7, 65536, 700_000, 3 << 20)
SPACES = [space(size, name) for size in SIZES for name in ("a", "b")]
NUMBERS = range(30)
RESTARTS, CALLS = 4, 60


class Model:
    """The numbers of the values of each space. Where slots are few, some of them may be gone."""

    def __init__(self, evicts: bool) -> None:
        self.evicts = evicts
        self.numbers: dict[Space, set[int]] = {of: set() for of in SPACES}

    def compare(self, of: Space, numbers: list[int], found: list[int]) -> None:
        expected = [number for number in numbers if number in self.numbers[of]]
        assert set(found) <= set(expected)
        assert self.evicts or found == expected
        self.numbers[of] -= set(numbers) - set(found)


async def run(directory: Path, num_slabs: int, draw: Random) -> None:
    model = Model(evicts=num_slabs < 100)
    for _ in range(RESTARTS):
        async with opened(options(directory, num_slabs, slab_bytes=4 << 20)) as disk:
            for _ in range(CALLS):
                of = draw.choice(SPACES)
                numbers = draw.sample(NUMBERS, draw.randint(0, 5))
                call = draw.choices(["put", "get", "lookup", "remove", "clear"], [40, 30, 20, 9, 1])[0]
                if call == "put":
                    assert await disk.put(of, numbers) == numbers
                    model.numbers[of] |= set(numbers)
                elif call == "get":
                    model.compare(of, numbers, await disk.get(of, numbers))
                elif call == "lookup":
                    model.compare(of, numbers, await disk.lookup(of, numbers))
                elif call == "remove":
                    count = await disk.tier.remove(of, keys(numbers))
                    expected = len(model.numbers[of] & set(numbers))
                    assert count <= expected if model.evicts else count == expected
                    model.numbers[of] -= set(numbers)
                else:
                    await disk.tier.clear(of)
                    model.numbers[of].clear()
            stats = disk.tier.stats()
            assert (stats.corrupt, stats.errors, stats.dropped) == (0, 0, 0)


@pytest.mark.parametrize("num_slabs", [100, 9], ids=["everything fits", "values are evicted"])
def test_random_calls_agree_with_a_dictionary(tmp_path: Path, num_slabs: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    try:
        asyncio.run(run(tmp_path, num_slabs, Random(seed)))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}") from error
