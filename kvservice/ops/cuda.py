"""The CUDA kernels, for device memory that the caller owns.

    pool    T[num_blocks, num_layers, 2, num_kv_heads, head_size * block_size]

T is float32, float16, bfloat16, float8_e4m3fn or float8_e5m2. In an FP8 pool a value is the stored number times the
scale of its KV head, and keys, values, queries and outputs have one of the other dtypes. In other pools they have the
pool's dtype. Head sizes are multiples of 8 from 32 to 256 (of 16 in an FP8 pool), block sizes are powers of two up to
256.

All work is enqueued on the given stream. No function synchronizes or reads device memory back, so the content of device
memory (lengths, tables, slots) is not checked and must be valid. All arguments on the host are checked; an invalid one
raises `InvalidArgumentError` whose `field` is the argument's name. The module can be imported without a device and
without the CUDA part of kvservice; see `available`.
"""

from __future__ import annotations

import importlib
import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from kvservice.attention_options import AttentionOptions, BlockSparse
from kvservice.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from kvservice import _cuda


# ---- arrays in device memory, and the checks on them that do not read device memory
#
# A failed check raises `InvalidArgumentError` whose `field` is the argument's name.


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


__all__ = [
    "COUNTER_BYTES",
    "HOST",
    "DeviceArray",
    "Kernel",
    "Scratch",
    "Workspace",
    "attention",
    "available",
    "copy_blocks",
    "load_extension",
    "read_kv",
    "write_kv",
]

# Leading bytes of a workspace that are zero before its first launch. Only launches write them.
COUNTER_BYTES = 1 << 16

# Completes a message about code that is missing.
HOW_TO_BUILD = (
    "`KVSERVICE_CUDA=on pip install .` in its source builds the kernels, for all GPUs or those in CUDAARCHS; it needs "
    "the nvcc of CUDA 12.4 or later"
)

Kernel: TypeAlias = Literal["auto", "reference", "decode", "extend", "cascade"]


class Scratch(Protocol):
    """Provider of workspace for launches: memory of the launch's device, used on one stream at a time, with its first
    64 KiB initially zero. `Workspace` implements it."""

    def reserve(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes` bytes, aligned to 256."""
        ...


class Workspace:
    """Workspace for the launches of one stream, which grows on demand. A CUDA graph keeps the address with which it was
    captured, so each graph needs its own workspace, reserved at its full size before the capture.
    """

    def __init__(self, device: int, stream: int) -> None:
        self.device, self.stream = device, stream
        self.num_bytes = self._pointer = 0

    def reserve(self, num_bytes: int) -> int:
        if num_bytes > self.num_bytes:
            extension = load_extension()
            self.close()
            extension.set_device(self.device)
            self._pointer = extension.allocate_async(num_bytes, self.stream)
            self.num_bytes = num_bytes
            extension.fill_async(self._pointer, 0, min(num_bytes, COUNTER_BYTES), self.stream)
        return self._pointer

    def close(self) -> None:
        """Free the memory in stream order. The workspace can be used again."""
        if self.num_bytes:
            load_extension().free_async(self._pointer, self.stream)
            self.num_bytes = self._pointer = 0


def available() -> bool:
    """Return whether kvservice was built with CUDA and finds a device."""
    try:
        return bool(load_extension().device_count())
    except FailedPreconditionError:
        return False


def write_kv(
    pool: DeviceArray,
    layer: int,
    slot_mapping: DeviceArray,
    key: DeviceArray,
    value: DeviceArray,
    *,
    k_scale: DeviceArray | None = None,
    v_scale: DeviceArray | None = None,
    stream: int,
) -> None:
    """Write the keys and values of new tokens into their slots (vLLM's `reshape_and_cache`).

    `slot_mapping` int64[num_tokens], `key` and `value` [num_tokens, num_kv_heads, head_size]. Slots outside the pool,
    such as -1 for padding, are skipped; a slot must not occur twice. In an FP8 pool a value is divided by `k_scale` or
    `v_scale`, float32[num_kv_heads] (1 if not given), and rounded to nearest even; values out of range saturate to the
    largest finite number.
    """
    arguments = _slot_arguments(pool, layer, slot_mapping, "slot_mapping", key, value, k_scale, v_scale)
    load_extension().write_kv(*arguments, stream)


def read_kv(
    pool: DeviceArray,
    layer: int,
    slots: DeviceArray,
    *,
    key: DeviceArray,
    value: DeviceArray,
    k_scale: DeviceArray | None = None,
    v_scale: DeviceArray | None = None,
    stream: int,
) -> None:
    """Read the keys and values of `slots` int64[num_tokens] into `key` and `value` [num_tokens, num_kv_heads,
    head_size]. This is the inverse of `write_kv`. Tokens whose slot is outside the pool are not written.
    """
    arguments = _slot_arguments(pool, layer, slots, "slots", key, value, k_scale, v_scale)
    load_extension().read_kv(*arguments, stream)


def attention(
    pool: DeviceArray,
    layer: int,
    query: DeviceArray,
    query_lens: DeviceArray,
    block_tables: DeviceArray,
    context_lens: DeviceArray,
    *,
    max_query_len: int,
    out: DeviceArray,
    workspace: Scratch,
    stream: int,
    scale: float | None = None,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: DeviceArray | None = None,
    k_scale: DeviceArray | None = None,
    v_scale: DeviceArray | None = None,
    block_sparse: BlockSparse | None = None,
    batch_invariant: bool = False,
    num_common_blocks: int = 0,
    lse: DeviceArray | None = None,
    kernel: Kernel = "auto",
) -> None:
    """Paged attention over ragged queries, as `kvservice.ops.attention` (vLLM's paged attention, SGLang's extend). Its
    arguments mean the same here; these are different or new:

    max_query_len   upper bound of the query lengths, known to the host
    out             destination of the result, shape and dtype of query, shares no memory with it
    workspace       memory for the launch
    k_scale         float32[num_kv_heads], for an FP8 pool: a key is the stored number times this; 1 if not given
    v_scale         the same for values
    block_sparse    pattern of the attended keys; off if not given
    num_common_blocks
                    the first num_common_blocks blocks are equal in the tables of all sequences with queries, and all
                    queries come after them; they may be read once for all sequences (Hydragen, FlashInfer's cascade)
    lse             float32[num_tokens, num_heads], receives the natural logarithm of the sum of exponentials
    kernel          decode and extend use tensor cores; cascade is for few queries per sequence after common blocks;
                    reference supports everything; auto selects one of them

    A sequence of query length 0 writes nothing. Accumulation is in float32. The tensor-core kernels round attention
    weights to the query's dtype, or to float16 for an FP8 pool.
    """
    call = _call(pool, layer, query, k_scale, v_scale)
    num_tokens, num_heads, head_size = query.shape
    num_seqs = check_array(query_lens, "query_lens", "int32", (None,), pool.device)[0]
    call.num_seqs = num_seqs
    call.max_blocks = check_array(block_tables, "block_tables", "int32", (num_seqs, None), pool.device)[1]
    check_array(context_lens, "context_lens", "int32", (num_seqs,), pool.device)
    check_array(out, "out", query.dtype, query.shape, pool.device)
    require(not overlap(out, query), "out", "shares memory with query")
    call.query_lens, call.block_tables, call.context_lens = (
        query_lens.pointer,
        block_tables.pointer,
        context_lens.pointer,
    )
    call.out = out.pointer
    call.alibi_slopes = optional_pointer(alibi_slopes, "alibi_slopes", (num_heads,), pool.device)
    call.lse = optional_pointer(lse, "lse", (num_tokens, num_heads), pool.device)
    call.max_query_len = as_int(max_query_len, "max_query_len", 0)
    call.num_common_blocks = as_int(num_common_blocks, "num_common_blocks", 0)
    options = AttentionOptions(
        scale=head_size**-0.5 if scale is None else as_float(scale, "scale", -math.inf),
        sliding_window=as_int(sliding_window, "sliding_window", 0),
        logits_soft_cap=as_float(logits_soft_cap, "logits_soft_cap", 0.0),
        block_sparse=None if block_sparse is None else _checked_sparse(block_sparse),
    )
    set_options(call, options)
    require(kernel in get_args(Kernel), "kernel", f"{kernel!r} is not known")
    call.batch_invariant, call.kernel, call.stream = batch_invariant, kernel, stream
    call.workspace_bytes = call.wanted_workspace_bytes()
    call.workspace = workspace.reserve(call.workspace_bytes)
    call.launch()


def copy_blocks(
    src_pool: DeviceArray,
    dst_pool: DeviceArray,
    src_ids: npt.NDArray[np.int32],
    dst_ids: npt.NDArray[np.int32],
    *,
    stream: int,
) -> None:
    """Copy block `src_ids[i]` of one pool to block `dst_ids[i]` of another or the same pool (vLLM's `copy_blocks` and
    `swap_blocks`). One of the pools, but not both, may be in pinned host memory. `src_ids` and `dst_ids` are
    int32[num_copies] in host memory and are not read after the call. No destination may occur twice, and within one
    pool no source may be a destination.
    """
    for pool, field in ((src_pool, "src_pool"), (dst_pool, "dst_pool")):
        check_pool(pool, field)
    same = (src_pool.shape[1:], src_pool.dtype) == (dst_pool.shape[1:], dst_pool.dtype)
    require(same, "dst_pool", "its blocks are not like those of src_pool")
    device = max(src_pool.device, dst_pool.device)
    require(device >= 0, "dst_pool", "both pools are in host memory")
    for ids, field in ((src_ids, "src_ids"), (dst_ids, "dst_ids")):
        require(isinstance(ids, np.ndarray) and ids.dtype == np.int32, field, "is not a NumPy array of int32")
        require(ids.shape == (src_ids.size,), field, f"has shape {ids.shape}, expected ({src_ids.size},)")
    extension = load_extension()
    extension.set_device(device)
    block_bytes = src_pool.num_bytes // src_pool.shape[0]
    ids_of = [np.ascontiguousarray(ids) for ids in (src_ids, dst_ids)]
    extension.copy_blocks(
        src_pool.pointer, dst_pool.pointer, src_pool.shape[0], dst_pool.shape[0], block_bytes, *ids_of, stream
    )


def load_extension() -> ModuleType:
    """Return the module with the CUDA kernels. Raises FailedPreconditionError, which says how to get it."""
    try:
        return importlib.import_module("kvservice._cuda")
    except ModuleNotFoundError as error:
        raise FailedPreconditionError(f"kvservice was built without CUDA; {HOW_TO_BUILD}") from error
    except ImportError as error:
        raise FailedPreconditionError(f"the CUDA module of kvservice cannot be loaded: {error}") from error


def set_options(call: _cuda.Attention, options: AttentionOptions) -> None:
    """Set the options of a call, except the slopes, which are in device memory. A scale of None keeps the call's."""
    if options.scale is not None:
        call.scale = options.scale
    call.soft_cap, call.sliding_window = options.logits_soft_cap, options.sliding_window
    if options.block_sparse is not None:
        call.sparse = astuple(options.block_sparse)


def _checked_sparse(sparse: BlockSparse) -> BlockSparse:
    numbers = [as_int(number, "block_sparse", -(2**31)) for number in astuple(sparse)]
    require(all(number < 2**31 for number in numbers), "block_sparse", "is out of range")
    return BlockSparse(*numbers)


def _call(
    pool: DeviceArray, layer: int, query: DeviceArray, k_scale: DeviceArray | None, v_scale: DeviceArray | None
) -> _cuda.Attention:
    """Check pool and query, and return a call with them. Makes the pool's device current in this thread."""
    check_pool(pool)
    dtype = tensor_dtype(pool, query, "query")
    num_tokens, num_heads, head_size = check_array(query, "query", dtype, (None, None, None), pool.device)
    index, block_size = pool_sizes(pool, layer, head_size, "query")
    require(
        num_heads > 0 and num_heads % pool.shape[3] == 0, "query", "number of heads is not a multiple of the pool's"
    )
    extension = load_extension()
    extension.set_device(pool.device)
    call: _cuda.Attention = extension.Attention()
    call.pool, call.pool_dtype = pool.pointer, DTYPE_NUMBERS[pool.dtype]
    call.num_blocks, call.num_layers, _, call.num_kv_heads, _ = pool.shape
    call.head_size, call.block_size, call.layer = head_size, block_size, index
    call.query, call.dtype, call.num_tokens, call.num_heads = query.pointer, DTYPE_NUMBERS[dtype], num_tokens, num_heads
    call.k_scale, call.v_scale = scale_pointer(pool, k_scale, "k_scale"), scale_pointer(pool, v_scale, "v_scale")
    return call


def _slot_arguments(
    pool: DeviceArray,
    layer: int,
    slots: DeviceArray,
    slots_field: str,
    key: DeviceArray,
    value: DeviceArray,
    k_scale: DeviceArray | None,
    v_scale: DeviceArray | None,
) -> tuple[int, ...]:
    """Check and return the arguments of `_cuda.write_kv` and `_cuda.read_kv` before the stream. Makes the pool's device
    current in this thread."""
    check_pool(pool)
    num_tokens = check_array(slots, slots_field, "int64", (None,), pool.device)[0]
    dtype = tensor_dtype(pool, key, "key")
    shape = check_array(key, "key", dtype, (num_tokens, pool.shape[3], None), pool.device)
    index, block_size = pool_sizes(pool, layer, shape[2], "key")
    check_array(value, "value", dtype, shape, pool.device)
    scales = scale_pointer(pool, k_scale, "k_scale"), scale_pointer(pool, v_scale, "v_scale")
    load_extension().set_device(pool.device)
    num_blocks, num_layers, _, num_kv_heads, _ = pool.shape
    sizes = (num_blocks, num_layers, num_kv_heads, shape[2], block_size, index, num_tokens)
    arrays = (slots.pointer, key.pointer, value.pointer)
    return pool.pointer, DTYPE_NUMBERS[pool.dtype], *sizes, *arrays, DTYPE_NUMBERS[dtype], *scales
