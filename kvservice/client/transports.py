"""The inline and region transports: tensors travel in messages, or in shared memory that the messages refer to.

A transport passes the tensors of one layer to the daemon and returns the result. The other transports are the lane
(`lane.py`) and the mapped pool (`mapped.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from kvservice.client import tensors
from kvservice.client.batches import token_parts
from kvservice.client.gpu import device_of
from kvservice.client.requests import build, whole
from kvservice.client.shared_memory import Memory, Place
from kvservice.client.tensors import Tensor
from kvservice.client.values import BlockSparse, PoolInfo
from kvservice.errors import InvalidArgumentError, UnknownRegionError
from kvservice.v1 import attention_pb2
from kvservice.wire.tensors import Array, put_tensor, put_type, to_array

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore
    from kvservice.client.step import StepCore

TransportName = Literal["inline", "region", "lane", "mapped"]
# From this size on, tensors are faster in shared memory than in the message; below it, both are equally fast.
STAGED_BYTES = 16 << 10
ALIGNMENT = 256
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Options:
    """Options of the attention scores; see AttentionOptions in step.py. The values are those of the message: 0 and None
    mean off, or the default scale."""

    scale: float = 0.0
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] | None = None
    block_sparse: BlockSparse | None = None

    @staticmethod
    def of(
        scale: float | None,
        sliding_window: int,
        logits_soft_cap: float,
        alibi_slopes: Iterable[float] | None,
        block_sparse: BlockSparse | None,
    ) -> Options:
        """Convert a caller's options. Raises InvalidArgumentError naming the option."""
        off = (
            (type(sliding_window), type(logits_soft_cap)) == (int, float) and not sliding_window and not logits_soft_cap
        )
        if off and scale is None and alibi_slopes is None and block_sparse is None:
            return DEFAULT_OPTIONS
        if scale is not None and np.float32(scale) == 0:
            raise InvalidArgumentError("0 makes all scores equal; None is the default scale", field="options.scale")
        return Options(
            scale or 0.0,
            whole(sliding_window, "options.sliding_window"),
            logits_soft_cap,
            None if alibi_slopes is None else tuple(float(slope) for slope in alibi_slopes) or None,
            block_sparse,
        )

    def check(self, num_heads: int) -> None:
        """Apply the daemon's checks, for transports without messages. Raises InvalidArgumentError naming the option."""
        if not abs(self.scale) <= FLOAT32_MAX:
            raise InvalidArgumentError(f"{self.scale} is not finite", field="options.scale")
        if not 0 <= self.sliding_window < 1 << 31:
            raise InvalidArgumentError(f"{self.sliding_window} is no window", field="options.sliding_window")
        if not 0 <= self.logits_soft_cap <= FLOAT32_MAX:
            raise InvalidArgumentError(f"{self.logits_soft_cap} is no bound", field="options.logits_soft_cap")
        slopes = self.alibi_slopes
        if slopes is not None and len(slopes) != num_heads:
            raise InvalidArgumentError(f"{len(slopes)} slopes for {num_heads} heads", field="options.alibi_slopes")
        if slopes is not None and not all(abs(slope) <= FLOAT32_MAX for slope in slopes):
            raise InvalidArgumentError("not finite", field="options.alibi_slopes")

    def message(self) -> attention_pb2.AttentionOptions:
        return build(
            attention_pb2.AttentionOptions,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            block_sparse=None if self.block_sparse is None else _sparse_message(self.block_sparse),
        )


DEFAULT_OPTIONS = Options()


def _sparse_message(sparse: BlockSparse) -> attention_pb2.BlockSparse:
    fields = {name: whole(value, f"options.block_sparse.{name}") for name, value in asdict(sparse).items()}
    return build(attention_pb2.BlockSparse, **fields)


@dataclass(slots=True, eq=False)
class Layer:
    """The call for one layer of a step: write key and value, then attend.

    query [num_tokens, num_heads, head_size]; key and value [num_tokens, num_kv_heads, head_size]. `out` and `lse_out`
    receive the results; None: new arrays. `number` is the layer's. `timeout_s` is in seconds.
    """

    step: StepCore
    decode: bool
    number: int
    query: Tensor
    key: Tensor
    value: Tensor
    options: Options
    return_lse: bool
    out: Tensor | None
    lse_out: Tensor | None
    timeout_s: float | None

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors are on a GPU; all of them are on the same device."""
        return tensors.is_on_gpu(self.query)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return tuple(self.query.shape[:2])


class Transport(Protocol):
    """A way to pass tensors to the daemon. Its methods raise the errors of `StepCore.extend`."""

    name: TransportName
    takes_gpu_tensors: bool
    """Whether it accepts tensors on the pool's GPU. Other GPU tensors are copied to host memory first, by `attend` and
    `write` below."""

    async def attend(self, layer: Layer) -> tuple[Tensor, Tensor | None]:
        """Execute the call. Returns output and log-sum-exp: `out` and `lse_out` if given, else new arrays."""

    async def attend_in_place(
        self, step: StepCore, decode: bool, number: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, /
    ) -> bool:
        """Try the fast path for a call with `out` and no options, with arguments that are not validated. Returns True
        if the call is done. False: the fast path does not apply or failed, and `attend` executes the call or raises its
        error."""

    async def write(
        self, step: StepCore, number: int | None, key: Tensor, value: Tensor, timeout_s: float | None = None, /
    ) -> None:
        """Write the K/V of one layer, or of all layers (`number` None), without attention."""

    async def close(self) -> None:
        """Release the transport's resources before the session ends."""


async def attend(transport: Transport, layer: Layer) -> tuple[Tensor, Tensor | None]:
    """Execute the call through any transport. Tensors may be on any device. Retries once if the daemon has lost the
    regions."""
    try:
        return await _attend(transport, layer)
    except UnknownRegionError:
        layer.step.session.forget_regions()
        return await _attend(transport, layer)


async def _attend(transport: Transport, layer: Layer) -> tuple[Tensor, Tensor | None]:
    if _takes(transport, layer.step, layer.query):
        return await transport.attend(layer)
    query, key, value = (tensors.as_array(tensor) for tensor in (layer.query, layer.key, layer.value))
    on_host = replace(layer, query=query, key=key, value=value, out=None, lse_out=None)
    output, lse = await transport.attend(on_host)
    result = given(tensors.like(output, layer.query), layer.out)
    return result, None if lse is None else given(tensors.like(lse, layer.query), layer.lse_out)


def _takes(transport: Transport, step: StepCore, tensor: Tensor) -> bool:
    """Return whether the transport accepts a tensor of this device: host memory, or the pool's GPU if it supports
    that."""
    device = tensors.device_of(tensor)
    return device < 0 or (transport.takes_gpu_tensors and device == device_of(step.session.info))


async def write(
    transport: Transport, step: StepCore, number: int | None, key: Tensor, value: Tensor, timeout_s: float | None
) -> None:
    """Write K/V through any transport. Tensors may be on any device. Retries once if the daemon has lost the
    regions."""
    if not _takes(transport, step, key):
        key, value = tensors.as_array(key), tensors.as_array(value)
    try:
        await transport.write(step, number, key, value, timeout_s)
    except UnknownRegionError:
        step.session.forget_regions()
        await transport.write(step, number, key, value, timeout_s)


class StreamTransport:
    """The inline transport: messages on the session's stream carry the tensors, except those already in a region."""

    name: TransportName = "inline"
    takes_gpu_tensors = False

    def __init__(self, session: SessionCore[Any]) -> None:
        self._session = session

    async def attend(self, layer: Layer) -> tuple[Array, Array | None]:
        parts = self._parts(layer.step, layer.query, layer.key, layer.value)
        if len(parts) == 1:
            return await self._attend(layer)
        output = np.empty_like(layer.query) if layer.out is None else layer.out
        lse = layer.lse_out
        if layer.return_lse and lse is None:
            lse = np.empty(layer.lse_shape, np.float32)
        stream = self._session.stream
        deadline = stream.deadline(layer.timeout_s)
        for first, stop in parts:
            stream.check(deadline)
            part = replace(
                layer,
                query=layer.query[first:stop],
                key=layer.key[first:stop],
                value=layer.value[first:stop],
                out=output[first:stop],
                lse_out=None if lse is None else lse[first:stop],
                timeout_s=stream.left_s(deadline, math.inf),
            )
            await self._attend(part, first)
        return output, lse

    async def _attend(self, layer: Layer, first_token: int | None = None) -> tuple[Array, Array | None]:
        """Send one layer, or the part of it that starts at `first_token`."""
        request = self._request(layer)
        if first_token is not None:
            request.first_token, request.num_tokens = first_token, len(layer.query)
        self._put(request, layer.query, layer.key, layer.value)
        self._name(request.output_place, layer.out)
        self._name(request.lse_place, layer.lse_out)
        response = await self._session.call("decode" if layer.decode else "extend", request, layer.timeout_s)
        output = self._take(response.output, layer.out, "output")
        return output, self._take(response.lse, layer.lse_out, "lse") if layer.return_lse else None

    def _parts(self, step: StepCore, *arrays: Array) -> list[tuple[int, int]]:
        """Split the step's tokens into parts (first, stop) that fit into a message in both directions. With
        batch_invariant there is one part, because the split would affect the outputs."""
        whole_step = [(0, step.num_tokens)]
        if self._session.info.batch_invariant or any(array.shape[:1] != (step.num_tokens,) for array in arrays):
            return whole_step
        sizes = [array.nbytes // step.num_tokens for array in arrays]
        # The output is as large as the query; the log-sum-exp adds at most an eighth.
        return token_parts(step.num_tokens, max(sum(sizes), sizes[0] * 9 // 8), self._session.info)

    def _take(self, message: Any, wanted: Array | None, field: str) -> Array:
        """Return a result of the response, in `wanted` if given."""
        if wanted is None:
            return tensors.from_message(message, field)
        if not message.HasField("shared_memory"):
            np.copyto(wanted, to_array(message, field))
        return wanted

    def _request(self, layer: Layer) -> attention_pb2.AttendRequest:
        return build(
            attention_pb2.AttendRequest,
            step_id=layer.step.step_id,
            layer=layer.number,
            options=layer.options.message(),
            return_lse=layer.return_lse,
        )

    def _put(self, request: Any, *arrays: Array) -> None:
        """Set the tensor fields of a request to the bytes of each array, or to its place in a region."""
        num_bytes = 0
        for name, array in zip(("query", "key", "value")[-len(arrays) :], arrays, strict=True):
            message = getattr(request, name)
            place = self._session.find_place(array)
            # The daemon's limit includes tensors in regions.
            num_bytes += array.nbytes
            self._session.check_size(num_bytes, "query, key, value")
            if place is None:
                put_tensor(array, message)
            else:
                put_type(array, message)
                message.shared_memory.CopyFrom(place.message())

    def _name(self, message: Any, array: Array | None) -> None:
        """Set the place of a result, if `array` lies in a region."""
        place = None if array is None else self._session.find_place(array)
        if place is not None:
            message.CopyFrom(place.message())

    async def attend_in_place(self, *_: object) -> bool:
        return False

    async def write(
        self, step: StepCore, number: int | None, key: Array, value: Array, timeout_s: float | None = None
    ) -> None:
        stream = self._session.stream
        deadline = stream.deadline(timeout_s)
        for layer, (first, stop), arrays in self._writes(step, number, key, value):
            request = build(attention_pb2.WriteRequest, step_id=step.step_id, layer=layer)
            if stop - first < step.num_tokens:
                request.first_token, request.num_tokens = first, stop - first
                arrays = tuple(array[first:stop] for array in arrays)
            self._put(request, *arrays)
            stream.check(deadline)
            await self._session.call("write", request, stream.left_s(deadline, math.inf))

    def _writes(
        self, step: StepCore, number: int | None, key: Array, value: Array
    ) -> Iterator[tuple[int | None, tuple[int, int], tuple[Array, ...]]]:
        """Yield layer, tokens (first, stop) and tensors of each call. There is one call for all layers if they fit into
        a message."""
        if number is not None:
            yield from ((number, part, (key, value)) for part in self._parts(step, key, value))
            return
        num_layers = self._session.info.num_layers
        regular = {key.shape[:2], value.shape[:2]} == {(num_layers, step.num_tokens)}
        if self._session.fits(key.nbytes + value.nbytes) or not regular:
            yield None, (0, step.num_tokens), (key, value)
            return
        for layer in range(num_layers):
            yield from self._writes(step, layer, key[layer], value[layer])

    async def close(self) -> None:
        pass


class Staging:
    """A staging region for tensors that are not in a region. One call uses it at a time. It grows to the size of the
    largest call. `device` as in `create_region`."""

    def __init__(self, session: SessionCore[Any], device: int | None = None) -> None:
        self._session = session
        self._device = device
        self._memory: Memory | None = None
        self._used = 0

    async def reserve(self, num_bytes: int) -> None:
        """Start a call that stages `num_bytes` in total, including `ALIGNMENT` bytes of padding for each tensor."""
        self._used = 0
        if self._memory is not None and not self._session.has_region(self._memory):
            self._memory = None  # the session's regions were removed
        if self._memory is None or self._memory.num_bytes < num_bytes:
            if self._memory is not None:
                await self._session.unregister_region(self._memory)
            self._memory = None
            size = max(1 << 20, 1 << (num_bytes - 1).bit_length())
            self._memory = await self._session.create_region(size, device=self._device)

    def place(self, shape: tuple[int, ...], dtype: str) -> tuple[Tensor, Place]:
        """Reserve room for an array. Returns the array and its place."""
        assert self._memory is not None, "room was reserved"
        array = self._memory.array(shape, dtype, self._used)
        place = Place(self._memory, self._used, array.nbytes)
        self._used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return array, place

    def put(self, tensor: Tensor) -> tuple[Tensor, Place]:
        """Copy a tensor to the region. Returns the copy and its place."""
        copy, place = self.place(tuple(tensor.shape), tensors.dtype_name(tensor))
        tensors.copy(copy, tensor)
        return copy, place


def staged_bytes(layer: Layer) -> int:
    """Return the size in bytes that a call needs in the staging region if none of its tensors is in a region."""
    sizes: list[int] = [layer.query.nbytes] * 2 + [
        layer.key.nbytes,
        layer.value.nbytes,
        4 * math.prod(layer.lse_shape),
    ]
    return sum(sizes) + ALIGNMENT * len(sizes)


class RegionTransport(StreamTransport):
    """The region transport: messages refer to tensors in regions. Other tensors are copied to a staging region."""

    name: TransportName = "region"

    def __init__(self, session: SessionCore[Any]) -> None:
        super().__init__(session)
        self._staging = Staging(session)
        self._lock = session.stream.lock()

    async def attend(self, layer: Layer) -> tuple[Array, Array | None]:
        if layer.query.nbytes + layer.key.nbytes + layer.value.nbytes < STAGED_BYTES:
            return await super().attend(layer)
        async with self._lock:
            await self._staging.reserve(staged_bytes(layer))
            out = self._result(layer.out, layer.query.shape, layer.query.dtype.name)
            lse_out = self._result(layer.lse_out, layer.lse_shape, "float32") if layer.return_lse else None
            query, key, value = (self._staged(array) for array in (layer.query, layer.key, layer.value))
            staged = replace(layer, query=query, key=key, value=value, out=out, lse_out=lse_out)
            await super().attend(staged)
            return given(out, layer.out), None if lse_out is None else given(lse_out, layer.lse_out)

    def _result(self, wanted: Array | None, shape: tuple[int, ...], dtype: str) -> Array:
        """Return the array for a result: the caller's, if that is in a region, else one in the staging region."""
        if wanted is not None and self._session.find_place(wanted) is not None:
            return wanted
        array: Array = self._staging.place(shape, dtype)[0]
        return array

    async def write(
        self, step: StepCore, number: int | None, key: Array, value: Array, timeout_s: float | None = None
    ) -> None:
        if key.nbytes + value.nbytes < STAGED_BYTES:
            await super().write(step, number, key, value, timeout_s)
            return
        async with self._lock:
            await self._staging.reserve(key.nbytes + value.nbytes + 2 * ALIGNMENT)
            await super().write(step, number, self._staged(key), self._staged(value), timeout_s)

    def _staged(self, array: Array) -> Array:
        return array if self._session.find_place(array) is not None else self._staging.put(array)[0]


def given(result: Tensor, wanted: Tensor | None) -> Tensor:
    """Return a result to the caller: copied to `wanted` if given, else as a new array."""
    if wanted is None:
        return tensors.copy_of(result)
    if result is not wanted:
        tensors.copy(wanted, result)
    return wanted


def check_out(tensor: Tensor, shape: tuple[int, ...], dtype: str, field: str) -> None:
    """Raise InvalidArgumentError unless a caller's tensor fits a result: shape, dtype, writable."""
    if tensor.shape != shape or tensors.dtype_name(tensor) != dtype:
        raise InvalidArgumentError(
            f"is {tensor.dtype} of shape {list(tensor.shape)}, must be {dtype} of {list(shape)}", field=field
        )
    if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        raise InvalidArgumentError("is read-only", field=field)


def check_same_device(layer: Layer) -> None:
    """Raise InvalidArgumentError unless all tensors are on the device of the query."""
    device = tensors.device_of(layer.query)
    for name in ("key", "value", "out", "lse_out"):
        tensor = getattr(layer, name)
        if tensor is not None and tensors.device_of(tensor) != device:
            found, expected = ("the CPU" if of < 0 else f"GPU {of}" for of in (tensors.device_of(tensor), device))
            raise InvalidArgumentError(f"is on {found}, query on {expected}", field=name)


def check_layer(info: PoolInfo, layer: Layer) -> None:
    """Check shapes, dtypes and options for transports that send neither shapes nor dtypes. The options must be valid
    before anything is written. Raises InvalidArgumentError."""
    num_tokens, query = layer.step.num_tokens, tuple(layer.query.shape)
    if len(query) != 3 or query[::2] != (num_tokens, info.head_size) or not query[1] or query[1] % info.num_kv_heads:
        expected = f"[{num_tokens}, a multiple of {info.num_kv_heads}, {info.head_size}]"
        raise InvalidArgumentError(f"shape is {list(query)}, must be {expected}", field="query.shape")
    _check_type(info, layer.query, "query")
    check_kv(info, (num_tokens,), layer.key, layer.value)
    layer.options.check(query[1])


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
