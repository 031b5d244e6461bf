"""Torch custom ops: `torch.ops.kvservice.{write_kv,read_kv,attention,attention_lse,copy_blocks}`.

CPU tensors use the kernels of `kvservice.ops.cpu`. CUDA tensors use those of `kvservice.ops.cuda` on the current
stream. Both work on the tensors' memory in place. Importing this module registers the ops; only this module and
`torch_cuda` of `kvservice.ops` import torch. Fake kernels make the ops usable under `torch.compile`.

Only the CUDA kernels support FP8 pools (with `k_scale`, `v_scale`) and `block_sparse`, the fields of
`kvservice.attention_options.BlockSparse` in order; the CPU kernels refuse them. `max_query_len` and `num_common_blocks`
have an effect on CUDA only. If `max_query_len` is not given on CUDA, it is read back from `query_lens`, which
synchronizes the stream and cannot be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.errors import InvalidArgumentError
from kvservice.ops import cpu, torch_cuda

# Dtypes that torch cannot convert to NumPy: an integer dtype of the same size, and the dtype in NumPy.
_BY_WAY_OF: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.int8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.int8, ml_dtypes.float8_e5m2),
}


def as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a view of a CPU tensor's memory. bfloat16 and FP8 become the dtypes of `ml_dtypes`."""
    tensor = tensor.detach()
    if tensor.dtype in _BY_WAY_OF:
        integer, dtype = _BY_WAY_OF[tensor.dtype]
        return tensor.view(integer).numpy().view(dtype)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


@torch.library.custom_op("kvservice::write_kv", mutates_args=("pool",), device_types="cpu")
def write_kv(
    pool: Tensor,
    layer: int,
    slot_mapping: Tensor,
    key: Tensor,
    value: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """As `kvservice.ops.write_kv`."""
    _refuse(k_scale=k_scale, v_scale=v_scale)
    cpu.write_kv(as_numpy(pool), layer, as_numpy(slot_mapping), as_numpy(key), as_numpy(value))


@torch.library.custom_op("kvservice::read_kv", mutates_args=(), device_types="cpu")
def read_kv(
    pool: Tensor,
    layer: int,
    slots: Tensor,
    head_size: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kvservice.ops.read_kv`. `dtype` is the dtype of the result. It defaults to the pool's and is required for an
    FP8 pool."""
    _refuse(k_scale=k_scale, v_scale=v_scale)
    if dtype not in (None, pool.dtype):
        raise InvalidArgumentError(f"is {dtype}, the pool's is {pool.dtype}", field="dtype")
    key, value = cpu.read_kv(as_numpy(pool), layer, as_numpy(slots), head_size=head_size)
    return as_tensor(key, pool.dtype), as_tensor(value, pool.dtype)


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
    max_query_len: int | None = None,  # noqa: ARG001
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    block_sparse: Sequence[int] | None = None,
    batch_invariant: bool = False,
    num_common_blocks: int = 0,  # noqa: ARG001
) -> Tensor:
    """As `kvservice.ops.attention`."""
    _refuse(k_scale=k_scale, v_scale=v_scale, block_sparse=block_sparse)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    arrays = (as_numpy(query_lens), as_numpy(block_tables), as_numpy(context_lens))
    options = _options(scale, sliding_window, logits_soft_cap, alibi_slopes, batch_invariant)
    cpu.attention(as_numpy(pool), layer, as_numpy(query), *arrays, out=as_numpy(out), **options)
    return out


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
    max_query_len: int | None = None,  # noqa: ARG001
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    block_sparse: Sequence[int] | None = None,
    batch_invariant: bool = False,
    num_common_blocks: int = 0,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """As `kvservice.ops.attention` with `return_lse`. It is a separate op because a torch op has a fixed number of
    results."""
    _refuse(k_scale=k_scale, v_scale=v_scale, block_sparse=block_sparse)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    arrays = (as_numpy(query_lens), as_numpy(block_tables), as_numpy(context_lens))
    options = _options(scale, sliding_window, logits_soft_cap, alibi_slopes, batch_invariant)
    _, lse = cpu.attention(
        as_numpy(pool), layer, as_numpy(query), *arrays, out=as_numpy(out), return_lse=True, **options
    )
    return out, torch.from_numpy(lse)


@torch.library.custom_op("kvservice::copy_blocks", mutates_args=("dst_pool",), device_types="cpu")
def copy_blocks(src_pool: Tensor, dst_pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """As `kvservice.ops.copy_blocks`, between two pools. If one of them is a CUDA tensor, the other may be a pinned CPU
    tensor; the ids are CPU tensors.
    """
    cpu.copy_blocks(as_numpy(src_pool), as_numpy(dst_pool), as_numpy(src_ids), as_numpy(dst_ids))


@torch.library.custom_op("kvservice::copy_blocks_", mutates_args=("pool",), device_types="cpu")
def copy_blocks_(pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """As `kvservice.ops.copy_blocks`, within one pool. It is a separate op because a torch op may not mutate one of two
    arguments that share memory.
    """
    array = as_numpy(pool)
    cpu.copy_blocks(array, array, as_numpy(src_ids), as_numpy(dst_ids))


@read_kv.register_fake
def _(
    pool: Tensor,
    layer: int,  # noqa: ARG001
    slots: Tensor,
    head_size: int,
    k_scale: Tensor | None = None,  # noqa: ARG001
    v_scale: Tensor | None = None,  # noqa: ARG001
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (slots.shape[0], pool.shape[3], head_size)
    return pool.new_empty(shape, dtype=dtype), pool.new_empty(shape, dtype=dtype)


@attention.register_fake
def _(pool: Tensor, layer: int, query: Tensor, *_arguments: object) -> Tensor:  # noqa: ARG001
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@attention_lse.register_fake
def _(pool: Tensor, layer: int, query: Tensor, *_arguments: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)


for _op, _kernel in (
    (write_kv, torch_cuda.write_kv),
    (read_kv, torch_cuda.read_kv),
    (attention, torch_cuda.attention),
    (attention_lse, torch_cuda.attention_lse),
    (copy_blocks, torch_cuda.copy_blocks),
    (copy_blocks_, torch_cuda.copy_blocks_),
):
    _op.register_kernel("cuda", _kernel)


def _options(
    scale: float | None,
    sliding_window: int,
    logits_soft_cap: float,
    alibi_slopes: Tensor | None,
    batch_invariant: bool,
) -> dict[str, Any]:
    return {
        "scale": scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "alibi_slopes": None if alibi_slopes is None else as_numpy(alibi_slopes),
        "batch_invariant": batch_invariant,
    }


def _refuse(**arguments: object) -> None:
    """Raise InvalidArgumentError if an argument that only the CUDA kernels support is given."""
    for name, argument in arguments.items():
        if argument is not None:
            raise InvalidArgumentError("is not supported by the CPU kernels", field=name)


def as_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor over an array's memory, of a dtype that `array` has in NumPy. It is not for FP8."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
