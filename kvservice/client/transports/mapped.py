"""The mapped transport: the client maps the pool and runs the kernels in its own process. The daemon maintains the
block tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvservice.client.mapped import GpuKernels, MappedPool, MappedStep
from kvservice.client.messages import build
from kvservice.client.remote import Context
from kvservice.client.step import (
    AttentionCall,
    AttentionResult,
    Transport,
    TransportName,
    WriteCall,
    check_attention,
    check_kv,
)
from kvservice.client.tensors import Tensor, is_on_gpu
from kvservice.client.values import StepInfo
from kvservice.errors import InvalidArgumentError, LayerWrittenError, PoolNotSharedError
from kvservice.v1 import host_pb2

T = TypeVar("T")


class MappedTransport(Transport):
    """See Transport. Calls go through the transport `rest` to the daemon if the kernels here do not support them or the
    step is not in the tables; so do the writes if the pool is read-only."""

    name: TransportName = "mapped"

    def __init__(self, context: Context, pool: MappedPool, rest: Transport) -> None:
        super().__init__(context)
        self.rest = rest
        # The scales of an FP8 pool are known only to the daemon.
        self._same_dtype = context.info.kv_cache_dtype == context.info.dtype
        # The layers that were written here in steps of an earlier process of the daemon, by step id. If that process
        # handed the steps over to the next one, the other layers go to the daemon; the first of them reports these.
        self._begun: dict[int, set[int]] = {}
        self._use(pool)

    def _use(self, pool: MappedPool) -> None:
        self.pool = pool
        self.kernels = self._kernels = pool.kernels
        self.takes_gpu_tensors = self._kernels.takes_gpu_tensors
        # The kernels that execute plain calls in place.
        may_write = pool.writable and self._same_dtype
        self._in_place = self._kernels if may_write and isinstance(self._kernels, GpuKernels) else None

    async def attend(self, call: AttentionCall) -> AttentionResult:
        if self._in_place is None or not call.is_plain:
            return await super().attend(call)
        if not is_on_gpu(call.query):
            return await self._attend_elsewhere(call)
        tables = self._tables_in_place(self._in_place, call)
        if tables is None:
            return await super().attend(call)
        self._in_place.write_and_attend(tables, call.layer, call.query, call.key, call.value, call.out)
        await self._check_after(tables, call.deadline)
        tables.written.add(call.layer)
        await self._commit_if_complete(tables, call.deadline)
        return call.out, None

    def _tables_in_place(self, kernels: GpuKernels, call: AttentionCall) -> MappedStep | None:
        """Return the tables of the step if the kernels can execute the plain call as it is, else None."""
        step = call.step
        if not self._maps(step) or type(call.layer) is not int or not 0 <= call.layer < self.pool.layout.num_layers:
            return None
        if call.decode and step.num_tokens != step.num_sequences:
            return None
        if not kernels.fits(step.num_tokens, call.query, call.key, call.value, call.out):
            return None
        tables = self.pool.tables(step)
        return None if call.layer in tables.written else tables

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        step = call.step
        if not self._maps(step) or not self._can_attend(call):
            return await self._attend_elsewhere(call)
        tables = self.pool.tables(step)
        self._check(call)
        if self.pool.writable:
            self._claim(tables, (call.layer,))
        else:
            await self._write_elsewhere(WriteCall(step, call.layer, call.key, call.value, call.deadline))
        try:
            result = await self._run(self._attend, tables, call)
            await self._check_after(tables, call.deadline)
        except BaseException as error:
            tables.written.discard(call.layer)
            if isinstance(error, InvalidArgumentError):
                tables.check()  # the tables of a step that has ended are invalid and can cause this error
            raise
        await self._commit_if_complete(tables, call.deadline)
        return result

    def _maps(self, step: StepInfo) -> bool:
        """Return whether a step is in the tables, those of this process of the daemon."""
        return step.mapped is not None and step.num_restarts == self.pool.num_restarts

    async def _check_after(self, tables: MappedStep, deadline: float | None) -> None:
        """Check that a step was not over while its tables were used. If the daemon was restarted meanwhile, it knows
        that: a step that it does not have cannot be committed. Raises StaleStepError."""
        connection = self.context.connection
        if not connection.connected:
            await connection.ready(deadline)
        if not self.pool.writable or connection.num_restarts == self.pool.num_restarts:
            tables.check()

    async def _attend_elsewhere(self, call: AttentionCall) -> AttentionResult:
        await self._drain()
        await self._commit_begun(call.step, call.deadline)
        return await self.rest.attend(call)

    async def _write_elsewhere(self, call: WriteCall) -> None:
        await self._drain()
        await self._commit_begun(call.step, call.deadline)
        await self.rest.write(call)

    async def _commit_begun(self, step: StepInfo, deadline: float | None) -> None:
        """Tell the daemon which layers of a step were written here before it was restarted."""
        if layers := self._begun.get(step.step_id):
            await self._commit(step.step_id, sorted(layers), deadline)
            self._begun.pop(step.step_id, None)

    def _can_attend(self, call: AttentionCall) -> bool:
        """Return whether the kernels here support the call: device of the tensors, dtype of the pool, options."""
        if call.on_gpu != self.takes_gpu_tensors or not self._same_dtype:
            return False
        return self.takes_gpu_tensors or call.options.block_sparse is None

    def _check(self, call: AttentionCall) -> None:
        """Check what the kernels do not check, and what the daemon reports with a different error."""
        check_attention(self.context.info, call)
        if call.decode and call.step.num_tokens != call.step.num_sequences:
            raise InvalidArgumentError("a sequence has several tokens in this step: use Extend", field="step_id")

    def _claim(self, tables: MappedStep, layers: Sequence[int]) -> None:
        """Mark layers as written. Raises InvalidArgumentError, and LayerWrittenError if one is marked already."""
        for layer in layers:
            if not 0 <= layer < self.pool.layout.num_layers:
                raise InvalidArgumentError(f"{layer} is not from 0 to {self.pool.layout.num_layers - 1}", field="layer")
            if layer in tables.written:
                raise LayerWrittenError(f"layer {layer} of step {tables.step_id} is written", field="layer")
        tables.written.update(layers)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work on the pool: in a thread for host kernels. GPU kernels are only launched, which is fast and has to
        use the caller's current stream."""
        if self.takes_gpu_tensors:
            return work(*arguments)
        result: T = await self.context.connection.run(work, *arguments)
        return result

    def _attend(self, tables: MappedStep, call: AttentionCall) -> AttentionResult:
        if self.pool.writable:
            self._kernels.write(tables, call.layer, call.key, call.value)
        output, lse = self._kernels.attend(tables, call.layer, call.query, call.options, call.out, call.lse_out)
        return output, lse if call.return_lse else None

    async def write_prepared(self, call: WriteCall) -> None:
        step = call.step
        if not self._maps(step) or not self.pool.writable or is_on_gpu(call.key) != self.takes_gpu_tensors:
            await self._write_elsewhere(call)
            return
        tables = self.pool.tables(step)
        layers = range(self.pool.layout.num_layers) if call.layer is None else (call.layer,)
        leading = (len(layers), step.num_tokens) if call.layer is None else (step.num_tokens,)
        check_kv(self.context.info, leading, call.key, call.value)
        parts = list(zip(call.key, call.value, strict=True)) if call.layer is None else [(call.key, call.value)]
        self._claim(tables, layers)
        try:
            await self._run(self._write, tables, layers, parts)
            await self._check_after(tables, call.deadline)
        except BaseException:
            tables.written.difference_update(layers)
            raise
        await self._commit_if_complete(tables, call.deadline)

    def _write(self, tables: MappedStep, layers: Sequence[int], parts: list[tuple[Tensor, Tensor]]) -> None:
        for layer, (key, value) in zip(layers, parts, strict=True):
            self._kernels.write(tables, layer, key, value)

    async def _commit_if_complete(self, tables: MappedStep, deadline: float | None) -> None:
        if self.pool.writable and len(tables.written) == self.pool.layout.num_layers:
            await self._drain()
            await self._commit(tables.step_id, [], deadline)

    async def _commit(self, step_id: int, layers: Sequence[int], deadline: float | None) -> None:
        """Tell the daemon that layers are written; none: all. If the caller does not wait for the answer, this is
        done in the background."""
        connection, cut = self.context.connection, self.context.cut
        request_id = connection.next_request_id()
        request = build(host_pb2.CommitRequest, request_id=request_id, step_id=step_id, layers=layers)
        try:
            await connection.call_until(deadline, "commit", request, cut, functools.partial(cut.add, "commit", request))
        except PoolNotSharedError:
            if self.pool.num_restarts == connection.num_restarts:
                raise
            await connection.with_one_process(self.reopen, deadline)  # only who has mapped the pool may commit
            await connection.call_until(deadline, "commit", request)

    async def _drain(self) -> None:
        """Wait for the kernels, before a call that the daemon executes. It does not wait for streams of other
        processes: it would hang forever if such a process were killed."""
        if self._kernels.is_busy:
            await self.context.connection.run(self._kernels.wait)

    async def reopen(self) -> None:
        await self.rest.reopen()
        if self.pool.num_restarts != self.context.connection.num_restarts:
            await self._drain()
            self._begun = {step.step_id: step.written for step in self.pool.begun_steps()}
            self._use(await MappedPool.open(self.context, self.pool.writable))

    async def close(self) -> None:
        await self._drain()
