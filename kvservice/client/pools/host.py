"""Kernels on a mapped pool in host memory."""

from __future__ import annotations

import mmap

import numpy as np

from kvservice import ops
from kvservice.attention_options import AttentionOptions
from kvservice.client.pools.tables import MappedStep
from kvservice.client.values import PoolInfo
from kvservice.pool.layout import DTYPES
from kvservice.wire.tensors import Array


class HostKernels:
    """See MappedKernels. The host kernels are synchronous."""

    takes_gpu_tensors = False
    is_busy = False

    def __init__(self, info: PoolInfo, pool: Array) -> None:
        self.pool = pool
        self._batch_invariant = info.batch_invariant

    @staticmethod
    def open(info: PoolInfo, shape: tuple[int, ...], descriptor: int, num_bytes: int, writable: bool) -> HostKernels:
        """Map the pool from a file descriptor of its memory."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = mmap.mmap(descriptor, num_bytes, prot=access)
        return HostKernels(info, np.ndarray(shape, DTYPES[info.kv_cache_dtype], memory))

    def write(self, tables: MappedStep, layer: int, key: Array, value: Array) -> None:
        ops.write_kv(self.pool, layer, tables.slot_mapping, key, value)

    def attend(
        self,
        tables: MappedStep,
        layer: int,
        query: Array,
        options: AttentionOptions,
        out: Array | None,
        lse_out: Array | None,
    ) -> tuple[Array, Array]:
        output, lse = ops.attention(
            self.pool,
            layer,
            query,
            tables.query_lens,
            tables.block_tables,
            tables.context_lens,
            scale=options.scale,
            sliding_window=options.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=options.alibi_slopes,
            batch_invariant=self._batch_invariant,
            out=out,
            return_lse=True,
        )
        if lse_out is None:
            return output, lse
        np.copyto(lse_out, lse)
        return output, lse_out

    def mark_launch(self) -> None:
        pass

    def wait(self) -> None:
        pass
