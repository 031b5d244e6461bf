"""The services of the contract, taken from their protobuf descriptors, and the handler names of their RPCs."""

from __future__ import annotations

import re

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    events_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    regions_pb2,
    scheduler_pb2,
    session_pb2,
    store_pb2,
    transfer_pb2,
)

SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        session_pb2,
        blocks_pb2,
        attention_pb2,
        regions_pb2,
        host_pb2,
        store_pb2,
        transfer_pb2,
        scheduler_pb2,
        pool_pb2,
        inspect_pb2,
        events_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)

HEALTH_SERVICE = "grpc.health.v1.Health"

# Services whose calls belong to a session. They can also be sent over the session's stream.
SESSION_SERVICES = frozenset(
    (
        "BlockService",
        "AttentionService",
        "RegionService",
        "HostService",
        "StoreService",
        "TransferService",
        "SchedulerService",
    )
)


# Calls of other services that belong to a session, too.
SESSION_CALLS = frozenset(("Detach",))


def is_of_session(method: MethodDescriptor) -> bool:
    """Return whether the calls of a method belong to a session."""
    return method.containing_service.name in SESSION_SERVICES or method.name in SESSION_CALLS


def call_name(method: MethodDescriptor) -> str:
    """Return the name of an RPC's handler and of its field in Call and Reply: CanAllocate → can_allocate, and Lookup of
    StoreService → store_lookup."""
    prefix = "store_" if method.containing_service.name == "StoreService" else ""
    return prefix + re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


# The methods whose latency is measured. Streaming RPCs have no latency.
METHODS: list[str] = [
    call_name(method)
    for service in SERVICES
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
]


# The methods with request ids whose effects survive a restart of the daemon, and therefore their replies. What the
# others set up ends with the process: regions, lanes, mappings, schedulers. They are executed again.
KEPT_METHODS: frozenset[str] = frozenset(
    call_name(method)
    for service in SERVICES
    for method in service.methods
    if service.name in ("BlockService", "StoreService") or method.name == "Commit"
    if "request_id" in method.input_type.fields_by_name
) - {"store_map_store"}
