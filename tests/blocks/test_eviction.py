"""The eviction queue, compared with a plain list."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from kvservice.blocks.eviction import EvictionQueue
from kvservice.blocks.plans import numpy_memory


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_it_is_a_list(data: st.DataObject) -> None:
    num_blocks = 12
    queue, model = EvictionQueue(num_blocks, numpy_memory), list[int]()
    for _ in range(data.draw(st.integers(1, 400))):
        action = data.draw(st.sampled_from(["add", "remove", "pop"]))
        if action == "add":
            outside = sorted(set(range(num_blocks)) - set(model))
            blocks = data.draw(st.permutations(outside))[: data.draw(st.integers(0, 4))]
            queue.add(np.array(blocks, np.int64))
            model += blocks
        elif action == "remove":
            blocks = data.draw(st.permutations(model))[:3]
            queue.remove(np.array(blocks, np.int64))
            model = [block for block in model if block not in blocks]
        else:
            count = data.draw(st.integers(0, len(model)))
            assert queue.pop(count).tolist() == model[:count]
            del model[:count]
        assert queue.blocks().tolist() == model
        assert len(queue) == len(model)


def test_its_memory_stays_the_same_however_long_it_is_used() -> None:
    """After thousands of hits without an eviction, stale entries are removed and the order is kept."""
    queue = EvictionQueue(8, numpy_memory)
    queue.add(np.arange(8))
    size = len(queue._log)
    for i in range(5000):
        block = np.array([i % 8])
        queue.remove(block)
        queue.add(block)
    assert len(queue._log) == size
    assert queue.pop(8).tolist() == list(range(8))
