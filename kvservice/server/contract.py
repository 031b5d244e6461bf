"""The contract's services, from its own descriptors, and what its RPCs are called here."""

from __future__ import annotations

import re

from google.protobuf.descriptor import ServiceDescriptor

from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    events_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    session_pb2,
    shared_memory_pb2,
)

SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        session_pb2,
        blocks_pb2,
        attention_pb2,
        shared_memory_pb2,
        host_pb2,
        pool_pb2,
        inspect_pb2,
        events_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)

# The observer serializes their answers; they are passed on as they are.
ANSWERED_BY_OBSERVER = frozenset(("GetSnapshot",))

# Their calls are a session's, and go over its stream too.
SESSION_SERVICES = frozenset(("BlockService", "AttentionService", "SharedMemoryService", "HostService"))


def call_name(rpc_name: str) -> str:
    """CanAllocate → can_allocate: the name of the handler, and of the field in Call and Reply."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", rpc_name).lower()


# Methods whose latency is measured: streams have none.
METHODS: list[str] = [
    call_name(method.name)
    for service in SERVICES
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
]
