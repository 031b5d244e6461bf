"""The transport of clients on other hosts: Transfer Engines carry what is written, and messages the rest."""

from __future__ import annotations

import functools

from kvservice.client import remote_tensors
from kvservice.client.calls import AttentionCall, AttentionResult, WriteCall
from kvservice.client.context import Context
from kvservice.client.remote_tensors import KVPart
from kvservice.client.transports.base import Transport, TransportName
from kvservice.client.transports.inline import InlineTransport


class TransferTransport(Transport):
    """See Transport. Messages carry K and V, too, when they are small, and when the engine is not there or fails."""

    name: TransportName = "transfer"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._inline = InlineTransport(context)

    async def attend_prepared(self, call: AttentionCall) -> AttentionResult:
        return await self._inline.attend_prepared(call)

    async def write_prepared(self, call: WriteCall) -> None:
        context, inline = self.context, self._inline
        calls = inline.parts_of(call, context.remote.part_bytes(context.info))
        parts = [KVPart(one.key, one.value, functools.partial(inline.send_part, one)) for one in calls]
        await remote_tensors.write(context, parts)
