"""The interface of the transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from kvservice.client import tensors
from kvservice.client.calls import AttentionCall, AttentionResult, WriteCall, given
from kvservice.client.context import Context
from kvservice.client.cuda import device_of
from kvservice.client.tensors import Tensor

TransportName = Literal["inline", "transfer", "region", "lane", "mapped"]


class Transport(ABC):
    """Executes the calls of a session's steps.

    The methods raise the errors of `StepCore.extend`, and SharedMemoryLostError or UnknownRegionError if the daemon has
    removed what the transport shares with it; after `reopen`, the call can be made again.
    """

    name: TransportName
    takes_gpu_tensors = False
    """Whether `attend_prepared` and `write_prepared` accept tensors on the pool's GPU."""

    def __init__(self, context: Context) -> None:
        self.context = context

    async def attend(self, call: AttentionCall) -> AttentionResult:
        """Execute a call with the tensors as the caller gave them, on any device. Returns `out` and `lse_out` if given,
        else new tensors of the query's type."""
        prepared = call.prepared(self.context.info)
        if self._takes(prepared.query):
            output, lse = await self.attend_prepared(prepared)
        else:
            output, lse = await self._attend_on_host(prepared)
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
        return device < 0 or (self.takes_gpu_tensors and device == device_of(self.context.info))

    @abstractmethod
    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        """Execute a prepared call. Returns `out` and `lse_out` if given, else new tensors."""

    @abstractmethod
    async def write_prepared(self, call: WriteCall) -> None:
        """Write the K/V of a prepared call."""

    async def drain(self) -> None:
        """Wait until the kernels that this process has launched for the session are done. A call to the daemon may end
        a step, after which other sequences use its blocks."""
        return

    async def reopen(self) -> None:
        """Open again what the daemon has removed. It removes lanes and regions of a session that has had no stream for
        its grace period."""
        return

    async def close(self) -> None:
        """Release the transport's resources before the session ends."""
        return
