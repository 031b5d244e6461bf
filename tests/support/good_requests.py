"""One valid request of each RPC, and a session in which they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raw_wire import call_name

from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    regions_pb2,
    scheduler_pb2,
    session_pb2,
    store_pb2,
    tensor_pb2,
    transfer_pb2,
)

# A shared memory object of the client that the requests name.
OBJECT = f"kvservice-requests-{os.getpid()}"


@contextmanager
def shared_object() -> Iterator[None]:
    path = Path("/dev/shm", OBJECT)
    path.write_bytes(bytes(4096))
    yield
    path.unlink()


def in_region(tensor: tensor_pb2.Tensor, place: tensor_pb2.SharedMemoryPlace) -> tensor_pb2.Tensor:
    tensor.shared_memory.CopyFrom(place)
    return tensor


def key_of(method: Any) -> str:
    """Return the name of a method. Those of the store have the names of their calls, because some names are others'."""
    return call_name(method) if method.containing_service.name == "StoreService" else method.name


def good_requests(token: bytes, tensor: Any) -> dict[str, Any]:
    """Return one valid request per method that has an effect, by `key_of`."""
    name: dict[str, Any] = {"session_token": token}
    kv: dict[str, Any] = {"key": tensor(1, 2, 32), "value": tensor(1, 2, 32)}
    one = blocks_pb2.SequenceAllocation(sequence_id=9, token_ids=[1, 2, 3], extra_keys=[blocks_pb2.ExtraKey(key=b"k")])
    place = tensor_pb2.SharedMemoryPlace(region="r", offset=0, byte_size=4 * 128)
    store = name | {"namespace_id": 1, "keys": bytes(64)}
    scatter = store_pb2.Scatter(region="r", piece_bytes=[60, 4], offsets=bytes(32))
    part = attention_pb2.SequenceRange(sequence_id=1, start=0, stop=4)
    request = scheduler_pb2.ScheduledRequest(
        request_id=30, token_ids=[1, 2, 3], max_tokens=2, width=1, extra_keys=[blocks_pb2.ExtraKey(key=b"k")]
    )
    report = scheduler_pb2.StepReport(batch=1, token_ids=[5], finished_ids=[21])
    return {
        "Allocate": blocks_pb2.AllocateRequest(**name, request_id=3, sequences=[one], lookahead=2),
        "CanAllocate": blocks_pb2.CanAllocateRequest(**name, sequences=[one], lookahead=2),
        "Append": blocks_pb2.AppendRequest(
            **name, sequence_ids=[1], token_ids=[5], num_tokens=[1], expected_lengths=[5]
        ),
        "CanAppend": blocks_pb2.CanAppendRequest(**name, sequence_ids=[1], num_tokens=[1], lookahead=2),
        "OpenAhead": blocks_pb2.OpenAheadRequest(**name, sequence_ids=[1], num_steps=2),
        "CommitAhead": blocks_pb2.CommitAheadRequest(**name, step_id=1, token_ids=[5, 6], num_tokens=[2], num_steps=1),
        "OpenStep": blocks_pb2.OpenStepRequest(**name, sequence_ids=[1], num_tokens=[1]),
        "Truncate": blocks_pb2.TruncateRequest(**name, sequence_ids=[1], lengths=[4]),
        "Fork": blocks_pb2.ForkRequest(**name, parent_ids=[1], child_ids=[8]),
        "SwapOut": blocks_pb2.SwapOutRequest(**name, sequence_ids=[1]),
        "CanSwapOut": blocks_pb2.CanSwapOutRequest(**name, sequence_ids=[1]),
        "SwapIn": blocks_pb2.SwapInRequest(**name, sequence_ids=[1]),
        "CanSwapIn": blocks_pb2.CanSwapInRequest(**name, sequence_ids=[1]),
        "Free": blocks_pb2.FreeRequest(**name, sequence_ids=[1]),
        "Describe": blocks_pb2.DescribeRequest(**name, sequence_ids=[1], return_token_ids=True),
        "MatchPrefix": blocks_pb2.MatchPrefixRequest(**name, token_ids=[1, 2, 3, 4]),
        "Pin": blocks_pb2.PinRequest(**name, token_ids=[1, 2, 3, 4], ttl_s=0.1),
        "Unpin": blocks_pb2.UnpinRequest(**name, pin_id=1),
        "ResetPrefixCache": blocks_pb2.ResetPrefixCacheRequest(**name),
        "CommonPrefix": blocks_pb2.CommonPrefixRequest(**name, sequence_ids=[1]),
        "Decode": attention_pb2.AttendRequest(**name, step_id=1, layer=1, query=tensor(1, 4, 32), **kv),
        "Extend": attention_pb2.AttendRequest(
            **name, step_id=1, layer=1, query=in_region(tensor(1, 4, 32), place), output_place=place, **kv
        ),
        "Write": attention_pb2.WriteRequest(**name, step_id=1, layer=1, **kv),
        "Read": attention_pb2.ReadRequest(**name, ranges=[part]),
        "ListRegions": regions_pb2.ListRegionsRequest(**name),
        "RegisterRegion": regions_pb2.RegisterRegionRequest(**name, name="n", key=OBJECT, offset=16, byte_size=64),
        "UnregisterRegion": regions_pb2.UnregisterRegionRequest(**name, name="r"),
        "RegisterCudaRegion": regions_pb2.RegisterCudaRegionRequest(
            **name, name="g", raw_handle=bytes(64), byte_size=64
        ),
        "CreateRegion": regions_pb2.CreateRegionRequest(**name, name="m", byte_size=4096),
        "CreateRemoteRegion": transfer_pb2.CreateRemoteRegionRequest(
            **name, name="m", byte_size=4096, remote_bytes=4096, ports=[9], address=4096
        ),
        "RemoveRemoteRegion": transfer_pb2.RemoveRemoteRegionRequest(**name, name="m"),
        "OpenLane": host_pb2.OpenLaneRequest(**name),
        "CloseLane": host_pb2.CloseLaneRequest(**name),
        "MapPool": host_pb2.MapPoolRequest(**name, writable=True),
        "UnmapPool": host_pb2.UnmapPoolRequest(**name),
        "Commit": host_pb2.CommitRequest(**name, step_id=1),
        "store_open_namespace": store_pb2.OpenNamespaceRequest(
            **name, request_id=4, namespace=store_pb2.StoreNamespace(model="m", block_bytes=64, tp_size=1)
        ),
        "store_lookup": store_pb2.LookupRequest(**store),
        "store_acquire": store_pb2.AcquireRequest(**store, request_id=5, ttl_s=1.0, leading_only=True),
        "store_renew": store_pb2.RenewRequest(**name, lease_id=1, ttl_s=1.0),
        "store_release": store_pb2.ReleaseRequest(**name, lease_ids=[1, 2]),
        "store_reserve": store_pb2.ReserveRequest(**store, request_id=6),
        "store_commit": store_pb2.StoreCommitRequest(**name, request_id=7, reservation_id=1, written=b"\1"),
        "store_abort": store_pb2.AbortRequest(**name, reservation_id=1),
        "store_batch_get": store_pb2.BatchGetRequest(**store, region=scatter, verify=True),
        "store_batch_put": store_pb2.BatchPutRequest(**store, data=bytes(128)),
        "store_touch": store_pb2.TouchRequest(**store),
        "store_remove": store_pb2.RemoveRequest(**store, request_id=8),
        "store_clear": store_pb2.ClearRequest(**name, request_id=9, namespace_id=1),
        "store_map_store": store_pb2.MapStoreRequest(**name, request_id=10, writable=True),
        "OpenScheduler": scheduler_pb2.OpenSchedulerRequest(**name, request_id=11, max_step_tokens=16, weight=2.0),
        "AddRequests": scheduler_pb2.AddRequestsRequest(**name, request_id=12, requests=[request]),
        "AbortRequests": scheduler_pb2.AbortRequestsRequest(**name, request_ids=[21]),
        "Schedule": scheduler_pb2.ScheduleRequest(**name, reports=[report], max_step_tokens=9, max_running=3),
        "DescribeRequests": scheduler_pb2.DescribeRequestsRequest(**name, request_ids=[21], return_token_ids=True),
        "GetSnapshot": inspect_pb2.GetSnapshotRequest(max_sessions=3, max_sequences=4, search="x"),
        "Ping": pool_pb2.PingRequest(payload=b"x"),
        "Open": session_pb2.OpenRequest(name="x", detachable=False, detach_ttl_s=1.0),
        "Close": session_pb2.CloseRequest(session_token=token),
        "Detach": session_pb2.DetachRequest(session_token=token),
    }


def schedule(victim: Any, tensor: Any) -> None:
    """Open the scheduler of a session, and compute its first batch."""
    victim.ok("open_scheduler", scheduler_pb2.OpenSchedulerRequest())
    request = scheduler_pb2.ScheduledRequest(request_id=21, token_ids=[7, 8], max_tokens=3, width=1)
    victim.ok("add_requests", scheduler_pb2.AddRequestsRequest(requests=[request]))
    step_id = victim.ok("schedule", scheduler_pb2.ScheduleRequest()).step.step_id
    for layer in range(2):
        key, value = tensor(2, 2, 32), tensor(2, 2, 32)
        victim.ok("write", attention_pb2.WriteRequest(step_id=step_id, layer=layer, key=key, value=value))


def prepare(victim: Any, tensor: Any, service: str, method: Any, *, is_local: bool = True) -> None:
    """Give a session what the good requests need. Over TCP a session has no shared memory."""
    allocation = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[50, 51, 52, 53, 54])
    victim.ok("allocate", blocks_pb2.AllocateRequest(sequences=[allocation]))
    victim.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1], num_tokens=[1]))
    if is_local:
        register = regions_pb2.RegisterRegionRequest(name="r", key=OBJECT, byte_size=4096)
        victim.ok("register_region", register)
        victim.ok("map_pool", host_pb2.MapPoolRequest(writable=True))
    if service.endswith("SchedulerService") and method.name != "OpenScheduler":
        schedule(victim, tensor)
    if is_local and method.name == "CloseLane":
        victim.ok("open_lane", host_pb2.OpenLaneRequest())
