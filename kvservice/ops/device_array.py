"""Arrays in device memory, and the checks on them that do not read device memory.

A failed check raises `InvalidArgumentError` whose `field` is the argument's name.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.errors import InvalidArgumentError

# The numbers of dtypes in csrc/pool.h.
DTYPE_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int32": 4, "int64": 8}
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

# The `device` of pinned host memory.
HOST = -1


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A contiguous array in memory that the caller owns. `dtype` is float32, float16, bfloat16, float8_e4m3fn,
    float8_e5m2, int32 or int64; `device` is a CUDA device index or `HOST`.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    device: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


def require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(message, field=field)


def check_array(
    array: DeviceArray, field: str, dtype: str, shape: Sequence[int | None], device: int | None = None
) -> tuple[int, ...]:
    """Check an array's dtype, shape (None: any size) and, if given, device. Returns its shape."""
    require(isinstance(array, DeviceArray), field, "is not a DeviceArray")
    require(array.dtype == dtype, field, f"has dtype {array.dtype}, expected {dtype}")
    fits = len(array.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidArgumentError(f"has shape {list(array.shape)}, expected [{expected}]", field=field)
    require(device is None or array.device == device, field, f"is on device {array.device}, the pool on {device}")
    require(array.pointer > 0 or array.num_bytes == 0, field, "has no memory")
    return array.shape


def check_pool(pool: DeviceArray, field: str = "pool") -> None:
    require(isinstance(pool, DeviceArray), field, "is not a DeviceArray")
    require(pool.dtype in DTYPE_NUMBERS, field, f"has dtype {pool.dtype}, expected one of {', '.join(DTYPE_NUMBERS)}")
    is_pool = len(pool.shape) == 5 and pool.shape[2] == 2 and all(size > 0 for size in pool.shape)
    require(
        is_pool, field, f"has shape {list(pool.shape)}, expected [blocks, layers, 2, KV heads, head size * block size]"
    )
    require(pool.pointer > 0, field, "has no memory")


def pool_sizes(pool: DeviceArray, layer: int, head_size: int, field: str) -> tuple[int, int]:
    """Check layer and head size. Returns (layer, block size)."""
    step = 16 if pool.dtype in FLOAT8 else 8
    require(
        32 <= head_size <= 256 and head_size % step == 0,
        field,
        f"head size {head_size} is not a multiple of {step} between 32 and 256",
    )
    block_size, rest = divmod(pool.shape[4], head_size)
    require(rest == 0, field, "head size does not divide the pool's last dimension")
    require(
        block_size <= 256 and block_size & (block_size - 1) == 0, "pool", "block size is not a power of two up to 256"
    )
    index = as_int(layer, "layer", 0)
    require(index < pool.shape[1], "layer", f"{index} is outside a pool of {pool.shape[1]} layers")
    return index, block_size


def tensor_dtype(pool: DeviceArray, array: DeviceArray, field: str) -> str:
    """Check that the dtype of `array` is compatible with the pool's, and return it."""
    require(isinstance(array, DeviceArray), field, "is not a DeviceArray")
    expected = ("float32", "float16", "bfloat16") if pool.dtype in FLOAT8 else (pool.dtype,)
    require(array.dtype in expected, field, f"has dtype {array.dtype}, expected {' or '.join(expected)}")
    return array.dtype


def optional_pointer(array: DeviceArray | None, field: str, shape: Sequence[int], device: int) -> int:
    """Return the address of a float32 array, or 0 for None."""
    if array is None:
        return 0
    check_array(array, field, "float32", shape, device)
    return array.pointer


def scale_pointer(pool: DeviceArray, scale: DeviceArray | None, field: str) -> int:
    require(scale is None or pool.dtype in FLOAT8, field, "is only valid for FP8 pools")
    return optional_pointer(scale, field, (pool.shape[3],), pool.device)


def as_int(value: int, field: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError("is not an integer", field=field) from None
    require(least <= number < 2**63, field, f"{number} is out of range")
    return number


def as_float(value: float, field: str, least: float) -> float:
    require(isinstance(value, numbers.Real), field, "is not a number")
    # The value is finite as a float32 and not NaN.
    require(abs(value) < 2.0**128 and value >= least, field, f"{value} is out of range")
    return float(value)


def overlap(one: DeviceArray, other: DeviceArray) -> bool:
    return (
        one.pointer < other.pointer + other.num_bytes
        and other.pointer < one.pointer + one.num_bytes
        and one.num_bytes > 0
        and other.num_bytes > 0
    )
