"""Execution of a session's calls, by its transport or over its connection. Lost shared memory is opened again here."""

from __future__ import annotations

import weakref
from typing import Any

from kvservice.client.calls import AttentionCall, SharedMemoryLostError, WriteCall
from kvservice.client.context import Context
from kvservice.client.pools.mapped import MappedKernels
from kvservice.client.selection import inline_transport
from kvservice.client.tensors import Tensor
from kvservice.client.transports.base import Transport
from kvservice.client.values import StepInfo
from kvservice.errors import FailedPreconditionError, UnknownRegionError

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
        # Kernels that this process launches without the transport.
        self._kernels: weakref.WeakSet[MappedKernels] = weakref.WeakSet()

    def next_request_id(self) -> int:
        return self.context.connection.next_request_id()

    def deadline(self, timeout_s: float | None) -> float | None:
        """Return the deadline of a call that starts now; None: no limit. Raises InvalidArgumentError."""
        return self.context.connection.deadline(timeout_s)

    async def settle(self, deadline: float | None = None) -> None:
        """Prepare a call that uses shared memory: wait for the connection, and open again what a new process of the
        daemon does not share yet. A mapped pool must not be written meanwhile: the process that comes may give the
        blocks of lost sequences to others."""
        connection = self.context.connection
        connection.process.check()
        if not connection.connected:
            await connection.ready(deadline)
        if self._num_restarts != connection.num_restarts:
            await self._reopen(self._num_opened)

    def watch(self, kernels: MappedKernels) -> None:
        """Wait for these kernels too, as long as they exist, where the session waits for those of its transport."""
        self._kernels.add(kernels)

    async def drain(self) -> None:
        """See Transport.drain."""
        await self.transport.drain()
        await self._drain_watched()

    async def _drain_watched(self) -> None:
        for kernels in list(self._kernels):
            if kernels.is_busy:
                await self.context.connection.run(kernels.wait)

    async def send(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        """Send a request and return its response, after the kernels that this process has launched: the call may end a
        step, after which other sequences use its blocks."""
        await self.drain()
        return await self.context.connection.call(name, request, timeout_s)

    async def attend(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Execute a call with the session's transport; see Transport. Returns the output, or with `return_lse` output
        and log-sum-exp."""
        _check_has_layers(call.step)
        await self.settle(call.deadline)
        opened = self._num_opened
        try:
            output, lse = await self.transport.attend(call)
        except _LOST:
            await self._reopen(opened)
            output, lse = await self.transport.attend(call)
        return output if lse is None else (output, lse)

    async def write(self, call: WriteCall) -> None:
        """Execute a call with the session's transport; see Transport."""
        _check_has_layers(call.step)
        await self.settle(call.deadline)
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
            await self._drain_watched()
            await connection.with_one_process(self.transport.reopen)
            self._num_restarts = num_restarts
            self._num_opened += 1

    async def release(self) -> None:
        """Release the memory that the session shares with the daemon, so that the system can reclaim it when the
        session ends. Does nothing in a forked process."""
        if not self.context.connection.process.is_here:
            return
        await self._drain_watched()
        await self.transport.close()
        self.context.remote.close()
        self.transport = inline_transport(self.context)
        self.context.regions.forget()


def _check_has_layers(step: StepInfo) -> None:
    """Raise FailedPreconditionError for a step ahead, before a transport writes any of it."""
    if step.ahead:
        raise FailedPreconditionError(
            f"step {step.step_id} is ahead: write it in the mapped pool, and call commit_ahead", field="step_id"
        )
