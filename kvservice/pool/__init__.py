"""The bytes of a pool: its layout, host memory that other processes map, and how much of it there is."""

from kvservice.pool.available import available_bytes
from kvservice.pool.cpu import CpuPool
from kvservice.pool.layout import DTYPES, TENSOR_DTYPES, PoolLayout
from kvservice.pool.sealed import SealedMemory

__all__ = [
    "DTYPES",
    "TENSOR_DTYPES",
    "CpuPool",
    "PoolLayout",
    "SealedMemory",
    "available_bytes",
]
