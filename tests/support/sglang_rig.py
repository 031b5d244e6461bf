"""SGLang's cache controller over host pools of its own, without a model. Imports SGLang.

SGLang imports torchvision, for images alone, and the registry's torchvision is linked with CUDA. Modules without
content take its place. transformers must have found out before that there is none.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers.utils import import_utils


def _hollow(name: str) -> types.ModuleType:
    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return object

    module = types.ModuleType(name)
    module.__dict__.update(__getattr__=attribute, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
    return module


if not import_utils.is_torchvision_available():
    for _name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional",
                  "torchvision.transforms.v2", "torchvision.transforms.v2.functional"):  # fmt: skip
        sys.modules[_name] = _hollow(_name)

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402  after torchvision
from sglang.srt.mem_cache import device_pool_info as info  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

PAGE_SIZE = 4
NUM_TOKENS = 32
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 8
WAIT_S = 60


class Engine:
    """A controller and its host pool, whose scheduler is the test."""

    def __init__(self, controller: HiCacheController, pool: Any) -> None:
        self.controller, self.pool = controller, pool
        self.backend = controller.storage_backend

    def back_up(self, tokens: list[int]) -> list[torch.Tensor]:
        """Write the pages of tokens to the storage. Returns them."""
        indices = self.pool.alloc(len(tokens))
        self.controller.write_storage(indices, tokens, get_storage_hash_str(tokens, None, page_size=PAGE_SIZE))
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        assert done.completed_tokens == len(tokens)
        return self._pages(indices)

    def prefetch(self, tokens: list[int]) -> list[torch.Tensor]:
        """Load the pages of tokens that the storage has."""
        controller = self.controller
        controller.prefetch("request", tokens, None, None)
        operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        num_tokens = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            num_tokens = ack.completed_tokens
        return self._pages(operation.host_indices[:num_tokens])

    def _pages(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [self.pool.get_data_page(int(index)).clone() for index in indices[::PAGE_SIZE]]


@contextlib.contextmanager
def engine(
    address: str,
    layout: str,
    *,
    mla: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    rank: tuple[int, int] = (0, 1),
    model: str = "model",
    weights: str = "some",
    start_layer: int = 0,
    extra: dict[str, Any] | None = None,
) -> Iterator[Engine]:
    """Each engine has other random contents in its host pool."""
    pool = (_mla_pool if mla else _mha_pool)(layout, dtype, start_layer)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    device_pool = MLATokenToKVPool.__new__(MLATokenToKVPool) if mla else SimpleNamespace()
    device_pool.__dict__.update(
        device="cpu", layer_num=NUM_LAYERS, register_layer_transfer_counter=lambda counter: None
    )
    get_parallel().override_permanently(
        tp_rank=rank[0], tp_size=rank[1], pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
    )
    options = {
        "backend_name": "kvservice",
        "module_path": "kvservice.integrations.sglang",
        "class_name": "KVServiceStorage",
        "interface_v1": 1,
        "kvservice": {"address": address, "weights": weights},
    }
    controller = HiCacheController(
        SimpleNamespace(get_kvcache=lambda: device_pool),
        pool,
        PAGE_SIZE,
        None,
        threading.Event(),
        write_policy="write_through",
        io_backend="kernel",
    )
    controller.attach_storage_backend("dynamic", model_name=model, storage_backend_extra_config=options | (extra or {}))
    try:
        yield Engine(controller, pool)
    finally:
        controller.detach_storage_backend()


def _mha_pool(layout: str, dtype: torch.dtype, start_layer: int) -> MHATokenToKVPoolHost:
    keys, values = (_buffers((NUM_TOKENS, NUM_HEADS, HEAD_DIM), dtype) for _ in range(2))
    device = info.MHABufferInfo(
        buffers=info.KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=_addresses(keys),
            v_data_ptrs=_addresses(values),
            layout=info.KVBufferLayout.NHD,
        ),
        page_size=PAGE_SIZE,
        head_num=NUM_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        device, 2.0, 0, PAGE_SIZE, layout, pin_memory=False, device_capacity_tokens=NUM_TOKENS,
        start_layer=start_layer, end_layer=start_layer + NUM_LAYERS,
    )  # fmt: skip


def _mla_pool(layout: str, dtype: torch.dtype, start_layer: int) -> MLATokenToKVPoolHost:
    rank = HEAD_DIM - 2
    buffers = _buffers((NUM_TOKENS, 1, HEAD_DIM), dtype)
    device = info.MLABufferInfo(
        buffers=buffers,
        data_ptrs=_addresses(buffers),
        layer_indices=tuple(range(NUM_LAYERS)),
        device_layer_num=NUM_LAYERS,
        page_size=PAGE_SIZE,
        kv_lora_rank=rank,
        qk_rope_head_dim=HEAD_DIM - rank,
        kv_cache_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        device, 2.0, 0, PAGE_SIZE, layout, pin_memory=False, device_capacity_tokens=NUM_TOKENS,
        start_layer=start_layer, end_layer=start_layer + NUM_LAYERS, target_layer_num=NUM_LAYERS,
    )  # fmt: skip


def _buffers(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype) for _ in range(NUM_LAYERS))


def _addresses(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
