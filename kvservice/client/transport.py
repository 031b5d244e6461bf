"""What a transport is, and the calls of a step's layers as values, which it executes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np

from kvservice.attention_options import DEFAULT_OPTIONS, AttentionOptions
from kvservice.client import tensors
from kvservice.client.mapped import MappedKernels
from kvservice.client.messages import whole
from kvservice.client.regions import ALIGNMENT
from kvservice.client.remote import Context
from kvservice.client.tensors import Tensor, pool_device
from kvservice.client.values import PoolInfo, StepInfo
from kvservice.errors import ConnectionLostError, InvalidArgumentError
from kvservice.pool.layout import TENSOR_DTYPES

# ---- the calls

_DTYPES = frozenset(TENSOR_DTYPES.values())


class AttentionCall(NamedTuple):
    """The call for one layer of a step: write key and value, then attend.

    query [num_tokens, num_heads, head_size]; key and value [num_tokens, num_kv_heads, head_size]. `out` and `lse_out`
    receive the results; None: new arrays. `deadline` is a time of the connection's clock, None: no limit. The values
    are the caller's, and `prepared` returns them checked and converted.
    """

    step: StepInfo
    decode: bool
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions = DEFAULT_OPTIONS
    return_lse: bool = False
    out: Tensor | None = None
    lse_out: Tensor | None = None
    deadline: float | None = None

    @property
    def has_defaults(self) -> bool:
        """Whether every option has its default and no log-sum-exp is wanted."""
        return self.options is DEFAULT_OPTIONS and not self.return_lse and self.lse_out is None

    @property
    def is_plain(self) -> bool:
        """Whether the output goes to `out` and every option has its default."""
        return self.out is not None and self.has_defaults

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors are on a GPU; all of them are on the same device."""
        return tensors.is_on_gpu(self.query)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return tuple(self.query.shape[:2])

    @property
    def staging_bytes(self) -> int:
        """The size in bytes that the call needs in a staging region if none of its tensors is in a region."""
        sizes: list[int] = [self.query.nbytes] * 2 + [self.key.nbytes, self.value.nbytes, 4 * math.prod(self.lse_shape)]
        return sum(sizes) + ALIGNMENT * len(sizes)

    def prepared(self, info: PoolInfo) -> AttentionCall:
        """Convert layer and tensors, and check what every transport requires: types, devices, and the shapes of the
        results. Raises InvalidArgumentError."""
        layer = whole(self.layer, "layer")
        if (
            (self.query.__class__ is self.key.__class__ is self.value.__class__ is np.ndarray)
            and {self.query.dtype, self.key.dtype, self.value.dtype} <= _DTYPES
            and self.out is self.lse_out is None
        ):
            return self if layer is self.layer else self._replace(layer=layer)
        call = self._replace(
            layer=layer,
            query=tensors.as_tensor(self.query, "query"),
            key=tensors.as_tensor(self.key, "key"),
            value=tensors.as_tensor(self.value, "value"),
            out=None if self.out is None else tensors.as_result(self.out, "out"),
            lse_out=None if self.lse_out is None else tensors.as_result(self.lse_out, "lse_out"),
        )
        if call.out is not None:
            _check_result(call.out, call.query.shape, info.dtype, "out")
        if call.lse_out is not None:
            if not call.return_lse:
                raise InvalidArgumentError("there is no log-sum-exp without return_lse", field="lse_out")
            _check_result(call.lse_out, call.lse_shape, "float32", "lse_out")
        _check_same_device(call)
        return call


# The output, shaped as the query, and the log-sum-exp, float32 [num_tokens, num_heads], if it was requested. A plain
# tuple, because the short calls take microseconds.
AttentionResult = tuple[Tensor, Tensor | None]


class WriteCall(NamedTuple):
    """The call that writes the K/V of one layer, `[num_tokens, num_kv_heads, head_size]`, or with a leading
    `[num_layers]` those of all layers (`layer` None), without attention. A part of a layer begins at `first_token`,
    which is None for all tokens of the step."""

    step: StepInfo
    layer: int | None
    key: Tensor
    value: Tensor
    deadline: float | None = None
    first_token: int | None = None

    def part(self, first: int, stop: int) -> WriteCall:
        """Return the call for some tokens of a layer."""
        return self._replace(first_token=first, key=self.key[first:stop], value=self.value[first:stop])

    def prepared(self) -> WriteCall:
        """Convert layer and tensors. Raises InvalidArgumentError."""
        return self._replace(
            layer=None if self.layer is None else whole(self.layer, "layer"),
            key=tensors.as_tensor(self.key, "key"),
            value=tensors.as_tensor(self.value, "value"),
        )


def given(result: Tensor, wanted: Tensor | None) -> Tensor:
    """Return a result to the caller: copied to `wanted` if given, else as a new array."""
    if wanted is None:
        return tensors.copy_of(result)
    if result is not wanted:
        tensors.copy(wanted, result)
    return wanted


def _check_result(tensor: Tensor, shape: tuple[int, ...], dtype: str, field: str) -> None:
    """Raise InvalidArgumentError unless a caller's tensor fits a result: shape, dtype, writable."""
    if tensor.shape != shape or tensors.dtype_name(tensor) != dtype:
        raise InvalidArgumentError(
            f"is {tensor.dtype} of shape {list(tensor.shape)}, must be {dtype} of {list(shape)}", field=field
        )
    if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        raise InvalidArgumentError("is read-only", field=field)


def _check_same_device(call: AttentionCall) -> None:
    """Raise InvalidArgumentError unless all tensors are on the device of the query."""
    device = tensors.device_of(call.query)
    for name in ("key", "value", "out", "lse_out"):
        tensor = getattr(call, name)
        if tensor is not None and tensors.device_of(tensor) != device:
            found, expected = ("the CPU" if of < 0 else f"GPU {of}" for of in (tensors.device_of(tensor), device))
            raise InvalidArgumentError(f"is on {found}, query on {expected}", field=name)


def check_attention(info: PoolInfo, call: AttentionCall) -> None:
    """Check shapes, dtypes and options for transports that send neither shapes nor dtypes. The options must be valid
    before anything is written. Raises InvalidArgumentError."""
    num_tokens, query = call.step.num_tokens, tuple(call.query.shape)
    if len(query) != 3 or query[::2] != (num_tokens, info.head_size) or not query[1] or query[1] % info.num_kv_heads:
        expected = f"[{num_tokens}, a multiple of {info.num_kv_heads}, {info.head_size}]"
        raise InvalidArgumentError(f"shape is {list(query)}, must be {expected}", field="query.shape")
    _check_type(info, call.query, "query")
    check_kv(info, (num_tokens,), call.key, call.value)
    call.options.check(query[1], info.block_size)


def check_kv(info: PoolInfo, leading: tuple[int, ...], key: Tensor, value: Tensor) -> None:
    """Check key and value: shape (*leading, num_kv_heads, head_size), the pool's dtype. Raises InvalidArgumentError."""
    expected = (*leading, info.num_kv_heads, info.head_size)
    for tensor, field in ((key, "key"), (value, "value")):
        if tuple(tensor.shape) != expected:
            raise InvalidArgumentError(
                f"shape is {list(tensor.shape)}, must be {list(expected)}", field=f"{field}.shape"
            )
        _check_type(info, tensor, field)


def _check_type(info: PoolInfo, tensor: Tensor, field: str) -> None:
    if tensors.dtype_name(tensor) != info.dtype:
        raise InvalidArgumentError(f"is {tensor.dtype}, must be {info.dtype}", field=f"{field}.data_type")


# ---- who executes them


class SharedMemoryLostError(ConnectionLostError):
    """The daemon has removed the lane or the regions of the session, as it does when the session has had no stream for
    its grace period. The call was not executed. Callers of the session never see this error, unless it occurs again
    after the session has opened them anew."""


TransportName = Literal["inline", "transfer", "region", "lane", "mapped"]


class Transport(ABC):
    """Executes the calls of a session's steps.

    The methods raise the errors of `StepCore.extend`, and SharedMemoryLostError or UnknownRegionError if the daemon has
    removed what the transport shares with it; after `reopen`, the call can be made again.
    """

    name: TransportName
    takes_gpu_tensors = False
    """Whether `attend_prepared` and `write_prepared` accept tensors on the pool's GPU."""
    kernels: MappedKernels | None = None
    """The kernels that this process launches itself. Requests of the session wait for them."""

    def __init__(self, context: Context) -> None:
        self.context = context

    async def attend(self, call: AttentionCall) -> AttentionResult:
        """Execute a call with the tensors as the caller gave them, on any device. Returns `out` and `lse_out` if given,
        else new tensors of the query's type."""
        prepared = call.prepared(self.context.info)
        if prepared.query.__class__ is np.ndarray or self._takes(prepared.query):
            output, lse = await self.attend_prepared(prepared)
        else:
            output, lse = await self._attend_on_host(prepared)
        if call.query.__class__ is np.ndarray and call.out is call.lse_out is None:
            return output, lse
        output = tensors.like(output, call.query) if call.out is None else call.out
        if lse is not None:
            lse = tensors.like(lse, call.query) if call.lse_out is None else call.lse_out
        return output, lse

    async def _attend_on_host(self, call: AttentionCall) -> AttentionResult:
        """Execute a call whose tensors are on a GPU with copies of them in host memory."""
        query, key, value = (tensors.as_array(tensor) for tensor in (call.query, call.key, call.value))
        on_host = call._replace(query=query, key=key, value=value, out=None, lse_out=None)
        output, lse = await self.attend_prepared(on_host)
        result = given(tensors.like(output, call.query), call.out)
        return result, None if lse is None else given(tensors.like(lse, call.query), call.lse_out)

    async def write(self, call: WriteCall) -> None:
        """Write K/V. The tensors are those of the caller, on any device."""
        prepared = call.prepared()
        if not self._takes(prepared.key):
            prepared = prepared._replace(key=tensors.as_array(prepared.key), value=tensors.as_array(prepared.value))
        await self.write_prepared(prepared)

    def _takes(self, tensor: Tensor) -> bool:
        """Return whether the transport accepts a tensor of this device: host memory, or the pool's GPU if it supports
        that."""
        device = tensors.device_of(tensor)
        return device < 0 or (self.takes_gpu_tensors and device == pool_device(self.context.info))

    @abstractmethod
    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        """Execute a prepared call. Returns `out` and `lse_out` if given, else new tensors."""

    @abstractmethod
    async def write_prepared(self, call: WriteCall) -> None:
        """Write the K/V of a prepared call."""

    async def reopen(self) -> None:
        """Open again what the daemon has removed. It removes lanes and regions of a session that has had no stream for
        its grace period."""
        return

    async def close(self) -> None:
        """Release the transport's resources before the session ends."""
        return
