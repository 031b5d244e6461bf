"""Source of the snapshots: the daemon's InspectService."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message

from kvservice.auth.client import NO_CREDENTIALS, ClientCredentials
from kvservice.client.channel import CHANNEL_OPTIONS, to_error
from kvservice.errors import CallTimeoutError, ObserverUnavailableError
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc
from kvservice.wire.channels import open_aio_channel

# The daemon's limit on rows.
MAX_ROWS = 1000
TIMEOUT_S = 5.0
# The daemon may start its observer on the first request, which then waits for it.
START_TIMEOUT_S = 15.0
_START_PAUSE_S = 0.1


class Source:
    """A connection to a daemon, which reconnects when a call finds it broken. It is an async context manager."""

    def __init__(self, address: str, credentials: ClientCredentials = NO_CREDENTIALS) -> None:
        self.address = address
        self._credentials = credentials

    async def __aenter__(self) -> Source:
        self._channel = open_aio_channel(self.address, self._credentials, CHANNEL_OPTIONS)
        self._stub = inspect_pb2_grpc.InspectServiceStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def snapshot(self, search: str = "", timeout_s: float = TIMEOUT_S) -> inspect_pb2.Snapshot:
        """Return a current snapshot, with the sessions and sequences that match `search`. Raises KVServiceError."""
        request = inspect_pb2.GetSnapshotRequest(max_sessions=MAX_ROWS, max_sequences=MAX_ROWS, search=search)
        try:
            headers = self._credentials.headers()
            snapshot: inspect_pb2.Snapshot = await self._stub.GetSnapshot(request, metadata=headers, timeout=timeout_s)
        except grpc.RpcError as error:
            raise to_error(error) from None
        return snapshot

    async def first_snapshot(self, search: str = "") -> inspect_pb2.Snapshot:
        """Return a snapshot and wait for an observer that is starting. Raises KVServiceError at once if there is no
        daemon."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + START_TIMEOUT_S
        refusal: ObserverUnavailableError | None = None
        while True:
            try:
                return await self.snapshot(search, deadline - clock())
            except ObserverUnavailableError as error:
                if clock() + _START_PAUSE_S > deadline:
                    raise
                refusal = error
            except CallTimeoutError:
                raise refusal or CallTimeoutError(f"no answer within {START_TIMEOUT_S:g} s") from None
            await asyncio.sleep(_START_PAUSE_S)


def to_json(message: Message) -> dict[str, Any]:
    """Return the message's fields by name, with 64-bit integers as numbers and unset fields as None."""
    return {field.name: _field_to_json(message, field) for field in message.DESCRIPTOR.fields}


def _field_to_json(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.message_type is None:
        return value
    return [to_json(row) for row in value] if field.is_repeated else to_json(value)
