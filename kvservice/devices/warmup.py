"""Warm-up of the usual kernels. The driver loads a kernel, and allocates memory for it, at its first launch."""

from __future__ import annotations

import numpy as np

from kvservice.devices.arena import aligned
from kvservice.devices.compute import Compute
from kvservice.devices.kernels import CudaPoolKernels
from kvservice.pool.layout import TENSOR_DTYPES

# Tokens of the larger warm-up call.
NUM_TOKENS = 256


def warm_up(compute: Compute, kernels: CudaPoolKernels, workspace: int, workspace_bytes: int) -> None:
    """Write, read and attend over zeros. `kernels` has a pool of one block, to which every table entry refers."""
    config = kernels.config
    tensor_bytes = aligned(NUM_TOKENS * config.num_kv_heads * config.head_size * TENSOR_DTYPES[config.dtype].itemsize)
    tables_bytes = aligned(8 * NUM_TOKENS)
    lengths = np.array([1, NUM_TOKENS], np.int32)
    zeros = compute.allocate(tables_bytes + 3 * tensor_bytes + aligned(lengths.nbytes))
    tensors = zeros + tables_bytes
    lengths_at = tensors + 3 * tensor_bytes
    buffer = compute.arena.allocate(lengths.nbytes)
    kernels.cuda.fill_async(zeros, 0, tables_bytes + 3 * tensor_bytes, kernels.stream)
    buffer.put(0, lengths)
    kernels.cuda.copy_async(lengths_at, buffer.host_pointer, lengths.nbytes, kernels.stream)
    kernels.write(0, 1, zeros, tensors, tensors)
    kernels.read(0, 1, zeros, tensors + tensor_bytes, tensors + 2 * tensor_bytes)
    for index, num_tokens in enumerate(lengths.tolist()):
        call = kernels.attention(0)
        call.num_tokens, call.num_seqs, call.num_heads = num_tokens, 1, config.num_kv_heads
        call.max_blocks, call.max_query_len = -(-num_tokens // config.block_size), num_tokens
        call.query_lens = call.context_lens = lengths_at + 4 * index
        call.block_tables, call.query, call.out = zeros, tensors, tensors + tensor_bytes
        call.workspace, call.workspace_bytes = workspace, workspace_bytes
        call.launch()
    compute.free(zeros)
    compute.stream.synchronize()
    compute.arena.release(buffer)
