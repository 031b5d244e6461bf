"""The region transport: the tensors lie in shared memory, and messages on the session's stream name them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from kvservice.client.regions import ALIGNMENT, Staging
from kvservice.client.remote import Context
from kvservice.client.step import (
    AttentionCall,
    AttentionResult,
    Transport,
    TransportName,
    WriteCall,
    given,
)
from kvservice.client.transports.inline import InlineTransport
from kvservice.wire.tensors import Array


class RegionTransport(Transport):
    """See Transport. Tensors that do not lie in a region are copied to a staging region."""

    name: TransportName = "region"
    # From this size on, tensors are faster in shared memory than in the message; below it, both are equally fast.
    staged_bytes_min = 16 << 10

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._inline = InlineTransport(context)
        self._staging = Staging(context.regions)
        self._lock = context.connection.lock()

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        if call.query.nbytes + call.key.nbytes + call.value.nbytes < self.staged_bytes_min:
            return await self._inline.attend_prepared(call)
        async with self._staging_for(call.staging_bytes, call.deadline):
            out = self._result(call.out, call.query.shape, call.query.dtype.name)
            lse_out = self._result(call.lse_out, call.lse_shape, "float32") if call.return_lse else None
            query, key, value = (self._staged(array) for array in (call.query, call.key, call.value))
            staged = call._replace(query=query, key=key, value=value, out=out, lse_out=lse_out)
            await self._inline.attend_prepared(staged)
            lse = None if lse_out is None else given(lse_out, call.lse_out)
            return given(out, call.out), lse

    @contextlib.asynccontextmanager
    async def _staging_for(self, num_bytes: int, deadline: float | None) -> AsyncIterator[None]:
        """Hold the staging region for one call. A call that ends with an error or is interrupted may still be waiting
        in the daemon, so the next call does not get its memory."""
        async with self._lock:
            await self._staging.reserve(num_bytes, deadline)
            try:
                yield
            except BaseException:
                self._staging.drop()
                raise

    def _result(self, wanted: Array | None, shape: tuple[int, ...], dtype: str) -> Array:
        """Return the array for a result: the caller's, if that is in a region, else one in the staging region."""
        if wanted is not None and self.context.regions.find(wanted) is not None:
            return wanted
        array: Array = self._staging.place(shape, dtype)[0]
        return array

    async def write_prepared(self, call: WriteCall) -> None:
        if call.key.nbytes + call.value.nbytes < self.staged_bytes_min:
            await self._inline.write_prepared(call)
            return
        async with self._staging_for(call.key.nbytes + call.value.nbytes + 2 * ALIGNMENT, call.deadline):
            staged = call._replace(key=self._staged(call.key), value=self._staged(call.value))
            await self._inline.write_prepared(staged)

    def _staged(self, array: Array) -> Array:
        return array if self.context.regions.find(array) is not None else self._staging.put(array)[0]
