"""Blocks in the K/V tensors of vLLM, in the layouts of its backends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from each_row import each_row
from fake_store import FakeStore
from vllm_connector import Engine, cache_config, connector_config, stores_of
from vllm_stub import Role
from waiting import until

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.vllm import gpu_copies
from kvservice.integrations.vllm.copies import block_layout

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
# The layers of each layout, and the axis of its blocks.
CASES = {
    # K and V in one page: the CPU backend.
    "page": (layers(CPU), 0),
    "tokens before heads": (layers(CPU, (0, 2, 1, 3)), 0),
    # Heads outside of blocks.
    "heads first": (layers(CPU, (1, 0, 2, 3)), 0),
    "K and V first": (layers((2, NUM_BLOCKS, SIZE, HEADS, HEAD)), 1),
    "K and V in a block": (layers((NUM_BLOCKS, 2, SIZE, HEADS, HEAD)), 0),
    "two kernel blocks in a block": (layers((2 * NUM_BLOCKS, HEADS, SIZE, HEAD)), 0),
    "bytes": (layers((NUM_BLOCKS, SIZE, 576), dtype=torch.uint8), 0),
    "layers side by side": (packed(), 0),
}
KEYS = [bytes([n]) * 32 for n in range(3)]
# Copies blocks into a store, or from it: the keys, the blocks, and for loads the keys that are not there.
Copy = Callable[[list[bytes], list[int]], Any]


class HostStream:
    """A stream of CUDA whose work is done at once."""

    def __init__(self, *_: object) -> None: ...

    def wait(self, stream: object) -> None: ...

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


def on_the_host(patch: pytest.MonkeyPatch) -> None:
    """Let StagedCopier work on tensors in host memory."""
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    patch.setattr(torch.cuda, "Stream", HostStream)
    patch.setattr(torch.cuda, "Event", HostStream)
    patch.setattr(torch.cuda, "current_stream", HostStream)
    patch.setattr(torch.cuda, "stream", nullcontext)


def assert_blocks_come_back(kv_caches: dict[str, torch.Tensor], axis: int, put: Copy, get: Copy) -> None:
    """Save blocks 1 and 4, clear all, and load them into 0 and 4, with another between them that is missing."""
    before = {name: tensor.clone() for name, tensor in kv_caches.items()}
    put(KEYS[:2], [1, 4])
    for tensor in kv_caches.values():
        tensor.zero_()
    get([KEYS[1], KEYS[2], KEYS[0]], [4, 2, 0])
    for name, tensor in kv_caches.items():
        blocks, expected = (each.unflatten(axis, (NUM_BLOCKS, -1)).movedim(axis, 0) for each in (tensor, before[name]))
        assert torch.equal(blocks[4], expected[4])
        assert torch.equal(blocks[0], expected[1])
        assert not blocks[[1, 2, 3, 5]].any()


def test_a_block_comes_back_as_it_was(vllm_connector: Any) -> None:
    with each_row() as row:
        for case, (layers_of_case, axis) in CASES.items():
            kv_caches, store = copy.deepcopy(dict(layers_of_case)), FakeStore()
            engine = Engine(vllm_connector, store, layers=kv_caches, num_blocks=NUM_BLOCKS)

            def put(keys: list[bytes], block_ids: list[int], engine: Engine = engine, store: FakeStore = store) -> None:
                engine.save("writer", keys, block_ids)
                until(lambda: len(store.values) == len(keys))

            def get(keys: list[bytes], block_ids: list[int], engine: Engine = engine) -> None:
                engine.load("reader", keys, block_ids)
                assert engine.loaded() == ({"reader"}, {2})

            with row(case):
                assert_blocks_come_back(kv_caches, axis, put, get)
                num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kv_caches.values())
                assert {len(value) for value in store.values.values()} == {num_bytes // NUM_BLOCKS}
            engine.close()


def test_a_staged_block_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without our kernels. One block is staged at a time."""
    on_the_host(monkeypatch)
    with each_row() as row:
        for case, (layers_of_case, axis) in CASES.items():
            kv_caches, store = copy.deepcopy(dict(layers_of_case)), FakeStore()
            layout = block_layout(kv_caches, NUM_BLOCKS)
            monkeypatch.setattr(gpu_copies, "CALL_BYTES", layout.block_bytes)
            copier = gpu_copies.StagedCopier(layout, verify=False)

            def put(keys: list[bytes], block_ids: list[int], copier: Any = copier, store: Any = store) -> None:
                copier.put(store, b"".join(keys), np.array(block_ids), copier.mark()).result()

            def get(keys: list[bytes], block_ids: list[int], copier: Any = copier, store: Any = store) -> None:
                found = copier.get(store, b"".join(keys), np.array(block_ids), copier.mark()).result()
                assert found.tolist() == [True, False, True]

            with row(case):
                assert_blocks_come_back(kv_caches, axis, put, get)


def namespace_of(connector: Any, kv_caches: Any, num_blocks: int = NUM_BLOCKS) -> StoreNamespace:
    """Return where a worker with these layers keeps its blocks."""
    worker = connector(connector_config(), Role.WORKER, cache_config(num_blocks=num_blocks))
    try:
        with stores_of(lambda _: FakeStore()):
            worker.register_kv_caches(kv_caches)
        namespace: StoreNamespace = worker.get_handshake_metadata().namespace
    finally:
        worker.shutdown()
    return namespace


def test_layers_that_share_a_tensor_are_saved_once(vllm_connector: Any) -> None:
    kv_caches = layers(CPU)
    shared = namespace_of(vllm_connector, kv_caches | {"layer.2": kv_caches["layer.0"]})
    assert shared.block_bytes == namespace_of(vllm_connector, kv_caches).block_bytes


def test_the_layout_tells_orders_and_dtypes_apart_but_not_the_number_of_blocks(vllm_connector: Any) -> None:
    texts = {case: namespace_of(vllm_connector, dict(kv_caches)).layout for case, (kv_caches, _) in CASES.items()}
    # The bytes of a value are in the same order.
    assert texts.pop("heads first") == texts["page"]
    assert len(set(texts.values())) == len(texts)
    twice = 2 * NUM_BLOCKS
    assert namespace_of(vllm_connector, layers((twice, *CPU[1:])), twice).layout == texts["page"]
    assert namespace_of(vllm_connector, layers((2, twice, SIZE, HEADS, HEAD)), twice).layout == texts["K and V first"]
    assert namespace_of(vllm_connector, layers(CPU, dtype=torch.bfloat16)).layout not in texts.values()


def test_other_layouts_and_devices_are_refused(vllm_connector: Any) -> None:
    rows: list[tuple[Any, str]] = [
        ({}, "no K/V caches"),
        ({"layer": torch.zeros(7, 7, 4)}, "no axis"),
        ({"layer": "text"}, "str is not one tensor"),
        ({"layer": torch.zeros(20, NUM_BLOCKS, 4).permute(1, 0, 2)}, "20 pieces"),
        ({"layer": torch.zeros(CPU, device="meta")}, "meta"),
    ]
    with each_row() as row:
        for kv_caches, what in rows:
            with row(what), pytest.raises(InvalidArgumentError, match=what):
                namespace_of(vllm_connector, kv_caches)


def test_memory_that_layers_share_is_saved_once_if_their_blocks_are_the_same() -> None:
    """Layers of several groups of K/V caches lie in the same memory, each with blocks of its own."""
    memory = torch.zeros(NUM_BLOCKS, 2 * HEADS * SIZE * HEAD, dtype=torch.float16)
    page, other = memory.view(NUM_BLOCKS, HEADS, SIZE, 2 * HEAD), memory.view(NUM_BLOCKS, 2 * HEADS, SIZE, HEAD)
    assert block_layout({"one": page, "other": other}, NUM_BLOCKS).block_bytes == memory[0].nbytes
    with pytest.raises(InvalidArgumentError, match="share memory"):
        block_layout({"one": page, "other": memory.view(2, NUM_BLOCKS, SIZE, HEADS, HEAD)}, NUM_BLOCKS)


def test_recurrent_states_share_blocks_with_the_kv_of_other_groups() -> None:
    """Of a page, the K/V and the two parts of a state take different parts. The order is that of the layers."""
    page = 256
    memory = torch.arange(2 * NUM_BLOCKS * page, dtype=torch.int64).to(torch.uint8)
    first, second = memory.view(2, NUM_BLOCKS, page)

    def of_page(place: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return place[:, start:stop].view(torch.float16)

    state = [of_page(first, 0, 32), of_page(first, 32, 200)]
    other, full = of_page(second, 0, page), of_page(first, 0, 160)
    layout = block_layout({"mamba": state, "other": other, "full": full}, NUM_BLOCKS)
    assert layout.piece_bytes == (200, page)
    assert (layout.starts, layout.strides) == ((0, memory.nbytes // 2), (page, page))
    turned = block_layout({"other": other, "mamba": state}, NUM_BLOCKS)
    assert turned.piece_bytes == (page, 200)
    assert turned.description != layout.description
