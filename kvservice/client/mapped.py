"""The mapped transport: the client maps the pool and runs the kernels in its own process. The daemon maintains the
block tables."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from kvservice import ops
from kvservice.client.gpu import GpuKernels, device_of, extension
from kvservice.client.requests import build
from kvservice.client.shared_memory import fetch, introduce_once
from kvservice.client.tensors import Tensor, is_on_gpu
from kvservice.client.transports import (
    Layer,
    Options,
    Transport,
    TransportName,
    attend,
    check_kv,
    check_layer,
    write,
)
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LayerWrittenError, StaleStepError
from kvservice.pool.layout import DTYPES, PoolLayout
from kvservice.v1 import host_pb2
from kvservice.wire.tensors import Array

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore
    from kvservice.client.step import StepCore
    from kvservice.client.values import PoolInfo

T = TypeVar("T")
ALIGNMENT = 64


class OpenStep(Protocol):
    """A step of the sync or async API."""

    step_id: int
    num_tokens: int
    query_lens: Array
    context_lens: Array
    mapped: tuple[int, int] | None
    """Slot number and byte offset in the session's tables; None: the step is not in them."""


class MappedPool:
    """The pool and the session's tables, mapped into this process.

    `pool` is the array for `kvservice.ops`, or for a GPU the torch tensor for `kvservice.ops.torch_ops`. It is
    read-only unless it was mapped as writable; a GPU does not enforce this.

    Steps that the session opens after the mapping can be processed here. A step that is written here must be committed
    (`session.commit`); otherwise its blocks do not count as computed. On a GPU, synchronize before a call that ends the
    step, because its blocks may be reallocated then.
    """

    def __init__(self, layout: PoolLayout, kernels: Kernels, tables: mmap.mmap, writable: bool) -> None:
        self.layout = layout
        self.writable = writable
        self.kernels = kernels
        self.pool = kernels.pool
        self._tables = tables
        # The tables of the last step, because the layers of a step follow each other.
        self._last: MappedStep | None = None

    @staticmethod
    async def open(session: SessionCore[Any], writable: bool, timeout_s: float | None = None) -> MappedPool:
        """Map the pool. Raises PoolNotSharedError, ConnectionLostError if the descriptors cannot be fetched, and for a
        pool on a GPU FailedPreconditionError."""
        info = session.info
        if (device := device_of(info)) is not None:
            extension()
        request = build(host_pb2.MapPoolRequest, request_id=session.next_request_id(), writable=writable)
        await introduce_once(session)
        response = await session.call("map_pool", request, timeout_s)
        layout = PoolLayout(info.num_layers, info.num_kv_heads, info.head_size, info.block_size, info.kv_cache_dtype)
        shape = (info.num_blocks, *layout.block_shape)
        open_kernels = HostKernels.open if device is None else GpuKernels.open
        descriptors = await fetch(session, response.handover_token, 2)
        try:
            kernels = open_kernels(info, shape, descriptors[0], response.pool_bytes, writable)
            tables = mmap.mmap(descriptors[1], response.table_bytes, prot=mmap.PROT_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return MappedPool(layout, kernels, tables, writable)

    def step(self, step: OpenStep) -> MappedStep:
        """Return the tables of a step. Raises StaleStepError, and FailedPreconditionError if the step is not in the
        tables."""
        if self._last is None or self._last.step_id != step.step_id:
            self._last = MappedStep(self._tables, step, self.layout.block_size)
        self._last.check()
        return self._last


class MappedStep:
    """A step's lengths, block tables and slot mapping as `kvservice.ops` takes them: slot_mapping int64[num_tokens],
    query_lens and context_lens int32[num_seqs], block_tables int32[num_seqs, max_blocks].

    They are views of the daemon's memory. They are valid as long as `check` does not raise: call it before they are
    used, and again when the operation that used them is done.
    """

    def __init__(self, tables: mmap.mmap, step: OpenStep, block_size: int) -> None:
        if step.mapped is None:
            raise FailedPreconditionError(
                f"step {step.step_id} is not in the tables: they were full, or not mapped yet"
            )
        slot, begin = step.mapped
        self.step_id = step.step_id
        self.max_query_len = int(step.query_lens.max())
        self._word: Array = np.frombuffer(tables, np.int64, 1, 8 * slot)
        num_seqs = len(step.query_lens)
        max_blocks = -(-int(step.context_lens.max()) // block_size)
        parts = (
            ((step.num_tokens,), np.int64),
            ((num_seqs,), np.int32),
            ((num_seqs,), np.int32),
            ((num_seqs, max_blocks), np.int32),
        )
        offset = begin
        # The arrays with their byte offsets from the start of `bytes`.
        self.arrays_and_offsets: list[tuple[Array, int]] = []
        for shape, dtype in parts:
            array: Array = np.ndarray(shape, dtype, tables, offset)
            self.arrays_and_offsets.append((array, offset - begin))
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self.bytes: Array = np.frombuffer(tables, np.uint8, offset - begin, begin)
        arrays = (array for array, _ in self.arrays_and_offsets)
        self.slot_mapping, self.query_lens, self.context_lens, self.block_tables = arrays

    def check(self) -> None:
        """Raise StaleStepError if the step is over, since its blocks may have been reallocated."""
        if self._word[0] != self.step_id:
            raise StaleStepError(
                f"a newer operation on one of its sequences replaced step {self.step_id}", field="step_id"
            )


class Kernels(Protocol):
    """The kernels on a mapped pool."""

    takes_gpu_tensors: bool
    pool: Tensor

    def write(self, mapped: MappedStep, layer: int, key: Tensor, value: Tensor) -> None: ...

    def attend(self, mapped: MappedStep, layer: Layer, options: dict[str, Any]) -> tuple[Tensor, Tensor]: ...

    def wait(self) -> None:
        """Wait until all launched work is done."""


class HostKernels:
    """See Kernels. The host kernels are synchronous."""

    takes_gpu_tensors = False

    def __init__(self, info: PoolInfo, pool: Array) -> None:
        self.pool = pool
        self._batch_invariant = info.batch_invariant

    @staticmethod
    def open(info: PoolInfo, shape: tuple[int, ...], descriptor: int, num_bytes: int, writable: bool) -> HostKernels:
        """Map the pool from a file descriptor of its memory."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = mmap.mmap(descriptor, num_bytes, prot=access)
        return HostKernels(info, np.ndarray(shape, DTYPES[info.kv_cache_dtype], memory))

    def write(self, mapped: MappedStep, layer: int, key: Array, value: Array) -> None:
        ops.write_kv(self.pool, layer, mapped.slot_mapping, key, value)

    def attend(self, mapped: MappedStep, layer: Layer, options: dict[str, Any]) -> tuple[Array, Array]:
        tables = mapped.query_lens, mapped.block_tables, mapped.context_lens
        output, lse = ops.attention(
            self.pool,
            layer.number,
            layer.query,
            *tables,
            **options,
            batch_invariant=self._batch_invariant,
            out=layer.out,
            return_lse=True,
        )
        if layer.lse_out is None:
            return output, lse
        np.copyto(layer.lse_out, lse)
        return output, layer.lse_out

    def wait(self) -> None:
        pass


class MappedTransport:
    """The mapped transport: attention runs in this process. Calls go through the transport `rest` to the daemon if the
    kernels here do not support them or the step is not in the tables; so do the writes if the pool is read-only."""

    name: TransportName = "mapped"

    def __init__(self, session: SessionCore[Any], pool: MappedPool, rest: Transport) -> None:
        self._session = session
        self.pool = pool
        self._kernels = pool.kernels
        self.takes_gpu_tensors = self._kernels.takes_gpu_tensors
        self.rest = rest
        # The scales of an FP8 pool are known only to the daemon.
        self._same_dtype = session.info.kv_cache_dtype == session.info.dtype
        if self.takes_gpu_tensors:
            self._call = session.call
            session.call = self._call_after_kernels

    async def _call_after_kernels(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        """Synchronize before each call, because a call may end a step. The daemon does not wait for streams of other
        processes: it would hang forever if such a process were killed."""
        await self._session.stream.run(self._kernels.wait)
        return await self._call(name, request, timeout_s)

    async def attend(self, layer: Layer) -> tuple[Tensor, Tensor | None]:
        step = layer.step
        if step.mapped is None or not self._can_attend(layer):
            return await attend(self.rest, layer)
        mapped = self.pool.step(step)
        self._check(layer)
        if self.pool.writable:
            self._claim(step, (layer.number,))
        else:
            await write(self.rest, step, layer.number, layer.key, layer.value, layer.timeout_s)
        try:
            result = await self._run(self._attend, mapped, layer)
            mapped.check()
        except BaseException as error:
            step.written.discard(layer.number)
            if isinstance(error, InvalidArgumentError):
                mapped.check()  # the tables of a step that has ended are invalid and can cause this error
            raise
        await self._commit_if_complete(step, layer.timeout_s)
        return result

    async def attend_in_place(
        self, step: StepCore, decode: bool, number: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> bool:
        """See Transport."""
        kernels = self._kernels
        if not (isinstance(kernels, GpuKernels) and self.pool.writable and self._same_dtype):
            return False
        if not is_on_gpu(query):
            return await self.rest.attend_in_place(step, decode, number, query, key, value, out)
        if step.mapped is None or type(number) is not int or not 0 <= number < self.pool.layout.num_layers:
            return False
        if number in step.written or (decode and step.num_tokens != len(step.sequences)):
            return False
        if not kernels.fits(step.num_tokens, query, key, value, out):
            return False
        mapped = self.pool.step(step)
        kernels.write_and_attend(mapped, number, query, key, value, out)
        mapped.check()
        step.written.add(number)
        await self._commit_if_complete(step, None)
        return True

    def _can_attend(self, layer: Layer) -> bool:
        """Return whether the kernels here support the call: device of the tensors, dtype of the pool, options."""
        if layer.on_gpu != self.takes_gpu_tensors or not self._same_dtype:
            return False
        return self.takes_gpu_tensors or layer.options.block_sparse is None

    def _check(self, layer: Layer) -> None:
        """Check what the kernels do not check, and what the daemon reports with a different error."""
        check_layer(self._session.info, layer)
        if layer.decode and layer.step.num_tokens != len(layer.step.sequences):
            raise InvalidArgumentError("a sequence has several tokens in this step: use Extend", field="step_id")

    def _claim(self, step: StepCore, layers: Sequence[int]) -> None:
        for number in layers:
            if not 0 <= number < self.pool.layout.num_layers:
                raise InvalidArgumentError(f"{number} is not below {self.pool.layout.num_layers}", field="layer")
            if number in step.written:
                raise LayerWrittenError(f"layer {number} of step {step.step_id} is written", field="layer")
        step.written.update(layers)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work on the pool: in a thread for host kernels. GPU kernels are only launched, which is fast and has to
        use the caller's current stream."""
        if self.takes_gpu_tensors:
            return work(*arguments)
        return await self._session.stream.run(work, *arguments)

    def _attend(self, mapped: MappedStep, layer: Layer) -> tuple[Tensor, Tensor | None]:
        if self.pool.writable:
            self._kernels.write(mapped, layer.number, layer.key, layer.value)
        output, lse = self._kernels.attend(mapped, layer, _as_options(layer.options))
        return output, lse if layer.return_lse else None

    async def write(
        self, step: StepCore, number: int | None, key: Tensor, value: Tensor, timeout_s: float | None = None
    ) -> None:
        if step.mapped is None or not self.pool.writable or is_on_gpu(key) != self.takes_gpu_tensors:
            await write(self.rest, step, number, key, value, timeout_s)
            return
        mapped = self.pool.step(step)
        layers = range(self.pool.layout.num_layers) if number is None else (number,)
        leading = (len(layers), step.num_tokens) if number is None else (step.num_tokens,)
        check_kv(self._session.info, leading, key, value)
        parts = list(zip(key, value, strict=True)) if number is None else [(key, value)]
        self._claim(step, layers)
        try:
            await self._run(self._write, mapped, layers, parts)
            mapped.check()
        except BaseException:
            step.written.difference_update(layers)
            raise
        await self._commit_if_complete(step, timeout_s)

    def _write(self, mapped: MappedStep, layers: Any, parts: list[tuple[Tensor, Tensor]]) -> None:
        for layer, (key, value) in zip(layers, parts, strict=True):
            self._kernels.write(mapped, layer, key, value)

    async def _commit_if_complete(self, step: StepCore, timeout_s: float | None) -> None:
        if self.pool.writable and len(step.written) == self.pool.layout.num_layers:
            await self._session.commit(step, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._session.stream.run(self._kernels.wait)
        if self.takes_gpu_tensors:
            self._session.call = self._call  # otherwise the session would keep the mapping alive


def _as_options(options: Options) -> dict[str, Any]:
    slopes = None if options.alibi_slopes is None else np.array(options.alibi_slopes, np.float32)
    return {
        "scale": options.scale or None,
        "sliding_window": options.sliding_window,
        "logits_soft_cap": options.logits_soft_cap,
        "alibi_slopes": slopes,
    }
