"""The operations as torch custom ops: `torch.ops.kvservice.{write_kv,read_kv,attention,attention_lse,copy_blocks}`.

For CPU tensors, by the kernels of `kvservice.ops.cpu` on the tensors' own memory. Importing this module registers them;
it is the only one of `kvservice.ops` that imports torch. `torch.compile` sees through them by their fake kernels.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.ops import cpu


def as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """A view of a CPU tensor's memory; bfloat16, which torch does not hand to NumPy, by way of int16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _options(
    scale: float | None, sliding_window: int, logits_soft_cap: float, alibi_slopes: Tensor | None
) -> dict[str, Any]:
    return {
        "scale": scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "alibi_slopes": None if alibi_slopes is None else as_numpy(alibi_slopes),
    }


@torch.library.custom_op("kvservice::write_kv", mutates_args=("pool",), device_types="cpu")
def write_kv(pool: Tensor, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
    """As `kvservice.ops.write_kv`."""
    cpu.write_kv(as_numpy(pool), layer, as_numpy(slot_mapping), as_numpy(key), as_numpy(value))


@torch.library.custom_op("kvservice::read_kv", mutates_args=(), device_types="cpu")
def read_kv(pool: Tensor, layer: int, slots: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """As `kvservice.ops.read_kv`."""
    key, value = cpu.read_kv(as_numpy(pool), layer, as_numpy(slots), head_size=head_size)
    return _as_tensor(key, pool.dtype), _as_tensor(value, pool.dtype)


@read_kv.register_fake
def _(pool: Tensor, layer: int, slots: Tensor, head_size: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = (slots.shape[0], pool.shape[3], head_size)
    return pool.new_empty(shape), pool.new_empty(shape)


@torch.library.custom_op("kvservice::attention", mutates_args=(), device_types="cpu")
def attention(
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
) -> Tensor:
    """As `kvservice.ops.attention`."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    arrays = (as_numpy(query_lens), as_numpy(block_tables), as_numpy(context_lens))
    options = _options(scale, sliding_window, logits_soft_cap, alibi_slopes)
    cpu.attention(as_numpy(pool), layer, as_numpy(query), *arrays, out=as_numpy(out), **options)
    return out


@attention.register_fake
def _(pool: Tensor, layer: int, query: Tensor, *_arguments: object) -> Tensor:  # noqa: ARG001
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("kvservice::attention_lse", mutates_args=(), device_types="cpu")
def attention_lse(
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
) -> tuple[Tensor, Tensor]:
    """As `kvservice.ops.attention` with `return_lse`: a torch op's number of results is fixed."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    arrays = (as_numpy(query_lens), as_numpy(block_tables), as_numpy(context_lens))
    options = _options(scale, sliding_window, logits_soft_cap, alibi_slopes)
    _, lse = cpu.attention(
        as_numpy(pool), layer, as_numpy(query), *arrays, out=as_numpy(out), return_lse=True, **options
    )
    return out, torch.from_numpy(lse)


@attention_lse.register_fake
def _(pool: Tensor, layer: int, query: Tensor, *_arguments: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvservice::copy_blocks", mutates_args=("dst_pool",), device_types="cpu")
def copy_blocks(src_pool: Tensor, dst_pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """As `kvservice.ops.copy_blocks`, between two pools."""
    cpu.copy_blocks(as_numpy(src_pool), as_numpy(dst_pool), as_numpy(src_ids), as_numpy(dst_ids))


@torch.library.custom_op("kvservice::copy_blocks_", mutates_args=("pool",), device_types="cpu")
def copy_blocks_(pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """As `kvservice.ops.copy_blocks`, within one pool: a torch op may not mutate one of two arguments that are the
    same memory.
    """
    array = as_numpy(pool)
    cpu.copy_blocks(array, array, as_numpy(src_ids), as_numpy(dst_ids))


def _as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
