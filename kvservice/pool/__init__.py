"""The bytes of a pool: its layout, host memory that other processes map, and how much of it there is."""

from kvservice.pool.layout import DTYPES, TENSOR_DTYPES, PoolLayout
from kvservice.pool.pools import CpuPool
from kvservice.pool.sealed import SealedMemory, available_bytes

__all__ = [
    "DTYPES",
    "TENSOR_DTYPES",
    "CpuPool",
    "PoolLayout",
    "SealedMemory",
    "available_bytes",
]
