"""Blocks in the K/V tensors of vLLM, in the layouts of its backends."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from fake_store import FakeStore

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.vllm import transfers
from kvservice.integrations.vllm.copiers import block_copier
from kvservice.integrations.vllm.layout import block_layout
from kvservice.integrations.vllm.transfers import BlockCopier

NUM_BLOCKS, HEADS, SIZE, HEAD = 6, 3, 4, 8


def layers(
    shape: tuple[int, ...], order: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float16
) -> dict[str, torch.Tensor]:
    """Return two layers with different numbers, whose axes have the given order in memory."""
    order = order or tuple(range(len(shape)))
    memory = torch.arange(2 * int(np.prod(shape))).to(dtype).reshape(2, *(shape[axis] for axis in order))
    inverse = tuple(order.index(axis) for axis in range(len(shape)))
    return {f"layer.{n}": memory[n].permute(inverse) for n in range(2)}


def packed() -> dict[str, torch.Tensor]:
    """Return layers that lie side by side in each block."""
    memory = torch.arange(NUM_BLOCKS * 2 * HEADS * SIZE * HEAD).to(torch.float16)
    both = memory.reshape(NUM_BLOCKS, 2, HEADS, SIZE, HEAD)
    return {f"layer.{n}": both[:, n] for n in range(2)}


CPU = (NUM_BLOCKS, HEADS, SIZE, 2 * HEAD)
CASES = {
    # K and V in one page: the CPU backend.
    "page": (layers(CPU), 2, 0),
    "tokens before heads": (layers(CPU, (0, 2, 1, 3)), 2, 0),
    # Heads outside of blocks.
    "heads first": (layers(CPU, (1, 0, 2, 3)), 2 * HEADS, 0),
    "K and V first": (layers((2, NUM_BLOCKS, SIZE, HEADS, HEAD)), 4, 1),
    "K and V in a block": (layers((NUM_BLOCKS, 2, SIZE, HEADS, HEAD)), 2, 0),
    "two kernel blocks in a block": (layers((2 * NUM_BLOCKS, HEADS, SIZE, HEAD)), 2, 0),
    "bytes": (layers((NUM_BLOCKS, SIZE, 576), dtype=torch.uint8), 2, 0),
    "layers side by side": (packed(), 1, 0),
}


class HostStream:
    """A stream of CUDA whose work is done at once."""

    def __init__(self, *_: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


def on_the_host(patch: pytest.MonkeyPatch) -> None:
    """Let StagedCopier work on tensors in host memory."""
    patch.setattr(transfers, "_pinned", lambda *shape: torch.empty(shape, dtype=torch.uint8))
    patch.setattr(torch.cuda, "Stream", HostStream)
    patch.setattr(torch.cuda, "Event", HostStream)
    patch.setattr(torch.cuda, "current_stream", HostStream)
    patch.setattr(torch.cuda, "stream", nullcontext)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_block_comes_back_as_it_was(case: str, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kv_caches, num_pieces, axis = CASES[case]
    kv_caches = copy.deepcopy(dict(kv_caches))
    layout = block_layout(kv_caches, NUM_BLOCKS)
    assert len(layout.piece_bytes) == num_pieces
    per_block = sum(tensor.numel() * tensor.element_size() for tensor in kv_caches.values()) // NUM_BLOCKS
    assert layout.block_bytes == per_block

    on_the_host(monkeypatch)
    monkeypatch.setattr(transfers, "CALL_BYTES", layout.block_bytes)  # one block is staged at a time
    copier: BlockCopier = transfers.StagedCopier(layout, verify=False) if staged else block_copier(layout)
    store = FakeStore()
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    copier.put(store, [b"a", b"b"], [1, 4], copier.mark()).result()
    for tensor in kv_caches.values():
        tensor.zero_()
    assert copier.get(store, [b"b", b"missing", b"a"], [4, 2, 0], copier.mark()).result().tolist() == [
        True,
        False,
        True,
    ]
    for name, tensor in kv_caches.items():
        blocks, expected = (each.unflatten(axis, (NUM_BLOCKS, -1)).movedim(axis, 0) for each in (tensor, before[name]))
        assert torch.equal(blocks[4], expected[4])
        assert torch.equal(blocks[0], expected[1])
        assert not blocks[[1, 2, 3, 5]].any()


def test_layers_that_share_a_tensor_are_saved_once() -> None:
    kv_caches = layers(CPU)
    alone = block_layout(kv_caches, NUM_BLOCKS)
    shared = block_layout(kv_caches | {"layer.2": kv_caches["layer.0"]}, NUM_BLOCKS)
    assert (shared.block_bytes, shared.description) == (alone.block_bytes, alone.description)


def test_the_description_tells_orders_and_dtypes_apart_but_not_the_number_of_blocks() -> None:
    texts = {case: block_layout(dict(CASES[case][0]), NUM_BLOCKS).description for case in CASES}
    # The bytes of a value are in the same order.
    assert texts.pop("heads first") == texts["page"]
    assert len(set(texts.values())) == len(texts)
    assert block_layout(layers((2 * NUM_BLOCKS, *CPU[1:])), 2 * NUM_BLOCKS).description == texts["page"]
    more = layers((2, 2 * NUM_BLOCKS, SIZE, HEADS, HEAD))
    assert block_layout(more, 2 * NUM_BLOCKS).description == texts["K and V first"]
    assert block_layout(layers(CPU, dtype=torch.bfloat16), NUM_BLOCKS).description not in texts.values()


@pytest.mark.parametrize(
    ("kv_caches", "what"),
    [
        ({}, "no K/V caches"),
        ({"layer": torch.zeros(7, 7, 4)}, "no axis"),
        ({"layer": [torch.zeros(6, 4)]}, "list is not one tensor"),
        ({"layer": torch.zeros(20, NUM_BLOCKS, 4).permute(1, 0, 2)}, "20 pieces"),
    ],
)
def test_other_layouts_are_refused(kv_caches: dict[str, torch.Tensor], what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what):
        block_layout(kv_caches, NUM_BLOCKS)


def test_other_devices_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="meta"):
        block_copier(block_layout({"layer": torch.zeros(CPU, device="meta")}, NUM_BLOCKS))
