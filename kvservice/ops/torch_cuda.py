"""CUDA implementations of the torch custom ops. `torch_ops` registers them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvservice.attention_options import BlockSparse
from kvservice.errors import InvalidArgumentError
from kvservice.ops import cuda
from kvservice.ops.cuda import HOST, DeviceArray, Kernel, Scratch


class TensorWorkspace:
    """Workspace for launches on one stream, from torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> int:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._memory[: cuda.COUNTER_BYTES].zero_()
        return self._memory.data_ptr()


_workspaces: dict[tuple[int, int], TensorWorkspace] = {}


def workspace(device: torch.device) -> TensorWorkspace:
    """Return the workspace of the device's current stream. During a graph capture every launch gets a new workspace,
    which later growth does not free, and whose counters are zeroed at every replay.
    """
    if torch.cuda.is_current_stream_capturing():
        return TensorWorkspace(device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _workspaces:
        _workspaces[key] = TensorWorkspace(device)
    return _workspaces[key]


def device_array(tensor: Tensor, field: str) -> DeviceArray:
    """Return a tensor's memory as a DeviceArray. The tensor must be contiguous, and on a CUDA device or pinned."""
    if not tensor.is_contiguous():
        raise InvalidArgumentError("is not contiguous", field=field)
    if not (tensor.is_cuda or tensor.is_pinned()):
        raise InvalidArgumentError("is neither on a CUDA device nor in pinned memory", field=field)
    device = tensor.device.index if tensor.is_cuda else HOST
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), device)


def write_kv(
    pool: Tensor,
    layer: int,
    slot_mapping: Tensor,
    key: Tensor,
    value: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    key, value, slot_mapping = key.contiguous(), value.contiguous(), slot_mapping.contiguous()
    with torch.cuda.device(pool.device):
        cuda.write_kv(
            device_array(pool, "pool"),
            layer,
            device_array(slot_mapping, "slot_mapping"),
            device_array(key, "key"),
            device_array(value, "value"),
            k_scale=_optional(k_scale, "k_scale"),
            v_scale=_optional(v_scale, "v_scale"),
            stream=_stream(pool),
        )


def read_kv(
    pool: Tensor,
    layer: int,
    slots: Tensor,
    head_size: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    if (dtype or pool.dtype).itemsize == 1:
        raise InvalidArgumentError(f"is {dtype or pool.dtype}, expected float32, float16 or bfloat16", field="dtype")
    slots = slots.contiguous()
    # The kernel does not write tokens whose slot is outside the pool, so the tensors start as zeros.
    key, value = (pool.new_zeros((slots.shape[0], pool.shape[3], head_size), dtype=dtype) for _ in range(2))
    with torch.cuda.device(pool.device):
        cuda.read_kv(
            device_array(pool, "pool"),
            layer,
            device_array(slots, "slots"),
            key=device_array(key, "key"),
            value=device_array(value, "value"),
            k_scale=_optional(k_scale, "k_scale"),
            v_scale=_optional(v_scale, "v_scale"),
            stream=_stream(pool),
        )
    return key, value


def attention(pool: Tensor, layer: int, query: Tensor, *arguments: object) -> Tensor:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    attend(out, None, pool, layer, query, *arguments)  # type: ignore[arg-type]
    return out


def attention_lse(pool: Tensor, layer: int, query: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    attend(out, lse, pool, layer, query, *arguments)  # type: ignore[arg-type]
    return out, lse


def attend(
    out: Tensor,
    lse: Tensor | None,
    pool: Tensor,
    layer: int,
    query: Tensor,
    query_lens: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    max_query_len: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    block_sparse: Sequence[int] | None = None,
    batch_invariant: bool = False,
    num_common_blocks: int = 0,
    kernel: Kernel = "auto",
    scratch: Scratch | None = None,
) -> None:
    """Compute attention into `out` and `lse` with the given kernel. `scratch` is the workspace; None: see
    `workspace`."""
    if max_query_len is None:
        max_query_len = int(query_lens.max()) if query_lens.numel() else 0
    query, query_lens, block_tables, context_lens = (
        tensor.contiguous() for tensor in (query, query_lens, block_tables, context_lens)
    )
    with torch.cuda.device(pool.device):
        cuda.attention(
            device_array(pool, "pool"),
            layer,
            device_array(query, "query"),
            device_array(query_lens, "query_lens"),
            device_array(block_tables, "block_tables"),
            device_array(context_lens, "context_lens"),
            max_query_len=max_query_len,
            out=device_array(out, "out"),
            workspace=scratch or workspace(pool.device),
            stream=_stream(pool),
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=_optional(alibi_slopes, "alibi_slopes"),
            k_scale=_optional(k_scale, "k_scale"),
            v_scale=_optional(v_scale, "v_scale"),
            block_sparse=_sparse(block_sparse),
            batch_invariant=batch_invariant,
            num_common_blocks=num_common_blocks,
            lse=_optional(lse, "lse"),
            kernel=kernel,
        )


def copy_blocks(src_pool: Tensor, dst_pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    device = src_pool.device if src_pool.is_cuda else dst_pool.device
    with torch.cuda.device(device):
        cuda.copy_blocks(
            device_array(src_pool, "src_pool"),
            device_array(dst_pool, "dst_pool"),
            src_ids.cpu().numpy(),
            dst_ids.cpu().numpy(),
            stream=torch.cuda.current_stream(device).cuda_stream,
        )


def copy_blocks_(pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    copy_blocks(pool, pool, src_ids, dst_ids)


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def _optional(tensor: Tensor | None, field: str) -> DeviceArray | None:
    return None if tensor is None else device_array(tensor, field)


def _sparse(fields: Sequence[int] | None) -> BlockSparse | None:
    if fields is None:
        return None
    if not 2 <= len(fields) <= 5:
        raise InvalidArgumentError(f"has {len(fields)} numbers, expected those of BlockSparse", field="block_sparse")
    return BlockSparse(*fields)
