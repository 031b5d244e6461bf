from google.rpc import status_pb2 as _status_pb2
from kvservice.v1 import attention_pb2 as _attention_pb2
from kvservice.v1 import blocks_pb2 as _blocks_pb2
from kvservice.v1 import host_pb2 as _host_pb2
from kvservice.v1 import pool_pb2 as _pool_pb2
from kvservice.v1 import regions_pb2 as _regions_pb2
from kvservice.v1 import scheduler_pb2 as _scheduler_pb2
from kvservice.v1 import store_pb2 as _store_pb2
from kvservice.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DetachRequest(_message.Message):
    __slots__ = ("session_token", "ttl_s", "durable")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    ttl_s: float
    durable: bool
    def __init__(self, session_token: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., durable: bool = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ("num_sequences", "num_bytes")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    num_bytes: int
    def __init__(self, num_sequences: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("name", "detachable", "detach_ttl_s", "tenant", "session_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DETACHABLE_FIELD_NUMBER: _ClassVar[int]
    DETACH_TTL_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    detachable: bool
    detach_ttl_s: float
    tenant: str
    session_token: bytes
    def __init__(self, name: _Optional[str] = ..., detachable: bool = ..., detach_ttl_s: _Optional[float] = ..., tenant: _Optional[str] = ..., session_token: _Optional[bytes] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("session_token", "session_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    session_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., session_id: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session_token", "holder")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    holder: int
    def __init__(self, session_token: _Optional[bytes] = ..., holder: _Optional[int] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("session_token", "holder", "reconnects")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    holder: int
    reconnects: bool
    def __init__(self, session_token: _Optional[bytes] = ..., holder: _Optional[int] = ..., reconnects: bool = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("session_id", "daemon_start", "num_lost_sequences", "max_calls")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DAEMON_START_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    daemon_start: int
    num_lost_sequences: int
    max_calls: int
    def __init__(self, session_id: _Optional[int] = ..., daemon_start: _Optional[int] = ..., num_lost_sequences: _Optional[int] = ..., max_calls: _Optional[int] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("call_id", "traceparent", "calls", "attach", "ping", "detach", "allocate", "can_allocate", "append", "open_step", "truncate", "fork", "swap_out", "swap_in", "free", "describe", "match_prefix", "pin", "unpin", "reset_prefix_cache", "common_prefix", "can_append", "can_swap_out", "can_swap_in", "open_ahead", "commit_ahead", "decode", "extend", "write", "read", "list_regions", "register_region", "unregister_region", "create_region", "register_cuda_region", "open_lane", "close_lane", "map_pool", "unmap_pool", "commit", "store_open_namespace", "store_lookup", "store_acquire", "store_renew", "store_release", "store_reserve", "store_commit", "store_abort", "store_batch_get", "store_batch_put", "store_touch", "store_remove", "store_clear", "store_map_store", "open_scheduler", "add_requests", "abort_requests", "schedule", "describe_requests", "create_remote_region", "remove_remote_region")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    CAN_ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    OPEN_STEP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    MATCH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    COMMON_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CAN_APPEND_FIELD_NUMBER: _ClassVar[int]
    CAN_SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    CAN_SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    OPEN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    LIST_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    CREATE_REGION_FIELD_NUMBER: _ClassVar[int]
    REGISTER_CUDA_REGION_FIELD_NUMBER: _ClassVar[int]
    OPEN_LANE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_LANE_FIELD_NUMBER: _ClassVar[int]
    MAP_POOL_FIELD_NUMBER: _ClassVar[int]
    UNMAP_POOL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STORE_OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STORE_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    STORE_ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    STORE_RENEW_FIELD_NUMBER: _ClassVar[int]
    STORE_RELEASE_FIELD_NUMBER: _ClassVar[int]
    STORE_RESERVE_FIELD_NUMBER: _ClassVar[int]
    STORE_COMMIT_FIELD_NUMBER: _ClassVar[int]
    STORE_ABORT_FIELD_NUMBER: _ClassVar[int]
    STORE_BATCH_GET_FIELD_NUMBER: _ClassVar[int]
    STORE_BATCH_PUT_FIELD_NUMBER: _ClassVar[int]
    STORE_TOUCH_FIELD_NUMBER: _ClassVar[int]
    STORE_REMOVE_FIELD_NUMBER: _ClassVar[int]
    STORE_CLEAR_FIELD_NUMBER: _ClassVar[int]
    STORE_MAP_STORE_FIELD_NUMBER: _ClassVar[int]
    OPEN_SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    ADD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CREATE_REMOTE_REGION_FIELD_NUMBER: _ClassVar[int]
    REMOVE_REMOTE_REGION_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    traceparent: str
    calls: _containers.RepeatedCompositeFieldContainer[Call]
    attach: AttachRequest
    ping: _pool_pb2.PingRequest
    detach: DetachRequest
    allocate: _blocks_pb2.AllocateRequest
    can_allocate: _blocks_pb2.CanAllocateRequest
    append: _blocks_pb2.AppendRequest
    open_step: _blocks_pb2.OpenStepRequest
    truncate: _blocks_pb2.TruncateRequest
    fork: _blocks_pb2.ForkRequest
    swap_out: _blocks_pb2.SwapOutRequest
    swap_in: _blocks_pb2.SwapInRequest
    free: _blocks_pb2.FreeRequest
    describe: _blocks_pb2.DescribeRequest
    match_prefix: _blocks_pb2.MatchPrefixRequest
    pin: _blocks_pb2.PinRequest
    unpin: _blocks_pb2.UnpinRequest
    reset_prefix_cache: _blocks_pb2.ResetPrefixCacheRequest
    common_prefix: _blocks_pb2.CommonPrefixRequest
    can_append: _blocks_pb2.CanAppendRequest
    can_swap_out: _blocks_pb2.CanSwapOutRequest
    can_swap_in: _blocks_pb2.CanSwapInRequest
    open_ahead: _blocks_pb2.OpenAheadRequest
    commit_ahead: _blocks_pb2.CommitAheadRequest
    decode: _attention_pb2.AttendRequest
    extend: _attention_pb2.AttendRequest
    write: _attention_pb2.WriteRequest
    read: _attention_pb2.ReadRequest
    list_regions: _regions_pb2.ListRegionsRequest
    register_region: _regions_pb2.RegisterRegionRequest
    unregister_region: _regions_pb2.UnregisterRegionRequest
    create_region: _regions_pb2.CreateRegionRequest
    register_cuda_region: _regions_pb2.RegisterCudaRegionRequest
    open_lane: _host_pb2.OpenLaneRequest
    close_lane: _host_pb2.CloseLaneRequest
    map_pool: _host_pb2.MapPoolRequest
    unmap_pool: _host_pb2.UnmapPoolRequest
    commit: _host_pb2.CommitRequest
    store_open_namespace: _store_pb2.OpenNamespaceRequest
    store_lookup: _store_pb2.LookupRequest
    store_acquire: _store_pb2.AcquireRequest
    store_renew: _store_pb2.RenewRequest
    store_release: _store_pb2.ReleaseRequest
    store_reserve: _store_pb2.ReserveRequest
    store_commit: _store_pb2.StoreCommitRequest
    store_abort: _store_pb2.AbortRequest
    store_batch_get: _store_pb2.BatchGetRequest
    store_batch_put: _store_pb2.BatchPutRequest
    store_touch: _store_pb2.TouchRequest
    store_remove: _store_pb2.RemoveRequest
    store_clear: _store_pb2.ClearRequest
    store_map_store: _store_pb2.MapStoreRequest
    open_scheduler: _scheduler_pb2.OpenSchedulerRequest
    add_requests: _scheduler_pb2.AddRequestsRequest
    abort_requests: _scheduler_pb2.AbortRequestsRequest
    schedule: _scheduler_pb2.ScheduleRequest
    describe_requests: _scheduler_pb2.DescribeRequestsRequest
    create_remote_region: _transfer_pb2.CreateRemoteRegionRequest
    remove_remote_region: _transfer_pb2.RemoveRemoteRegionRequest
    def __init__(self, call_id: _Optional[int] = ..., traceparent: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[Call, _Mapping]]] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., ping: _Optional[_Union[_pool_pb2.PingRequest, _Mapping]] = ..., detach: _Optional[_Union[DetachRequest, _Mapping]] = ..., allocate: _Optional[_Union[_blocks_pb2.AllocateRequest, _Mapping]] = ..., can_allocate: _Optional[_Union[_blocks_pb2.CanAllocateRequest, _Mapping]] = ..., append: _Optional[_Union[_blocks_pb2.AppendRequest, _Mapping]] = ..., open_step: _Optional[_Union[_blocks_pb2.OpenStepRequest, _Mapping]] = ..., truncate: _Optional[_Union[_blocks_pb2.TruncateRequest, _Mapping]] = ..., fork: _Optional[_Union[_blocks_pb2.ForkRequest, _Mapping]] = ..., swap_out: _Optional[_Union[_blocks_pb2.SwapOutRequest, _Mapping]] = ..., swap_in: _Optional[_Union[_blocks_pb2.SwapInRequest, _Mapping]] = ..., free: _Optional[_Union[_blocks_pb2.FreeRequest, _Mapping]] = ..., describe: _Optional[_Union[_blocks_pb2.DescribeRequest, _Mapping]] = ..., match_prefix: _Optional[_Union[_blocks_pb2.MatchPrefixRequest, _Mapping]] = ..., pin: _Optional[_Union[_blocks_pb2.PinRequest, _Mapping]] = ..., unpin: _Optional[_Union[_blocks_pb2.UnpinRequest, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[_blocks_pb2.ResetPrefixCacheRequest, _Mapping]] = ..., common_prefix: _Optional[_Union[_blocks_pb2.CommonPrefixRequest, _Mapping]] = ..., can_append: _Optional[_Union[_blocks_pb2.CanAppendRequest, _Mapping]] = ..., can_swap_out: _Optional[_Union[_blocks_pb2.CanSwapOutRequest, _Mapping]] = ..., can_swap_in: _Optional[_Union[_blocks_pb2.CanSwapInRequest, _Mapping]] = ..., open_ahead: _Optional[_Union[_blocks_pb2.OpenAheadRequest, _Mapping]] = ..., commit_ahead: _Optional[_Union[_blocks_pb2.CommitAheadRequest, _Mapping]] = ..., decode: _Optional[_Union[_attention_pb2.AttendRequest, _Mapping]] = ..., extend: _Optional[_Union[_attention_pb2.AttendRequest, _Mapping]] = ..., write: _Optional[_Union[_attention_pb2.WriteRequest, _Mapping]] = ..., read: _Optional[_Union[_attention_pb2.ReadRequest, _Mapping]] = ..., list_regions: _Optional[_Union[_regions_pb2.ListRegionsRequest, _Mapping]] = ..., register_region: _Optional[_Union[_regions_pb2.RegisterRegionRequest, _Mapping]] = ..., unregister_region: _Optional[_Union[_regions_pb2.UnregisterRegionRequest, _Mapping]] = ..., create_region: _Optional[_Union[_regions_pb2.CreateRegionRequest, _Mapping]] = ..., register_cuda_region: _Optional[_Union[_regions_pb2.RegisterCudaRegionRequest, _Mapping]] = ..., open_lane: _Optional[_Union[_host_pb2.OpenLaneRequest, _Mapping]] = ..., close_lane: _Optional[_Union[_host_pb2.CloseLaneRequest, _Mapping]] = ..., map_pool: _Optional[_Union[_host_pb2.MapPoolRequest, _Mapping]] = ..., unmap_pool: _Optional[_Union[_host_pb2.UnmapPoolRequest, _Mapping]] = ..., commit: _Optional[_Union[_host_pb2.CommitRequest, _Mapping]] = ..., store_open_namespace: _Optional[_Union[_store_pb2.OpenNamespaceRequest, _Mapping]] = ..., store_lookup: _Optional[_Union[_store_pb2.LookupRequest, _Mapping]] = ..., store_acquire: _Optional[_Union[_store_pb2.AcquireRequest, _Mapping]] = ..., store_renew: _Optional[_Union[_store_pb2.RenewRequest, _Mapping]] = ..., store_release: _Optional[_Union[_store_pb2.ReleaseRequest, _Mapping]] = ..., store_reserve: _Optional[_Union[_store_pb2.ReserveRequest, _Mapping]] = ..., store_commit: _Optional[_Union[_store_pb2.StoreCommitRequest, _Mapping]] = ..., store_abort: _Optional[_Union[_store_pb2.AbortRequest, _Mapping]] = ..., store_batch_get: _Optional[_Union[_store_pb2.BatchGetRequest, _Mapping]] = ..., store_batch_put: _Optional[_Union[_store_pb2.BatchPutRequest, _Mapping]] = ..., store_touch: _Optional[_Union[_store_pb2.TouchRequest, _Mapping]] = ..., store_remove: _Optional[_Union[_store_pb2.RemoveRequest, _Mapping]] = ..., store_clear: _Optional[_Union[_store_pb2.ClearRequest, _Mapping]] = ..., store_map_store: _Optional[_Union[_store_pb2.MapStoreRequest, _Mapping]] = ..., open_scheduler: _Optional[_Union[_scheduler_pb2.OpenSchedulerRequest, _Mapping]] = ..., add_requests: _Optional[_Union[_scheduler_pb2.AddRequestsRequest, _Mapping]] = ..., abort_requests: _Optional[_Union[_scheduler_pb2.AbortRequestsRequest, _Mapping]] = ..., schedule: _Optional[_Union[_scheduler_pb2.ScheduleRequest, _Mapping]] = ..., describe_requests: _Optional[_Union[_scheduler_pb2.DescribeRequestsRequest, _Mapping]] = ..., create_remote_region: _Optional[_Union[_transfer_pb2.CreateRemoteRegionRequest, _Mapping]] = ..., remove_remote_region: _Optional[_Union[_transfer_pb2.RemoveRemoteRegionRequest, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("call_id", "replies", "error", "attach", "ping", "detach", "allocate", "can_allocate", "append", "open_step", "truncate", "fork", "swap_out", "swap_in", "free", "describe", "match_prefix", "pin", "unpin", "reset_prefix_cache", "common_prefix", "can_append", "can_swap_out", "can_swap_in", "open_ahead", "commit_ahead", "decode", "extend", "write", "read", "list_regions", "register_region", "unregister_region", "create_region", "register_cuda_region", "open_lane", "close_lane", "map_pool", "unmap_pool", "commit", "store_open_namespace", "store_lookup", "store_acquire", "store_renew", "store_release", "store_reserve", "store_commit", "store_abort", "store_batch_get", "store_batch_put", "store_touch", "store_remove", "store_clear", "store_map_store", "open_scheduler", "add_requests", "abort_requests", "schedule", "describe_requests", "create_remote_region", "remove_remote_region")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    CAN_ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    OPEN_STEP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    MATCH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    COMMON_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CAN_APPEND_FIELD_NUMBER: _ClassVar[int]
    CAN_SWAP_OUT_FIELD_NUMBER: _ClassVar[int]
    CAN_SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    OPEN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    COMMIT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    LIST_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    UNREGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    CREATE_REGION_FIELD_NUMBER: _ClassVar[int]
    REGISTER_CUDA_REGION_FIELD_NUMBER: _ClassVar[int]
    OPEN_LANE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_LANE_FIELD_NUMBER: _ClassVar[int]
    MAP_POOL_FIELD_NUMBER: _ClassVar[int]
    UNMAP_POOL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STORE_OPEN_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    STORE_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    STORE_ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    STORE_RENEW_FIELD_NUMBER: _ClassVar[int]
    STORE_RELEASE_FIELD_NUMBER: _ClassVar[int]
    STORE_RESERVE_FIELD_NUMBER: _ClassVar[int]
    STORE_COMMIT_FIELD_NUMBER: _ClassVar[int]
    STORE_ABORT_FIELD_NUMBER: _ClassVar[int]
    STORE_BATCH_GET_FIELD_NUMBER: _ClassVar[int]
    STORE_BATCH_PUT_FIELD_NUMBER: _ClassVar[int]
    STORE_TOUCH_FIELD_NUMBER: _ClassVar[int]
    STORE_REMOVE_FIELD_NUMBER: _ClassVar[int]
    STORE_CLEAR_FIELD_NUMBER: _ClassVar[int]
    STORE_MAP_STORE_FIELD_NUMBER: _ClassVar[int]
    OPEN_SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    ADD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CREATE_REMOTE_REGION_FIELD_NUMBER: _ClassVar[int]
    REMOVE_REMOTE_REGION_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    error: _status_pb2.Status
    attach: AttachResponse
    ping: _pool_pb2.PingResponse
    detach: DetachResponse
    allocate: _blocks_pb2.AllocateResponse
    can_allocate: _blocks_pb2.CanAllocateResponse
    append: _blocks_pb2.StepResponse
    open_step: _blocks_pb2.StepResponse
    truncate: _blocks_pb2.TruncateResponse
    fork: _blocks_pb2.ForkResponse
    swap_out: _blocks_pb2.SwapResponse
    swap_in: _blocks_pb2.SwapResponse
    free: _blocks_pb2.FreeResponse
    describe: _blocks_pb2.DescribeResponse
    match_prefix: _blocks_pb2.MatchPrefixResponse
    pin: _blocks_pb2.PinResponse
    unpin: _blocks_pb2.UnpinResponse
    reset_prefix_cache: _blocks_pb2.ResetPrefixCacheResponse
    common_prefix: _blocks_pb2.CommonPrefixResponse
    can_append: _blocks_pb2.CanAppendResponse
    can_swap_out: _blocks_pb2.CanSwapOutResponse
    can_swap_in: _blocks_pb2.CanSwapInResponse
    open_ahead: _blocks_pb2.StepResponse
    commit_ahead: _blocks_pb2.StepResponse
    decode: _attention_pb2.AttendResponse
    extend: _attention_pb2.AttendResponse
    write: _attention_pb2.WriteResponse
    read: _attention_pb2.ReadResponse
    list_regions: _regions_pb2.ListRegionsResponse
    register_region: _regions_pb2.RegisterRegionResponse
    unregister_region: _regions_pb2.UnregisterRegionResponse
    create_region: _regions_pb2.CreateRegionResponse
    register_cuda_region: _regions_pb2.RegisterCudaRegionResponse
    open_lane: _host_pb2.OpenLaneResponse
    close_lane: _host_pb2.CloseLaneResponse
    map_pool: _host_pb2.MapPoolResponse
    unmap_pool: _host_pb2.UnmapPoolResponse
    commit: _host_pb2.CommitResponse
    store_open_namespace: _store_pb2.OpenNamespaceResponse
    store_lookup: _store_pb2.LookupResponse
    store_acquire: _store_pb2.AcquireResponse
    store_renew: _store_pb2.RenewResponse
    store_release: _store_pb2.ReleaseResponse
    store_reserve: _store_pb2.ReserveResponse
    store_commit: _store_pb2.StoreCommitResponse
    store_abort: _store_pb2.AbortResponse
    store_batch_get: _store_pb2.BatchGetResponse
    store_batch_put: _store_pb2.BatchPutResponse
    store_touch: _store_pb2.TouchResponse
    store_remove: _store_pb2.RemoveResponse
    store_clear: _store_pb2.ClearResponse
    store_map_store: _store_pb2.MapStoreResponse
    open_scheduler: _scheduler_pb2.OpenSchedulerResponse
    add_requests: _scheduler_pb2.AddRequestsResponse
    abort_requests: _scheduler_pb2.AbortRequestsResponse
    schedule: _scheduler_pb2.ScheduleResponse
    describe_requests: _scheduler_pb2.DescribeRequestsResponse
    create_remote_region: _transfer_pb2.CreateRemoteRegionResponse
    remove_remote_region: _transfer_pb2.RemoveRemoteRegionResponse
    def __init__(self, call_id: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., attach: _Optional[_Union[AttachResponse, _Mapping]] = ..., ping: _Optional[_Union[_pool_pb2.PingResponse, _Mapping]] = ..., detach: _Optional[_Union[DetachResponse, _Mapping]] = ..., allocate: _Optional[_Union[_blocks_pb2.AllocateResponse, _Mapping]] = ..., can_allocate: _Optional[_Union[_blocks_pb2.CanAllocateResponse, _Mapping]] = ..., append: _Optional[_Union[_blocks_pb2.StepResponse, _Mapping]] = ..., open_step: _Optional[_Union[_blocks_pb2.StepResponse, _Mapping]] = ..., truncate: _Optional[_Union[_blocks_pb2.TruncateResponse, _Mapping]] = ..., fork: _Optional[_Union[_blocks_pb2.ForkResponse, _Mapping]] = ..., swap_out: _Optional[_Union[_blocks_pb2.SwapResponse, _Mapping]] = ..., swap_in: _Optional[_Union[_blocks_pb2.SwapResponse, _Mapping]] = ..., free: _Optional[_Union[_blocks_pb2.FreeResponse, _Mapping]] = ..., describe: _Optional[_Union[_blocks_pb2.DescribeResponse, _Mapping]] = ..., match_prefix: _Optional[_Union[_blocks_pb2.MatchPrefixResponse, _Mapping]] = ..., pin: _Optional[_Union[_blocks_pb2.PinResponse, _Mapping]] = ..., unpin: _Optional[_Union[_blocks_pb2.UnpinResponse, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[_blocks_pb2.ResetPrefixCacheResponse, _Mapping]] = ..., common_prefix: _Optional[_Union[_blocks_pb2.CommonPrefixResponse, _Mapping]] = ..., can_append: _Optional[_Union[_blocks_pb2.CanAppendResponse, _Mapping]] = ..., can_swap_out: _Optional[_Union[_blocks_pb2.CanSwapOutResponse, _Mapping]] = ..., can_swap_in: _Optional[_Union[_blocks_pb2.CanSwapInResponse, _Mapping]] = ..., open_ahead: _Optional[_Union[_blocks_pb2.StepResponse, _Mapping]] = ..., commit_ahead: _Optional[_Union[_blocks_pb2.StepResponse, _Mapping]] = ..., decode: _Optional[_Union[_attention_pb2.AttendResponse, _Mapping]] = ..., extend: _Optional[_Union[_attention_pb2.AttendResponse, _Mapping]] = ..., write: _Optional[_Union[_attention_pb2.WriteResponse, _Mapping]] = ..., read: _Optional[_Union[_attention_pb2.ReadResponse, _Mapping]] = ..., list_regions: _Optional[_Union[_regions_pb2.ListRegionsResponse, _Mapping]] = ..., register_region: _Optional[_Union[_regions_pb2.RegisterRegionResponse, _Mapping]] = ..., unregister_region: _Optional[_Union[_regions_pb2.UnregisterRegionResponse, _Mapping]] = ..., create_region: _Optional[_Union[_regions_pb2.CreateRegionResponse, _Mapping]] = ..., register_cuda_region: _Optional[_Union[_regions_pb2.RegisterCudaRegionResponse, _Mapping]] = ..., open_lane: _Optional[_Union[_host_pb2.OpenLaneResponse, _Mapping]] = ..., close_lane: _Optional[_Union[_host_pb2.CloseLaneResponse, _Mapping]] = ..., map_pool: _Optional[_Union[_host_pb2.MapPoolResponse, _Mapping]] = ..., unmap_pool: _Optional[_Union[_host_pb2.UnmapPoolResponse, _Mapping]] = ..., commit: _Optional[_Union[_host_pb2.CommitResponse, _Mapping]] = ..., store_open_namespace: _Optional[_Union[_store_pb2.OpenNamespaceResponse, _Mapping]] = ..., store_lookup: _Optional[_Union[_store_pb2.LookupResponse, _Mapping]] = ..., store_acquire: _Optional[_Union[_store_pb2.AcquireResponse, _Mapping]] = ..., store_renew: _Optional[_Union[_store_pb2.RenewResponse, _Mapping]] = ..., store_release: _Optional[_Union[_store_pb2.ReleaseResponse, _Mapping]] = ..., store_reserve: _Optional[_Union[_store_pb2.ReserveResponse, _Mapping]] = ..., store_commit: _Optional[_Union[_store_pb2.StoreCommitResponse, _Mapping]] = ..., store_abort: _Optional[_Union[_store_pb2.AbortResponse, _Mapping]] = ..., store_batch_get: _Optional[_Union[_store_pb2.BatchGetResponse, _Mapping]] = ..., store_batch_put: _Optional[_Union[_store_pb2.BatchPutResponse, _Mapping]] = ..., store_touch: _Optional[_Union[_store_pb2.TouchResponse, _Mapping]] = ..., store_remove: _Optional[_Union[_store_pb2.RemoveResponse, _Mapping]] = ..., store_clear: _Optional[_Union[_store_pb2.ClearResponse, _Mapping]] = ..., store_map_store: _Optional[_Union[_store_pb2.MapStoreResponse, _Mapping]] = ..., open_scheduler: _Optional[_Union[_scheduler_pb2.OpenSchedulerResponse, _Mapping]] = ..., add_requests: _Optional[_Union[_scheduler_pb2.AddRequestsResponse, _Mapping]] = ..., abort_requests: _Optional[_Union[_scheduler_pb2.AbortRequestsResponse, _Mapping]] = ..., schedule: _Optional[_Union[_scheduler_pb2.ScheduleResponse, _Mapping]] = ..., describe_requests: _Optional[_Union[_scheduler_pb2.DescribeRequestsResponse, _Mapping]] = ..., create_remote_region: _Optional[_Union[_transfer_pb2.CreateRemoteRegionResponse, _Mapping]] = ..., remove_remote_region: _Optional[_Union[_transfer_pb2.RemoveRemoteRegionResponse, _Mapping]] = ...) -> None: ...
