"""The pool map, compared with a count of single blocks."""

from __future__ import annotations

import numpy as np
from each_row import each_row
from observed_pool import ObservedPool
from page_pool import MAX_CELLS, STATES

from kvservice.observer.views import Views
from kvservice.telemetry import Arrays


def random_pool(num_blocks: int, num_swap_blocks: int, seed: int = 0) -> Arrays:
    source = np.random.default_rng(seed)
    indexed = source.random(num_blocks) < 0.4
    return {
        "device_ref_count": source.integers(0, 4, num_blocks, np.int32) * (source.random(num_blocks) < 0.5),
        "swap_ref_count": source.integers(0, 3, num_swap_blocks, np.int32),
        "indexed": indexed,
        "pinned": indexed & (source.random(num_blocks) < 0.3),
    }


def views_of(pool: Arrays) -> Views:
    """Return views of these blocks. What they read besides is of another pool."""
    other = ObservedPool()
    return Views(pool, other.reader, other.history, {}, NotImplemented, NotImplemented)


def state(pool: Arrays, block: int) -> str:
    if pool["device_ref_count"][block]:
        return "active" if pool["device_ref_count"][block] == 1 else "shared"
    if not pool["indexed"][block]:
        return "free"
    return "pinned" if pool["pinned"][block] else "cached"


def test_states() -> None:
    pool = random_pool(300, 7)
    states = views_of(pool).blocks("device", 0, 300)["states"]
    assert states == [state(pool, block) for block in range(300)]
    assert set(states) == set(STATES)


def test_cells_have_the_shares_of_their_blocks() -> None:
    with each_row() as row:
        for num_blocks, group in ((1, 1), (MAX_CELLS, 1), (MAX_CELLS + 1, 2), (3 * MAX_CELLS + 5, 4)):
            with row(f"{num_blocks} blocks"):
                pool = random_pool(num_blocks, 0)
                pool_map = views_of(pool).map()
                cells = np.frombuffer(pool_map.device, np.uint8).reshape(-1, len(STATES))
                assert pool_map.group == group
                assert len(cells) == -(-num_blocks // group) <= MAX_CELLS
                assert pool_map.swap == b""
                for cell in (0, len(cells) // 2, len(cells) - 1):
                    blocks = range(cell * group, min(num_blocks, (cell + 1) * group))
                    found = [state(pool, block) for block in blocks]
                    assert cells[cell].tolist() == [found.count(name) * 255 // len(blocks) for name in STATES]


def test_the_swap_tier_is_free_or_held() -> None:
    pool = random_pool(10, 50)
    pool_map = views_of(pool).map()
    held = pool["swap_ref_count"] > 0
    expected = np.stack([~held, held], axis=1) * 255
    assert np.frombuffer(pool_map.swap, np.uint8).reshape(-1, 2).tolist() == expected.tolist()
