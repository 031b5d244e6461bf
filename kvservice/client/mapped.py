"""The pool itself, mapped: the client works on it in its own process, on tables that the daemon keeps current."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from kvservice import ops
from kvservice.client.requests import build
from kvservice.client.shared_memory import fetch
from kvservice.client.transports import (
    Layer,
    Options,
    RegionTransport,
    StreamTransport,
    Transport,
    TransportName,
    check_shapes,
)
from kvservice.errors import InvalidArgumentError, LayerWrittenError, StaleStepError
from kvservice.pool.layout import PoolLayout
from kvservice.v1 import host_pb2
from kvservice.wire.tensors import Array

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore
    from kvservice.client.step import StepCore

ALIGNMENT = 64


class MappedPool:
    """The pool and the session's tables, in this process. `pool` is what `kvservice.ops` takes; read-only unless it was
    mapped to be written."""

    def __init__(self, layout: PoolLayout, num_blocks: int, pool: mmap.mmap, tables: mmap.mmap, writable: bool) -> None:
        self.layout = layout
        self.writable = writable
        self.pool: Array = np.frombuffer(pool, layout.numpy_dtype, num_blocks * layout.block_bytes // _itemsize(layout))
        self.pool = self.pool.reshape(num_blocks, *layout.block_shape)
        self._tables = tables

    @staticmethod
    async def open(session: SessionCore[Any], writable: bool) -> MappedPool:
        """Raises PoolNotSharedError, and ConnectionLostError where the descriptors are not to be had."""
        info = session.info
        request = build(host_pb2.MapPoolRequest, request_id=session.next_request_id(), writable=writable)
        response = await session.call("map_pool", request)
        descriptors = await fetch(session, response.handover_token, 2)
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            pool = mmap.mmap(descriptors[0], response.pool_bytes, prot=access)
            tables = mmap.mmap(descriptors[1], response.table_bytes, prot=mmap.PROT_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        layout = PoolLayout(info.num_layers, info.num_kv_heads, info.head_size, info.block_size, info.kv_cache_dtype)
        return MappedPool(layout, info.num_blocks, pool, tables, writable)

    def step(self, step: StepCore) -> MappedStep:
        """Its tables. Raises StaleStepError."""
        return MappedStep(self._tables, step, self.layout.block_size)


class MappedStep:
    """A step's lengths, tables and slots as `kvservice.ops` takes them, over the daemon's memory. They are right for as
    long as `check` does not raise."""

    def __init__(self, tables: mmap.mmap, step: StepCore, block_size: int) -> None:
        assert step.mapped is not None, "the step is in the tables"
        slot, offset = step.mapped
        self._step_id = step.step_id
        self._word: Array = np.frombuffer(tables, np.int64, 1, 8 * slot)
        self.check()
        num_seqs = len(step.query_lens)
        max_blocks = -(-int(step.context_lens.max()) // block_size)
        parts = (
            ((step.num_tokens,), np.int64),
            ((num_seqs,), np.int32),
            ((num_seqs,), np.int32),
            ((num_seqs, max_blocks), np.int32),
        )
        arrays = []
        for shape, dtype in parts:
            arrays.append(np.ndarray(shape, dtype, tables, offset))
            offset += -(-arrays[-1].nbytes // ALIGNMENT) * ALIGNMENT
        self.slot_mapping, self.query_lens, self.context_lens, self.block_tables = arrays

    def check(self) -> None:
        """Raise StaleStepError unless the step is live: its blocks may be others' then."""
        if self._word[0] != self._step_id:
            raise StaleStepError(
                f"a newer operation on one of its sequences replaced step {self._step_id}", field="step_id"
            )


class MappedTransport:
    """Attends in this process. What it may not write goes to the daemon, and so does a step that the tables lack."""

    name: TransportName = "mapped"

    def __init__(self, session: SessionCore[Any], pool: MappedPool) -> None:
        self._session = session
        self.pool = pool
        regions = session.info.allow_client_shm
        self._stream: Transport = RegionTransport(session) if regions else StreamTransport(session)

    async def attend(self, layer: Layer) -> tuple[Array, Array | None]:
        step = layer.step
        if step.mapped is None or layer.options.block_sparse is not None:
            return await self._stream.attend(layer)
        mapped = self.pool.step(step)
        self._check(layer)
        if self.pool.writable:
            self._claim(step, layer.number)
        else:
            await self._stream.write(step, layer.number, layer.key, layer.value)
        try:
            result = await self._session.stream.run(self._attend, mapped, layer)
            mapped.check()
        except BaseException as error:
            step.written.discard(layer.number)
            if isinstance(error, InvalidArgumentError):
                mapped.check()  # tables of a step that has ended may be anything
            raise
        await self._commit_if_complete(step)
        return result

    def _check(self, layer: Layer) -> None:
        """What the operations cannot see, and what the daemon says otherwise than they."""
        check_shapes(self._session.info, layer)
        if layer.decode and layer.step.num_tokens != len(layer.step.sequences):
            raise InvalidArgumentError("a sequence has several tokens in this step: use Extend", field="step_id")

    def _claim(self, step: StepCore, number: int) -> None:
        if not 0 <= number < self.pool.layout.num_layers:
            raise InvalidArgumentError(f"{number} is not below {self.pool.layout.num_layers}", field="layer")
        if number in step.written:
            raise LayerWrittenError(f"layer {number} of step {step.step_id} is written", field="layer")
        step.written.add(number)

    def _attend(self, mapped: MappedStep, layer: Layer) -> tuple[Array, Array | None]:
        if self.pool.writable:
            ops.write_kv(self.pool.pool, layer.number, mapped.slot_mapping, layer.key, layer.value)
        result = ops.attention(
            self.pool.pool,
            layer.number,
            layer.query,
            mapped.query_lens,
            mapped.block_tables,
            mapped.context_lens,
            out=layer.out,
            return_lse=True,
            **_as_options(layer.options),
        )
        if layer.lse_out is not None:
            np.copyto(layer.lse_out, result[1])
        lse = layer.lse_out if layer.lse_out is not None else result[1]
        return result[0], lse if layer.return_lse else None

    async def write(self, step: StepCore, number: int | None, key: Array, value: Array) -> None:
        if step.mapped is None or not self.pool.writable:
            await self._stream.write(step, number, key, value)
            return
        mapped = self.pool.step(step)
        layers = range(self.pool.layout.num_layers) if number is None else (number,)
        parts = [(key, value)] if number is not None else list(zip(key, value, strict=True))
        if len(parts) != len(layers):
            raise InvalidArgumentError(f"has {len(parts)} layers, not {len(layers)}", field="key.shape")
        for layer in layers:
            self._claim(step, layer)
        try:
            await self._session.stream.run(self._write, mapped, layers, parts)
            mapped.check()
        except BaseException:
            step.written.difference_update(layers)
            raise
        await self._commit_if_complete(step)

    def _write(self, mapped: MappedStep, layers: Any, parts: list[tuple[Array, Array]]) -> None:
        for layer, (key, value) in zip(layers, parts, strict=True):
            ops.write_kv(self.pool.pool, layer, mapped.slot_mapping, key, value)

    async def _commit_if_complete(self, step: StepCore) -> None:
        if self.pool.writable and len(step.written) == self.pool.layout.num_layers:
            request = build(host_pb2.CommitRequest, request_id=self._session.next_request_id(), step_id=step.step_id)
            await self._session.call("commit", request)

    async def close(self) -> None:
        pass  # with the session


def _as_options(options: Options) -> dict[str, Any]:
    slopes = None if options.alibi_slopes is None else np.array(options.alibi_slopes, np.float32)
    return {
        "scale": options.scale or None,
        "sliding_window": options.sliding_window,
        "logits_soft_cap": options.logits_soft_cap,
        "alibi_slopes": slopes,
    }


def _itemsize(layout: PoolLayout) -> int:
    return layout.numpy_dtype.itemsize
