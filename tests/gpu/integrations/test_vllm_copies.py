"""Copies of vLLM's K/V on a GPU, in the layouts of its GPU backends, to and from a store."""

from __future__ import annotations

import pytest
import torch
from fake_store import FakeStore

from kvservice.integrations.vllm.layout import block_layout
from kvservice.integrations.vllm.transfers import StagedCopier, block_copier

NUM_BLOCKS, HEADS, SIZE, HEAD = 64, 8, 16, 128
SHAPES = {
    "K and V in one page": (NUM_BLOCKS, HEADS, SIZE, 2 * HEAD),
    "K and V first": (2, NUM_BLOCKS, SIZE, HEADS, HEAD),
    "K and V in a block": (NUM_BLOCKS, 2, SIZE, HEADS, HEAD),
}


def key(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.mark.parametrize("layout", SHAPES)
def test_saved_blocks_are_loaded_into_other_blocks(layout: str) -> None:
    shape = SHAPES[layout]
    axis = shape.index(NUM_BLOCKS)
    layers = {str(n): torch.randn(shape, device="cuda").bfloat16() for n in range(8)}
    copier, store = block_copier(block_layout(layers, NUM_BLOCKS), 8), FakeStore()
    assert isinstance(copier, StagedCopier)
    # A block is written by work that is queued behind a long computation. Its save must wait for it.
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = torch.nn.functional.normalize(busy @ busy)
    for layer in layers.values():
        layer.select(axis, 5).copy_(busy.flatten()[: layer.select(axis, 5).numel()].view(layer.select(axis, 5).shape))
    copier.put(store, [key(n) for n in range(8)], range(8), copier.mark())
    expected = {name: layer.clone() for name, layer in layers.items()}
    for layer in layers.values():
        layer.zero_()

    assert copier.get(store, [key(9), key(5), key(7)], [1, 40, 41]).tolist() == [False, True, True]
    for name, layer in layers.items():
        assert torch.equal(layer.select(axis, 40), expected[name].select(axis, 5))
        assert torch.equal(layer.select(axis, 41), expected[name].select(axis, 7))
        others = [block for block in range(NUM_BLOCKS) if block not in (40, 41)]
        assert not layer.index_select(axis, torch.tensor(others, device="cuda")).any()
