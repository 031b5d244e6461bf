"""Execution of a session's calls, by its transport or over its connection. Lost shared memory is opened again here."""

from __future__ import annotations

from typing import Any

from kvservice.client.calls import AttentionCall, SharedMemoryLostError, WriteCall
from kvservice.client.context import Context
from kvservice.client.selection import inline_transport
from kvservice.client.tensors import Tensor
from kvservice.client.transports.base import Transport
from kvservice.errors import UnknownRegionError

# The daemon has removed what a session shares with it. The call was not executed.
_LOST = (SharedMemoryLostError, UnknownRegionError)


class SessionCalls:
    """The calls of one session and its steps."""

    def __init__(self, context: Context, transport: Transport) -> None:
        self.context = context
        self.transport = transport

    def next_request_id(self) -> int:
        return self.context.connection.next_request_id()

    def deadline(self, timeout_s: float | None) -> float | None:
        """Return the deadline of a call that starts now; None: no limit. Raises InvalidArgumentError."""
        return self.context.connection.deadline(timeout_s)

    async def drain(self) -> None:
        """See Transport.drain."""
        await self.transport.drain()

    async def send(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        """Send a request and return its response, after the kernels that this process has launched: the call may end a
        step, after which other sequences use its blocks."""
        await self.transport.drain()
        return await self.context.connection.call(name, request, timeout_s)

    async def attend(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Execute a call with the session's transport; see Transport. Returns the output, or with `return_lse` output
        and log-sum-exp."""
        self.context.connection.process.check()
        try:
            output, lse = await self.transport.attend(call)
        except _LOST:
            await self._reopen()
            output, lse = await self.transport.attend(call)
        return output if lse is None else (output, lse)

    async def write(self, call: WriteCall) -> None:
        """Execute a call with the session's transport; see Transport."""
        self.context.connection.process.check()
        try:
            await self.transport.write(call)
        except _LOST:
            await self._reopen()
            await self.transport.write(call)

    async def _reopen(self) -> None:
        self.context.regions.forget()
        await self.transport.reopen()

    async def release(self) -> None:
        """Release the memory that the session shares with the daemon, so that the system can reclaim it when the
        session ends. Does nothing in a forked process."""
        if not self.context.connection.process.is_here:
            return
        await self.transport.close()
        self.transport = inline_transport(self.context)
        self.context.regions.forget()
