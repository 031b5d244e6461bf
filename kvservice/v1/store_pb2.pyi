from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_STATUS_UNSPECIFIED: _ClassVar[PutStatus]
    PUT_STATUS_DONE: _ClassVar[PutStatus]
    PUT_STATUS_PRESENT: _ClassVar[PutStatus]
    PUT_STATUS_BEING_WRITTEN: _ClassVar[PutStatus]
    PUT_STATUS_NO_ROOM: _ClassVar[PutStatus]
    PUT_STATUS_DAMAGED: _ClassVar[PutStatus]
PUT_STATUS_UNSPECIFIED: PutStatus
PUT_STATUS_DONE: PutStatus
PUT_STATUS_PRESENT: PutStatus
PUT_STATUS_BEING_WRITTEN: PutStatus
PUT_STATUS_NO_ROOM: PutStatus
PUT_STATUS_DAMAGED: PutStatus

class StoreNamespace(_message.Message):
    __slots__ = ("model", "weights", "dtype", "layout", "block_bytes", "tp_rank", "tp_size", "pp_rank", "pp_size", "key_algorithm")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEY_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    dtype: str
    layout: str
    block_bytes: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    key_algorithm: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., block_bytes: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., key_algorithm: _Optional[str] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "namespace", "quota_bytes")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    namespace: StoreNamespace
    quota_bytes: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., namespace: _Optional[_Union[StoreNamespace, _Mapping]] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "num_blocks", "quota_bytes", "slab_bytes", "first_block", "block_stride", "blocks_per_slab", "number", "has_tiers")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_SLAB_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HAS_TIERS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    num_blocks: int
    quota_bytes: int
    slab_bytes: int
    first_block: int
    block_stride: int
    blocks_per_slab: int
    number: int
    has_tiers: bool
    def __init__(self, namespace_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., first_block: _Optional[int] = ..., block_stride: _Optional[int] = ..., blocks_per_slab: _Optional[int] = ..., number: _Optional[int] = ..., has_tiers: bool = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_token", "namespace_id", "keys", "uncounted", "max_wait_s", "unexplained")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    UNEXPLAINED_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_id: int
    keys: bytes
    uncounted: bool
    max_wait_s: float
    unexplained: bool
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., uncounted: bool = ..., max_wait_s: _Optional[float] = ..., unexplained: bool = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("num_leading", "found", "num_in_memory")
    NUM_LEADING_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    num_leading: int
    found: bytes
    num_in_memory: int
    def __init__(self, num_leading: _Optional[int] = ..., found: _Optional[bytes] = ..., num_in_memory: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "namespace_id", "keys", "ttl_s", "leading_only", "uncounted", "max_wait_s")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    LEADING_ONLY_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    namespace_id: int
    keys: bytes
    ttl_s: float
    leading_only: bool
    uncounted: bool
    max_wait_s: float
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., leading_only: bool = ..., uncounted: bool = ..., max_wait_s: _Optional[float] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "found", "offsets", "versions")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    found: bytes
    offsets: bytes
    versions: bytes
    def __init__(self, lease_id: _Optional[int] = ..., found: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., versions: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("session_token", "lease_id", "ttl_s")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    lease_id: int
    ttl_s: float
    def __init__(self, session_token: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_token", "lease_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "namespace_id", "keys")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    namespace_id: int
    keys: bytes
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_id", "statuses", "offsets")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    statuses: bytes
    offsets: bytes
    def __init__(self, reservation_id: _Optional[int] = ..., statuses: _Optional[bytes] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class StoreCommitRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "reservation_id", "written", "checksums")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    reservation_id: int
    written: bytes
    checksums: bytes
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., reservation_id: _Optional[int] = ..., written: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class StoreCommitResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_token", "reservation_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    reservation_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., reservation_id: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Scatter(_message.Message):
    __slots__ = ("region", "piece_bytes", "offsets")
    REGION_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    region: str
    piece_bytes: _containers.RepeatedScalarFieldContainer[int]
    offsets: bytes
    def __init__(self, region: _Optional[str] = ..., piece_bytes: _Optional[_Iterable[int]] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class BatchGetRequest(_message.Message):
    __slots__ = ("session_token", "namespace_id", "keys", "region", "verify", "return_checksums", "max_wait_s")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    RETURN_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_id: int
    keys: bytes
    region: Scatter
    verify: bool
    return_checksums: bool
    max_wait_s: float
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., region: _Optional[_Union[Scatter, _Mapping]] = ..., verify: bool = ..., return_checksums: bool = ..., max_wait_s: _Optional[float] = ...) -> None: ...

class BatchGetResponse(_message.Message):
    __slots__ = ("found", "data", "checksums")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    found: bytes
    data: bytes
    checksums: bytes
    def __init__(self, found: _Optional[bytes] = ..., data: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class BatchPutRequest(_message.Message):
    __slots__ = ("session_token", "namespace_id", "keys", "region", "data", "checksums")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_id: int
    keys: bytes
    region: Scatter
    data: bytes
    checksums: bytes
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., region: _Optional[_Union[Scatter, _Mapping]] = ..., data: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class BatchPutResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    def __init__(self, statuses: _Optional[bytes] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("session_token", "namespace_id", "keys", "num_hits", "num_misses", "num_read", "missing", "num_not_whole", "engine")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSES_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    NUM_NOT_WHOLE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_id: int
    keys: bytes
    num_hits: int
    num_misses: int
    num_read: int
    missing: bytes
    num_not_whole: int
    engine: EngineReport
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., num_hits: _Optional[int] = ..., num_misses: _Optional[int] = ..., num_read: _Optional[int] = ..., missing: _Optional[bytes] = ..., num_not_whole: _Optional[int] = ..., engine: _Optional[_Union[EngineReport, _Mapping]] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("loads_in_flight", "prompt_tokens", "found_tokens", "blocks_loaded", "blocks_not_loaded", "blocks_saved", "blocks_not_saved", "blocks_skipped")
    LOADS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOADED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NOT_LOADED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SAVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NOT_SAVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    loads_in_flight: int
    prompt_tokens: int
    found_tokens: int
    blocks_loaded: int
    blocks_not_loaded: int
    blocks_saved: int
    blocks_not_saved: int
    blocks_skipped: int
    def __init__(self, loads_in_flight: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., blocks_loaded: _Optional[int] = ..., blocks_not_loaded: _Optional[int] = ..., blocks_saved: _Optional[int] = ..., blocks_not_saved: _Optional[int] = ..., blocks_skipped: _Optional[int] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "namespace_id", "keys")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    namespace_id: int
    keys: bytes
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "namespace_id")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    namespace_id: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., namespace_id: _Optional[int] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class MapStoreRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "writable")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    writable: bool
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., writable: bool = ...) -> None: ...

class MapStoreResponse(_message.Message):
    __slots__ = ("handover_token", "num_bytes", "growing")
    HANDOVER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROWING_FIELD_NUMBER: _ClassVar[int]
    handover_token: bytes
    num_bytes: int
    growing: bool
    def __init__(self, handover_token: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., growing: bool = ...) -> None: ...
