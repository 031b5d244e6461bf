"""The mapped pool: the pool and the session's step tables in this process."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

from kvservice.attention_options import AttentionOptions
from kvservice.client.connection import SessionConnection
from kvservice.client.context import Context
from kvservice.client.cuda import device_of, extension
from kvservice.client.pools.cuda import GpuKernels
from kvservice.client.pools.host import HostKernels
from kvservice.client.pools.tables import MappedStep
from kvservice.client.requests import build
from kvservice.client.tensors import Tensor
from kvservice.client.values import Sequence, StepInfo
from kvservice.errors import ConnectionLostError, StaleStepError
from kvservice.pool.layout import PoolLayout
from kvservice.v1 import host_pb2


class HasStepInfo(Protocol):
    """A step of the sync or async API."""

    @property
    def info(self) -> StepInfo: ...
    @property
    def sequences(self) -> tuple[Sequence, ...]: ...


class MappedKernels(Protocol):
    """The kernels on a mapped pool. Tensors and tables are valid; options are those of AttentionOptions."""

    takes_gpu_tensors: bool
    pool: Tensor

    def write(self, tables: MappedStep, layer: int, key: Tensor, value: Tensor, /) -> None: ...

    def attend(
        self,
        tables: MappedStep,
        layer: int,
        query: Tensor,
        options: AttentionOptions,
        out: Tensor | None,
        lse_out: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp: `out` and `lse_out` if given, else new tensors."""

    def mark_launch(self) -> object:
        """Say that the caller launches kernels of its own on the pool, for `is_busy` and `wait`."""

    @property
    def is_busy(self) -> bool:
        """Whether launched work may still be running."""

    def wait(self) -> None:
        """Wait until all work that was launched until now is done."""


class MappedPool:
    """The pool and the session's tables, mapped into this process.

    `pool` is the array for `kvservice.ops`, or for a GPU the torch tensor for `kvservice.ops.torch_ops`. It is
    read-only unless it was mapped as writable; a GPU does not enforce this.

    Steps that the session opens after the mapping can be processed here. A step that is written here must be committed
    (`session.commit`); otherwise its blocks do not count as computed. On a GPU, synchronize before a call that ends the
    step, because its blocks may be reallocated then.
    """

    def __init__(
        self,
        layout: PoolLayout,
        kernels: MappedKernels,
        tables: mmap.mmap,
        writable: bool,
        connection: SessionConnection,
        num_restarts: int,
    ) -> None:
        """`num_restarts` is the connection's, from before the pool was mapped."""
        self.num_restarts = num_restarts
        self._connection = connection
        self.layout = layout
        self.writable = writable
        self.kernels = kernels
        self.pool = kernels.pool
        self._tables = tables
        self._steps: dict[int, MappedStep] = {}  # the last step of each slot of the tables

    @staticmethod
    async def open(context: Context, writable: bool, timeout_s: float | None = None) -> MappedPool:
        """Map the pool. Raises PoolNotSharedError, ConnectionLostError if the descriptors cannot be fetched, and for a
        pool on a GPU FailedPreconditionError."""
        return await context.connection.with_one_process(lambda: MappedPool._open(context, writable, timeout_s))

    @staticmethod
    async def _open(context: Context, writable: bool, timeout_s: float | None) -> MappedPool:
        info, connection = context.info, context.connection
        num_restarts = connection.num_restarts
        if (device := device_of(info)) is not None:
            extension()
        request = build(host_pb2.MapPoolRequest, request_id=connection.next_request_id(), writable=writable)
        await context.fds.introduce_once()
        response = await connection.call("map_pool", request, timeout_s)
        layout = PoolLayout(info.num_layers, info.num_kv_heads, info.head_size, info.block_size, info.kv_cache_dtype)
        shape = (info.num_blocks, *layout.block_shape)
        descriptors = await context.fds.fetch(response.handover_token, 2)
        try:
            kernels: MappedKernels
            if device is None:
                kernels = HostKernels.open(info, shape, descriptors[0], response.pool_bytes, writable)
            else:
                kernels = GpuKernels.open(info, shape, descriptors[0], response.pool_bytes, writable)
            tables = mmap.mmap(descriptors[1], response.table_bytes, prot=mmap.PROT_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return MappedPool(layout, kernels, tables, writable, connection, num_restarts)

    def step(self, step: HasStepInfo) -> MappedStep:
        """Return the tables of a step. Raises StaleStepError, and FailedPreconditionError if the step is not in the
        tables."""
        return self.tables(step.info)

    def tables(self, step: StepInfo) -> MappedStep:
        """See `step`."""
        if step.num_restarts != self.num_restarts:
            raise StaleStepError(
                f"step {step.step_id} or the mapping is of an earlier process of the daemon", field="step_id"
            )
        slot = -1 if step.mapped is None else step.mapped[0]
        found = self._steps.get(slot)
        if found is not None and found.step_id == step.step_id:
            found.check()
            return found
        found = MappedStep(self._tables, step, self.layout.block_size, self._check_process)
        found.check()  # before it replaces the step that has the slot now
        self._steps[slot] = found
        return found

    def begun_steps(self) -> list[MappedStep]:
        """Return the steps of which the session's transport has written some layers here, and not all."""
        return [step for step in self._steps.values() if 0 < len(step.written) < self.layout.num_layers]

    def _check_process(self) -> None:
        if self.num_restarts != self._connection.num_restarts:
            raise StaleStepError("the daemon was restarted: map the pool again")
        if not self._connection.connected:
            raise ConnectionLostError("the daemon may have ended, so that the step's tables are not kept current")
