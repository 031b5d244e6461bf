"""The pool in GPU memory that an earlier process of the daemon left, or a new one."""

from __future__ import annotations

import os
from types import ModuleType

from kvservice.config import ServeConfig
from kvservice.devices import sizing
from kvservice.errors import InvalidArgumentError
from kvservice.kept import KeptState, KeptStateError
from kvservice.pool.cuda import CudaPool

# The name of the descriptor, and of the fact that has [number of blocks, bytes of the memory].
POOL = "pool"


def open_pool(cuda: ModuleType, device: int, config: ServeConfig, kept: KeptState) -> CudaPool:
    """Take over the pool in `kept`, or allocate one and put it there. Raises ResourceExhaustedError, and KeptStateError
    if the earlier process's pool cannot be mapped."""
    fd = kept.descriptor(POOL)
    if fd is None:
        pool = _new_pool(cuda, device, config)
        kept.facts[POOL] = [pool.num_blocks, pool.mapped_bytes]
        kept.put_descriptor(POOL, os.dup(pool.fd))
        return pool
    num_blocks, mapped_bytes = kept.facts[POOL]
    try:
        return CudaPool.reopen(cuda, device, config.layout, num_blocks, fd, mapped_bytes)
    except (InvalidArgumentError, cuda.CudaError) as error:
        raise KeptStateError(f"the earlier process's pool cannot be mapped: {error}") from None


def _new_pool(cuda: ModuleType, device: int, config: ServeConfig) -> CudaPool:
    if config.pool_blocks is not None:
        return CudaPool(cuda, device, config.layout, config.pool_blocks, config.pool_field)
    num_blocks = sizing.blocks_that_fit(cuda, device, config)
    return CudaPool(cuda, device, config.layout, num_blocks, "gpu_memory_utilization")
