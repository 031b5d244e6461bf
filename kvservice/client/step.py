"""A step's operations, shared by the sync and async API; the calls of a session; and the transport that
executes them. Lost shared memory is opened again here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from kvservice.attention_options import DEFAULT_OPTIONS, AttentionOptions, BlockSparse
from kvservice.client import tensors
from kvservice.client.mapped import MappedKernels
from kvservice.client.messages import flag, listed, number, whole
from kvservice.client.regions import ALIGNMENT
from kvservice.client.remote import Context
from kvservice.client.tensors import Tensor, pool_device
from kvservice.client.values import PoolInfo, Sequence, StepInfo
from kvservice.errors import ConnectionLostError, FailedPreconditionError, InvalidArgumentError, UnknownRegionError
from kvservice.pool.layout import TENSOR_DTYPES

# ---- the operations of a step


class AttentionArguments(TypedDict, total=False):
    """Options of the attention scores and of the results.

    `scale` to `block_sparse`: see AttentionOptions; `alibi_slopes` has one slope for each query head. `return_lse`:
    return the log-sum-exp too. `out`, `lse_out`: arrays with the shapes of the output and the log-sum-exp, which are
    filled and returned instead of new ones. `timeout_s`: see SessionCore.
    """

    scale: float | None
    sliding_window: int
    logits_soft_cap: float
    alibi_slopes: Iterable[float] | None
    block_sparse: BlockSparse | None
    return_lse: bool
    out: Tensor | None
    lse_out: Tensor | None
    timeout_s: float | None


class OpenStep:
    """A step that the daemon has opened. The faces of both APIs add its calls."""

    def __init__(self, calls: SessionCalls, sequences: tuple[Sequence, ...], info: StepInfo) -> None:
        self._calls = calls
        self.sequences = sequences
        self.info = info
        self.step_id = info.step_id
        self.query_lens = info.query_lens
        self.context_lens = info.context_lens
        self.num_tokens = info.num_tokens
        self.cow_copies = info.cow_copies
        self.mapped = info.mapped

    def _attend(
        self,
        decode: bool,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        alibi_slopes: Iterable[float] | None = None,
        block_sparse: BlockSparse | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Awaitable[Any]:
        options = attention_options(scale, sliding_window, logits_soft_cap, alibi_slopes, block_sparse)
        deadline = self._calls.context.connection.deadline(timeout_s)
        lse = return_lse is not False and flag(return_lse, "return_lse")
        call = AttentionCall(self.info, decode, layer, query, key, value, options, lse, out, lse_out, deadline)
        return self._calls.attend(call)


class StepCore(OpenStep):
    """One engine iteration over a batch, with one call for each layer.

    Token j of sequence i is at position context_lens[i] - query_lens[i] + j; both are int32[num_seqs]. Tensors are
    ragged: they hold the tokens of sequence after sequence, without padding.
    """

    async def decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionArguments]
    ) -> Any:
        """`extend` for steps with one token per sequence. Raises InvalidArgumentError for other steps."""
        return await self._attend(True, layer, query, key, value, **options)

    async def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionArguments]
    ) -> Any:
        """Write the K/V of the step's tokens for one layer, then compute causal attention over each sequence.

        query is `[num_tokens, num_heads, head_size]`, key and value are `[num_tokens, num_kv_heads, head_size]`, NumPy
        or torch, in the pool's dtype; options as in AttentionArguments. Returns the output with the shape of query, or
        with `return_lse` (output, log-sum-exp float32 `[num_tokens, num_heads]`). Call it once for each layer of a
        step. Raises KVServiceError.
        """
        return await self._attend(False, layer, query, key, value, **options)

    async def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionArguments]
    ) -> Any:
        """`decode` if every sequence has one token, else `extend`."""
        return await self._attend(self.num_tokens == len(self.sequences), layer, query, key, value, **options)

    async def write(
        self, key: Tensor, value: Tensor, layer: int | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Write the step's K/V without attention. key and value are `[num_tokens, num_kv_heads, head_size]` for one
        layer, or `[num_layers, num_tokens, num_kv_heads, head_size]` for all layers (`layer` None)."""
        await self._calls.write(
            WriteCall(self.info, layer, key, value, self._calls.context.connection.deadline(timeout_s))
        )


def attention_options(
    scale: float | None,
    sliding_window: int,
    logits_soft_cap: float,
    alibi_slopes: Iterable[float] | None,
    block_sparse: BlockSparse | None,
) -> AttentionOptions:
    """Convert a caller's options. Raises InvalidArgumentError naming the option."""
    off = (type(sliding_window), type(logits_soft_cap)) == (int, float) and not sliding_window and not logits_soft_cap
    if off and scale is None and alibi_slopes is None and block_sparse is None:
        return DEFAULT_OPTIONS
    if block_sparse is not None and not isinstance(block_sparse, BlockSparse):
        raise InvalidArgumentError(f"is {type(block_sparse).__name__}, not a BlockSparse", field="options.block_sparse")
    factor = None if scale is None else number(scale, "options.scale")
    cap, window = number(logits_soft_cap, "options.logits_soft_cap"), whole(sliding_window, "options.sliding_window")
    slopes_field = "options.alibi_slopes"
    slopes = [
        number(slope, slopes_field) for slope in listed(() if alibi_slopes is None else alibi_slopes, slopes_field)
    ]
    with np.errstate(over="ignore"):  # numbers that become infinite are refused
        if factor is not None and np.float32(factor) == 0:
            raise InvalidArgumentError("0 makes all scores equal; None is the default scale", field="options.scale")
        slopes_array = np.array(slopes, np.float32) if slopes else None
    return AttentionOptions(factor, window, cap, slopes_array, block_sparse)


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


# ---- the calls of a session

# The daemon has removed what a session shares with it. The call was not executed.
_LOST = (SharedMemoryLostError, UnknownRegionError)


class SessionCalls:
    """The calls of one session and its steps."""

    def __init__(self, context: Context, transport: Transport) -> None:
        self.context = context
        self.transport = transport
        # The number of restarts of the daemon when the shared memory was opened, and how often it was opened again.
        self._num_restarts = context.connection.num_restarts
        self._num_opened = 0
        self._reopening = context.connection.lock()
        if transport.kernels is not None:
            context.connection.kernels.add(transport.kernels)

    async def ready(self, deadline: float | None = None) -> None:
        """Prepare a call that uses shared memory: wait for the connection, and open again what a new process of the
        daemon does not share yet. A mapped pool must not be written meanwhile: the process that comes may give the
        blocks of lost sequences to others."""
        connection = self.context.connection
        connection.process.check()
        if not connection.connected:
            await connection.ready(deadline)
        if self._num_restarts != connection.num_restarts:
            await self._reopen(self._num_opened)

    async def attend(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Execute a call with the session's transport; see Transport. Returns the output, or with `return_lse` output
        and log-sum-exp."""
        if call.step.ahead:
            raise _has_no_layers(call.step)
        await self.ready(call.deadline)
        opened = self._num_opened
        try:
            output, lse = await self.transport.attend(call)
        except _LOST:
            await self._reopen(opened)
            output, lse = await self.transport.attend(call)
        return output if lse is None else (output, lse)

    async def write(self, call: WriteCall) -> None:
        """Execute a call with the session's transport; see Transport."""
        if call.step.ahead:
            raise _has_no_layers(call.step)
        await self.ready(call.deadline)
        opened = self._num_opened
        try:
            await self.transport.write(call)
        except _LOST:
            await self._reopen(opened)
            await self.transport.write(call)

    async def _reopen(self, opened: int) -> None:
        """Open the shared memory again, unless another caller has done that since it was opened for the `opened`-th
        time."""
        connection = self.context.connection
        async with self._reopening:
            if self._num_opened != opened:
                return
            num_restarts = connection.num_restarts
            self.context.regions.forget()
            await connection.drain()
            await connection.with_one_process(self.transport.reopen)
            self._num_restarts = num_restarts
            self._num_opened += 1

    async def release(self, rest: Transport) -> None:
        """Release the memory that the session shares with the daemon, so that the system can reclaim it when the
        session ends. `rest` executes calls from now on. Does nothing in a forked process."""
        if not self.context.connection.process.is_here:
            return
        await self.context.connection.drain()
        await self.transport.close()
        self.context.remote.close()
        self.transport = rest
        self.context.regions.forget()


def _has_no_layers(step: StepInfo) -> FailedPreconditionError:
    """Return the error for a step ahead, before a transport writes any of it."""
    return FailedPreconditionError(
        f"step {step.step_id} is ahead: write it in the mapped pool, and call commit_ahead", field="step_id"
    )
